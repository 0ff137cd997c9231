"""Code: licences, which files are generated or data, repositories as one document, and notebooks as text."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.plan.file_list import SourceFile
from pipeline.plan.split import partitions
from stages.document import BadRecord, Document
from stages.read.code import Code
from stages.read.code_table import CodeTable
from stages.read.languages import language
from stages.read.licence import licence
from stages.read.notebook import Notebook
from stages.read.reader import Skipped, Slice
from tests.stages.texts import assert_linear

GOOD = "def f(x):\n    return x + 1  # why\n"


def read(reader: object, local: Path, path: str = "") -> list[Document | BadRecord]:
    return list(reader.read(str(local), Slice("s", path or local.name)))


@pytest.mark.parametrize(("head", "spdx"), [
    ("# SPDX-License-Identifier: MIT\n", "MIT"),
    ("/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */", "(GPL-2.0-only OR MIT)"),
    ("// SPDX-License-Identifier: GPL-2.0-or-later WITH Linux-syscall-note\n",
     "GPL-2.0-or-later WITH Linux-syscall-note"),
    ("#\n# Licensed under the Apache License, Version 2.0 (the \"License\");\n# you may not use", "Apache-2.0"),
    ("/* This program is free software: you can redistribute it under the terms of the GNU\n * General Public License"
     " as published by the FSF, either\n * version 3 of the License, or (at your option) any later version. */",
     "GPL-3.0-or-later"),
    ("; under the terms of the GNU General Public License version 2 as\n; published", "GPL-2.0-only"),
    ("/* This library is free software under the terms of the GNU Lesser General Public\n * License, either version 2.1"
     " of the License, or (at your option) any later version. */", "LGPL-2.1-or-later"),
    ("# GNU Library General Public License as published, version 2 of the License only", "LGPL-2.0-only"),
    ("# GNU General Public License, version 2. You may use the GNU Lesser General Public License", "GPL-2.0-only"),
    ("# License: GPLv3+\n", "GPL-3.0-or-later"),
    ("// Distributed under the Boost Software License, Version 1.0.\n", "BSL-1.0"),
    ("// Apache 2 license\n", "Apache-2.0"),
    # the beginning of a licence is none: what it goes on with may be anything
    ("/*\n * Redistribution and use in source and binary\n * forms, with or without\n */", ""),
    ("% Permission is hereby granted, free\n% of charge, to any person", ""),
    # a tag that goes on, and two tags
    ("// SPDX-License-Identifier: MIT with the Commons Clause\n", ""),
    ("// SPDX-License-Identifier: MIT\n// SPDX-License-Identifier: Apache-2.0\n", "MIT AND Apache-2.0"),
    # a sentence that names a licence
    ("# Licensed under the MIT License.\nimport x\n", "MIT"),
    ("# Released under the 3-clause BSD license\n", "BSD-3-Clause"),
    ("# This file is not licensed under the MIT License.\n", ""), ("# Formerly licensed under the MIT license\n", ""),
    ("# Licensed under the MIT license with the Commons Clause\n", ""), ("# Released under an MIT-style license\n", ""),
    ("# Licensed under the MIT License, for non-commercial use.\n", ""),
    ("# Licensed under the MIT License or the GNU General Public License, version 2\n", ""),
    ("# Licensed under the Apache License, Version 2.0, except for Section 6\n", ""),
    # which versions of the GNU licences
    ("/* This program is free software: you can redistribute it under the terms of the GNU Affero General Public"
     " License, version 3, as published by\n * the Free Software Foundation. Any later version of this file "
     "is by others. */",
     "AGPL-3.0-only"),
    ("# under the GNU Affero General Public License version 3 only\n", "AGPL-3.0-only"),
    ("# under the GNU AGPL\n# license\n", ""), ("# GPL version 2, or any later version, only\n", ""),
    ("# GNU General Public License version 2, with a special exception for linking\n", ""),
    ("// the Eclipse Public License v1.0\n", "EPL-1.0"),
    ("def f(): pass\n" * 1000 + "# SPDX-License-Identifier: MIT", ""), ("x = 1", ""), ("", ""),
])
def test_licences(head, spdx):
    assert licence(head) == spdx


# -- what a person wrote ---------------------------------------------------------------------------------------------
APACHE = "".join(f"// {line}\n" for line in ["Copyright A. Person", 'Licensed under the Apache License, Version 2.0',
                                             *["you may not use this file except"] * 12])


@pytest.mark.parametrize(("path", "text", "outcome"), [
    # generated, by name and by what the head says
    ("a_pb2.py", GOOD, "generated"), ("x/zz_generated.go", GOOD, "generated"), ("pnpm-lock.yaml", GOOD, "generated"),
    ("Form1.Designer.cs", "class A {}\n", "generated"), ("ui_main.h", "int x;\n", "generated"),
    ("a.py", "# This file was generated from a table\n" + GOOD, "generated"),
    ("a.py", "# Generated by Django 4.2 on 2023-05-01 10:00\n" + GOOD, "generated"),
    ("a.go", APACHE + "\n// Code generated by deepcopy-gen. DO NOT EDIT.\n\npackage v1\n", "generated"),
    ("a.go", "package v1\n\n// Code generated by deepcopy-gen.\n// DO NOT EDIT.\n", "generated"),
    ("a.java", "package a;\n\n// This is a generated file. Not intended for manual editing.\nclass A {}\n",
     "generated"),
    ("a.c", "/* A Bison parser, made by GNU Bison 3.8.2.  */\nint x;\n", "generated"),
    ("a.c", '#line 1 "scan.l"\nint x;\n', "generated"),
    ("a.js", "// AUTO-GENERATED\nvar x = 1;\n", "generated"),
    ("a.ts",
     "/* tslint:disable */\n/**\n * This file was automatically generated by a tool.\n * DO NOT MODIFY IT BY HAND.\n"
             " */\nexport interface A { x: number }\n", "generated"),
    ("Makefile.in", "# Makefile.in generated by automake 1.16.5 from Makefile.am.\nall:\n", "generated"),
    ("a.js", "var x = 1;\n//# sourceMappingURL=a.js.map\n", "generated"),
    ("a.pl", "# -*- buffer-read-only: t -*-\n# !!!!!!!   DO NOT EDIT THIS FILE   !!!!!!!\nprint 1;\n", "generated"),
    ("a.h", "/* ANSI-C code produced by gperf version 3.1 */\nint x;\n", "generated"),
    # not generated: about generated things, or a generator that has its header in a string
    ("a.py", '"""Tests for code generated by the compiler.\n\nGenerators of random numbers."""\n' + GOOD, "kept"),
    ("a.py", "# The report that is generated by this script must not be edited by users.\n" + GOOD, "kept"),
    ("a.f",
     "*  Q is a real orthogonal matrix defined as\n*  generated using the compact representation\n      END\n", "kept"),
    ("a.py", 'HEADER = """\n# This file was automatically generated by gen.py. DO NOT EDIT.\n"""\n' + GOOD, "kept"),
    ("gen.sh", "cat > out.py <<EOF\n# Code generated by gen.sh. DO NOT EDIT.\nEOF\n", "kept"),
    ("a.py", "# Do not edit the values below unless you know what you do\n" + GOOD, "kept"),
    ("a.py", GOOD * 30 + "# Code generated by x. DO NOT EDIT.\n", "kept"),
    ("a.sh", "#!/bin/bash\nset -e\nf() {\n  rm $1\n}\n\n# Generated by glib-compile-schemas\nf gschemas.compiled\n",
     "kept"),
    ("a.y", "/* The grammar. */\n%{\n/* This file is generated from a yacc grammar. */\n%}\n%%\nx: y;\n", "kept"),
    ("Makefile.in", "prefix = @prefix@\nall:\n\tcc x.c\n", "kept"), ("autogenerated.py", GOOD, "kept"),
    # other people's, and what a build made of it
    ("web/jquery-3.1.js", GOOD, "vendored"), ("web/bootstrap.css", GOOD, "vendored"),
    ("m4/libtool.m4", GOOD, "vendored"),
    ("third_party/x.c", GOOD, "vendored"), ("src/vendor.py", GOOD, "kept"), ("src/d3reader.js", GOOD, "kept"),
    ("js/bootstrap.js", GOOD, "kept"), ("js/highlight.js", GOOD, "kept"), ("js/jquery.js", GOOD, "vendored"),
    ("lib/app.min.js", GOOD, "minified"), ("dist/app.js", GOOD, "minified"), ("dist/build.py", GOOD, "kept"),
    ("a.css", ("a{b:c}" * 30 + "\n") * 9, "minified"),
    # data
    ("a.py", "X = [\n" + "    0x12, 0xab, 0x00, 0xff, 0x12, 0xab, 0x00, 0xff, 0x11,\n" * 60 + "]\n", "data"),
    ("a.c", "short t[] = {\n" + "    1234, -5678, 0x9abc, 42, 4321, 8765,\n" * 200 + "};\n", "data"),
    ("a.py", "WORDS = [\n" + "    'word', \"other\",\n" * 250 + "]\n", "data"),
    ("a.ts", '<?xml version="1.0"?>\n<!DOCTYPE TS>\n<TS></TS>\n', "other_type"),
    ("a.yml", '<?xml version="1.0"?>\n<a>text of an element</a>\n', "data"),
    ("a.py", GOOD * 300 + "K = (\n" + ("    '" + "QUJD" * 20 + "'\n") * 3 + ")\n", "kept"),
    ("a.py", GOOD + "K = (\n" + ("    '" + "QUJD" * 20 + "'\n") * 30 + ")\n", "data"),
    ("aes.c",
     GOOD * 400 + "int sbox[] = {\n" + "    0x63, 0x7c, 0x77, 0x7b, 0xf2, 0x6b, 0x6f, 0xc5,\n" * 32 + "};\n", "kept"),
    ("a.c", ("//" + "=" * 90 + "\n" + GOOD * 9) * 9, "kept"),
    ("a.js", "var a = '" + r"\u4e00" * 160 + "';\n" + GOOD * 60, "kept"),
    ("a.py", "TABLE = {\n" + "    'one': f(1),\n" * 300 + "}\n", "kept"), ("a.sed", "s/\\(a\\)/[\\1]/\n", "kept"),
    # long lines
    ("a.tex", ("A paragraph that is one line. " * 50 + "\n\n") * 3, "kept"),
    ("a.py", ("A paragraph that is one line. " * 50 + "\n\n") * 3, "long_lines"),
    ("a.py", '"""Docs.\n\nAnd more."""\n# comment\n' + GOOD, "kept"),
])
def test_what_is_generated_vendored_minified_or_data(tmp_path, path, text, outcome):
    (tmp_path / "x").write_text(text)
    (item,) = read(Code(), tmp_path / "x", path)
    assert (item.reason if isinstance(item, Skipped) else "kept") == outcome
    if outcome == "kept":
        assert item.text == text, "comments, docstrings and licence stay as they are"


