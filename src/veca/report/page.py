"""Pages that need nothing beside them: what the reports of training and of probes are made of.

Arguments are HTML already, unless they say otherwise: whoever has text from elsewhere escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from veca.report.charts import STYLE, colour_of, ramp
from veca.utils.files import atomic_path


def write_page(
    path: Path,
    *,
    name: str,
    eyebrow: str,
    facts: Mapping[str, str],
    sections: Sequence[str],
    footer: str,
    banner: str = "",
) -> None:
    """Write a page whose `name` is plain text."""
    page = Template((files("veca.report") / "templates" / "page.html").read_text(encoding="utf-8")).substitute(
        title=f"VECA · {escape(name)}",
        name=escape(name),
        eyebrow=eyebrow,
        banner=f'<div class="banner" role="note">{banner}</div>' if banner else "",
        facts="\n".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in facts.items()),
        sections="\n".join(sections),
        chart_style=STYLE.strip(),
        ramp=ramp(),
        footer=footer,
    )
    with atomic_path(path) as part:
        part.write_text(page, encoding="utf-8", errors="replace")


def section(title: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def figure(title: str, picture: str, caption: str = "") -> str:
    said = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure><h3>{title}</h3>{picture}{said}</figure>"


def details(title: str, body: str, shown: bool = False) -> str:
    start = '<details open="">' if shown else "<details>"
    return f"{start}<summary>{title}</summary>{body}</details>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "plain", words: Container[int] = ()) -> str:
    """`words` are columns of text, not of numbers. Of the kind "stack", rows are cards where the screen is narrow."""
    sides = [' class="word"' if i in words else "" for i in range(len(heads))]
    head = "".join(f'<th scope="col"{side}>{name}</th>' for side, name in zip(sides, heads, strict=True))
    told = [f' data-head="{name}"' if kind == "stack" else "" for name in heads]
    body = "\n".join(
        "<tr>" + "".join(f"<td{s}{t}>{cell}</td>" for s, t, cell in zip(sides, told, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def heat_table(
    corner: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[tuple[str, float]]],
    caption: str,
    ends: tuple[str, str] = ("low", "high"),
) -> str:
    """A table of (text, level in [0, 1]) cells, each in the colour of its level; no level (nan), no colour."""
    lines = []
    for name, cells in rows.items():
        drawn = []
        for text, level in cells:
            ground, ink = colour_of(level) if math.isfinite(level) else ("transparent", "inherit")
            drawn.append(f'<td style="background:{ground};color:{ink}">{text}</td>')
        lines.append(f'<tr><th scope="row">{name}</th>{"".join(drawn)}</tr>')
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<div class="wide"><table class="heat"><caption>{caption} '
        f'<span class="scale">{ends[0]} <i></i> {ends[1]}</span></caption>'
        f'<thead><tr><th scope="col">{corner}</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
