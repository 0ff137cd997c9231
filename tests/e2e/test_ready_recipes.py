"""Every ready recipe is planned, run on a few dozen pages, and its sources are cited.

`SITES` says for each recipe which input it gets, and which drops its run must show. A recipe without an entry fails
here. `ready_recipes.json` holds the version and a hash of each recipe. After a change of a recipe, raise its `version:`
and run `python -m tests.e2e.test_ready_recipes`, which rewrites this file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command
from pipeline.passes.tally import score_bin
from pipeline.plan.estimate import survey_recipe
from pipeline.plan.lint import lint
from pipeline.recipe import Recipe, RecipeError, load_recipe, ready_recipes
from pipeline.recipe.citation import citation
from pipeline.recipe.load import READY
from pipeline.recipe.marks import parse_yaml
from pipeline.run import make_backend, run_recipe
from stages.filter.badwords import LISTS
from stages.models.train_quality import FastTextSettings, train
from stages.scoring.models import LID176
from tests.corpus import GERMAN, Page, _html, pages, sentences, warc
from tests.frozen import hold_run
from tests.stages.lid import lid176_model

DEUTSCH = (
    "Die Verarbeitung großer Textmengen ist eine Aufgabe, die man sorgfältig planen muss.",
    "Jede Seite wird gelesen, geprüft und nur dann behalten, wenn sie genügend Inhalt hat.",
    "Dabei hilft es, die Regeln offen zu legen und ihre Wirkung an Beispielen zu zeigen.",
    "Im Frühling blühen an den Hängen die Kirschbäume, und die Bienen sind schon am Morgen unterwegs.",
    "Der alte Bahnhof der Stadt wurde vor zwei Jahren verkauft und dient heute als Bibliothek.",
    "Wer mit dem Fahrrad zur Arbeit fährt, kennt den Wind, der vom Fluss her durch die Straßen zieht.",
    "Meine Großmutter erzählte gern von dem Winter, in dem der See bis zum Grund gefroren war.",
    "Das Museum zeigt Karten, auf denen die Küste noch ganz anders verläuft als heute.",
    "Nach dem Konzert standen die Leute lange vor der Tür und sprachen über das letzte Stück.",
    "Ein Garten braucht Geduld, denn was man im Herbst pflanzt, sieht man erst im Mai.",
    "In der Werkstatt liegen Hobel und Sägen, die schon der Vater des Tischlers benutzt hat.",
    "Der Arzt riet ihm, jeden Tag eine Stunde zu gehen und abends früher zu schlafen.",
    "Auf dem Markt gibt es Äpfel, Birnen und Pflaumen aus den Dörfern der Umgebung.",
    "Die Brücke über das Tal ist so hoch, dass man von ihr aus die ganze Ebene sieht.",
    "Sie hat das Buch in einer Nacht gelesen und am nächsten Morgen ihrer Schwester geschenkt.",
    "Für den Kuchen nimmt man vier Eier, etwas Mehl und die Schale einer Zitrone.",
    "Der Richter hörte beide Seiten an und gab dem Nachbarn in den meisten Punkten recht.",
    "Weil der Zug nicht kam, warteten sie im Café und spielten Karten bis zum Abend.",
    "Im Labor messen die Studenten, wie schnell sich das Wasser in den Röhren erwärmt.",
    "Das Dorf liegt abseits der Straße, und nachts hört man dort nur die Hunde.")
FRANCAIS = (
    "Le traitement de grandes quantités de textes est une tâche qui demande de la patience et du soin.",
    "Chaque page est lue, vérifiée, puis gardée seulement si elle a assez de contenu pour le lecteur.",
    "Au printemps, les cerisiers fleurissent sur les pentes et les abeilles sortent dès le matin.",
    "L'ancienne gare de la ville a été vendue il y a deux ans et sert aujourd'hui de bibliothèque.",
    "Ceux qui vont au travail à vélo connaissent le vent qui vient de la rivière par les rues.",
    "Ma grand-mère parlait souvent de l'hiver où le lac avait gelé jusqu'au fond.",
    "Le musée montre des cartes sur lesquelles la côte est tout autre que celle de nos jours.",
    "Après le concert, les gens sont restés devant la porte et ont parlé du dernier morceau.",
    "Un jardin demande du temps, car on ne voit qu'en mai ce que l'on plante à l'automne.",
    "Dans l'atelier se trouvent des scies et des rabots que le père du menuisier utilisait déjà.",
    "Le médecin lui a conseillé de marcher une heure par jour et de dormir plus tôt le soir.",
    "Au marché, on vend des pommes, des poires et des prunes des villages de la région.",
    "Le pont au-dessus de la vallée est si haut que l'on voit de là toute la plaine.",
    "Elle a lu le livre en une nuit et l'a donné le lendemain à sa sœur.",
    "Pour le gâteau, il faut quatre œufs, un peu de farine et le zeste d'un citron.",
    "Le juge a écouté les deux parties et a donné raison au voisin sur la plupart des points.",
    "Comme le train n'arrivait pas, ils ont attendu dans un café et joué aux cartes jusqu'au soir.",
    "Dans le laboratoire, les étudiants mesurent la vitesse à laquelle l'eau chauffe dans les tubes.",
    "Le village est loin de la route, et la nuit on n'y entend que les chiens.",
    "Il pleut depuis une semaine, et la rivière monte lentement vers les maisons du quai.")
BAD_WORDS = {"en": ["garbage collected", "grammar"], "de": ["unfug"]}
HELD = Path(__file__).with_name("ready_recipes.json")
DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
#: keys of a recipe that make no other documents
_SAID = ("about", "input", "wants")


@dataclass(frozen=True)
class Site:
    """The input for one recipe. `input` writes it to a folder, and returns the pattern for --input. `drops` are the
    triples (dataset, stage, reason) that its run must show. `wants` writes the further files that the recipe needs, and
    returns {key of the recipe: path}."""

    input: Callable[[Path], str]
    drops: set[tuple[str, str, str]]
    wants: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})


def planted() -> list[Page]:
    """Return pages, each of which breaks one rule."""
    rng, prose = random.Random(4), sentences()

    def page(name: str, paragraphs: list[str]) -> Page:
        return Page(f"https://planted.example/{name}", _html(name.title(), paragraphs), name)

    repeated = prose[7]
    return [page("repeats", [f"{repeated} {repeated} {repeated} {s}" for s in rng.sample(prose, 8)]),
            page("lorem", [*rng.sample(prose, 8), "Here it says lorem ipsum, as drafts of pages do."]),
            page("braces", [*rng.sample(prose, 12), f"{prose[3][:-1]} {{ and this }} too."]),
            page("short", ["Too short to be of any use to anyone who reads it."]),
            page("german", [GERMAN * 3, GERMAN * 2]),
            page("menu", [f"item number {i} of the long list" for i in range(60)]),
            Page("https://xxx.example/porn/video-sex.html", _html("Site", rng.sample(prose, 20)), "address")]


def crawl(folder: Path) -> str:
    """Write two WARC files of pages: articles, near-duplicates, copies, and pages that rules drop. Returns the pattern
    of the files."""
    found = [*pages(44, seed=6), *planted()]
    (folder / "crawl").mkdir()
    (folder / "crawl" / "a.warc.gz").write_bytes(warc(found[::2]))
    (folder / "crawl" / "b.warc.gz").write_bytes(warc(found[1::2]))
    return str(folder / "crawl" / "*.warc.gz")


def texts(folder: Path) -> str:
    """Write a file of JSON lines with texts of the same kinds. Returns its path."""
    rng, prose = random.Random(2), sentences()
    said = [" ".join(rng.sample(prose, 20)) for _ in range(30)]
    said += [said[3], said[7], *(f"{said[i]} One sentence is added here." for i in (4, 5, 6, 8)), GERMAN * 5,
             "This is too short to be of any use to anyone who reads it.", f"{prose[7]} " * 30,
             "\n".join(f"- {s}" for s in rng.sample(prose, 20))]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t, "url": f"https://t.example/{i}"}) + "\n"
                                                for i, t in enumerate(said)))
    return str(folder / "texts.jsonl")


def many_languages(folder: Path) -> str:
    """Write pages in German and French, with near-duplicates and menus, and a page in neither language. Returns the
    pattern of the files."""
    rng, found = random.Random(9), []
    for language, said in (("de", DEUTSCH), ("fr", FRANCAIS)):
        for i in range(9):
            picked = rng.sample(said, 16)
            found.append((f"{language}/{i}", [" ".join(picked[j:j + 4]) for j in range(0, 16, 4)]))
        found.append((f"{language}/near", [*found[-1][1][:-1], found[-1][1][-1] + " " + said[0]]))
        found.append((f"{language}/lines", [f"{s.split()[0]} {s.split()[1]}" for s in said] * 2))
        found.append((f"{language}/copied", [said[0], said[1], said[2]] * 12))
    found.append(("en/0", rng.sample(sentences(), 20)))
    pages_of = [Page(f"https://site.example/{name}", _html(name, paragraphs), name) for name, paragraphs in found]
    (folder / "crawl").mkdir()
    (folder / "crawl" / "a.warc.gz").write_bytes(warc(pages_of[::2]))
    (folder / "crawl" / "b.warc.gz").write_bytes(warc(pages_of[1::2]))
    return str(folder / "crawl" / "*.warc.gz")


def classifier(folder: Path) -> Path:
    """Train a fastText classifier that prefers prose about classes. Returns its path."""
    rng, prose = random.Random(7), sentences()
    good = [s for s in prose if "class" in s or "attribute" in s]
    other = [s for s in prose if s not in good]
    labelled = [(label, " ".join(rng.sample(said, 6))) for label, said in (("hq", good), ("lq", other))
                for _ in range(120)]
    train(labelled, folder / "quality.bin", settings=FastTextSettings(dim=8, buckets=1 << 12))
    return folder / "quality.bin"


def web_table(folder: Path) -> str:
    """Write a Parquet file with FineWeb's columns. Returns the pattern of the file."""
    rng, prose = random.Random(3), sentences()
    rows = [{"text": " ".join(rng.sample(prose, rng.randrange(2, 20))), "id": f"<urn:uuid:{i}>", "dump": "2026-01",
             "url": f"https://t.example/{i}", "date": "2026-01-01T00:00:00Z", "language": "en"} for i in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "000.parquet", row_group_size=10)
    return str(folder / "*.parquet")