def test_other_encodings_are_no_binaries(tmp_path):
    for encoding in ("utf-16", "utf-8-sig", "latin-1"):
        (tmp_path / "x").write_bytes("Größe = 'ä'\r\nx = 1\r\n".encode(encoding))
        (doc,) = read(Code(), tmp_path / "x", "a.cs")
        assert doc.text == "Größe = 'ä'\nx = 1\n", encoding


# -- languages -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("path", "text", "name"), [
    ("a.h", "int f(void);\n", "c"), ("a.h", "#pragma once\nnamespace a {\nint f();\n}\n", "c++"),
    ("a.h", "#include <vector>\nint f();\n", "c++"), ("a.h", "#import <Foundation/Foundation.h>\n", "objective-c"),
    ("a.h", "@interface A : NSObject\n@end\n", "objective-c"), ("a.h", "/* -*- C++ -*- */\nint f();\n", "c++"),
    ("a.h", '#ifdef __cplusplus\nextern "C" {\ntemplate <class T> T x();\n#endif\nint f(void);\n', "c"),
    ("a.h", "/* a class of\n * things */\nstruct s { int class_; };\n", "c"), ("a.C", "int x;\n", "c++"),
    ("MAIN.C", "int x;\n", "c"),
    ("a.m", "% fit\nfunction y = f(x)\n  y = x.^2;\nend\n", "matlab"),
    ("a.m", "@implementation A\n- (int)f { return 1; }\n@end\n", "objective-c"),
    ("a.m", ":- module a.\n:- interface.\n", "mercury"), ("a.m", "(* ::Package:: *)\nf[x_] := x\n", "mathematica"),
    ("a.m", "//\n// A.m\n//\n#import \"A.h\"\n", "objective-c"),
    ("a.pl", "use strict;\nmy $x = 1;\n", "perl"),
    ("a.pl", "% facts\nparent(a, b).\nold(X) :- age(X, Y), Y > 9.\n", "prolog"),
    ("a.pl", ":- module(a, [b/1]).\nb(1).\n", "prolog"), ("a.pl", "#!/usr/bin/env perl\nprint 1;\n", "perl"),
    ("a.pl", "/*  Part of XPCE */\n:- pce_extend_class(bitmap).\n%copy = 1\n", "prolog"),
    ("a.mm", "%%MatrixMarket matrix\n", ""),
    ("a.pl", "print \"hello\";\n", "perl"), ("a.t", "use Test::More;\nok(1);\n", "perl"),
    ("a.ts", "export const x: number = 1;\n", "typescript"),
    ("a.v", "module a(input b);\nendmodule\n", "verilog"),
    ("a.v", "Require Import Arith.\nLemma a : 1 = 1.\nProof. auto. Qed.\n", "coq"),
    ("a.v", "module main\n\nfn main() {\n}\n", "v"), ("a.fs", "module A\nlet x = 1\n", "f#"),
    ("a.fs", "#version 330\nvoid main() {}\n", "glsl"),
    ("a.d", "module a;\nvoid main() {}\n", "d"), ("a.d", "a.o: a.c \\\n a.h\n", ""),
    ("a.cl", "(defun f (x) x)\n", "common lisp"),
    ("a.cl", "__kernel void f() {}\n", "opencl"), ("a.cls", "\\ProvidesClass{a}\n", "tex"),
    ("a.pp", "program a;\nbegin\nend.\n", "pascal"),
    ("a.pp", "class a {\n  file { '/x': ensure => present }\n}\n", "puppet"),
    ("a.pro", "QT += core\nSOURCES += a.cpp\n", "qmake"),
    ("a.ml", "let f x = x\n", "ocaml"), ("a.ml", "structure A = struct\nfun f x = x\nend\n", "standard ml"),
    ("a.l", "%{\n%}\n%%\n", "lex"),
    ("Makefile", "all:\n", "makefile"), ("GNUmakefile", "all:\n", "makefile"),
    ("sub/CMakeLists.txt", "project(a)\n", "cmake"),
    ("Dockerfile", "FROM a\n", "dockerfile"), ("Dockerfile.test", "FROM a\n", "dockerfile"),
    ("Rakefile", "task :a\n", "ruby"),
    ("bin/tool", "#!/usr/bin/env python3\nprint(1)\n", "python"), ("bin/tool", "#! /bin/sh -e\necho\n", "shell"),
    ("bin/tool", "#!/usr/bin/env -S node --x\n1\n", "javascript"), ("README", "Read me.\n", ""), ("a.xyz", "x\n", ""),
])
def test_languages(path, text, name):
    assert language(path, text) == name


