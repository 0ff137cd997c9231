"""Licences are recognised by their whole texts: changed, extended and negated ones are unknown, whatever they begin
with."""

from __future__ import annotations

import pytest

from stages.read import licence_texts
from stages.read.licence import licence

GRANT = (
    "Redistribution and use in source and binary forms, with or without modification, are permitted provided "
    "that the following conditions are met:\n"
)
SOURCE = (
    "1. Redistributions of source code must retain the above copyright notice, this list of conditions and "
    "the following disclaimer.\n"
)
BINARY = (
    "2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions "
    "and the following disclaimer in the documentation and/or other materials provided with the "
    "distribution.\n"
)
NAMES = (
    "3. Neither the name of the {holder} nor the names of its contributors may be used to endorse or promote "
    "products derived from this software without specific prior written permission.\n"
)
END = (
    "THIS SOFTWARE IS PROVIDED BY THE {holder} AND CONTRIBUTORS \"AS IS\" AND ANY EXPRESS OR IMPLIED "
    "WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A "
    "PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE {holder} OR CONTRIBUTORS BE LIABLE FOR ANY "
    "DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED "
    "TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS "
    "INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR "
    "TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF "
    "ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.\n"
)
MIT = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software and "
    "associated documentation files (the \"Software\"), to deal in the Software without restriction, including "
    "without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell "
    "copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to "
    "the following conditions:\nThe above copyright notice and this permission notice shall be included in "
    "all copies or substantial portions of the Software.\nTHE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY "
    "OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, "
    "FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT "
    "HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR "
    "OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE "
    "SOFTWARE.\n"
)
BSD = (GRANT + SOURCE + BINARY + NAMES + END).format(holder="Example Foundation")


def comment(text: str) -> str:
    """Return a licence as a comment above code."""
    lines = [" ".join(words) for line in text.splitlines() for words in _wrapped(line.split())]
    return "/*\n * A module that does things.\n * Copyright (c) 2019 Someone. All rights reserved.\n *\n" + "".join(
        f" * {line}\n" for line in lines) + " */\n#include <x.h>\nint may_not_use(void) { return 0; }\n"


def _wrapped(words: list[str]) -> list[list[str]]:
    return [words[i:i + 11] for i in range(0, len(words), 11)]


@pytest.mark.parametrize(("text", "named"), [
    (MIT, "MIT"), (BSD, "BSD-3-Clause"), (BSD.replace("3. Neither",
    "3. All advertising materials mentioning features or "
     "use of this software must display the following acknowledgement: This product includes software developed by the "
     "organization.\n4. Neither"), "BSD-4-Clause"),
    ((GRANT + SOURCE + BINARY + END).format(holder="COPYRIGHT HOLDERS"), "BSD-2-Clause"),
    ((GRANT + SOURCE + END).format(holder="COPYRIGHT HOLDERS"), "BSD-1-Clause"), ("The MIT Licence\n\n" + MIT, "MIT"),
])
@pytest.mark.parametrize("above_code", [False, True])
def test_texts_as_they_are(text, named, above_code):
    assert licence(comment(text) if above_code else text) == named


@pytest.mark.parametrize("text", [
    BSD.replace("are permitted", "are NOT permitted"), BSD.replace("are permitted",
    "for non-commercial purposes are permitted"),
    BSD.replace("may be used to endorse", "may be used to endorse or criticise").replace("3. Neither",
    "3. The software may "
                "not be sold.\n4. Neither"),
    BSD + "You acknowledge that this software is not designed or licensed for use in a nuclear facility.\n",
    BSD + "This software may only be used in connection with microcontrollers of the Foundation.\n",
    MIT.replace("subject to the following", "as long as it does no harm, subject to the following"),
    MIT.replace("publish, distribute, sublicense, and/or sell copies of the Software, ", ""),
    MIT.replace("without restriction", "with restriction"), MIT.replace("\nTHE SOFTWARE",
    "\nThe Software shall be used for "
                "good.\nNobody may use it in breach of human rights.\nTHE SOFTWARE"),
    "\"Commons Clause\" License Condition v1.0: the License does not grant you the right to Sell the Software.\n" + MIT,
    MIT + "\nAlternatively, under the GNU General Public License version 2.\n", MIT + BSD,
    MIT + "Terms of the service. " * 100,
])
@pytest.mark.parametrize("above_code", [False, True])
def test_texts_that_were_changed(text, above_code):
    assert licence(comment(text) if above_code else text) == ""


