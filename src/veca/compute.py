"""The dial `compute`: from a share of the full cost to a budget, a width and a size, by a table of quality and cost.

`veca probe pareto` measures such a table, and provenance takes it along with the weights. A model without one has a
table by FLOPs alone, over its trained budgets and widths.
"""

from __future__ import annotations

import functools
import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.config import MlpWidth, VecaConfig
from veca.errors import ArgumentError, warn_caller
from veca.flops import model_flops
from veca.inputs import nearest_sizes, patch_grid
from veca.utils.settings import Bounds, Positive, Settings

if TYPE_CHECKING:
    from veca.model import Veca

TABLE_KEY = "quality_cost"
"""Of the table in a model's provenance."""
TABLE_VERSION = 1
GRIDS = tuple(step << octave for octave in range(6) for step in (4, 5, 6, 7))
"""Patches along a side, 4 to 224: the sizes of a table by FLOPs."""
DEFAULT_GRID = 32
_Cost = Annotated[float, Bounds(gt=0)]


@dataclass(frozen=True, kw_only=True)
class MeasuredSetting(Settings):
    """A row of a quality-cost table."""

    section: ClassVar[str] = "quality_cost.settings"

    cores: Positive
    width: MlpWidth = 1.0
    size: Positive
    """Side in pixels; in dense probes the short one."""
    gflops: _Cost
    """Per image of size × size."""
    ms: _Cost | None = None
    """Per image of size × size."""
    quality: Annotated[float, Bounds(ge=0)]
    """1 at the full setting: the mean over probes of the score there over the score of the full setting."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of each probe, as "knn pets top1"."""


@dataclass(frozen=True, kw_only=True)
class CostTable(Settings):
    """Quality and cost of a model over budgets, widths and sizes: plain data that travels with the weights.

    The full setting of a size has the largest budget and width of the table; every size has one.
    """

    section: ClassVar[str] = TABLE_KEY

    version: int = TABLE_VERSION
    device: str = ""
    """What times were measured on, and how; empty: costs are FLOPs."""
    settings: tuple[MeasuredSetting, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        way = "veca probe pareto makes a new table"
        self.require("version", self.version == TABLE_VERSION, f"{TABLE_VERSION}, which this veca reads; {way}")
        self.require("settings", len(self.settings) > 0, "one row or more")
        keys = {(row.cores, row.width, row.size) for row in self.settings}
        rows = f"{len(self.settings)} rows"
        self.require("settings", len(keys) == len(self.settings), "different settings, none twice", rows)
        full = all((*self.full, size) in keys for size in self.sizes)
        self.require("settings", full, f"settings with C = {self.full[0]}, width {self.full[1]:g} at every size", rows)
        timed = {row.ms is not None for row in self.settings} == {bool(self.device)}
        self.require("device", timed, "named where all rows have ms, and empty where none has")

    @property
    def full(self) -> tuple[int, float]:
        """The largest budget and width."""
        return max(row.cores for row in self.settings), max(row.width for row in self.settings)

    @property
    def sizes(self) -> list[int]:
        return sorted({row.size for row in self.settings})

    @property
    def by(self) -> str:
        """What costs are, in words."""
        return f"time on {self.device}" if self.device else "FLOPs"

    def points(self, sizes: Sequence[int]) -> list[Candidate]:
        """The rows of some sizes."""
        rows = [row for row in self.settings if row.size in sizes]
        return [Candidate(row.cores, row.width, row.size, row.ms or row.gflops, row.quality) for row in rows]

    def front(self) -> list[MeasuredSetting]:
        """The Pareto front by cost: rows that no other row surpasses at the same or a lower cost, cheapest first."""
        front: list[MeasuredSetting] = []
        for row in sorted(self.settings, key=lambda row: (row.ms or row.gflops, -row.quality)):
            if not front or row.quality > front[-1].quality:
                front.append(row)
        return front

    @classmethod
    def read(cls, path: Path) -> Self:
        """The table in a pareto.json, as `veca probe pareto` writes it."""
        try:
            return cls.from_dict(json.loads(path.read_text("utf-8")))
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"{path} is no pareto.json of `veca probe pareto`: {error}") from error

    @classmethod
    def from_provenance(cls, provenance: Mapping[str, Any], config: VecaConfig) -> Self | None:
        """The table in a model's provenance, checked; None: there is none."""
        if provenance.get(TABLE_KEY) is None:
            return None
        table = cls.from_dict(provenance[TABLE_KEY])
        table.require("settings", table.full[0] <= config.num_cores, f"within the {config.num_cores} cores", table.full)
        return table


class Candidate(NamedTuple):
    """A setting to choose from; costs of one table have one unit."""

    cores: int
    width: float
    size: int
    cost: float
    quality: float


class Choice(NamedTuple):
    """What `compute` stands for.

    >>> import veca
    >>> choice = resolve_compute(veca.create_model("veca_base", widths=(1, 0.5, 0.25)), compute=0.5)
    >>> choice.cores, choice.width, choice.size, round(choice.cost, 2)
    (24, 0.25, (512, 512), 0.49)
    """

    cores: int
    width: float
    size: tuple[int, int]
    """Height and width of the images in pixels."""
    cost: float
    """Over the cost of the full setting at the size asked for."""
    quality: float | None
    """As in the table, 1 at its full setting; None: there is no measured table."""
    by: str
    """What the cost is: "FLOPs", or time and where it was measured."""