# -- repositories ----------------------------------------------------------------------------------------------------
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


def test_a_folder_of_repositories(tmp_path):
    """One document a repository, from whatever partitions the folder is cut into."""
    files = {"a/one.py": GOOD, "a/sub/two.py": GOOD, "a/vendor/x.py": GOOD, "a-b/x.py": GOOD, "b/y.c": "int y;\n",
     "top.py": GOOD}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    listed = [SourceFile(name, str(tmp_path), len(text), "1") for name, text in sorted(files.items())]
    reader = Code(repository=True)
    found = {}
    for target in (1, 60, 10**6):
        parts = list(partitions("s", listed, reader.expansion, target, {}, reader.group))
        items = [item for part in parts for item in reader.read_files(
            (str(tmp_path / a["$file"]), Slice("s", a["$file"])) for a in part.slices)]
        found[target] = [(d.id, d.text, d.meta) if isinstance(d, Document) else d.reason for d in items]
    assert len(list(partitions("s", listed, reader.expansion, 1, {}, reader.group))) == 4
    assert found[1] == found[60] == found[10**6]
    docs = [f for f in found[1] if not isinstance(f, str)]
    assert [(m.get("repository"), m.get("files")) for _, _, m in docs] == [("a-b", 1), ("a", 2), ("b", 1), (None, None)]
    assert docs[1][1] == f"<file_sep>one.py\n{GOOD}<file_sep>sub/two.py\n{GOOD}" and "vendored" in found[1]
    whole = Code(repository=True, depth=0)
    (doc,) = [d for d in whole.read_files((str(tmp_path / f.path), Slice("s", f.path)) for f in listed)
              if isinstance(d, Document)]
    assert doc.meta["repository"] == "s" and doc.meta["files"] == 5 and "<file_sep>a/sub/two.py" in doc.text


