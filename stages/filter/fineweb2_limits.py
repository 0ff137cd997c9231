"""Holds FineWeb-2's thresholds and stop words for each language, and reads FineWeb-2's config files.

The table in this module comes from the config files (https://github.com/huggingface/fineweb-2, `configs/LANGUAGE.yml`,
as of the release: commits 05e6729 and d331bee). FineWeb-2's authors computed the thresholds by the method of arXiv
2506.20920. The table covers only large languages. FineWeb-2 has a file for each of 1,868 languages, and `read_limits`
reads such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class LanguageLimits(BaseModel):
    """The thresholds and stop words by which FineWeb-2 judges documents of one language. The fields have the names that
    FineWeb-2's config files give them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dup_line_frac: float = Field(description="largest share of lines that are copies")
    top_n_grams: tuple[tuple[int, float], ...] = Field(description="pairs of n (2 to 4) and the largest share of "
                                                                   "characters the most frequent run of n words covers")
    dup_n_grams: tuple[tuple[int, float], ...] = Field(description="pairs of n (5 to 10) and the largest share of "
                                                                   "characters in later copies of runs of n words")
    line_punct_thr: float = Field(description="smallest share of lines that end with terminal punctuation")
    new_line_ratio: float = Field(description="most line breaks per word")
    min_avg_word_length: float = Field(description="shortest mean word, characters")
    max_avg_word_length: float = Field(description="longest mean word, characters")
    max_non_alpha_words_ratio: float = Field(description="smallest share of words that hold a letter")
    stopwords: tuple[str, ...] = Field(description="words of which two different ones must occur")
    language_score: float | None = Field(None, description="smallest probability of the language, by GlotLID; for the "
                                                           "step `language`, not looked at here")