def resolve_compute(
    model: Veca, compute: float, size: int | tuple[int, int] | None = None, resize: bool = False
) -> Choice:
    """The setting of best quality whose cost is at most the share `compute` of the full setting's.

    It is chosen from the quality-cost table of the weights, by measured time where the table has times; without a table
    by FLOPs, where more is taken for better. `size` is the side, or (height, width), of the images in pixels; None: the
    largest of the table, or 32 patches. With `resize`, sizes down to half the side are considered too. Where nothing is
    cheap enough, the cheapest setting is taken, with a warning.

    >>> import veca
    >>> resolve_compute(veca.create_model("veca_base"), compute=0.5, size=512, resize=True).size
    (320, 320)
    """
    patch, table = model.config.patch_size, model.quality_cost
    size = (table.sizes[-1] if table else DEFAULT_GRID * patch) if size is None else size
    height, width = (size, size) if isinstance(size, int) else size
    if height < patch or width < patch or height % patch or width % patch:
        raise ArgumentError(f"size={size}; sides must be multiples of {patch}")
    return _choose(model, compute, (height // patch, width // patch), resize)


def apply_compute(
    model: Veca, images: Tensor, cores: int | None, width: float | None, compute: float | None, resize: bool
) -> tuple[Tensor, int | None, float | None]:
    """Images, budget and width of a call with `compute`; without it, the call's own."""
    _check_one_choice(cores, width, compute, resize)
    if compute is None:
        return images, cores, width
    choice = _choose(model, compute, patch_grid(images, model.config), resize)
    if choice.size != images.shape[-2:]:
        small = F.interpolate(images.float(), choice.size, mode="bicubic", antialias=True)
        images = small.to(images.dtype)
    return images, choice.cores, choice.width


def choose_each(
    model: Veca, grids: Sequence[tuple[int, int]], cores: Any, width: Any, compute: float | None, resize: bool
) -> tuple[Any, Any]:
    """Budget and width of each image of a pack with `compute`; without it, the call's own."""
    _check_one_choice(cores, width, compute, resize)
    if compute is None:
        return cores, width
    if resize:
        raise ArgumentError("resize=True does not go with a pack, whose images are cut already; leave it out")
    choices = {grid: _choose(model, compute, grid, False) for grid in dict.fromkeys(grids)}
    return [choices[grid].cores for grid in grids], [choices[grid].width for grid in grids]


def _check_one_choice(cores: Any, width: Any, compute: float | None, resize: bool) -> None:
    """Refuse `resize` without `compute`, and `compute` beside what it chooses."""
    if compute is None and resize:
        raise ArgumentError("resize=True goes with compute, which chooses the size; pass compute too, or neither")
    if compute is not None and (cores is not None or width is not None):
        given = f"cores={cores!r}, width={width!r}"
        raise ArgumentError(f"compute={compute!r} chooses cores and width, and {given} too; pass the one or the other")


def _choose(model: Veca, compute: float, grid: tuple[int, int], resize: bool) -> Choice:
    """`resolve_compute` of images of (rows, columns) patches; plain arithmetic, which `torch.compile` can trace."""
    if isinstance(compute, bool) or not isinstance(compute, numbers.Real) or not 0 < compute <= 1:
        raise ArgumentError(f"compute={compute!r}; it is a number above 0, at most 1: a share of the full cost")
    config, table, patch = model.config, model.quality_cost, model.config.patch_size
    height, width = grid[0] * patch, grid[1] * patch
    sizes = table.sizes if table else [patch * side for side in GRIDS]
    nearest = nearest_size(sizes, height * width)
    wanted = tuple(size for size in sizes if resize and nearest <= 2 * size <= 2 * nearest) or (nearest,)
    # A cached function is traced with a warning.
    by_flops = points_by_flops.__wrapped__ if torch.compiler.is_compiling() else points_by_flops
    points = table.points(wanted) if table else by_flops(config, wanted)
    most_cores, most_width = table.full if table else (max(config.budgets), max(config.widths))
    full = next(p for p in points if (p.cores, p.width, p.size) == (most_cores, most_width, nearest)).cost
    best = best_point(points, compute * full)
    if best is None:
        best = best_point(points, min(point.cost for point in points))
        assert best is not None
        if not torch.compiler.is_compiling():
            _warn_too_dear(model, compute, best.cost / full, resize)
    if best.size != nearest:
        height, width = nearest_sizes(height * best.size / nearest, width * best.size / nearest, patch)
    quality, by = (best.quality, table.by) if table else (None, "FLOPs")
    return Choice(best.cores, best.width, (height, width), best.cost / full, quality, by)


def nearest_size(sizes: Sequence[int], area: int) -> int:
    """The one of ascending sides whose square is nearest to an area in pixels, by ratio."""
    nearest = sizes[0]
    for size in sizes[1:]:
        if area > nearest * size:  # the geometric mean of both squares
            nearest = size
    return nearest


@functools.lru_cache(64)
def points_by_flops(config: VecaConfig, sizes: tuple[int, ...]) -> list[Candidate]:
    """The trained budgets and widths at some sizes; the quality is the cost."""
    points = []
    for size in sizes:
        for width in config.widths:
            for cores in config.budgets:
                flops = model_flops(config, size, size, cores, width)
                points.append(Candidate(cores, width, size, flops, flops))
    return points


def best_point(points: Iterable[Candidate], limit: float) -> Candidate | None:
    """Of the points that cost at most `limit` the best, of equally good ones the cheapest; None: all cost more."""
    best = None
    for point in points:
        better = best is None or (point.quality, -point.cost) > (best.quality, -best.cost)
        if better and point.cost <= limit * (1 + 1e-9):  # a share of one's own cost may be rounded down
            best = point
    return best


def _warn_too_dear(model: Veca, compute: float, cost: float, resize: bool) -> None:
    warning = f"compute={float(compute):g}"
    if warning not in model._warned:
        model._warned.add(warning)
        more = "" if resize else "; resize=True may choose a smaller size too"
        warn_caller(f"{warning}: the cheapest setting costs {cost:.2f} of the full one and is taken{more}")
