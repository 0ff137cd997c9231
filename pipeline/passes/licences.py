"""Names the licence that a document states about itself, so that a pass can count documents by licence.

Readers of source code note an SPDX expression in `meta.licence`, and the step `html` notes the URL of a licence in
`meta.license`. A column of the input may hold any string under these names. Therefore only known licences get a label,
which is the identifier of the licence on the Hugging Face hub. All other strings share one label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: label of licences that are not in LICENCES, of expressions that join two (`MIT OR Apache-2.0`), and of other strings
OTHER = "other"

LICENCES = frozenset(re.findall(r"\S+", """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0
    cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
    cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gpl-2.0 gpl-3.0 isc
    lgpl-2.1 lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 osl-3.0 pddl postgresql unlicense wtfpl zlib
    """))
#: SPDX identifiers whose label differs from the identifier
_SPDX = {"odbl-1.0": "odbl", "odc-by-1.0": "odc-by", "pddl-1.0": "pddl"}
_CREATIVE = re.compile(r"https?://(?:www\.)?creativecommons\.org/"
                       r"(?:licenses/(by(?:-nc)?(?:-nd|-sa)?)/(\d\.\d)|publicdomain/(zero)/(1\.0))(?:/|$)")
#: longest string that is looked at
_LONGEST = 200


def licence_label(meta: Mapping[str, Any]) -> str:
    """Return the label under which a document is counted by licence. It is the licence that the metadata names, or
    'other' if that is not a known licence. It is '' if the metadata names none."""
    stated = meta.get("licence") or meta.get("license")
    if not stated:
        return ""
    if not isinstance(stated, str) or len(stated) > _LONGEST:
        return OTHER
    name = stated.strip().lower()
    if match := _CREATIVE.match(name):
        name = f"cc0-{match[4]}" if match[3] else f"cc-{match[1]}-{match[2]}"
    name = re.sub(r"-(?:only|or-later)$", "", name)
    name = _SPDX.get(name, name)
    return name if name in LICENCES else OTHER
