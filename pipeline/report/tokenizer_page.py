"""Shows an evaluation of tokenizers (`tokenizer.evaluate`) as one HTML page with charts, which works offline and holds
no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.base.svg import Element, tag
from pipeline.base.visible import visible

#: figure of a row → title of its chart, and what a high value means
CHARTS = {"bytes_per_token": ("Bytes per token", "more is shorter"),
          "fertility": ("Tokens per word (fertility)", "fewer is better; not for scripts without spaces"),
          "continued_words": ("Share of words that are split", "fewer is better; not for scripts without spaces"),
          "parity": ("Parity: tokens per text, English = 1", "of translations of the same texts"),
          "renyi": ("Rényi efficiency, α = 2.5", "more is a more even use of the vocabulary"),
          "mb_per_cpu_s": ("MB of text per CPU second", "of encoding alone")}
COLUMNS = ("texts", "bytes", "tokens", "bytes_per_token", "fertility", "continued_words", "parity", "renyi", "unknown",
           "broken", "mb_per_cpu_s")
COLORS = ("#3465a4", "#c4701d", "#3f8f4f", "#8a4fae", "#b3434f", "#4f9aa8", "#857a2f", "#777777")
STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;"
         "background:#fff}table{border-collapse:collapse;font-size:13px}td,th{padding:2px 8px;text-align:right;"
         "border-bottom:1px solid #ddd}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}"
         ".wide{overflow-x:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}.key{margin-right:1rem}"
         "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}}"
         + "".join(f".c{i}{{fill:{color};color:{color}}}" for i, color in enumerate(COLORS)))
#: pixels: width of the names of groups, of the bars, of the numbers; height of a bar
NAMES, BARS, NUMBERS, BAR = 190, 560, 90, 11


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page. `rows` are those of `tokenizer.evaluate.rows_of`: one for each tokenizer and group of
    texts."""
    names = list(dict.fromkeys(row["tokenizer"] for row in rows))
    colors = {name: i % len(COLORS) for i, name in enumerate(names)}
    keys = tag("p", *(tag("span", tag("span", "■ ", class_=f"c{colors[name]}"), visible(name), class_="key")
                      for name in names))
    charts = [part for figure, (title, hint) in CHARTS.items() if any(row[figure] is not None for row in rows)
              for part in (tag("h2", title), tag("p", hint), keys, _chart(rows, figure, colors))]
    policy = Element('<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
                     'style-src \'unsafe-inline\'">')
    head = tag("head", Element('<meta charset="utf-8">'), policy,
               Element('<meta name="viewport" content="width=device-width, initial-scale=1">'),
               tag("title", "Tokenizers"), tag("style", Element(STYLE)))
    body = tag("body", tag("h1", "Tokenizers"), *charts, tag("h2", "Figures"), _table(rows))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _chart(rows: Sequence[Mapping[str, Any]], figure: str, colors: Mapping[str, int]) -> Element:
    """Draw a bar chart of one figure: a bar for each row that has the figure, under the name of the row's group of
    texts. `colors` maps a tokenizer to the number of its colour."""
    shown = [row for row in rows if row[figure] is not None]
    top = max((row[figure] for row in shown), default=0) or 1
    parts: list[Element] = []
    y, group = 0, ""
    for row in shown:
        if not parts or row["group"] != group:
            group, y = row["group"], y + 8
            parts.append(tag("text", visible(group)[:28], x=0, y=y + 10))
        number = _text(row[figure])
        width = max(1.0, BARS * row[figure] / top)
        title = tag("title", f"{visible(group)}, {visible(row['tokenizer'])}: {number}")
        parts.append(tag("rect", title, class_=f"c{colors[row['tokenizer']]}", x=NAMES, y=y, width=width,
                         height=BAR - 1))
        parts.append(tag("text", number, x=NAMES + width + 5, y=y + 10))
        y += BAR
    return tag("div", tag("svg", *parts, width=NAMES + BARS + NUMBERS, height=y + 4, role="img",
                          aria_label=CHARTS[figure][0]), class_="wide")


def _table(rows: Sequence[Mapping[str, Any]]) -> Element:
    head = tag("tr", *(tag("th", name.replace("_", " ")) for name in ("group", "tokenizer", *COLUMNS)))
    lines = [tag("tr", tag("td", visible(row["group"])), tag("td", visible(row["tokenizer"])),
                 *(tag("td", _text(row[column])) for column in COLUMNS)) for row in rows]
    return tag("div", tag("table", head, *lines), class_="wide")


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
