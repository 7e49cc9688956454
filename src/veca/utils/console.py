"""What is printed: text from users and files is shown as it is, never as markup or as commands to the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.status import Status
from rich.text import Text

from veca.utils.text import printable, shorten

LONGEST = 8_192
"""Characters of one printed string; the longest path of Linux, 4,096 bytes, fits with a sentence around it."""


def as_message(text: str, most: int = 2_000) -> str:
    """A message of several lines perhaps, with control characters escaped and of limited length."""
    return shorten(printable(text, keep="\n\t"), most)


class PlainConsole(Console):
    """A console without markup, emoji codes and highlighting, which escapes control characters.

    Strings are safe in `print`, `status` and the cells and titles of tables. A `Text` is taken as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(as_message(text, LONGEST), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(self.render_str(status) if isinstance(status, str) else status, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar: a format string of `task` that becomes plain text on one line."""

    def __init__(self, text_format: str, **options: Any) -> None:
        super().__init__(text_format, markup=False, **options)

    def render(self, task: Task) -> Text:
        text = shorten(printable(self.text_format.format(task=task)), 200)
        return Text(text, style=self.style, justify=self.justify)


def progress_bar(*columns: str | ProgressColumn, shown: bool = True, **options: Any) -> Progress:
    """A progress bar on stderr; strings among the columns are those of `PlainColumn`."""
    made = [PlainColumn(column) if isinstance(column, str) else column for column in columns]
    console = options.pop("console", None) or PlainConsole(stderr=True)
    return Progress(*made, console=console, disable=not shown, **options)