def grader(folder: Path, name: str = "grader", seed: int = 4) -> Path:
    """Write a transformer of two small layers with random weights, whose grades are spread around 2.5."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="the extra [encoder] is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", *sorted({w for s in sentences()[:200] for w in s.lower().split() if w.isalpha()})]
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    plain.normalizer, plain.pre_tokenizer = tokenizers.normalizers.Lowercase(), tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]",
                                         model_max_length=512).save_pretrained(folder / name)
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=512, initializer_range=0.7, num_labels=1)).eval()
    model.classifier.bias.data.fill_(2.5)
    model.save_pretrained(folder / name)
    return folder / name


def word_lists(folder: Path) -> Path:
    (folder / "bad.json").write_text(json.dumps(BAD_WORDS))
    return folder / "bad.json"


def edges_over(name: str, dataset: str, folder: Path, wants: dict[str, Any], *options: str) -> Path:
    """Fit the edges of score buckets with the command `buckets fit`. The scores are those of `dataset`, which the
    recipe makes first. Returns the path of the edges."""
    recipe = load_recipe(name, [f"until={dataset}", *(f"{k}={v}" for k, v in wants.items())],
                         inputs=[str(folder / "crawl" / "*.warc.gz")])
    run_recipe(recipe, str(folder / "scores"), make_backend=make_backend("inline", 1, None))
    assert run_command(["buckets", "fit", str(folder / "scores" / "datasets" / dataset), *options, "--out",
                        str(folder / "edges.json")]) == 0
    return folder / "edges.json"


def tier_models(folder: Path) -> dict[str, Any]:
    """Make three classifiers and the edges of their scores. Returns {key of the recipe: path}."""
    wants: dict[str, Any] = {"datasets.scored.steps.0.quality.model": classifier(folder),
                             "datasets.scored.steps.1.encoder.model": grader(folder),
                             "datasets.scored.steps.2.encoder.model": grader(folder, "other", seed=6)}
    scores = [word for s in ("oh_eli5", "nemotron_edu", "mixtral_edu") for word in ("--score", f"{s}_score")]
    edges = edges_over("nemotron-cc", "scored", folder, wants, *scores, "--weight", "bytes")
    return {**wants, "datasets.labelled.steps.buckets.edges": edges}


def ccnet_models(folder: Path) -> dict[str, Any]:
    """Make lists of words, a language model of English sentences, and edges of its perplexity. Returns {key of the
    recipe: path}."""
    rng, prose = random.Random(5), sentences()
    (folder / "prose").mkdir()
    for i in range(60):
        (folder / "prose" / f"{i:02}.txt").write_text("\n".join(rng.sample(prose, 20)))
    assert run_command(["lm", "train", str(folder / "prose"), "--vocab", "300", "--order", "3", "--out",
                        str(folder / "en.lm")]) == 0
    wants: dict[str, Any] = {"datasets.annotated.steps.redpajama2.bad_words": word_lists(folder),
                             "datasets.measured.steps.perplexity.models": f"{{en: {folder / 'en.lm'}}}"}
    edges = edges_over("redpajama2-signals", "measured", folder, wants, "--score", "perplexity", "--by", "language",
                       "--at", "30,60")
    return {**wants, "datasets.ranked.steps.buckets.edges": edges}


SITES = {
    "c4": Site(crawl, {("clean", "language", "language"), ("clean", "c4", "lorem_ipsum"),
                       ("clean", "c4", "curly_bracket"), ("clean", "c4", "too_few_sentences"),
                       ("clean", "c4_badwords", "document_removed_with_badwords"),
                       ("deduped", "exact", "exact_text")}),
    "dclm": Site(crawl, {("clean", "url", "hard_blacklisted"), ("clean", "language", "language"),
                         ("clean", "dclm_quality", "dclm_short_doc"), ("clean", "dclm_repetition", "dclm_top_4_gram"),
                         ("deduped", "minhash", "minhash")},
                 lambda folder: {"datasets.best.steps.quality.model": classifier(folder)}),
    "fineweb": Site(crawl, {("clean", "url", "hard_blacklisted"), ("clean", "language", "language"),
                            ("clean", "gopher_repetition", "duplicated_5_n_grams"), ("clean", "c4", "lorem_ipsum"),
                            ("clean", "gopher_quality", "gopher_below_alpha_threshold"),
                            ("deduped", "minhash", "minhash")}),
    "fineweb-edu": Site(web_table, {("edu", "encoder", "encoder")},
                        lambda folder: {"datasets.edu.steps.encoder.model": grader(folder)}),
    "fineweb2": Site(many_languages, {("identified", "language", "language"), ("deduped", "minhash", "minhash"),
                                      ("clean", "fineweb2", "dup_line_frac")},
                     lambda folder: {"datasets.identified.steps.language.model": lid176_model()}),
    "gopher": Site(texts, {("clean", "language", "language"), ("clean", "gopher_quality", "gopher_too_many_bullets"),
                           ("clean", "gopher_repetition", "duplicated_5_n_grams"), ("deduped", "exact", "exact_text"),
                           ("deduped", "minhash", "minhash")}),
    "nemotron-cc": Site(crawl, {("clean", "language", "language"), ("deduped", "minhash", "minhash"),
                                ("low", "where", "where_ensemble_tier"), ("high", "where", "where_ensemble_tier")},
                        tier_models),
    "redpajama2-signals": Site(crawl, {("annotated", "language", "language_score"), ("deduped", "exact", "exact_text")},
                               ccnet_models),
}
#: the one whose run is fast enough for every day
DAILY = "gopher"
#: the one that two workers run, too: it has barriers, and numeric and exact steps
BY_TWO = "redpajama2-signals"
#: those whose models take long to make, even to be planned
LABOUR = ("fineweb-edu", "nemotron-cc", "redpajama2-signals")
PLANS = [pytest.param(name, marks=pytest.mark.slow if name in LABOUR else ()) for name in ready_recipes()]
RUNS = [pytest.param(name, marks=() if name == DAILY else pytest.mark.slow) for name in ready_recipes()]


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    """Put in place what `tokenmill fetch` would fetch: the language model, and lists of bad words made for the
    tests."""
    folder = tmp_path_factory.mktemp("models")
    (folder / LID176).symlink_to(lid176_model())
    with tarfile.open(folder / LISTS, "w:gz") as archive:
        for language, words in BAD_WORDS.items():
            data = json.dumps(words).encode()
            info = tarfile.TarInfo(f"package/{language}.json")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_MODELS", str(folder))
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Callable[[str], Recipe]:
    """A function that loads a ready recipe with its input and the files that it needs. These are made once for each
    recipe."""
    made: dict[str, tuple[str, list[str]]] = {}

    def load(name: str) -> Recipe:
        if name not in made:
            folder, site = tmp_path_factory.mktemp(name), SITES[name]
            made[name] = site.input(folder), [f"{k}={v}" for k, v in site.wants(folder).items()]
        pattern, overrides = made[name]
        return load_recipe(name, [*overrides, "run.partition=60KB"], inputs=[pattern])

    return load


def test_every_ready_recipe_has_a_site():
    assert sorted(SITES) == ready_recipes()


# -- what they say -------------------------------------------------------------------------------------------------
def said(name: str) -> dict[str, Any]:
    return parse_yaml((READY / f"{name}.yaml").read_text(encoding="utf-8"), name)[0]


def held(name: str) -> dict[str, Any]:
    """Return what `ready_recipes.json` holds for a recipe: its version, and a hash of those of its keys that determine
    the documents."""
    recipe = said(name)
    made = {k: v for k, v in recipe.items() if k not in _SAID}
    return {"version": recipe["about"]["version"],
            "sha256": hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()}


@pytest.mark.parametrize("name", ready_recipes())
def test_a_change_raises_the_version(name):
    before, now = json.loads(HELD.read_text()).get(name), held(name)
    if before is None or before["sha256"] != now["sha256"]:
        assert before is None or now["version"] > before["version"], f"raise about.version of {name}"
    assert now == before, "then: python -m tests.e2e.test_ready_recipes"


@pytest.mark.parametrize("name", ready_recipes())
def test_a_recipe_says_what_it_is(name):
    recipe, text = said(name), (READY / f"{name}.yaml").read_text()
    assert recipe["about"]["name"] == name and recipe["about"]["after"]
    assert f"#   tokenmill run {name} --input '" in text
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, "one row in docs/recipes.md"
    for link in recipe["about"]["after"]:
        assert not link.startswith("https://arxiv.org/abs/") or link.rpartition("/")[2] in rows[0], link
    for key in recipe.get("wants") or {}:
        for shown in (text, DOCS.read_text()):
            assert f"--set {key}=" in shown or f"--set '{key}={{" in shown


@pytest.mark.parametrize("name", [name for name in SITES if said(name).get("wants")])
def test_what_is_missing_is_named_with_the_way_to_get_it(name):
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert len(caught.value.problems) == 1 + len(said(name)["wants"])
    for key in said(name)["wants"]:
        assert f"this recipe wants a file from you: add --set {key}=PATH. It is " in str(caught.value)
    assert "add --input 'FILES'" in str(caught.value)


def test_a_recipe_stops_where_it_is_told(tmp_path):
    """Without what comes later nothing is wanted for it; what is left is the recipe as it is."""
    recipe = load_recipe("dclm", ["until=deduped"], inputs=["x"])
    assert list(recipe.datasets) == ["extracted", "clean", "deduped"] and not recipe.wants
    assert citation(recipe)["changed"] == []
    both = load_recipe("dclm", ["until=[clean, extracted]", "datasets.clean.steps.dclm_quality.min_words=9"],
                       inputs=["x"])
    assert list(both.datasets) == ["extracted", "clean"]
    assert citation(both)["changed"] == ["datasets.clean.steps[3].dclm_quality.min_words"]
    with pytest.raises(RecipeError, match=r"add --set datasets.best.steps.quality.model=PATH. .* Without it, stop "
                                          r"before: --set until=deduped"):
        load_recipe("dclm", inputs=["x"])
    with pytest.raises(RecipeError, match="--set until=dedup: until: unknown dataset 'dedup': did you mean 'deduped'"):
        load_recipe("dclm", ["until=dedup"], inputs=["x"])
    for name in ("a", "b"):
        (tmp_path / name).write_text("x")
    (tmp_path / "r.yaml").write_text("""version: 1
