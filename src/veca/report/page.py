"""HTML, SVG and Markdown from the Jinja2 templates of this package, as files that need nothing beside them."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from veca.report.colours import CIVIDIS, DARK, LIGHT, ROLES, ramp_colours
from veca.utils.files import atomic_path
from veca.utils.text import duration, number, printable

if TYPE_CHECKING:
    from jinja2 import Environment

Key = TypeVar("Key")


def write_page(path: Path, template: str, **context: Any) -> None:
    """Render a template into a file, atomically."""
    write_text(path, render(template, **context))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, line ends as they are."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8", newline="")


def render(template: str, **context: Any) -> str:
    """A template of `veca/report/templates` filled in; text in `context` is escaped, unless it is `Markup`."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: most commands write no report

    environment = Environment(
        loader=PackageLoader("veca.report"),
        # Markdown has its own rules: there, templates pass text through the filter `md`.
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,  # a value that is missing is an error, not an empty place
        finalize=_displayable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "json": partial(json.dumps, indent=1, default=str, ensure_ascii=False),
        "md": escape_markdown, "pairs": _pairs, "ramp": _ramp_style, "svg_path": _svg_path, "number": number,
        "duration": duration,
    }  # fmt: skip
    environment.globals |= {"light": LIGHT, "dark": DARK, "roles": ROLES, "cividis": CIVIDIS, "now": datetime.now}
    return environment


def _displayable(value: Any) -> Any:
    """Applied to every value of a template: XML has no place for control characters, so they are shown escaped."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")  # Markup is made by templates
    return printable(value, keep="\n\t") if is_text else value


def escape_markdown(value: object) -> str:
    r"""Text that Markdown shows as it is.

    >>> escape_markdown("a|b <i> [x](y) *z*")
    'a\\|b &lt;i&gt; \\[x\\](y) \\*z\\*'
    """
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", escape(str(value), quote=False))


def _pairs(values: Mapping[str, Any], form: str = "{} {}") -> str:
    """Names and values on one line."""
    return ", ".join(form.format(name, value) for name, value in values.items())


def _ramp_style(level: float) -> str:
    """CSS of a cell of a heat table; nan has no colour."""
    ground, ink = ramp_colours(level) if math.isfinite(level) else ("transparent", "inherit")
    return f"background:{ground};color:{ink}"


def _svg_path(runs: list[list[tuple[float, float]]]) -> str:
    """The `d` of an SVG path through each run of points."""
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for run in runs for i, (x, y) in enumerate(run))


def levels(values: Mapping[Key, float], lower_is_better: bool = False, flat: float = 0.5) -> dict[Key, float]:
    """Finite values scaled to [0, 1] for a heat table, the best at 1; all equal: `flat`.

    >>> levels({"a": 2.0, "b": 4.0, "c": 3.0}, lower_is_better=True)
    {'a': 1.0, 'b': 0.0, 'c': 0.5}
    """
    signed = {key: -value if lower_is_better else value for key, value in values.items() if math.isfinite(value)}
    low, high = min(signed.values(), default=0.0), max(signed.values(), default=0.0)
    return {key: (value - low) / (high - low) if high > low else flat for key, value in signed.items()}


def heat_rows(
    values: Mapping[tuple[Key, Key], float], scaled: Mapping[tuple[Key, Key], float], names: Mapping[Key, str],
    columns: Sequence[Key], text: Callable[[float], str] = number,
) -> dict[str, list[tuple[str, float]]]:  # fmt: skip
    """Rows of a heat table by name: text and level of the values at each (row, column), nan where there is none."""
    return {
        name: [(text(values.get((row, c), math.nan)), scaled.get((row, c), math.nan)) for c in columns]
        for row, name in names.items()
    }


def data_uri(data: bytes, kind: str) -> str:
    """An image file as the `src` of an <img>; `kind` is png, jpeg or webp."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
