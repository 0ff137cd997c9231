"""Code: licences, what is generated or data, repositories as one document; notebooks as text."""

from __future__ import annotations

import io
import json
import random
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from stages.document import BadRecord, Document
from stages.read.code import Code
from stages.read.licence import licence
from stages.read.notebook import Notebook
from stages.read.reader import Skipped, Slice

GOOD = "def f(x):\n    return x + 1  # why\n"


def read(reader: object, local: Path, path: str = "") -> list[Document | BadRecord]:
    return list(reader.read(str(local), Slice("s", path or local.name)))


@pytest.mark.parametrize(("head", "spdx"), [
    ("# SPDX-License-Identifier: MIT\n", "MIT"),
    ("/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */", "(GPL-2.0-only OR MIT)"),
    ("// SPDX-License-Identifier: GPL-2.0-or-later WITH Linux-syscall-note\n",
     "GPL-2.0-or-later WITH Linux-syscall-note"),
    ("#\n# Licensed under the Apache License, Version 2.0 (the \"License\");\n# you may not use", "Apache-2.0"),
    ("/*\n * Redistribution and use in source and binary\n * forms, with or without\n * Neither the name of X\n */",
     "BSD-3-Clause"),
    ("// Redistribution and use in source and binary forms, with or without", "BSD-2-Clause"),
    ("/* This program is free software: you can redistribute it under the terms of the GNU\n * General Public License"
     " as published by the FSF, either\n * version 3 of the License, or (at your option) any later version. */",
     "GPL-3.0-or-later"),
    ("; under the terms of the GNU General Public License version 2 as\n; published", "GPL-2.0-only"),
    ("% Permission is hereby granted, free\n% of charge, to any person", "MIT"),
    ("def f(): pass\n" * 1000 + "# SPDX-License-Identifier: MIT", ""), ("x = 1", ""), ("", ""),
])
def test_licences(head, spdx):
    assert licence(head) == spdx


@pytest.mark.parametrize(("path", "text", "outcome"), [
    ("a_pb2.py", GOOD, "generated"), ("x/zz_generated.go", GOOD, "generated"), ("pnpm-lock.yaml", GOOD, "generated"),
    ("a.py", "# This file was generated from a table\n" + GOOD, "generated"),
    ("web/jquery-3.1.js", GOOD, "vendored"), ("web/bootstrap.css", GOOD, "vendored"), ("src/d3reader.js", GOOD, "kept"),
    ("third_party/x.c", GOOD, "vendored"), ("src/vendor.py", GOOD, "kept"),
    ("a.py", "X = [\n" + "    0x12, 0xab, 0x00, 0xff, 0x12, 0xab, 0x00, 0xff, 0x11,\n" * 60 + "]\n", "data"),
    ("a.py", GOOD * 300 + "K = (\n" + ("    '" + "QUJD" * 20 + "'\n") * 3 + ")\n", "kept"),
    ("a.py", GOOD + "K = (\n" + ("    '" + "QUJD" * 20 + "'\n") * 30 + ")\n", "data"),
    ("a.js", "var a = '" + r"\u4e00" * 160 + "';\n" + GOOD * 60, "kept"),
    ("a.py", '"""Docs.\n\nAnd more."""\n# comment\n' + GOOD, "kept"),
])
def test_what_is_generated_vendored_or_data(tmp_path, path, text, outcome):
    (tmp_path / "x").write_text(text)
    (item,) = read(Code(), tmp_path / "x", path)
    assert (item.reason if isinstance(item, Skipped) else "kept") == outcome
    if outcome == "kept":
        assert item.text == text


