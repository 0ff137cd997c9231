"""The output of every stage for fixed documents is compared with a stored hash: if it changes, the stage's version has
to be raised.

After an intended change of output, raise the stage's `version` and run `python -m tests.stages.test_conformance --write
NAME`. Without a name, this writes the hashes of all stages.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from stages.barrier import Barrier
from stages.catalog import STAGES, load, stage_class
from stages.document import Document
from stages.stage import Stage, library_versions
from stages.vectors import read_vectors

GOLDEN = Path(__file__).with_name("conformance.json")
VECTORS = Path(__file__).parents[1] / "conformance"
#: stages that cannot run without a model or a block of somebody else's: tested on their own
WITHOUT = {"badwords", "c4_badwords", "toxicity", "encoder", "quality", "where", "perplexity", "buckets", "ensemble",
           "datatrove", "decontaminate"}
#: settings that save set-up and change no output
CONFIGS = {"fineweb2": {"languages": ["fra_Latn"]}}
WORDS = """
the of and a to in is was he for it with as his on be at by had not are but from or have an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me
even most made after also did many before must through back years where much your way well down should because
each just those people how too little state good very make world still own see men work long get here between
both life being under never day same another know while last might us great old year off come since against go
came right used take three)
""".split()  # noqa: SIM905
FRENCH = """
le de un être et à il avoir ne je son que se qui ce dans en du elle au la les des par pour pas que vous sur faire plus
dire me on mon lui nous comme mais pouvoir avec tout y aller voir bien où sans tu ou leur homme si deux mari moi vouloir
te femme venir quand grand celui notre devoir là jour prendre même votre rien petit encore aussi quelque dont tout mer
trouver donner temps ça peu même falloir sous parler alors main chose ton mettre vie savoir yeux passer autre après
""".split()  # noqa: SIM905
#: of stages that judge by the language of a document: this language, and words of it
LANGUAGES = {"fineweb2": ("fra_Latn", FRENCH)}


def pick(seed: str, n: int) -> list[int]:
    """Return `n` numbers below 2**32 that depend on `seed` alone, not on the random module or the version of Python."""
    data = hashlib.shake_128(seed.encode()).digest(4 * n)
    return [int.from_bytes(data[4 * i:4 * i + 4], "little") for i in range(n)]


def prose(seed: str, sentences: int, vocabulary: list[str]) -> str:
    out = []
    for s in range(sentences):
        draws = pick(f"{seed}/{s}", 9 + s % 9)
        words = [vocabulary[d % len(vocabulary)] for d in draws]
        out.append(words[0].capitalize() + " " + " ".join(words[1:]) + ".!?."[draws[0] % 4])
    return "\n".join(" ".join(out[i:i + 4]) for i in range(0, len(out), 4))


def documents(language: str = "", vocabulary: list[str] = WORDS) -> list[Document]:
    """Return documents that all rules have something to say about, each as a text and as a page. One in nine names no
    language."""
    texts = [prose(str(i), 4 + 5 * (i % 6), vocabulary) for i in range(24)]
    texts += [
        texts[5] + "\n" + texts[5], "\n".join(["Same line again and again."] * 30), "word " * 80, "# # # ... … " * 40,
        "\n".join("• " + w for w in WORDS), "\n".join(f"Menu {w}" for w in WORDS[:60]), texts[7] + " { lorem ipsum }",
        "Cookie policy. Terms of use.\n" + texts[9],
        texts[11] + " Write to someone.else@mail.example.org or 8.8.4.4 now.",
        "Das ist ein deutscher Text über Größe und Maß, der nicht englisch ist. " * 8,
        "日本語の文章です。これは英語ではありません。" * 9, texts[3].upper(), "1234567890 " * 60,
        "javascript must be enabled.\n" + texts[13], "Read more...\n" * 12 + texts[2],
        "", "a", "e\u0301" * 200, texts[1].replace(" ", "  "), "word," * 400,
    ]
    urls = ["https://example.org/a", "http://casino-poker-bet.example/x", "https://sub.example.co.uk/q?x=1", "",
            "not a url"]
    out = []
    for i, text in enumerate(texts):
        body = "".join(f"<p>{p}</p>" for p in text.replace("<", "&lt;").split("\n"))
        page = (f"<!doctype html><html><head><title>T {i}</title></head><body><nav>Home</nav><main>{body}</main>"
                f"</body></html>")
        out.append(Document(f"{i:032x}", text, url=urls[i % len(urls)], language=language if i % 9 else "",
                            raw=page.encode(), mime="text/html", charset="utf-8",
                            meta={"title": f"T {i} by someone.else@mail.example.org"}))
    return out


def output(stage: Stage) -> tuple[str, set[str | None]]:
    """Return (a hash of verdict, text, language, signals, side table and metadata of each document, the set of
    verdicts)."""
    stage.setup()
    h = hashlib.sha256()
    reasons = set()
    for doc in documents(*LANGUAGES.get(stage.name, ())):
        if stage.extracts:
            doc.text = ""
        reason = stage.process_batch([doc])[0] if stage.batched else stage.process(doc)
        said = [doc.id, reason, doc.text, doc.language, sorted((k, v) for k, v in doc.signals.items()),
                sorted((k, str(v)) for k, v in doc.meta.items()),
                sorted((k, sorted((c, str(v)) for c, v in row.items())) for k, row in doc.side.items())]
        h.update(json.dumps(said, ensure_ascii=True).encode())
        reasons.add(reason)
    return h.hexdigest(), reasons


def one_verdict(stage: Stage, reasons: set[str | None]) -> str | None:
    """Return an error message if a step that drops documents gives all of them the same verdict. `reasons` are its
    verdicts on `documents()`. Its test vectors count, too, because `documents()` cannot trigger the rule of every
    filter."""
    vectors = VECTORS / f"{stage.name}.jsonl"
    if vectors.exists():
        reasons = reasons | {case["reason"] for case in read_vectors(vectors)[1]}
    if not stage.drops or (None in reasons and len(reasons) > 1):
        return None
    kept = reasons == {None}
    return (f"'{stage.name}' {'keeps' if kept else 'drops'} every golden document and test vector: add a case that it "
            f"{'drops' if kept else 'keeps'} to tests/conformance/{vectors.name}")


def names() -> list[str]:
    """Return the names of the golden hashes. A barrier has the hash of its prepare stage."""
    return sorted(f"{name}:prepare" if issubclass(stage_class(name), Barrier) else name
                  for name in STAGES if name not in WITHOUT)


def stage_of(name: str) -> Stage:
    made = stage_class(name.removesuffix(":prepare"))(CONFIGS.get(name))
    if isinstance(made, Barrier):
        target, config = made.prepare()
        return load(target)(config)
    return made


def entry(stage: Stage) -> dict[str, object]:
    return {"version": stage.version, "libraries": library_versions(stage.libraries)}


@pytest.mark.parametrize("name", names())
def test_output_changes_only_with_the_version(name):
    stage = stage_of(name)
    known = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert name in known, f"'{name}' has no golden hash: run python -m tests.stages.test_conformance --write {name}"
    golden = known[name]
    if golden["libraries"] != library_versions(stage.libraries):
        pytest.skip(f"golden hashes are of {golden['libraries']}")
    try:
        digest, reasons = output(stage)
    except FileNotFoundError as e:
        pytest.skip(str(e))
    if golden["version"] == stage.version:
        assert digest == golden["output"], f"the output of '{name}' changed: bump its version, write the golden hash"
        assert one_verdict(stage, reasons) is None
    else:
        pytest.fail(f"'{name}' has version {stage.version}: write its golden hash")


def write(chosen: list[str]) -> None:
    """Write the golden hashes of the given names, or of all if none is given. Writes nothing if a step gives all
    documents the same verdict."""
    written = json.loads(GOLDEN.read_text(encoding="utf-8")) if chosen else {}
    for name in chosen or names():
        stage = stage_of(name)
        digest, reasons = output(stage)
        if problem := one_verdict(stage, reasons):
            sys.exit(problem)
        written[name] = {**entry(stage), "output": digest}
    GOLDEN.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{GOLDEN.name}: wrote {', '.join(chosen or names())}")


if __name__ == "__main__" and sys.argv[1:2] == ["--write"]:
    if unknown := set(sys.argv[2:]) - set(names()):
        sys.exit(f"no golden hash is kept for {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    write(sys.argv[2:])
