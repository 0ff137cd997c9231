"""What is kept of wikitext beside running text: formulas, code, tables, lists, superscripts, inline templates."""

from __future__ import annotations

import pytest

from stages.read.wikitext import plain
from tests.stages.texts import assert_linear

TABLE = """Before
{| class="wikitable sortable" style="x"
|+ Caption
! Name !! scope=col | Born !! Note<ref>r</ref>
|-
| [[Ada Lovelace|Ada]] || align=right | 1815 || x<sup>2</sup> <math>y|z</math>
|-
| '''Bob'''
and Rob
|-
|
|}
After"""


@pytest.mark.parametrize(("markup", "text"), [
    ("a <math display=block>x^{{2}} |  ''y''</math> b {{math|''x''<sup>2</sup>}}", "a $$x^{{2}} | ''y''$$ b x²"),
    ("a <math>\n  b &lt; c\n</math>, <math></math>d", "a $b < c$, d"),
    ("10<sup>6</sup> m<sup>-2</sup> H<sub>2</sub>O x<sub>max</sub> 19<sup>th</sup> e<sup>iπ</sup> A<sup>(a b)</sup>",
     "10⁶ m⁻² H₂O x_max 19th e^iπ A^((a b))"),
    ("<sup>14</sup>C, x<sup>{{citation needed}}</sup>", "¹⁴C, x"),
    ("Fish {{cite|x}}, or (singular fish {{IPA|x}}) are .NET ( {{x}}here).",
     "Fish, or (singular fish) are .NET (here)."),
    ("Say <nowiki>[[x]] {{y}} &amp; ''z''</nowiki>.", "Say [[x]] {{y}} & ''z''."),
    ("So:\n<syntaxhighlight lang=\"Python\">\ndef f(x):\n    return [[x]] == '''y'''  # {{z}} &lt;\n"
     "</syntaxhighlight>\nEnd", "So:\n\n```python\ndef f(x):\n    return [[x]] == '''y'''  # {{z}} &lt;\n```\n\nEnd"),
    ("Type <source lang=c>x = 1;</source> now.", "Type x = 1; now."),
    ("<pre>\na  b\n c\n</pre>", "```\na  b\n c\n```"),
    ("{{frac|1|2}} {{frac|3|1|2}} {{e|6}} {{as of|2010}} {{nihongo|Tea|茶|cha}} {{okina}}",
     "1/2 3 1/2 ×10⁶ As of 2010 Tea (茶, cha) ʻ"),
    ("\ue0000\ue001 stays out", "0 stays out"),
    ("# a\n#: more\n# b\n## c\n##d\n# e\n\n# new\n*#x",
     "1. a\n  more\n2. b\n  1. c\n  2. d\n3. e\n\n1. new\n  1. x"),
    (TABLE,
     "Before\n\n| Name | Born | Note |\n|---|---|---|\n| Ada | 1815 | x² $y|z$ |\n| Bob and Rob |  |  |\n\nAfter"),
    ("{| class=wikitable\n! a !! b !! c\n|-\n| rowspan=2 | E || 1 || 2\n|-\n| 3 || 4\n|-\n| colspan=\"2\" | F || 5\n|}",
     "| a | b | c |\n|---|---|---|\n| E | 1 | 2 |\n| E | 3 | 4 |\n| F |  | 5 |"),
    ("{| class=wikitable\n" + "|-\n| rowspan=9999 colspan=9999 | a || b\n" * 50 + "|}z", "z"),
    ("* {{cite|x}}, again\n* {{cite|y}}", "- again"),
    (TABLE.replace("wikitable", "infobox"), "Before\n\nAfter"),
    ("{{box|" + TABLE + "}}x", "x"),
    ("{| class=wikitable\n! a || b\n|-\n" + "| x || y\n|-\n" * 400 + "|}z", "z"),
])
def test_kept(markup, text):
    assert plain(markup) == text


@pytest.mark.parametrize("unit", ["<math>", "</math>", "<nowiki>", "<pre>a</pre>", "<sup>", "<sup>1</sup>", "# ", "*",
                                  "\n#*#", "{| class=wikitable\n! a || b\n|-\n| c || d\n|}\n", "\n|", "\ue000", " (",
                                  " ,", "<syntaxhighlight lang=a\n"])
def test_hostile_markup_takes_linear_time(unit):
    assert_linear(plain, lambda n: unit * n, 500)