def archive(path: Path, files: dict[str, str]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as to:
            for name, text in files.items():
                to.writestr(name, text)
        return path
    with tarfile.open(path, "w:gz") as to:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            to.addfile(info, io.BytesIO(text.encode()))
    return path


REPO = {"repo-1.0/src/b.py": "# SPDX-License-Identifier: MIT\n" + GOOD, "repo-1.0/README.bin": "x",
        "repo-1.0/a.py": "x = 'größe'", "repo-1.0/src/z.c": "/* SPDX-License-Identifier: ISC */\nint f(void);\n",
        "repo-1.0/vendor/q.py": GOOD, "repo-1.0/src/B.py": GOOD}


@pytest.mark.parametrize("name", ["r.zip", "r.tar.gz"])
def test_a_repository_is_one_document_whatever_the_order_in_its_archive(tmp_path, name):
    texts = []
    for seed in range(3):
        files = list(REPO.items())
        random.Random(seed).shuffle(files)
        items = read(Code(repository=True), archive(tmp_path / name, dict(files)))
        (doc,) = [i for i in items if isinstance(i, Document)]
        assert sorted(i.reason for i in items if isinstance(i, BadRecord)) == ["other_type", "vendored"]
        texts.append((doc.id, doc.text, doc.meta))
    assert texts[0] == texts[1] == texts[2]
    assert doc.text == (f"<file_sep>a.py\nx = 'größe'\n<file_sep>src/B.py\n{GOOD}<file_sep>src/b.py\n"
                        f"# SPDX-License-Identifier: MIT\n{GOOD}<file_sep>src/z.c\n"
                        "/* SPDX-License-Identifier: ISC */\nint f(void);\n")
    assert doc.meta == {"repository": "repo-1.0", "files": 4, "code_language": "python", "licence": "ISC AND MIT"}
    plain = read(Code(), tmp_path / name)
    assert sum(isinstance(i, Document) for i in plain) == 4


def test_a_large_repository_is_cut_between_files(tmp_path):
    local = archive(tmp_path / "r.zip", {f"p/{i:02}.py": GOOD for i in range(10)})
    docs = read(Code(repository=True, max_repository=150, header="# {path}\n"), local)
    assert [d.meta["files"] for d in docs] == [3, 3, 3, 1] and len({d.id for d in docs}) == 4
    assert "".join(d.text for d in docs) == "".join(f"# {i:02}.py\n{GOOD}" for i in range(10))
    assert all(len(d.text.encode()) <= 150 for d in docs)
    items = read(Code(repository=True, max_files=4), local)
    assert [getattr(i, "reason", "document") for i in items] == ["too_large"] * 6 + ["document"]


# -- notebooks -------------------------------------------------------------------------------------------------------
BOOK = {"nbformat": 4, "metadata": {"language_info": {"name": "python"}}, "cells": [
    {"cell_type": "markdown", "source": ["# Title\n", "Some *text*. ![p](data:image/png;base64,AAAA)"]},
    {"cell_type": "code", "source": "import x\n\nx.plot()", "outputs": [
        {"output_type": "stream", "name": "stdout", "text": ["10%\r50%\r100%\n", "\u001b[1mdone\u001b[0m\n"]},
        {"output_type": "display_data", "data": {"text/plain": "<Figure size 1x1>", "image/png": "AAAA"}},
        {"output_type": "execute_result", "data": {"text/plain": ["42"], "text/html": "<b>42</b>"}}]},
    {"cell_type": "code", "source": "", "outputs": []},
    {"cell_type": "code", "source": "1/0  # ```", "outputs": [
        {"output_type": "error", "ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": ["long"]}]}]}
TEXT = """# Title
Some *text*.

```python
import x

x.plot()
```

Output:

```
100%
done
42
```

````python
1/0  # ```
````

Output:

```
ZeroDivisionError: division by zero
```"""


def notebook(tmp_path: Path, book: object, path: str = "n.ipynb", **config: object) -> Document | BadRecord:
    (tmp_path / "n").write_text(book if isinstance(book, str) else json.dumps(book))
    (item,) = read(Notebook(**config), tmp_path / "n", path)
    return item


def test_a_notebook_as_text(tmp_path):
    doc = notebook(tmp_path, BOOK)
    assert doc.text == TEXT and doc.meta == {"code_language": "python"} and doc.mime == "text/markdown"
    short = notebook(tmp_path, BOOK, max_output=6).text
    assert "100%\nd …" in short and "42" not in short and "ZeroDi …" in short
    assert "Output" not in notebook(tmp_path, BOOK, max_output=0).text


def test_an_old_notebook(tmp_path):
    old = {"nbformat": 3, "metadata": {}, "worksheets": [{"cells": [
        {"cell_type": "heading", "level": 2, "source": "Head"},
        {"cell_type": "code", "language": "python", "input": ["a = 1\n", "a"], "outputs": [
            {"output_type": "pyout", "text": ["1"]}]}]}]}
    assert notebook(tmp_path, old).text == "## Head\n\n```python\na = 1\na\n```\n\nOutput:\n\n```\n1\n```"


@pytest.mark.parametrize(("book", "reason"), [
    ("{", "bad_json"), ("[" * 100_000, "bad_json"), ('{"cells": ' + "[" * 300 + "]" * 300 + "}", "bad_json"),
    ("[]", "not_a_notebook"), ({"cells": 5}, "not_a_notebook"), ({"worksheets": [{"cells": None}]}, "empty"),
    ({"cells": [5, {"cell_type": "code", "source": [7, None], "outputs": 3}, {"source": {}}]}, "empty"),
    ({"cells": [{"cell_type": "code", "source": "x", "outputs": [3, {"data": 5, "text": {}}]}], "metadata": 5}, None),
    ({"cells": [{}] * 3000}, "too_large"), (BOOK, "hidden"),
])
def test_notebooks_that_are_none(tmp_path, book, reason):
    item = notebook(tmp_path, book, ".ipynb_checkpoints/n.ipynb" if reason == "hidden" else "n.ipynb")
    assert getattr(item, "reason", None) == reason
    assert isinstance(item, Skipped) == (reason in ("empty", "too_large", "hidden"))


@pytest.mark.parametrize("unit", ["![](data:", "`", "\u001b[1;", "0x00 ", "A", "\\x00", "<", "00  "])
def test_hostile_text_takes_linear_time(tmp_path, unit):
    took = []
    for n in (4_000, 40_000):
        book = {"cells": [{"cell_type": "markdown", "source": unit * n}, {"cell_type": "code", "source": unit * n}]}
        (tmp_path / "c").write_text((unit * 15 + "\n") * (n // 15))
        began = time.process_time()
        notebook(tmp_path, book)
        read(Code(max_line=10**7, mean_line=10**7), tmp_path / "c", "c.py")
        took.append(time.process_time() - began)
    assert took[1] < 40 * max(took[0], 0.05), "10 times the text, not 100 times the time"
