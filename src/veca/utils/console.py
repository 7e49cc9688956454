"""Console output safe for untrusted text: no markup, control characters escaped, limited length."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.status import Status
from rich.text import Text

from veca.utils.text import printable, shorten

# Characters of one printed string: room for the longest path of Linux, 4,096 bytes, in a sentence.
_MAX_CHARACTERS = 8_192


def as_message(text: str, limit: int = 2_000) -> str:
    """Text with control characters escaped except line breaks and tabs, shortened to about `limit` characters."""
    return shorten(printable(text, keep="\n\t"), limit)


class PlainConsole(Console):
    """A console without markup, emoji codes and highlighting, which escapes control characters.

    Strings are safe in `print`, `status` and the cells and titles of tables. A `Text` is printed unchanged.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(as_message(text, _MAX_CHARACTERS), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(self.render_str(status) if isinstance(status, str) else status, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar: a format string with `task`, shown as plain text on one line."""

    def __init__(self, text_format: str, **options: Any) -> None:
        super().__init__(text_format, markup=False, **options)

    def render(self, task: Task) -> Text:
        text = shorten(printable(self.text_format.format(task=task)), 200)
        return Text(text, style=self.style, justify=self.justify)


def progress_bar(*columns: str | ProgressColumn, shown: bool = True, **options: Any) -> Progress:
    """A progress bar on stderr; columns that are strings become `PlainColumn`."""
    plain = [PlainColumn(column) if isinstance(column, str) else column for column in columns]
    console = options.pop("console", None) or PlainConsole(stderr=True)
    return Progress(*plain, console=console, disable=not shown, **options)