#: columns: language; shares of copied lines, top 2/3/4-grams, duplicated 5…10-grams; language score; share of lines
#: that end with punctuation; shortest and longest mean word; share of words with a letter; line breaks per word; stop
#: words
_TABLE = """
arb_Arab .304 .197/.172/.146 .165/.153/.142/.131/.12/.109 .711 .143 2 9 .787 .189 ، في من على إلى عام أن مع أو هو عن التي كان بين ما كانت هي المتحدة بعد
bul_Cyrl .317 .173/.157/.139 .17/.158/.144/.131/.12/.108 .9 .154 3 10 .756 .142 на и в е от за се г. с през да по
cat_Latn .294 .216/.189/.168 .159/.149/.137/.126/.116/.105 .815 .154 2 11 .832 .118 de el la a i d l' en d' que va els per un les una amb es
ces_Latn .311 .206/.183/.165 .168/.157/.145/.133/.121/.109 .88 .06 3 11 .781 .182 v a se na je z s do
cmn_Hani .287 .256/.201/.171 .198/.182/.167/.154/.14/.127 .692 .106 1 5 .735 .178 的 年 在 月 是 和 日 了 於 · 為 有 被 人 中 为 他 與 後 也 而 由
dan_Latn .305 .367/.297/.232 .169/.158/.147/.134/.123/.112 .3 .1 3 11 .798 .182 i og af en til er den at som på for med det blev var der fra de han et
deu_Latn .263 .169/.153/.137 .141/.134/.126/.117/.108/.098 .821 0 0 15 .774 .152 der und die in von im den des mit das er dem als wurde für
ekk_Latn .363 .345/.268/.215 .172/.161/.15/.139/.125/.113 .638 .143 3 13 .722 .213 ja on oli ta aastal eesti ka ning et mis kui aasta ei või see oma tema
ell_Grek .31 .194/.175/.156 .174/.163/.153/.142/.13/.119 .826 .167 3 11 .809 .116 του και το της η την από ο με τον να που των στην για στο σε είναι τη τα οι
eus_Latn .298 .263/.227/.192 .152/.14/.129/.118/.108/.096 .701 .167 4 11 .788 .25 eta da ziren zen bat zuen zeuden izan
fas_Arab .246 .189/.164/.143 .157/.147/.137/.127/.117/.107 .85 .2 2 9 .812 .15 در و ، به از که است این را با یک
fin_Latn .293 .253/.202/.179 .153/.143/.133/.122/.112/.101 .764 .114 3 14 .755 .161 ja on oli hän vuonna myös joka se ei sen ovat sekä mutta että tai vuoden kanssa hänen s. jälkeen the
fra_Latn .264 .161/.149/.134 .15/.141/.131/.121/.111/.1 .824 .1 2 11 .812 .185 de la le et à en l' des du les est d' un une il dans par au
heb_Hebr .34 .239/.202/.173 .16/.151/.14/.129/.118/.108 .9 .2 2 9 .799 .126 של את על הוא עם בשנת גם היה היא לאחר לא ידי בין או כי
hin_Deva .206 .208/.198/.161 .135/.125/.116/.108/.099/.09 .692 .091 2 21 .837 .316 के में है की और से का को एक हैं पर
hrv_Latn .312 .215/.19/.165 .173/.162/.15/.138/.126/.113 .467 .099 2 11 .751 .198 je u i se na su za od s a
hun_Latn .322 .226/.198/.172 .169/.159/.148/.136/.124/.112 .744 .067 3 15 .766 .231 a az és is egy volt hogy nem meg de magyar első el között
ind_Latn .241 .194/.166/.145 .166/.155/.144/.133/.122/.111 .685 .111 3 12 .805 .157 dan yang di pada dari ini dengan adalah untuk dalam
isl_Latn .292 .21/.183/.163 .157/.15/.143/.126/.114/.104 .863 .095 2 13 .8 .25 og í á að sem er var til við en af um hann með
ita_Latn .246 .198/.156/.133 .144/.136/.127/.118/.109/.1 .817 .025 3 21 .807 .2 di e il la in a del che è della un per nel l' con da i una
jpn_Jpan .328 .239/.196/.172 .243/.225/.207/.19/.175/.159 .886 .096 1 6 .759 .13 の に を は た て が と で 年 し ・ 月 れ さ
kor_Hang .374 .282/.228/.185 .201/.184/.168/.154/.14/.127 .842 .062 1 6 .791 .196 의 다 이 는 에 을 한 년 하 은 를 했 고 에서 가 있 으로 인 월 로 되
lit_Latn .32 .247/.21/.174 .175/.163/.15/.137/.126/.114 .699 .167 3 12 .688 .19 m ir buvo į nuo iš d su yra lietuvos a iki o kaip kad apie po km
lvs_Latn .329 .526/.337/.242 .173/.16/.148/.135/.122/.109 .3 .125 2 13 .727 .169 un ir no ar gadā gada par bija arī
nld_Latn .296 .213/.182/.158 .156/.146/.136/.126/.115/.104 .689 .102 3 17 .828 .154 de van in het een en is op voor met door zijn werd hij uit
nob_Latn .283 .204/.175/.15 .146/.139/.128/.119/.11/.099 .813 .107 3 12 .783 .167 i og av som en er til på for ble med den det var han de å fra
pol_Latn .32 .222/.198/.176 .172/.16/.148/.136/.123/.111 .689 .087 3 12 .726 .158 w i na z do się roku od a jest przez po jako oraz o został był nie
por_Latn .287 .371/.191/.163 .163/.153/.141/.13/.119/.108 .799 .077 3 13 .814 .186 de a e o em do da que um no uma com para na é foi
ron_Latn .289 .161/.146/.131 .16/.149/.138/.127/.117/.106 .822 .081 1 14 .779 .207 de în a și din la o cu este un pe fost care al
rus_Cyrl .322 .184/.164/.146 .168/.156/.145/.133/.121/.109 .9 .231 3 11 .713 .139 в и на с года по году из был к не от что за для его как а он также до после
slk_Latn .319 .316/.218/.171 .176/.165/.152/.14/.127/.115 .667 0 2 11 .752 .214 v a na sa je z roku s
slv_Latn .317 .262/.225/.189 .17/.158/.146/.135/.123/.111 .6 .045 2 12 .781 .273 je v in na so se ki za leta z
spa_Latn .252 .156/.14/.125 .145/.136/.127/.117/.108/.099 .84 .182 3 14 .825 .138 de la en el y a que del los se por un con una las su
srp_Cyrl .257 .176/.158/.141 .147/.137/.126/.116/.106/.096 .872 .156 3 10 .8 .239 у је и на се од су године да за из са насеље
swe_Latn .292 .242/.195/.174 .156/.147/.136/.125/.116/.105 .629 .2 3 12 .841 .135 i och är av en som den med på till att för
swh_Latn .302 .396/.282/.231 .193/.17/.155/.14/.126/.113 .3 .143 3 9 .802 .167 ya na wa katika kwa ni la za mwaka
tha_Thai .349 .221/.197/.162 .185/.168/.152/.137/.124/.111 .9 0 2 10 .9 .153 ใน ที่ และ ของ เป็น มี การ ได้
ukr_Cyrl .3 .189/.172/.153 .16/.148/.136/.124/.113/.102 .9 .167 3 11 .694 .175 у в на і з та до року за що
vie_Latn .293 .223/.197/.171 .178/.163/.15/.136/.124/.111 .802 .333 3 11 .803 .103 là và của một được trong năm các có loài này đã người
zsm_Latn .331 .264/.252/.225 .185/.176/.166/.156/.145/.134 .618 .125 3 11 .808 .214 dan di yang pada dalam dengan untuk ini
"""  # noqa: E501