STACK = [  # repository, path, content, licences
    ("o/a", "x.py", GOOD, ["MIT"]), ("o/a", "lib/y.h", "#include <vector>\nint y();\n", ["MIT"]),
    ("o/a", "x_pb2.py", GOOD, []),
    ("o/b", "main.go", "// SPDX-License-Identifier: ISC\npackage main\n", []),
    ("o/c", "z.py", GOOD, ["MIT", "Apache-2.0"]),
    ("o/c", "big.py", GOOD * 100, []), ("o/d", "README", "text", []), ("o/d", "d.py", GOOD, [])]


def test_rows_of_the_stack(tmp_path):
    names = ("max_stars_repo_name", "max_stars_repo_path", "content", "licences")
    table = pa.table({n: list(column) for n, column in zip(names, zip(*STACK))})
    local = tmp_path / "s.parquet"
    pq.write_table(table, local, row_group_size=2)
    rows = read(CodeTable(licence="licences", max_bytes=500), local)
    assert [i.reason if isinstance(i, BadRecord) else (i.meta["path"], i.meta["code_language"], i.meta.get("licence"))
            for i in rows] == [
        ("x.py", "python", "MIT"), ("lib/y.h", "c++", "MIT"), "generated", ("main.go", "go", "ISC"),
        ("z.py", "python", "Apache-2.0 AND MIT"), "too_large", "other_type", ("d.py", "python", None)]
    assert all(isinstance(i, (Document, Skipped)) for i in rows) and rows[0].meta["repository"] == "o/a"
    whole = CodeTable(repository=True, max_bytes=500)
    docs = [i for i in read(whole, local) if isinstance(i, Document)]
    assert [(d.meta["repository"], d.meta["files"]) for d in docs] == [("o/a", 2), ("o/b", 1), ("o/c", 1), ("o/d", 1)]
    assert docs[0].text == f"<file_sep>lib/y.h\n#include <vector>\nint y();\n<file_sep>x.py\n{GOOD}"
    cut = whole.splits(str(local), "s.parquet", 1)
    assert [(s.start, s.stop) for s in cut] == [(0, 2), (2, 3), (3, 4)], "row groups 0 and 1 share o/a"
    pieces = [i for s in cut for i in whole.read(str(local), s.of("s", "s.parquet"))]
    assert [(i.id, getattr(i, "text", "")) for i in pieces] == [(i.id, getattr(i, "text", "")) for i in
                                                                read(whole, local)]
    with pytest.raises(ValueError, match="no column 'p'"):
        read(CodeTable(file_path="p"), local)
    with pytest.raises(ValueError, match="set `repository_name:`"):
        CodeTable(repository=True, repository_name="")


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