#: harmless, with the whole text of a licence below
HOLDERS = (
    "Copyright (c) 2020 Acme, Inc. All rights reserved.", "Copyright © 2019-2021 A. B. Person <person@use.example>",
    "Copyright 2001, 2003 Free Software Foundation, Inc.", "Copyright (c) May 2020 Brian May and contributors",
    "Portions Copyright (C) 1999 Acme Research and Education Ltd., et al.", "(c) 2020 Acme - all rights reserved",
    "© 2020 Private Academic Press https://acme.example/license/only.html",
    "Copyright (c) 2020 Acme\nCopyright (c) 2021 The Authors (see AUTHORS)\nAll rights reserved.",
    "Copyright (c) 2010 by A. Person. Some rights reserved.", "Copyright 2014-2019 Grant Person, Secret Labs AB",
    "Copyright (c) 2018-present, Yuxi (Evan) You", "Copyright 2015 Evan J. You and Vue contributors",
    "Copyright (c) 2020 Only Office, Commercial Press", "(c) 2021 Non Umemoto, Must Labs, Agreement Labs",
    "Copyright (c) 2019 Not Only Ltd. All rights reserved.", "Copyright 2022 Commercial Bank Software",
    "Copyright 2022 Allow-list contributors", "Copyright (c) 1999 Classified Ads Inc., Fee & Sons",
)
TERMS = (
    "For non-commercial use only.", "Noncommercial", "Non commercial.", "For internal use only.", "Confidential.",
    "Not for redistribution.", "Use is subject to license terms.", "Patent pending.", "Commercial use prohibited.",
    "You may not sell it.", "For evaluation purposes only.", "Do not copy without permission.",
    "No part of it may be used without consent.", "Licensed under the GPL.", "Proprietary and trade secret.",
)


@pytest.mark.parametrize(("text", "named"), [(MIT, "MIT"), (BSD, "BSD-3-Clause")])
def test_lines_of_holders_are_no_terms(text, named):
    for head in HOLDERS:
        assert licence(f"{head}\n\n{text}") == named, head
        assert licence(f"{head} {text}") == named, f"{head} in one line"


@pytest.mark.parametrize("head", ["Copyright (c) 2020 Acme. {}", "© 2020 Acme - {}", "(c) 2020 Acme: {}",
                                  "Copyright (c) 2018-present, Evan You. {}",
                                  "Portions copyright 2020 Acme, Inc. All rights reserved. {}",
                                  "Copyright (c) 2019 Someone\nCopyright (c) 2020 Acme. {}\nCopyright 2021 Others"])
def test_terms_in_a_line_of_a_holder(head):
    """Each term in each line; which licence it stands at, and where, takes turns."""
    for n, terms in enumerate(TERMS):
        line, text = head.format(terms), (MIT, BSD)[n % 2]
        whole = (f"{line}\n\n{text}", f"{text}\n{line}\n", comment(f"{line}\n\n{text}"))[n % 3]
        assert licence(whole) == "", whole[:200]


@pytest.mark.parametrize("terms", ["For non-commercial use only.", "For internal use only.", "Confidential.",
                                   "Evaluation purposes\nonly.", "Only for customers.",
                                   "Proprietary and trade secret."])
def test_terms_in_the_line_below_a_holder(terms):
    assert licence(f"Copyright (c) 2020 Acme.\n{terms}\n\n{MIT}") == ""


def test_what_a_file_is_for_is_no_term():
    """A description in a paragraph of its own, above or below."""
    assert licence(f"Copyright (c) 2020 Acme.\n\n{MIT}\nHelpers for internal use only.\n") == "MIT"


def test_words_of_code_are_no_terms():
    code = "int f(void) { /* may not be used commercially, patents */ return 0; }\n" * 30
    assert licence(comment(BSD) + code) == "BSD-3-Clause"


def test_fingerprints_are_of_the_words_that_texts_are_read_as():
    forms, _ = licence_texts.forms()
    mit = next(form for form in forms if form.licence == "MIT")
    hashes = licence_texts.triples(licence_texts.words_of(MIT))
    assert len(mit.places.keys() & set(hashes)) >= 0.98 * len(mit.places)
