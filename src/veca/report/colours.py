"""Colours of reports: light and dark palettes, the cividis ramp, and what each part of a chart looks like.

Line colours are those of Okabe and Ito and the ramp is cividis: both were made for readers with colour vision
deficiencies.
"""

from __future__ import annotations

from typing import NamedTuple

LIGHT = {
    "paper": "#fbfaf6", "ink": "#22211e", "muted": "#6a675f", "rule": "#e0dcd1", "warning": "#b34700",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#007d5a", "c3": "#b0508a", "c4": "#a67a00", "c5": "#3d8fc4",
}  # fmt: skip
DARK = {
    "paper": "#16171a", "ink": "#e8e6e0", "muted": "#a19e96", "rule": "#33353a", "warning": "#f08a3c",
    "c0": "#56b4e9", "c1": "#f08a3c", "c2": "#2bbf94", "c3": "#e39ac3", "c4": "#f0e442", "c5": "#8fb8e8",
}  # fmt: skip
LINE_COLOURS = 6  # c0 to c5 of the palettes


class Role(NamedTuple):
    """How a mark of a chart is drawn: a stroke of some width, or a filled shape where the width is 0."""

    width: float
    opacity: float = 1.0


# CSS for SVG and the strokes of PNG are both made from this table, so that the two cannot differ.
ROLES = {
    "grid": Role(1), "axis": Role(1), "line": Role(1.8), "faint": Role(1, 0.28), "lead": Role(1), "key": Role(2.4),
    "dot": Role(1.8), "band": Role(0, 0.15),
}  # fmt: skip

CIVIDIS = (
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
)  # fmt: skip


def ramp_colours(level: float) -> tuple[str, str]:
    """The cividis colour of a level in [0, 1], and black or white for text that is readable on it.

    >>> ramp_colours(0.0), ramp_colours(1.0)
    (('#00224e', '#ffffff'), ('#fee838', '#000000'))
    """
    position = min(max(level, 0.0), 1.0) * (len(CIVIDIS) - 1)
    i = min(int(position), len(CIVIDIS) - 2)
    low, high = (tuple(int(c[k : k + 2], 16) for k in (1, 3, 5)) for c in CIVIDIS[i : i + 2])
    rgb = [round(a + (b - a) * (position - i)) for a, b in zip(low, high, strict=True)]
    # Relative luminance and contrast as WCAG 2 defines them: contrast = (brighter + 0.05) / (darker + 0.05).
    linear = [(c / 255) / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    white_is_clearer = 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05
    return "#" + "".join(f"{c:02x}" for c in rgb), "#ffffff" if white_is_clearer else "#000000"