def table() -> dict[str, LanguageLimits]:
    """Return the thresholds that come with the step `fineweb2`, as {language: limits}."""
    result = {}
    for line in _TABLE.split("\n")[1:-1]:
        name, lines, top, dup, score, ended, low, high, letters, breaks, *words = line.split(" ")
        result[name] = LanguageLimits(
            dup_line_frac=float(lines), top_n_grams=_pairs(2, top), dup_n_grams=_pairs(5, dup),
            language_score=float(score), line_punct_thr=float(ended), min_avg_word_length=float(low),
            max_avg_word_length=float(high), max_non_alpha_words_ratio=float(letters), new_line_ratio=float(breaks),
            stopwords=tuple(words))
    return result


def _pairs(first: int, shares: str) -> tuple[tuple[int, float], ...]:
    return tuple((size, float(share)) for size, share in enumerate(shares.split("/"), first))


def read_limits(path: str | Path) -> dict[str, LanguageLimits]:
    """Read FineWeb-2's thresholds from a YAML file, as {language: limits}. The file is either one of FineWeb-2's config
    files (each is named after its language), or a mapping from languages to the contents of such files.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has neither form. The message names file, language, key and remedy.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_bytes(), Loader=_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: no YAML: {e}") from None
    if isinstance(content, Mapping) and "dup_line_frac" in content:
        content = {path.name.partition(".")[0]: content}
    if not isinstance(content, Mapping) or not content or not all(isinstance(e, Mapping) for e in content.values()):
        raise ValueError(f"{path}: neither one of FineWeb-2's configs (dup_line_frac: …) nor a mapping of languages to "
                         f"such (fra_Latn: {{dup_line_frac: …}})")
    return {str(name): _limits(path, str(name), entry) for name, entry in content.items()}


def _limits(path: Path, name: str, entry: Mapping[str, Any]) -> LanguageLimits:
    entry = dict(entry)
    if any(not isinstance(word, str) for word in entry.get("stopwords") or ()):
        stray = next(word for word in entry["stopwords"] if not isinstance(word, str))
        raise ValueError(f"{path}: {name}: stopwords: {stray!r} is no word; put quotes around words that YAML takes "
                         f"for something else (no, on, 1)")
    for key in ("top_n_grams", "dup_n_grams"):
        if isinstance(entry.get(key), list):
            entry[key] = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in entry[key])
    if isinstance(entry.get("stopwords"), list):
        entry["stopwords"] = tuple(entry["stopwords"])
    try:
        limits = LanguageLimits(**entry)
    except (ValidationError, TypeError) as e:
        first = e.errors()[0] if isinstance(e, ValidationError) else {"loc": (), "msg": str(e)}
        raise ValueError(f"{path}: {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for key, allowed in (("top_n_grams", (2, 3, 4)), ("dup_n_grams", (5, 6, 7, 8, 9, 10))):
        strays = [size for size, _ in getattr(limits, key) if size not in allowed]
        if strays:
            raise ValueError(f"{path}: {name}: {key}: no such n: {strays[0]}; there are {', '.join(map(str, allowed))}")
    return limits


def _loader() -> Any:
    """Return the fastest safe YAML loader: libyaml's if available. Speed matters because FineWeb-2's 1,868 config files
    in one are 1 MB."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
