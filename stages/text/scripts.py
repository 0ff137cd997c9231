"""Finds the script (writing system) of a text by its letters.

ISO 15924 gives each script a code of four letters (`Latn`, `Cyrl`, `Hani`) and a number (215, 220, 500). The signal
`script` of the step `language` holds the number, as a float. The table in this module is Unicode's property `Script`
for the letters (general category L) that belong to one script. Letters of no script (Common, Inherited), digits, marks
and signs do not count. The table is part of the project, so that results do not depend on the Unicode version of Python
or of a library.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stages.text.marks import MOST, Span, merged_spans

#: ISO 15924 code and number of every script that has letters, and of Jpan, Japanese writing (kana and Han together)
_NUMBERS = """
Adlm166 Aghb239 Ahom338 Arab160 Armi124 Armn230 Avst134 Bali360 Bamu435 Bass259 Batk365 Beng325 Berf258 Bhks334
Bopo285 Brah300 Bugi367 Buhd372 Cakm349 Cans440 Cari201 Cham358 Cher445 Chrs109 Copt204 Cpmn402 Cprt403 Cyrl220
Deva315 Diak342 Dogr328 Dsrt250 Dupl755 Egyp050 Elba226 Elym128 Ethi430 Gara164 Geor240 Glag225 Gong312 Gonm313
Goth206 Gran343 Grek200 Gujr320 Gukh397 Guru310 Hang286 Hani500 Hano371 Hatr127 Hebr125 Hira410 Hluw080 Hmng450
Hmnp451 Hung176 Ital210 Java361 Jpan413 Jurc510 Kali357 Kana411 Kawi368 Khar305 Khmr355 Khoj322 Kits288 Knda345 Krai396
Kthi317 Lana351 Laoo356 Latn215 Lepc335 Limb336 Lina400 Linb401 Lisu399 Lyci202 Lydi116 Mahj314 Maka366 Mand140
Mani139 Marc332 Medf265 Mend438 Merc101 Mero100 Mlym347 Modi324 Mong145 Mroo264 Mtei337 Mult323 Mymr350 Nagm295
Nand311 Narb106 Nbat159 Newa333 Nkoo165 Nshu499 Ogam212 Olck261 Onao296 Orkh175 Orya327 Osge219 Osma260 Ougr143
Palm126 Pauc263 Perm227 Phag331 Phli131 Phlp132 Phnx115 Plrd282 Prti130 Rjng363 Rohg167 Runr211 Samr123 Sarb105
Saur344 Seal590 Shaw281 Shrd319 Sidd302 Sidt180 Sind318 Sinh348 Sogd141 Sogo142 Sora398 Soyo329 Sund362 Sunu274
Sylo316 Syrc135 Tagb373 Takr321 Tale353 Talu354 Taml346 Tang520 Tavt359 Tayo380 Telu340 Tfng120 Tglg370 Thaa170
Thai352 Tibt330 Tirh326 Tnsa275 Todr229 Tols299 Toto294 Tutg341 Ugar040 Vaii470 Vith228 Wara262 Wcho283 Xpeo030
Xsux020 Yezi192 Yiii460 Zanb339
"""
#: Runs of code points. An entry is the first code point of a run, in hexadecimal, followed by its script, or by `.` if
#: the run has no letters of a single script. A run ends where the next begins. From Scripts.txt and UnicodeData.txt of
#: Unicode 18.0 (Unicode License v3). Unassigned code points belong to the run around them.
_RUNS = """
41Latn 5b. 61Latn 7b. aaLatn ab. baLatn bb. c0Latn d7. d8Latn f7. f8Latn 2b9. 2e0Latn 2e5. 370Grek 374. 376Grek 37e.
37fGrek 384. 386Grek 387. 388Grek 3e2Copt 3f0Grek 3f6. 3f7Grek 400Cyrl 482. 48aCyrl 531Armn 55a. 560Armn 589. 58bArmn
58d. 5d0Hebr 5f3. 620Arab 640. 641Arab 64b. 66eArab 670. 671Arab 6d4. 6d5Arab 6d6. 6e5Arab 6e7. 6eeArab 6f0. 6faArab
6fd. 6ffArab 700. 710Syrc 711. 712Syrc 730. 74dSyrc 750Arab 780Thaa 7a6. 7b1Thaa 7c0. 7caNkoo 7eb. 7f4Nkoo 7f6.
7faNkoo 7fd. 800Samr 816. 81aSamr 81b. 824Samr 825. 828Samr 829. 840Mand 859. 860Syrc 870Arab 888. 889Arab 890.
8a0Arab 8ca. 904Deva 93a. 93dDeva 93e. 950Deva 951. 958Deva 962. 971Deva 980Beng 981. 985Beng 9bc. 9bdBeng 9be.
9ceBeng 9d7. 9dcBeng 9e2. 9f0Beng 9f2. 9fcBeng 9fd. a05Guru a3c. a59Guru a66. a72Guru a75. a85Gujr abc. abdGujr abe.
ad0Gujr ae2. af9Gujr afa. b05Orya b3c. b3dOrya b3e. b5cOrya b62. b71Orya b72. b83Taml bbe. bd0Taml bd7. c05Telu c3c.
c3dTelu c3e. c58Telu c62. c80Knda c81. c85Knda cbc. cbdKnda cbe. cdcKnda ce2. cf1Knda cf3. d04Mlym d3b. d3dMlym d3e.
d4eMlym d4f. d54Mlym d57. d5fMlym d62. d7aMlym d81. d85Sinh dca. e01Thai e31. e32Thai e34. e40Thai e47. e81Laoo eb1.
eb2Laoo eb4. ebdLaoo ec8. edcLaoo f00Tibt f01. f40Tibt f71. f88Tibt f8d. 1000Mymr 102b. 103fMymr 1040. 1050Mymr 1056.
105aMymr 105e. 1061Mymr 1062. 1065Mymr 1067. 106eMymr 1071. 1075Mymr 1082. 108eMymr 108f. 10a0Geor 10fb. 10fcGeor
1100Hang 1200Ethi 135d. 1380Ethi 1390. 13a0Cher 1400. 1401Cans 166d. 166fCans 1680. 1681Ogam 169b. 16a0Runr 16eb.
16f1Runr 1700Tglg 1712. 171fTglg 1720Hano 1732. 1740Buhd 1752. 1760Tagb 1772. 1780Khmr 17b4. 17d7Khmr 17d8. 17dcKhmr
17dd. 1820Mong 1885. 1887Mong 18a9. 18aaMong 18b0Cans 1900Limb 1920. 1950Tale 1980Talu 19d0. 1a00Bugi 1a17. 1a20Lana
1a55. 1aa7Lana 1aa8. 1b05Bali 1b34. 1b45Bali 1b4e. 1b83Sund 1ba1. 1baeSund 1bb0. 1bbaSund 1bc0Batk 1be6. 1c00Lepc
1c24. 1c4dLepc 1c50. 1c5aOlck 1c7e. 1c80Cyrl 1c90Geor 1cc0. 1d00Latn 1d26Grek 1d2bCyrl 1d2cLatn 1d5dGrek 1d62Latn
1d66Grek 1d6bLatn 1d78Cyrl 1d79Latn 1dbfGrek 1dc0. 1e00Latn 1f00Grek 1fbd. 1fbeGrek 1fbf. 1fc2Grek 1fcd. 1fd0Grek
1fdd. 1fe0Grek 1fed. 1ff2Grek 1ffd. 2071Latn 2074. 207fLatn 2080. 2090Latn 20a0. 2126Grek 2127. 212aLatn 212c.
2132Latn 2133. 214eLatn 214f. 2183Latn 2185. 2c00Glag 2c60Latn 2c80Copt 2ce5. 2cebCopt 2cef. 2cf2Copt 2cf9. 2d00Geor
2d30Tfng 2d70. 2d80Ethi 2de0. 3005Hani 3006. 303bHani 303c. 3041Hira 3099. 309dHira 30a0. 30a1Kana 30fb. 30fdKana
3105Bopo 3131Hang 3190. 31a0Bopo 31c0. 31f0Kana 3200. 3400Hani 4dc0. 4e00Hani a000Yiii a490. a4d0Lisu a4fe. a500Vaii
a60d. a610Vaii a620. a62aVaii a640Cyrl a66f. a67fCyrl a69e. a6a0Bamu a6e6. a722Latn a788. a78bLatn a800Sylo a802.
a803Sylo a806. a807Sylo a80b. a80cSylo a823. a840Phag a874. a882Saur a8b4. a8f2Deva a8f8. a8fbDeva a8fc. a8fdDeva
a8ff. a90aKali a926. a930Rjng a947. a960Hang a980. a984Java a9b3. a9e0Mymr a9e5. a9e6Mymr a9f0. a9faMymr aa00Cham
aa29. aa40Cham aa43. aa44Cham aa4c. aa60Mymr aa77. aa7aMymr aa7b. aa7eMymr aa80Tavt aab0. aab1Tavt aab2. aab5Tavt
aab7. aab9Tavt aabe. aac0Tavt aac1. aac2Tavt aade. aae0Mtei aaeb. aaf2Mtei aaf5. ab01Ethi ab30Latn ab5b. ab5cLatn
ab65Grek ab66Latn ab6a. ab6cLatn ab70Cher abc0Mtei abe3. ac00Hang d800. f900Hani fb00Latn fb13Armn fb1dHebr fb1e.
fb1fHebr fb29. fb2aHebr fb50Arab fbb2. fbd3Arab fd3e. fd50Arab fd90. fd92Arab fdc8. fdf0Arab fdfc. fe70Arab feff.
ff21Latn ff3b. ff41Latn ff5b. ff66Kana ff70. ff71Kana ff9e. ffa0Hang ffe0. 10000Linb 10100. 10280Lyci 102a0Cari
102e0. 10300Ital 10320. 1032dItal 10330Goth 10341. 10342Goth 1034a. 10350Perm 10376. 10380Ugar 1039f. 103a0Xpeo
103d0. 10400Dsrt 10450Shaw 10480Osma 104a0. 104b0Osge 10500Elba 10530Aghb 1056f. 10570Vith 105c0Todr 10600Lina
10780Latn 10800Cprt 10840Armi 10857. 10860Palm 10877. 10880Nbat 108a7. 108e0Hatr 108fb. 10900Phnx 10916. 10920Lydi
1093f. 10940Sidt 10980Mero 109a0Merc 109bc. 109beMerc 109c0. 10a00Khar 10a01. 10a10Khar 10a38. 10a60Sarb 10a7d.
10a80Narb 10a9d. 10ac0Mani 10ac8. 10ac9Mani 10ae5. 10b00Avst 10b39. 10b40Prti 10b58. 10b60Phli 10b78. 10b80Phlp
10b99. 10c00Orkh 10c80Hung 10cfa. 10d00Rohg 10d24. 10d4aGara 10d69. 10d6fGara 10d8e. 10e80Yezi 10eab. 10eb0Yezi
10ec2Arab 10ec9. 10ed9Arab 10ef0. 10f00Sogo 10f1d. 10f27Sogo 10f30Sogd 10f46. 10f70Ougr 10f82. 10fb0Chrs 10fc5.
10fe0Elym 11000. 11003Brah 11038. 11071Brah 11073. 11075Brah 1107f. 11083Kthi 110b0. 110d0Sora 110f0. 11103Cakm
11127. 11144Cakm 11145. 11147Cakm 11150Mahj 11173. 11176Mahj 11180. 11183Shrd 111b3. 111c1Shrd 111c5. 111daShrd
111db. 111dcShrd 111dd. 11200Khoj 1122c. 1123fKhoj 11241. 11280Mult 112a9. 112b0Sind 112df. 11305Gran 1133b.
1133dGran 1133e. 11350Gran 11357. 1135dGran 11362. 11380Tutg 113b8. 113d1Tutg 113d2. 113d3Tutg 113d4. 11400Newa
11435. 11447Newa 1144b. 1145fNewa 11480Tirh 114b0. 114c4Tirh 114c6. 114c7Tirh 114d0. 11580Sidd 115af. 115d8Sidd
115dc. 11600Modi 11630. 11644Modi 11650. 11680Takr 116ab. 116b8Takr 116b9. 11700Ahom 1171d. 11740Ahom 11800Dogr
1182c. 118a0Wara 118e0. 118ffWara 11900Diak 11930. 1193fDiak 11940. 11941Diak 11942. 119a0Nand 119d1. 119e1Nand
119e2. 119e3Nand 119e4. 11a00Zanb 11a01. 11a0bZanb 11a33. 11a3aZanb 11a3b. 11a50Soyo 11a51. 11a5cSoyo 11a8a.
11a9dSoyo 11a9e. 11ab0Cans 11ac0Pauc 11b00. 11b0aDeva 11b60. 11bc0Sunu 11be1. 11c00Bhks 11c2f. 11c40Bhks 11c41.
11c72Marc 11c92. 11d00Gonm 11d31. 11d46Gonm 11d47. 11d60Gong 11d8a. 11d98Gong 11da0. 11db0Tols 11de0. 11df1Beng
11ee0Maka 11ef3. 11f02Kawi 11f03. 11f04Kawi 11f34. 11fb0Lisu 11fc0. 12000Xsux 12400. 12480Xsux 12550. 12f90Cpmn
12ff1. 13000Egyp 13430. 13441Egyp 13447. 13460Egyp 14400Hluw 16100Gukh 1611e. 16800Bamu 16a40Mroo 16a60. 16a70Tnsa
16ac0. 16ad0Bass 16af0. 16b00Hmng 16b30. 16b40Hmng 16b44. 16b63Hmng 16d40Krai 16d6d. 16e40Medf 16e80. 16ea0Berf
16f00Plrd 16f4f. 16f50Plrd 16f51. 16f93Plrd 16fe0Tang 16fe1Nshu 16fe2. 16fe3Hani 16fe4. 16ff2Hani 16ff4. 17000Tang
18b00Kits 18d00Tang 18e00Jurc 1aff0Kana 1b001Hira 1b120Kana 1b123Hira 1b124Kana 1b132Hira 1b155Kana 1b170Nshu
1bc00Dupl 1bc9c. 1df00Latn 1dff3Grek 1dff5Latn 1e000. 1e030Cyrl 1e08f. 1e100Hmnp 1e130. 1e137Hmnp 1e140. 1e14eHmnp
1e14f. 1e290Toto 1e2ae. 1e2c0Wcho 1e2ec. 1e4d0Nagm 1e4ec. 1e5d0Onao 1e5ee. 1e5f0Onao 1e5f1. 1e6c0Tayo 1e6e3.
1e6e4Tayo 1e6e6. 1e6e7Tayo 1e6ee. 1e6f0Tayo 1e6f5. 1e6feTayo 1e7e0Ethi 1e800Mend 1e8c7. 1e900Adlm 1e944. 1e94bAdlm
1e950. 1ee00Arab 1eef0. 20000Hani 3d000Seal e0001.
"""
#: script codes of labels that letters alone do not show (variants and mixtures) → the code compared instead
_FOLDED = {"Hans": "Hani", "Hant": "Hani", "Hang": "Kore", "Hira": "Jpan", "Kana": "Jpan", "Hrkt": "Jpan",
           "Aran": "Arab", "Cyrs": "Cyrl", "Latf": "Latn", "Latg": "Latn", "Geok": "Geor", "Syre": "Syrc",
           "Syrj": "Syrc", "Syrn": "Syrc"}
#: least share of kana among kana and Han that makes both Japanese writing
_KANA = 0.1

NUMBERS: dict[str, int] = {entry[:4]: int(entry[4:]) for entry in _NUMBERS.split()}
CODES: dict[int, str] = {number: code for code, number in NUMBERS.items()}
_NO_LETTERS = bytes(c for c in range(128) if not chr(c).isalpha())
_PLACES = sorted(set(NUMBERS) - {"Jpan"})


@lru_cache(maxsize=1)
def _table() -> np.ndarray:
    """Return an array that gives the script of each code point, uint8[0x110000]. The entry of a letter is 1 + the index
    of its script in `_PLACES`; that of any other character is 0."""
    table = np.zeros(0x110000, np.uint8)
    places = {code: 1 + i for i, code in enumerate(_PLACES)}
    runs = [(entry[:-4], entry[-4:]) if entry[-1] != "." else (entry[:-1], ".") for entry in _RUNS.split()]
    starts = [int(start, 16) for start, _ in runs]
    for start, end, (_, code) in zip(starts, [*starts[1:], 0x110000], runs):
        table[start:end] = places.get(code, 0)
    table.flags.writeable = False
    return table


def letters_by_script(text: str) -> dict[str, int]:
    """Count the letters of a text by script. Returns {ISO 15924 code of a script that occurs: number of its
    letters}."""
    if text.isascii():
        latin = len(text.encode().translate(None, _NO_LETTERS))
        return {"Latn": latin} if latin else {}
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.bincount(_table()[codes], minlength=1)
    return {_PLACES[place - 1]: int(counts[place]) for place in np.flatnonzero(counts).tolist() if place}


def main_script(text: str) -> tuple[str, float]:
    """Return (the script of most letters of a text, the share of the letters that are in this script). The result is
    ("", 0.0) for a text without letters.

    Kana and Han count as one script, Jpan, if at least a tenth of them are kana; otherwise Han is a script of its own.
    If scripts have equally many letters, the one with the lowest ISO 15924 number is returned.
    """
    letters = letters_by_script(text)
    kana = letters.get("Hira", 0) + letters.get("Kana", 0)
    if kana and kana >= _KANA * (kana + letters.get("Hani", 0)):
        letters["Jpan"] = sum(letters.pop(code, 0) for code in ("Hira", "Kana", "Hani"))
    if not letters:
        return "", 0.0
    code = min(letters, key=lambda code: (-letters[code], NUMBERS[code]))
    return code, letters[code] / sum(letters.values())


def other_letters(text: str) -> list[Span]:
    """Return the runs of letters of a text that are in another script than its main script, at most MOST, as (first
    character, one past the last)."""
    main = main_script(text)[0]
    own = [1 + _PLACES.index(code) for code in (("Hira", "Kana", "Hani") if main == "Jpan" else (main,)) if code]
    places = _table()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    edges = np.flatnonzero(np.diff(((places > 0) & ~np.isin(places, own)).astype(np.int8), prepend=0, append=0))
    return merged_spans([(begin, end) for begin, end in edges.reshape(-1, 2).tolist()])[:MOST]


def same_script(a: str, b: str) -> bool:
    """Return whether two ISO 15924 codes name scripts that `main_script` does not tell apart, such as Hans (simplified
    Han) and Hani (Han)."""
    return _FOLDED.get(a, a) == _FOLDED.get(b, b)


def fits(script: str, declared: str) -> bool:
    """Return whether the main script of a text agrees with the script that a language label declares. Equal scripts
    agree. A text in Han also agrees with the Japanese script, because a Japanese text may consist of Han alone."""
    return same_script(script, declared) or (script == "Hani" and _FOLDED.get(declared, declared) == "Jpan")
