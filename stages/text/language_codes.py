"""Compares names of languages: ISO 639-1 (`fr`), ISO 639-3 (`fra`), and either with a script of ISO 15924 (`fra_Latn`).

Models name languages differently: lid.176 as Wikipedia does (`fr`, `arz`), GlotLID, OpenLID and FLORES by ISO 639-3 and
script (`fra_Latn`). `Document.language` is the label of the model that identified the language. A setting may use any
of these names for a language. The function `names` decides which labels such a name stands for:

- Two-letter and three-letter codes of a language are equal: `fr` is `fra`. So are `-` and `_`, and capitals and small
  letters.
- The code of a macrolanguage (ISO 639-3) means its standard member, as in FLORES-200: `zh` is `cmn` (Mandarin, not
  `yue`), `ar` is `arb` (not `arz`), `fa` is `pes`, `no` is `nob`. Other members must be named by their own codes.
- Scripts are compared only if both the name and the label have one: `sr` is any Serbian, `srp_Latn` only Serbian in
  Latin letters. If the label has no script, the caller may give the script of the text's letters instead.
- `als` without a script is Alemannic, as in Wikipedia and lid.176. With a script it is Tosk Albanian, as in ISO 639-3.
  `bh` is Bhojpuri.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from stages.text.scripts import fits

#: every code of ISO 639-1, followed by that of ISO 639-3
_TWO_LETTERS = """
aaaar ababk aeave afafr akaka amamh anarg arara asasm avava ayaym azaze babak bebel bgbul bibis bmbam bnben bobod
brbre bsbos cacat ceche chcha cocos crcre csces cuchu cvchv cycym dadan dedeu dvdiv dzdzo eeewe elell eneng eoepo
esspa etest eueus fafas ffful fifin fjfij fofao frfra fyfry gagle gdgla glglg gngrn guguj gvglv hahau heheb hihin
hohmo hrhrv hthat huhun hyhye hzher iaina idind ieile igibo iiiii ikipk ioido isisl itita iuiku jajpn jvjav kakat
kgkon kikik kjkua kkkaz klkal kmkhm knkan kokor krkau kskas kukur kvkom kwcor kykir lalat lbltz lglug lilim lnlin
lolao ltlit lulub lvlav mgmlg mhmah mimri mkmkd mlmal mnmon mrmar msmsa mtmlt mymya nanau nbnob ndnde nenep ngndo
nlnld nnnno nonor nrnbl nvnav nynya ococi ojoji omorm orori ososs papan pipli plpol pspus ptpor quque rmroh rnrun
roron rurus rwkin sasan scsrd sdsnd sesme sgsag shhbs sisin skslk slslv smsmo snsna sosom sqsqi srsrp ssssw stsot
susun svswe swswa tatam tetel tgtgk ththa titir tktuk tltgl tntsn toton trtur tstso tttat twtwi tytah uguig ukukr
ururd uzuzb veven vivie vovol wawln wowol xhxho yiyid yoyor zazha zhzho zuzul
"""
#: macrolanguage (ISO 639-3) → its standard member, that of FLORES-200 where it has one
_STANDARD = """
ara:arb aym:ayr aze:azj bik:bcl bua:bxr chm:mhr cre:crk din:dik est:ekk fas:pes ful:fuv grn:gug iku:ike kau:knc kok:gom
kom:kpv kon:kng kur:kmr lav:lvs mlg:plt mon:khk msa:zsm nep:npi nor:nob oji:ojb ori:ory orm:gaz pus:pbt que:quy sqi:als
swa:swh uzb:uzn yid:ydd zho:cmn zza:diq
"""
#: language, by its name in lid.176 → the scripts in which it is written; `_LATIN` has the languages written in Latin
#: letters alone
_SCRIPTS = """
am:Ethi ar:Arab arz:Arab as:Beng av:Cyrl az:Latn,Cyrl,Arab azb:Arab ba:Cyrl be:Cyrl bg:Cyrl bh:Deva bn:Beng bo:Tibt
bpy:Beng bs:Latn,Cyrl bxr:Cyrl,Mong ce:Cyrl ckb:Arab cv:Cyrl dty:Deva dv:Thaa el:Grek fa:Arab gom:Deva,Latn,Knda
gu:Gujr he:Hebr hi:Deva hy:Armn ja:Jpan ka:Geor kk:Cyrl,Arab,Latn km:Khmr kn:Knda ko:Kore krc:Cyrl ku:Latn,Arab,Cyrl
kv:Cyrl ky:Cyrl,Arab lez:Cyrl lo:Laoo lrc:Arab mai:Deva mhr:Cyrl mk:Cyrl ml:Mlym mn:Cyrl,Mong mr:Deva mrj:Cyrl
ms:Latn,Arab my:Mymr myv:Cyrl mzn:Arab ne:Deva new:Deva,Newa or:Orya os:Cyrl pa:Guru,Arab pnb:Arab ps:Arab ru:Cyrl
rue:Cyrl sa:Deva sah:Cyrl sd:Arab,Deva sh:Latn,Cyrl si:Sinh sr:Cyrl,Latn ta:Taml te:Telu tg:Cyrl,Arab th:Thai
tk:Latn,Cyrl tt:Cyrl,Latn tyv:Cyrl ug:Arab,Cyrl,Latn uk:Cyrl ur:Arab uz:Latn,Cyrl,Arab wuu:Hani xal:Cyrl xmf:Geor
yi:Hebr yue:Hani zh:Hani
"""
_LATIN = """
af als an ast bar bcl br ca cbk ceb co cs cy da de diq dsb eml en eo es et eu fi fr frr fy ga gd gl gn gv hif hr hsb ht
hu ia id ie ilo io is it jbo jv kw la lb li lmo lt lv mg min mt mwl nah nap nds nl nn no oc pam pfl pl pms pt qu rm ro
sc scn sco sk sl so sq su sv sw tl tr vec vep vi vls vo wa war yo
"""
_FORM = re.compile(r"([A-Za-z]{2,3})(?:[_-]([A-Za-z]{4}))?")

TWO_LETTERS: dict[str, str] = {entry[:2]: entry[2:] for entry in _TWO_LETTERS.split()}
_MEMBERS = dict(entry.split(":") for entry in _STANDARD.split())
_SHORT = {three: two for two, three in TWO_LETTERS.items()}
_SHORT |= {member: _SHORT[macro] for macro, member in _MEMBERS.items() if macro in _SHORT}


class Tag(NamedTuple):
    """A language with its script. `language` is an ISO 639-3 code; for a macrolanguage (such as Chinese) it is the code
    of the standard member (`cmn`, Mandarin). `script` is an ISO 15924 code, or "" if the script is unknown."""

    language: str
    script: str = ""


@lru_cache(maxsize=4096)
def tag(name: str) -> Tag | None:
    """Parse the name of a language: a code of two or three letters, with or without a script (`fr`, `fra`, `fra_Latn`).
    Returns None for any other name, and for two letters that are no code of ISO 639-1.

    Codes of three letters are not checked against ISO 639-3, because models use some codes that ISO does not list.
    """
    form = _FORM.fullmatch(name)
    if form is None:
        return None
    code, script = form[1].lower(), (form[2] or "").capitalize()
    if code == "als" and not script:
        code = "gsw"
    elif code == "bh":
        code = "bho"
    elif len(code) == 2:
        if code not in TWO_LETTERS:
            return None
        code = TWO_LETTERS[code]
    return Tag(_MEMBERS.get(code, code), script)


@lru_cache(maxsize=65536)
def names(name: str, label: str, script: str = "") -> bool:
    """Return whether the language name `name` (`fr`, for instance) covers `label`, the label that a model gave a text
    (`fra_Latn`). `script` is the main script of the text, "" if unknown. It takes the place of the label's script if
    the label has none. Scripts are compared only if both sides have one."""
    if name == label:
        return True
    named, labelled = tag(name), tag(label)
    if named is None or labelled is None or named.language != labelled.language:
        return False
    return not named.script or not (labelled.script or script) or fits(labelled.script or script, named.script)


def meet(one: str, other: str) -> bool:
    """Return whether two language names can both apply to one text. That is the case if they name the same language,
    and their scripts agree or one of them has no script."""
    if one == other:
        return True
    a, b = tag(one), tag(other)
    if a is None or b is None or a.language != b.language:
        return False
    return not a.script or not b.script or fits(a.script, b.script) or fits(b.script, a.script)


def short(label: str) -> str:
    """Return the ISO 639-1 code of a language, or its ISO 639-3 code if it has no ISO 639-1 code. For `fra_Latn` the
    result is fr, for `cmn_Hani` zh, for `nob_Latn` no, and for `yue_Hani` yue. A string that is no code of a language
    is returned unchanged."""
    language_tag = tag(label)
    return label if language_tag is None else _SHORT.get(language_tag.language, language_tag.language)


@lru_cache(maxsize=4096)
def scripts_of(label: str) -> tuple[str, ...]:
    """Return the scripts in which texts with a language label are written. If the label has a script, only this script
    is returned. Otherwise the usual scripts of the language are returned, which are known for the languages of the
    model lid.176. The result is () if the scripts are unknown, or if the label's script code begins with Z (Zxxx:
    unwritten)."""
    language_tag = tag(label)
    if language_tag is None:
        return ()
    if language_tag.script:
        return () if language_tag.script.startswith("Z") else (language_tag.script,)
    return _SCRIPTS_OF.get(language_tag.language, ())


_SCRIPTS_OF: dict[str, tuple[str, ...]] = {
    tag(code).language: tuple(scripts.split(","))                                      # type: ignore[union-attr]
    for code, _, scripts in (e.partition(":") for e in [*_SCRIPTS.split(), *(f"{c}:Latn" for c in _LATIN.split())])}