sources: {a: {read: text, path: a}, b: {read: text, path: b}}
datasets: {one: {from: a}, two: {from: b}, all: {from: [one, two]}}
tokenizer: {train: {vocab: 300, from: all}}
shards: {s: {from: all, longest: 64}}
""")
    left = load_recipe(tmp_path / "r.yaml", ["until=one"])
    assert (list(left.sources), list(left.datasets), left.tokenizer, left.shards) == (["a"], ["one"], None, {})
    assert set(load_recipe(tmp_path / "r.yaml", ["until=all"]).sources) == {"a", "b"}


def test_until_keeps_the_datasets_that_a_kept_one_is_compared_with(tmp_path):
    (tmp_path / "r.yaml").write_text("""version: 1
sources: {a: {read: text, path: a}, b: {read: text, path: b}, c: {read: text, path: c}}
datasets:
  old: {from: a, steps: [exact]}
  new: {from: b, steps: [{exact: {against: old}}]}
  other: {from: c}
""")
    left = load_recipe(tmp_path / "r.yaml", ["until=new"])
    assert (set(left.datasets), set(left.sources)) == ({"old", "new"}, {"a", "b"})


def test_a_copy_with_two_inputs_stops_and_wants(tmp_path):
    text = """version: 1
input: web
wants: {datasets.best.steps.quality.model: a model}
sources: {web: {read: jsonl}, wiki: {read: jsonl, path: x.jsonl}}
datasets: {a: {from: web}, b: {from: wiki}, best: {from: [a, b], steps: [quality: {min: 0.5}]}}
"""
    mine = tmp_path / "r.yaml"
    mine.write_text(text)
    with pytest.raises(RecipeError, match=r"add --set datasets.best.steps.quality.model=PATH. It is a model$"):
        load_recipe(mine, inputs=["x.jsonl"])
    left = load_recipe(mine, ["until=b"])                      # the input is not what it is made from
    assert (left.input, list(left.sources)) == (None, ["wiki"])
    with pytest.raises(RecipeError, match="--input: the files go into the source 'web', which until=b leaves out"):
        load_recipe(mine, ["until=b"], inputs=["x.jsonl"])
    for wrong in ("5", "[[a]]", "{a: b}", "null"):
        mine.write_text(text.replace("from: [a, b]", f"from: {wrong}"))
        with pytest.raises(RecipeError, match=r"datasets\.best\.from"):
            load_recipe(mine, ["until=best", "datasets.best.steps.quality.model=x.bin"])


# -- planned and run -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PLANS)
def test_planned(given, tmp_path, name):
    recipe = given(name)
    assert recipe.warnings == [] and lint(recipe) == []
    document = survey_recipe(recipe, str(tmp_path / "store"))
    assert document["warnings"] == [] and document["total"]["bytes_in"] > 0
    assert [row["name"] for row in document["nodes"] if row["status"] == "stale"]
    assert citation(recipe)["changed"] == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", RUNS)
def test_run(given, tmp_path, name):
    """Datasets, signals and reasons are the frozen ones, and the report shows them."""
    store = tmp_path / "store"
    summary = run_recipe(given(name), str(store), make_backend=make_backend("inline", 1, None))
    report = json.loads((store / "report.json").read_text())
    if name == BY_TWO:
        run_recipe(given(name), str(tmp_path / "two"), make_backend=make_backend("process", 2, None))
        again = json.loads((tmp_path / "two" / "report.json").read_text())
        assert [(row["name"], row["content"]) for row in report["lineage"]] == [
            (row["name"], row["content"]) for row in again["lineage"]]
    final = report["names"]["final"]
    assert all(summary.datasets[dataset] for dataset in final), "something is kept"
    drops = {(dataset, row["stage"], row["reason"]): row for dataset, section in report["datasets"].items()
             for row in section["reasons"]}
    assert drops.keys() >= SITES[name].drops, "\n".join(map(str, sorted(drops)))
    assert all(row["samples"] for row in drops.values())
    for dataset, section in report["datasets"].items():
        files = [str(p) for kind in ("datasets", "dropped") for p in (store / kind / dataset).glob("part-*.parquet")]
        for signal, bins in section["scores"].items():       # counted as they were found; here from all that is stored
            scores = [row.get(signal) for f in files for row in pq.read_table(f)["signals"].to_pylist()]
            assert bins == Counter(str(score_bin(x)) for x in scores if x is not None), (dataset, signal)
            assert f"<b>{signal}</b>" in (store / "runs" / summary.run / "report.html").read_text()
    about = report["about"]
    assert (about["name"], about["version"], about["changed"]) == (name, said(name)["about"]["version"], [])
    page = (store / "runs" / summary.run / "report.html").read_text()
    assert f"Recipe {name}, version {about['version']}, <code>" in page
    hold_run(name, store)


# -- citing --------------------------------------------------------------------------------------------------------
def test_what_was_changed_is_cited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = load_recipe("fineweb", ["datasets.clean.steps.language.min=0.8", "run.partition=1MB", "run.signals=all",
                                      "datasets.clean.steps.url.soft_words=3"], inputs=["x"])
    assert citation(changed)["changed"] == ["datasets.clean.steps[0].url.soft_words",
                                            "datasets.clean.steps[1].language.min", "run.signals"]
    kept = changed.canonical_yaml()                      # what `resume` reads
    (tmp_path / "kept.yaml").write_text(kept)
    assert citation(load_recipe("kept.yaml")) == citation(changed)


def test_a_copy_is_cited_by_what_it_says(tmp_path):
    text = (READY / "fineweb.yaml").read_text()
    for name, edited, expected in (
            ("same", text, []), ("less", text.replace("      - pii\n", ""), ["datasets.clean.steps"]),
            ("own", text.replace("name: fineweb", "name: own"), None),
            ("older", text.replace("  version: 1\n", "  version: 99\n"), None)):
        (tmp_path / f"{name}.yaml").write_text(edited)
        found = citation(load_recipe(tmp_path / f"{name}.yaml", inputs=["x"]))
        assert found["changed"] == expected, name
    shorter = (READY / "dclm.yaml").read_text().partition("  best:\n")[0]         # what is wanted for it is not, either
    (tmp_path / "shorter.yaml").write_text(shorter)
    assert citation(load_recipe(tmp_path / "shorter.yaml", inputs=["x"]))["changed"] == []
    (tmp_path / "more.yaml").write_text(text + "  subset: {from: deduped, steps: [gopher_quality]}\n")
    assert citation(load_recipe(tmp_path / "more.yaml", inputs=["x"]))["changed"] == ["datasets.subset"]
    (tmp_path / "plain.yaml").write_text("version: 1\nsources: {a: {read: text, path: x}}\ndatasets: {b: {from: a}}\n")
    assert citation(load_recipe(tmp_path / "plain.yaml")) is None


def test_paths_given_to_a_ready_recipe_count_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "hosts").write_text("blocked.example\n")
    recipe = load_recipe("fineweb", ["datasets.clean.steps.url.domains=lists/hosts"], inputs=["x"])
    assert recipe.datasets["clean"].steps[0].config["domains"] == str(tmp_path / "lists" / "hosts")
    with pytest.raises(RecipeError, match=r"no such file: .*/lists/none; the path counts from the current folder"):
        load_recipe("fineweb", ["datasets.clean.steps.url.domains=lists/none"], inputs=["x"])


if __name__ == "__main__":
    HELD.write_text(json.dumps({name: held(name) for name in ready_recipes()}, indent=1) + os.linesep)