@pytest.mark.parametrize(("metadata", "language"), [
    ({}, "python"), ({"language_info": {"name": "ipython3"}}, "python"), ({"kernelspec": {"name": "ir"}}, "r"),
    ({"language_info": {"name": "R"}}, "r"), ({"kernelspec": {"language": "julia", "name": "julia-1.9"}}, "julia"),
    ({"kernelspec": {"name": "julia-1.9"}}, "julia"), ({"language_info": {"name": "C++17"}}, "c++"),
    ({"kernelspec": {"name": "xcpp17"}}, "c++"), ({"kernelspec": {"language": "C#", "name": ".net-csharp"}}, "c#"),
    ({"language_info": {"name": "bash"}}, "shell"), ({"language_info": {"name": "Wolfram Language"}}, "mathematica"),
    ({"language_info": {"name": "x`y"}, "kernelspec": {"name": "python3"}}, "python")])
def test_languages_of_kernels(tmp_path, metadata, language):
    book = {"metadata": metadata, "cells": [{"cell_type": "code", "source": "x"}]}
    assert notebook(tmp_path, book).meta["code_language"] == language


def test_what_outputs_and_markdown_leave_out(tmp_path):
    shown = [
        {"output_type": "stream", "name": "stderr", "text": "/home/a/x.py:3: FutureWarning"},
        {"output_type": "stream", "stream": "stderr", "text": "old stderr"},
        {"output_type": "display_data", "data": {"text/plain": "Slider(value=1)",
                                                 "application/vnd.jupyter.widget-view+json": {"model_id": "a"}}},
        {"output_type": "display_data", "data": {"text/plain": "<IPython.core.display.Latex object>",
                                                 "text/latex": "$x^2$"}},
        {"output_type": "execute_result", "data": {"text/plain": "   a\n0  1", "text/html": "<table></table>"}}]
    book = {"metadata": {"kernelspec": {"name": "python3"}}, "cells": [
        {"cell_type": "markdown", "source": "A <img src=\"data:image/png;base64,AAAA\" width=\"9\"> B\n"
                                            "<style>.a {}</style><script>x()</script>![p](attachment:a.png)"},
        {"cell_type": "code", "source": "%%bash\nls", "outputs": shown}]}
    assert notebook(tmp_path, book).text == (
        "A  B\n\n```bash\n%%bash\nls\n```\n\nOutput:\n\n```\n$x^2$\n   a\n0  1\n```")


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


@pytest.mark.parametrize("unit", ["<img src=data:", "<style>", "<script>a</script>", "![](data:", "`", "\u001b[1;",
 "0x00 ", "A", "\\x00", "<", "00  "])
def test_hostile_text_takes_linear_time(tmp_path, unit):
    def made(n: int) -> dict:
        (tmp_path / "c").write_text((unit * 15 + "\n") * (n // 15))
        return {"cells": [{"cell_type": kind, "source": unit * n} for kind in ("markdown", "code")]}

    def look(book: dict) -> None:
        notebook(tmp_path, book)
        for name in ("c.py", "c.h", "c.pl", "c.m"):
            read(Code(max_line=10**7, mean_line=10**7), tmp_path / "c", name)

    assert_linear(look, made, 1_500)
