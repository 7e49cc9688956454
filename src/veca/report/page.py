"""HTML, SVG and Markdown from the Jinja2 templates of this package, and the colours of reports."""

import base64
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from veca.utils.files import atomic_path
from veca.utils.text import duration, number, printable

Key = TypeVar("Key")
Row = TypeVar("Row")
_COLOURS = tomllib.loads(Path(__file__).with_name("colours.toml").read_text("utf-8"))
LIGHT, DARK, ROLES, CIVIDIS = (_COLOURS[key] for key in ("light", "dark", "roles", "cividis"))


def write_page(path: Path, template: str, **context: Any) -> None:
    """Render a template into a file, atomically."""
    write_text(path, render(template, **context))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, line ends as they are."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8", newline="")


def render(template: str, **context: Any) -> str:
    """A template of `veca/report/templates` filled in; text in `context` is escaped, unless it is `Markup`."""
    return str(_environment().get_template(template).render(context))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: most commands write no report

    def displayable(value: Any) -> Any:
        # XML has no place for control characters, so they are shown escaped. Markup is made by templates.
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return printable(value, keep="\n\t") if is_text else value

    environment = Environment(
        loader=PackageLoader("veca.report"),
        # Markdown has its own rules: there, templates pass text through the filter `md`.
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,  # a value that is missing is an error, not an empty place
        finalize=displayable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = partial(json.dumps, indent=1, default=str, ensure_ascii=False)
    environment.filters |= {"md": escape_markdown, "pairs": _pairs, "ramp": ramp_colours}
    environment.filters |= {"number": number, "duration": duration}
    environment.globals |= _COLOURS | {"now": datetime.now}
    return environment


def escape_markdown(value: object) -> str:
    r"""Text that Markdown shows as it is.

    >>> escape_markdown("a|b <i> [x](y) *z*")
    'a\\|b &lt;i&gt; \\[x\\](y) \\*z\\*'
    """
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", escape(str(value), quote=False))


def _pairs(values: Mapping[str, Any], form: str = "{} {}") -> str:
    """Names and values on one line."""
    return ", ".join(form.format(name, value) for name, value in values.items())


def ramp_colours(level: float) -> tuple[str, str]:
    """The cividis colour of a level in [0, 1], and black or white for text that is readable on it; none for nan.

    >>> ramp_colours(0.0), ramp_colours(1.0)
    (('#00224e', '#ffffff'), ('#fee838', '#000000'))
    """
    if not math.isfinite(level):
        return "transparent", "inherit"
    position = min(max(level, 0.0), 1.0) * (len(CIVIDIS) - 1)
    i = min(int(position), len(CIVIDIS) - 2)
    low, high = (bytes.fromhex(colour[1:]) for colour in CIVIDIS[i : i + 2])
    rgb = [round(a + (b - a) * (position - i)) for a, b in zip(low, high, strict=True)]
    # Relative luminance and contrast as WCAG 2 defines them: contrast = (brighter + 0.05) / (darker + 0.05).
    linear = [(c / 255) / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    white_is_clearer = 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05
    return f"#{bytes(rgb).hex()}", "#ffffff" if white_is_clearer else "#000000"


def levels(values: Mapping[Key, float], lower_is_better: bool = False, flat: float = 0.5) -> dict[Key, float]:
    """Finite values scaled to [0, 1] for a heat table, the best at 1; all equal: `flat`.

    >>> levels({"a": 2.0, "b": 4.0, "c": 3.0}, lower_is_better=True)
    {'a': 1.0, 'b': 0.0, 'c': 0.5}
    """
    signed = {key: -value if lower_is_better else value for key, value in values.items() if math.isfinite(value)}
    low, high = min(signed.values(), default=0.0), max(signed.values(), default=0.0)
    return {key: (value - low) / (high - low) if high > low else flat for key, value in signed.items()}


def heat_rows(
    values: Mapping[tuple[Row, Key], float], scaled: Mapping[tuple[Row, Key], float], names: Mapping[Row, str],
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
