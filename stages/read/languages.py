"""Finds the programming language of a file by its name, and by its content if several languages share the suffix.

The rules are modelled on GitHub Linguist
(https://github.com/github-linguist/linguist/blob/main/docs/how-linguist-works.md), whose names of languages are used in
lower case. If a file name or suffix belongs to one language only, that language is the result. Otherwise the following
are tried in this order: the editor's modeline, the shebang line, and words that only one of the candidates uses. If all
of these fail, the result is the language to which most files with the suffix belong, if there is such a language.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

#: suffixes by language, lower case; where several languages share one (`_SHARED_SUFFIXES`), content decides
_SUFFIXES: dict[str, str] = {
    "python": ".py .pyi .pyw", "cython": ".pyx .pxd .pxi", "c": ".c .h",
    "c++": ".cc .cpp .cxx .c++ .hh .hpp .hxx .ipp .tpp .tcc .inl",
    "cuda": ".cu .cuh", "opencl": ".cl", "rust": ".rs", "go": ".go", "java": ".java", "kotlin": ".kt .kts",
    "scala": ".scala .sbt", "groovy": ".groovy", "clojure": ".clj .cljs .cljc", "c#": ".cs .csx", "f#": ".fs .fsi .fsx",
    "visual basic": ".vb .bas", "javascript": ".js .mjs .cjs .jsx", "coffeescript": ".coffee",
    "typescript": ".ts .tsx .mts .cts", "vue": ".vue", "svelte": ".svelte", "astro": ".astro",
    "ruby": ".rb .rake .gemspec .ru", "crystal": ".cr", "php": ".php .phtml", "perl": ".pl .pm .t",
    "raku": ".raku .rakumod",
    "lua": ".lua", "r": ".r", "julia": ".jl", "objective-c": ".m", "objective-c++": ".mm", "swift": ".swift",
    "dart": ".dart", "haskell": ".hs .lhs .hsc", "ocaml": ".ml .mli .mll .mly", "standard ml": ".sml .sig",
    "reason": ".re .rei", "elixir": ".ex .exs", "erlang": ".erl .hrl", "gleam": ".gleam", "elm": ".elm",
    "purescript": ".purs", "idris": ".idr", "common lisp": ".lisp .lsp .asd", "emacs lisp": ".el",
    "scheme": ".scm .ss .sld", "racket": ".rkt", "fortran": ".f .for .f77 .f90 .f95 .f03 .f08", "ada": ".adb .ads",
    "pascal": ".pas .pp .dpr .lpr", "modula-2": ".mod", "d": ".d", "nim": ".nim .nims", "zig": ".zig", "v": ".vsh",
    "vala": ".vala .vapi", "verilog": ".v .vh", "systemverilog": ".sv .svh", "vhdl": ".vhd .vhdl",
    "assembly": ".asm .s .nasm", "shell": ".sh .bash .zsh .ksh", "fish": ".fish", "powershell": ".ps1 .psm1 .psd1",
    "batchfile": ".bat .cmd", "tcl": ".tcl", "awk": ".awk", "sed": ".sed", "vim script": ".vim", "sql": ".sql",
    "css": ".css", "scss": ".scss", "sass": ".sass", "less": ".less", "stylus": ".styl", "tex": ".tex .sty .cls .dtx",
    "cmake": ".cmake", "starlark": ".bzl .star", "gn": ".gn .gni", "makefile": ".mk .mak .am", "m4": ".m4 .ac",
    "gradle": ".gradle", "protocol buffer": ".proto", "thrift": ".thrift", "graphql": ".graphql .gql",
    "cap'n proto": ".capnp", "flatbuffers": ".fbs", "antlr": ".g4", "yacc": ".y .yy", "lex": ".l .ll",
    "hcl": ".tf .hcl", "nix": ".nix", "dhall": ".dhall", "jsonnet": ".jsonnet .libsonnet",
    "solidity": ".sol", "glsl": ".glsl .vert .frag .geom .comp", "hlsl": ".hlsl .fx", "metal": ".metal",
    "wgsl": ".wgsl",
    "coq": ".coq", "lean": ".lean", "agda": ".agda .lagda", "isabelle": ".thy", "tla": ".tla", "smt": ".smt2",
    "prolog": ".pro .prolog", "mathematica": ".wl", "stata": ".do .ado", "sas": ".sas", "cobol": ".cob .cbl",
    "gdscript": ".gd", "abap": ".abap", "smalltalk": ".st", "forth": ".fth .4th", "yaml": ".yaml .yml",
    "toml": ".toml",
}
#: whole file names by language, lower case
_NAMES: dict[str, str] = {
    "makefile": "makefile gnumakefile makefile.in kbuild", "dockerfile": "dockerfile containerfile",
    "cmake": "cmakelists.txt", "meson": "meson.build meson_options.txt", "starlark": "build.bazel workspace.bazel",
    "ruby": "rakefile gemfile vagrantfile podfile fastfile brewfile", "groovy": "jenkinsfile", "just": "justfile",
    "python": "sconstruct sconscript wscript", "go module": "go.mod", "shell": "pkgbuild",
}
LANGUAGES = {suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
NAMES = {name: language for language, names in _NAMES.items() for name in names.split()}
#: programs named in shebangs, without their version
_INTERPRETERS = {
    "python": "python", "pypy": "python", "sh": "shell", "bash": "shell", "dash": "shell", "ksh": "shell",
    "zsh": "shell", "ash": "shell", "fish": "fish", "perl": "perl", "ruby": "ruby", "node": "javascript",
    "nodejs": "javascript",
    "deno": "typescript", "php": "php", "lua": "lua", "luajit": "lua", "tclsh": "tcl", "wish": "tcl", "expect": "tcl",
    "awk": "awk", "gawk": "awk", "mawk": "awk", "sed": "sed", "make": "makefile", "rscript": "r", "julia": "julia",
    "guile": "scheme", "racket": "racket", "sbcl": "common lisp", "emacs": "emacs lisp", "ocaml": "ocaml",
    "runhaskell": "haskell", "runghc": "haskell", "stack": "haskell", "escript": "erlang", "elixir": "elixir",
    "groovy": "groovy", "scala": "scala", "swipl": "prolog", "octave": "matlab", "pwsh": "powershell", "raku": "raku",
    "nix-shell": "shell", "dart": "dart", "crystal": "crystal", "tcc": "c",
}
_SHEBANG = re.compile(r"#![ \t]{0,9}(?:\S{0,200}/)?(?:env(?:[ \t]{1,9}(?:-\S{1,40}|\w{1,40}=\S{0,200})){0,9}"
                      r"[ \t]{1,9})?(?:\S{0,200}/)?([A-Za-z][A-Za-z+-]{0,30})")
_MODELINE = re.compile(r"-\*-[ \t]{0,9}(?:[^\n]{0,200}?\bmode:[ \t]{0,9})?([A-Za-z][\w+#-]{0,30})[ \t]{0,9}"
                       r"(?:;[^\n]{0,300})?-\*-|\bvim?:[^\n]{0,200}?\b(?:ft|filetype|syntax)=([A-Za-z][\w+-]{0,30})",
                       re.IGNORECASE)
#: languages by the names of editor modes
_MODES = {
    "c": "c", "c++": "c++", "cpp": "c++", "objc": "objective-c", "objective-c": "objective-c", "perl": "perl",
    "cperl": "perl", "prolog": "prolog", "octave": "matlab", "matlab": "matlab", "python": "python", "ruby": "ruby",
    "sh": "shell", "shell-script": "shell", "bash": "shell", "tcl": "tcl", "makefile": "makefile",
    "makefile-gmake": "makefile", "make": "makefile", "awk": "awk", "scheme": "scheme", "lisp": "common lisp",
    "emacs-lisp": "emacs lisp", "coq": "coq", "verilog": "verilog", "fortran": "fortran", "f90": "fortran",
    "javascript": "javascript", "js": "javascript", "js2": "javascript", "java": "java", "haskell": "haskell",
    "sml": "standard ml", "tuareg": "ocaml", "caml": "ocaml", "ocaml": "ocaml", "m4": "m4", "autoconf": "m4",
    "latex": "tex", "tex": "tex", "pascal": "pascal", "puppet": "puppet", "forth": "forth", "mercury": "mercury",
    "typescript": "typescript", "d": "d", "lex": "lex", "bison": "yacc", "yacc": "yacc",
}
#: the part of a C header that only C++ compilers see
_FOR_CPP = re.compile(r"^[ \t]*#[ \t]*if[^\n]*__cplusplus[^\n]*\n(?:(?![ \t]*#[ \t]*e)[^\n]*\n)*", re.MULTILINE)
#: most characters of a file that are examined
_EXAMINED = 50_000


def _rules(*rules: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((language, re.compile(words, re.MULTILINE)) for language, words in rules)


_OBJC = (r"^[ \t]*(?:@(?:interface|implementation|protocol|property|selector|synthesize|end|class)\b|#import\b)"
         r"|@autoreleasepool|\[\w+ (?:alloc|release|retain|autorelease)\]")
_CPP = (r"^[ \t]*(?:template[ \t]*<|(?:inline[ \t]+)?namespace\b[ \t\w:]*(?:\{|$)|using[ \t]+(?:namespace\b|\w+[ \t]*="
        r"|\w+::)|(?:public|protected|private)[ \t]*:"
        r"|class[ \t]+(?:[A-Z_]+(?:\([^()\n]*\))?[ \t]+)?\w+[ \t]*(?:final[ \t]*)?"
        r"[:{;]|#[ \t]*include[ \t]*<(?:[a-z_]+|c(?:std\w+|math|assert|string))>|(?:virtual|explicit|constexpr)\b)"
        r"|\bstd::\w|\b(?:static|dynamic|reinterpret|const)_cast<|\boperator[ \t]*(?:[-+*/=<>!\[(]|new\b|delete\b)")
_MATLAB = (r"^[ \t]*(?:%|##?(?!import)|function\b|classdef\b|end(?:function|if|for|while)?\b|clc\b|clear\b|1;)"
           r"|[^;\n]{1,200};[ \t]*%|\.[*/^]")
_PERL = (r"^[ \t]*(?:(?:use|no)[ \t]+(?:strict|warnings|v?5|lib|constant|vars|[A-Z]\w*(?:::\w+)*)\b"
         r"|(?:my|our|local|sub|package|require)\b[ \t]*[\w${(@%])|[$@%]\w+[ \t]*=|->\{|=~|^=(?:head1|pod)\b")
#: suffixes that several languages share: the language when no pattern matches, and the patterns in the order they are
#: tried
_SHARED_SUFFIXES: dict[str, tuple[str, tuple[tuple[str, re.Pattern[str]], ...]]] = {
    ".h": ("c", _rules(("objective-c", _OBJC), ("c++", _CPP))),
    ".m": ("matlab", _rules(("objective-c", _OBJC), ("mercury", r"^:- (?:module|interface)"),
                            ("mathematica", r"\A\s*\(\*|^Begin(?:Package)?\["), ("matlab", _MATLAB),
                            ("objective-c", r"^[ \t]*(?://|/\*|#[ \t]*include\b)"))),
    ".mm": ("objective-c++", _rules(("", r"\A\s*(?:<|%%(?i:MatrixMarket))"))),
    ".pl": ("perl", _rules(("prolog", r"^:-[ \t]*[a-z]"),
                           ("perl", _PERL),
                           ("prolog", r"^[a-z]\w*(?:\([^\n]*\))?[ \t]*:-|^[a-z]\w*\([^\n]*\)\.[ \t]*(?:%|$)"))),
    ".t": ("", _rules(("perl", _PERL))),
    ".pro": ("", _rules(("qmake", r"^[ \t]*(?:TEMPLATE|SOURCES|HEADERS|TARGET|SUBDIRS|QT|CONFIG)\b[^\n=]{0,40}="),
                        ("prolog", r"^[a-z:][^#\[\n]*:-"), ("idl", r"(?i:^[ \t]*(?:pro|function)[ \t]+\w+)"))),
    ".ts": ("typescript", _rules(("", r"\A[^\n]{0,200}(?:<!DOCTYPE TS>|<\?xml)|^<TS\b"))),        # Qt translations
    ".v": ("verilog", _rules(
        ("verilog", r"\bendmodule\b|^[ \t]*`(?:timescale|define|ifdef|ifndef|include)\b|^[ \t]*always[ \t]*@"),
        ("coq", r"^[ \t]*(?:Proof|Qed|Defined|Admitted|Lemma|Theorem|Fixpoint|Inductive|Notation|Definition|Ltac)\b"
                r"|^[ \t]*(?:Require|From)[ \t]+[\w.]+|\A\s*\(\*"),
        ("v", r"^(?:pub[ \t]+)?fn[ \t]+[\w.(]+[^\n]*\{|^module[ \t]+\w+[ \t]*$|^import[ \t]+\w+$"))),
    ".fs": ("f#", _rules(("forth", r"^(?::[ \t]+\S+|\\[ \t]|new-device\b)"),
                         ("glsl", r"^[ \t]*(?:#version|precision[ \t]|uniform[ \t]|varying[ \t])"))),
    ".d": ("d", _rules(("dtrace", r"^#!\S*dtrace|^#pragma D |^\w*:\w*:\w*:\w*$"),
                       ("", r"\A\s*[^\s:]+\.l?o[ \t]*:[ \t]"))),                                 # make dependencies
    ".f": ("fortran", _rules(("forth", r"^:[ \t]+\S+[ \t]"))),
    ".for": ("fortran", _rules(("forth", r"^:[ \t]+\S+[ \t]"))),
    ".cl": ("opencl", _rules(("common lisp", r"^[ \t]*\((?:defun|defmacro|in-package|defpackage)\b"))),
    ".cls": ("", _rules(("tex", r"^[^%\n]*\\(?:NeedsTeXFormat|Provides(?:Expl)?Class|def|newcommand)"),
                        ("visual basic", r"^VERSION [\d.]+ CLASS|^Attribute VB_"),
                        ("apex", r"\bclass[ \t]+\w+[^\n]*\{"))),
    ".pp": ("", _rules(("pascal", r"(?i:^[ \t]*(?:unit|program|library|procedure|begin|end[.;])(?:[ \t;]|$))"),
                       ("puppet", r"^[ \t]*(?:class|define|node|include)\b|=>"))),
    ".mod": ("", _rules(("modula-2", r"^[ \t]*(?:(?:IMPLEMENTATION|DEFINITION)[ \t]+)?MODULE[ \t]+\w+"))),
    ".l": ("", _rules(("lex", r"^%(?:[%{}]|option\b)"), ("common lisp", r"^\((?:defun|defmacro|setq)\b"))),
    ".ll": ("", _rules(("lex", r"^%(?:%|option\b|\{)"), ("llvm", r"^(?:define|declare|target|source_filename)\b"))),
    ".ml": ("ocaml", _rules(("ocaml", r"^[ \t]*(?:module|let)\b|\(\*\*|;;[ \t]*$"),
                            ("standard ml", r"^[ \t]*(?:structure|signature|functor|fun)\b"))),
    ".sig": ("", _rules(("standard ml", r"^[ \t]*signature\b"))),
    ".st": ("", _rules(("smalltalk", r"^!|\bsubclass:|\^ ?self\b"))),
    ".bas": ("basic", _rules(("visual basic", r"^Attribute VB_|^[ \t]*(?:Public|Private) (?:Sub|Function)\b"))),
    ".do": ("stata", _rules(("shell", r"^[ \t]*redo-ifchange\b"))),
}


def language(path: str, text: str) -> str:
    """Returns the name, in lower case, of the programming language of a file with the path `path` and the content
    `text`; "" if it is not known."""
    place = PurePosixPath(path)
    name, suffix = place.name.lower(), place.suffix.lower()
    if name in NAMES:
        return NAMES[name]
    if name.startswith("dockerfile."):
        return "dockerfile"
    by_suffix = LANGUAGES.get(suffix)
    if by_suffix is None and suffix and name != suffix:
        return ""
    if place.suffix in (".C", ".H") and place.stem != place.stem.upper():       # not MAIN.C from a DOS disk
        return "c++"
    candidates = _SHARED_SUFFIXES.get(suffix)
    if by_suffix is not None and candidates is None:
        return by_suffix
    head = text[:_EXAMINED]
    if suffix == ".h":
        head = _FOR_CPP.sub("", head)
    if mode := _MODELINE.search("\n".join(head.split("\n", 2)[:2])[:1000]):
        by_mode = _MODES.get((mode[1] or mode[2]).lower().removesuffix("-mode"), "")
        if by_mode and (by_suffix is None or candidates is None or by_mode == candidates[0]
                        or any(by_mode == rule[0] for rule in candidates[1])):
            return by_mode
    if shebang := _SHEBANG.match(head):
        by_shebang = _INTERPRETERS.get(shebang[1].lower().rstrip("-"), "")
        if by_shebang or by_suffix is None:
            return by_shebang
    if candidates is None:
        return ""
    return next((language for language, words in candidates[1] if words.search(head)), candidates[0])
