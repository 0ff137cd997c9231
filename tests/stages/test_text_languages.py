"""The words of languages other than English equal datatrove's, and so does the table of languages."""

from __future__ import annotations

import pytest

from stages.text.languages import installed, split_words, splitter
from stages.text.spacy_rules import spacy_rules
from stages.text.words import words_of
from tests.conftest import shared_data

#: every kind of rule that English has not: a token pattern, special cases of several chunks, elision
TEXTS = {
    "fra_Latn": "L'abbaye d'Ailly, aujourd'hui (c'est-à-dire l'an 2000), va-t-il à Saint-Étienne-du-Mont? Qu'en…",
    "spa_Latn": "Los EE. UU. y (EE. UU.) no EE . UU . ni EE.UU. D. Juan, p.ej. 3.000 €, ¿qué? ¡No! EE.  UU.",
    "rus_Cyrl": "Он, в т.ч. и вед. науч. сотр. Иванов, жил в н.в. дома (и т.д.). А.С. Пушкин, 1999г. 5 км/ч",
    "srp_Cyrl": "да л' је и сл. али да л’ дође, др Петровић; нпр. 5. маја",
    "ell_Grek": "Η Μ. Ασία και ο Αγ. Γρ. (Μ. Ασία) κ.λπ. στις 5 μ.μ.· τι; Ναι.",
    "arb_Arab": "كان ذلك سنة ٣٠٠ ق.م ثم ب. م وبعدها، أليس كذلك؟ نعم.",
    "hun_Latn": "Az 1848-as évben 10-én, kb. 5%-kal több volt; Budapest-Bécs 2-3 km-re. 100Ft-ot, pl. ez-az!",
    "tur_Latn": "Saat 15'te Ankara'nın 3. gününde, %50'si Dr. Ali'ye 'evet' dedi; v.b. 1.000,5 TL.",
    "deu_Latn": "Z. B. sagt Dr. Müller: „So geht's z.B. nicht!“ Am 3. Mai kostete es 1.000,- € und/oder mehr.",
    "ita_Latn": "L'uomo dell'anno: c'è un po' d'acqua, nell'800 all'Aquila. 5°C, ecc.",
    "zsm_Latn": "Rujuk 1 Kor. dan 1 Tim. serta 1  Tim. dalam kitab; kanak-kanak itu (1 Kor.) ber-lari.",
    "bul_Cyrl": "Ябълки и под. плодове, и др. и пр. на ул. Витоша №5, гр. София.",
    "fin_Latn": "Klo 10.30 EU:n ja Nokia:lla oli esim. 5-vuotias. Mm. 3 %:n nousu!",
    "swh_Latn": "Ng'ombe wa Dar-es-Salaam, n.k. Bei ni Sh. 1,000/= kwa kilo.",
    "xho_Latn": "Umntu ngumntu ngabantu, njl.njl. (1994).",
}


@pytest.mark.parametrize("language", TEXTS)
def test_words_equal_datatrove(language):
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    theirs, rules = load_word_tokenizer(language), splitter(language).rules
    text = TEXTS[language]
    for variant in (text, text.replace(" ", "\n"), text.replace(" ", "  "), text.upper(), f"({text})" * 3,
                    text.replace(". ", "."), text.replace(" ", ""), text.replace(" ", "\u00a0")):
        expected = theirs.word_tokenize(variant)
        assert words_of(variant, rules).strings() == expected
        assert spacy_rules(rules).words(variant) == expected


@pytest.mark.slow
def test_words_of_real_sentences_equal_datatrove():
    """57 languages of lingua's test set: single sentences, and twenty of them as one text."""
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    compared = []
    for path in sorted(shared_data("lid", "lingua-sentences").glob("*.txt")):
        found = splitter(path.stem)
        if found is None or found.rules is None:
            continue
        theirs, lines = load_word_tokenizer(found.language), path.read_text(encoding="utf-8").splitlines()
        for text in [*lines[::20], "\n".join(lines[:20]), " ".join(lines[40:60]).replace(". ", ".")]:
            assert words_of(text, found.rules).strings() == theirs.word_tokenize(text), (path.stem, text[:80])
        compared.append(path.stem)
    assert len(compared) == 57


def test_full_names_are_split_as_datatrove_splits_them():
    from datatrove.utils.word_tokenizers import load_tokenizer_assignments

    checked = 0
    for name, factory in load_tokenizer_assignments().items():
        code, _, script = name.partition("_")
        if len(code) != 3 or len(script) != 4:
            continue
        kind, argument = factory.args
        rules = {"SpaCyTokenizer": argument, "WhitespaceTokenizer": "xx"}.get(kind)
        found = splitter(name)
        assert found.language == name
        assert found.rules == (None if rules in ("ja", "zh", "vi") else rules), name
        assert bool(found.needs) == (found.rules is None)
        checked += 1
    assert checked > 1900


def test_short_names_are_of_the_usual_script():
    assert splitter("fr") == splitter("fra") == splitter("fra_Latn")
    assert splitter("ar").language == "arb_Arab"
    assert splitter("sr").language == splitter("srp").language == "srp_Cyrl"
    assert splitter("zh").language == "cmn_Hani"
    assert splitter("no_such") is None
    assert splitter("") is None


def test_a_missing_package_is_named():
    with pytest.raises(LookupError, match="no tokenizer"):
        split_words("no_such")
    for language in ("kor_Hang", "tha_Thai", "jpn_Jpan"):
        package = splitter(language).needs
        if not installed(package):
            with pytest.raises(ModuleNotFoundError, match=package):
                split_words(language)
