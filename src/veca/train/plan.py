"""What a run would be, before it starts: its length, its draws, its work, its memory and its time.

Every number follows from the recipe and the model, which is built without memory. Two are estimates, and say so: the
activations, by what autograd keeps, and the teacher's work, by the size of a ViT of its width.

Symbols: N patches, C cores, S = C + N tokens, D width, M hidden width, H heads, L blocks; e bytes of a number in the
products (2 in bfloat16, else 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from veca.config import VecaConfig
from veca.flops import model_flops
from veca.flops import num_patches as patches
from veca.model import Veca
from veca.train.cache import cache_bytes
from veca.train.optimizers import Split, split_parameters
from veca.train.recipe import Recipe, RecipeError
from veca.utils.text import duration, printable, shorten

FLOAT = 4
"""Bytes of what is kept in float32: weights, gradients, optimizer states, the residual stream."""
_LONG = 10**9
"""Steps of a run of unknown length: its last phase is what counts."""
PASSES = 3
"""A training step costs three forward passes: one forward, and in the backward the products of both factors."""


class Length(NamedTuple):
    """How long a run is, in steps. `per_epoch` is None where nobody counted the pictures."""

    per_epoch: int | None
    steps: int
    warmup: int


def global_batch(recipe: Recipe, world_size: int) -> int:
    """Pictures per step, of all processes and forward passes."""
    return recipe.batch * recipe.accumulate * world_size


def run_length(recipe: Recipe, pictures: int | None, world_size: int = 1) -> Length:
    """Steps of a recipe on so many pictures. An epoch is whole batches: what is left over is not taken.

    >>> run_length(Recipe.from_dict({"schedule": {"epochs": 10, "warmup": 1}}), pictures=1000, world_size=2)
    Length(per_epoch=3, steps=30, warmup=3)
    """
    batch, schedule = global_batch(recipe, world_size), recipe.schedule
    per_epoch = None if pictures is None else pictures // batch
    if schedule.steps is not None:
        return Length(per_epoch, schedule.steps, round(schedule.warmup))
    if per_epoch is None:
        raise RecipeError(
            f"schedule.epochs={schedule.epochs}: the number of pictures is not known. "
            "Set schedule.steps, and schedule.epochs to null"
        )
    if not per_epoch:
        raise RecipeError(
            f"{pictures:,} pictures make no step of {batch:,} (batch {recipe.batch} × accumulate {recipe.accumulate} × "
            f"{world_size} processes): name more pictures, or lower batch"
        )
    steps = max(1, round((schedule.epochs or 0) * per_epoch))
    return Length(per_epoch, steps, min(steps - 1, round(schedule.warmup * per_epoch)))


def shares(odds: Mapping[int, float]) -> dict[int, float]:
    """Odds as parts of 1.

    >>> shares({8: 1, 64: 3})
    {8: 0.25, 64: 0.75}
    """
    whole = sum(odds.values())
    return {key: odd / whole for key, odd in odds.items()} if whole else {}


def resolution_odds(recipe: Recipe, steps: float) -> dict[int, float]:
    """Odds of the resolutions over the first `steps` steps, all phases together.

    >>> phases = [{"odds": {256: 1}, "until": 100}, {"odds": {256: 1, 512: 1}}]
    >>> resolution_odds(Recipe.from_dict({"resolutions": phases}), 400)
    {256: 0.625, 512: 0.375}
    """
    found: dict[int, float] = {}
    begin, steps = 0.0, max(1.0, steps)
    for phase in recipe.resolutions:
        end = steps if phase.until is None else min(steps, phase.until)
        for size, share in shares(phase.odds).items():
            found[size] = found.get(size, 0) + share * max(0.0, end - begin) / steps
        begin = max(begin, end)
    return found


def flops_at(step: int, config: VecaConfig, recipe: Recipe) -> float:
    """FLOPs of the student per picture in a training step, at the budgets and resolutions that come at `step`."""
    sizes, budgets = shares(recipe.odds_at(step)), shares(recipe.budgets)
    return PASSES * sum(a * b * model_flops(config, r, r, c) for r, a in sizes.items() for c, b in budgets.items())


class Memory(NamedTuple):
    """Bytes on the device of one process."""

    weights: int
    gradients: int
    normuon: int
    """The momentum of each number, and one number per row."""
    adamw: int
    """Two moments of each number, and a count of steps per parameter."""
    ema: int
    teacher: int
    activations: int
    """At the largest resolution and budget; an estimate."""
    resident: int
    """Pictures kept there, and what the teacher said of them; 0 where their number is not known."""


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    config: VecaConfig
    pictures: int | None
    world_size: int
    teacher: Mapping[str, Any]
    """`width`, `stride`, `parameters`; `depth` (blocks of attention) or `flops_per_pixel` (of a CNN) and `bytes` (of
    its weights) where known; empty where nobody loaded it."""
    images_per_s: float | None = None
    """Measured, of all processes together."""
    tflops: float | None = None
    """Measured: 10¹² FLOP/s of one process."""

    @property
    def length(self) -> Length | None:
        """None where it is given in epochs of pictures that nobody counted."""
        if self.pictures is None and self.recipe.schedule.steps is None:
            return None
        return run_length(self.recipe, self.pictures, self.world_size)

    @property
    def images(self) -> int | None:
        length = self.length
        return None if length is None else length.steps * global_batch(self.recipe, self.world_size)

    @property
    def budgets(self) -> dict[int, float]:
        """Share of the steps of each."""
        return shares(self.recipe.budgets)

    @property
    def resolutions(self) -> dict[int, float]:
        return resolution_odds(self.recipe, self.length.steps if self.length else _LONG)

    def model(self) -> Veca:
        """The student, without memory behind it."""
        with torch.device("meta"):
            return Veca(self.config)

    def cases(self) -> Iterator[tuple[int, int, float]]:
        """Resolution, budget, and the share of the steps that draw both."""
        for size, often in self.resolutions.items():
            for budget, odds in self.budgets.items():
                yield size, budget, often * odds

    def tokens(self, resolution: int | None = None, budget: int | None = None) -> float:
        """Tokens the student has per image, averaged over the steps; of one resolution or budget, their part of it."""
        fits = [c for c in self.cases() if resolution in (None, c[0]) and budget in (None, c[1])]
        return sum((patches(self.config, size, size) + cores) * share for size, cores, share in fits)

    def flops(self, resolution: int | None = None, budget: int | None = None) -> float:
        """FLOPs of the student's forward pass per image, averaged over the steps that draw what is named."""
        fits = [c for c in self.cases() if resolution in (None, c[0]) and budget in (None, c[1])]
        total = sum(share for _, _, share in fits)
        return sum(model_flops(self.config, s, s, c) * share for s, c, share in fits) / total if total else 0.0

    def teacher_flops(self) -> float:
        """Of the teacher's forward pass per image, about: 2 per weight and cell, and attention among all cells; of a
        CNN, by the pixels it sees.

        Its `depth` is taken for that of a ViT of its width, whose blocks have 12 D² weights, unless it is given.
        """
        if not self.teacher or self.recipe.teacher.resident:  # asked once, before the first step
            return 0.0
        meet, stride = self.recipe.teacher.meet, self.teacher["stride"]

        def seen(size: int) -> float:
            if isinstance(meet, int):
                return meet
            return size * stride / self.config.patch_size if meet == "input" else size

        sides = [(seen(size), share) for size, share in self.resolutions.items()]
        if glance := self.recipe.teacher.glance:
            sides.append((glance, 1.0))
        if per_pixel := self.teacher.get("flops_per_pixel"):
            return sum(per_pixel * side**2 * share for side, share in sides)
        width, weights = self.teacher["width"], self.teacher["parameters"]
        depth = self.teacher.get("depth", round(weights / (12 * width**2)))
        cells = [((side / stride) ** 2, share) for side, share in sides]
        return sum((2 * weights * n + 4 * width * n**2 * depth) * share for n, share in cells)

    def cache_bytes(self) -> int | None:
        """Of all targets on disk; None if they are not to be kept there, or their number is not known."""
        views = self.recipe.data.views
        if self.recipe.teacher.cache is None or views is None or self.pictures is None or not self.teacher:
            return None
        sizes = [size for size, share in self.resolutions.items() if share]
        return cache_bytes(self.pictures, views, sizes, self.config.patch_size, self.teacher["width"])

    def step_flops(self) -> float:
        """Of one image in training: the student's passes and the teacher's."""
        return PASSES * self.flops() + self.teacher_flops()

    def seconds(self) -> float | None:
        """Of the whole run, if its length is known and a rate was measured."""
        if self.images is None:
            return None
        if self.images_per_s:
            return self.images / self.images_per_s
        return self.images * self.step_flops() / (self.tflops * 1e12 * self.world_size) if self.tflops else None

    def memory(self) -> Memory:
        model = self.model()
        named, split = dict(model.named_parameters()), split_parameters(model)
        count = sum(p.numel() for p in named.values())
        trained = sum(p.numel() for p in named.values() if p.requires_grad)
        matrices = [named[name] for name in split.normuon_qkv + split.normuon]
        drawn = [(patches(self.config, size, size), cores) for size, cores, share in self.cases() if share]
        return Memory(
            weights=FLOAT * count,
            gradients=FLOAT * trained,
            normuon=FLOAT * sum(p.numel() + len(p) for p in matrices),
            adamw=FLOAT * sum(2 * named[name].numel() + 1 for name in split.adamw),
            ema=FLOAT * count if self.recipe.ema else 0,
            teacher=self.teacher.get("bytes", FLOAT * self.teacher.get("parameters", 0)),
            activations=max(self.activations(n, cores) for n, cores in drawn),
            resident=self.resident(),
        )

    def resident(self) -> int:
        """Bytes of the pictures that stay on the device, and of the teacher's maps and global features of them."""
        side, kept, pictures = self.recipe.data.resident, self.recipe.teacher.resident, self.pictures or 0
        if side is None:
            return 0
        width = self.teacher.get("width", 0) if kept else 0
        cells = patches(self.config, side, side)
        if (glance := self.recipe.teacher.glance) and self.teacher.get("pooled"):  # the map of the second look
            across = side // self.config.patch_size
            zoom = across / max(1, round(across / self.recipe.data.short_side))
            cells += max(1, round(glance * zoom / self.teacher["stride"])) ** 2
        return pictures * (3 * side**2 + width * (cells * (2 if kept == "bfloat16" else 1) + 2))

    def activations(self, n: int, cores: int) -> int:
        """Bytes kept for the backward pass of one forward pass on images of `n` patches, by the kernels, about.

        Per token and block: both sums of the residual stream, in float32 (2 · 4 D); what goes into each product, in its
        precision: both normed tokens, the three of qkv, the attention's result (6 e D), fc1's result and the gated half
        (3 e M); and each head's log-sum-exp (4 H). Per core and block but the first, what moved it (4 D). At the ends:
        the last sum (4 D per token), pixels (e · 3 p² per patch), and in the loss three maps of the output's width
        (4 D per patch); `output_proj` keeps its input. In bfloat16, a copy of the weights of all products besides.
        """
        c, s = self.config, n + cores
        e = 2 if self.recipe.precision == "bfloat16" else 4
        block = s * (2 * FLOAT * c.embed_dim + e * (6 * c.embed_dim + 3 * c.mlp_dim) + FLOAT * c.num_heads)
        moves = (c.depth - 1) * cores * FLOAT * c.embed_dim
        ends = s * FLOAT * c.embed_dim + n * (e * c.in_chans * c.patch_size**2 + 3 * FLOAT * c.num_features)
        ends += e * s * c.embed_dim if c.output_dim else 0
        copies = 0
        if e < FLOAT:
            products = 4 * c.embed_dim**2 + 3 * c.embed_dim * c.mlp_dim
            copies = e * (c.depth * products + c.embed_dim * (c.output_dim or 0))
        return self.recipe.batch * (c.depth * block + moves + ends) + copies


def describe_plan(
    recipe: Recipe,
    config: VecaConfig,
    pictures: int | None,
    *,
    world_size: int = 1,
    teacher: Mapping[str, Any] | None = None,
    images_per_s: float | None = None,
    tflops: float | None = None,
) -> Group:
    """Tables that say what a run would be. `teacher`, `images_per_s` and `tflops` as in `Plan`."""
    plan = Plan(recipe, config, pictures, world_size, teacher or {}, images_per_s, tflops)
    return Group(_run_table(plan), _budget_table(plan), _resolution_table(plan), _memory_table(plan))


def _run_table(plan: Plan) -> Table:
    recipe, model = plan.recipe, plan.model()
    split, named = split_parameters(model), dict(model.named_parameters())
    table = _table("The run", "", "")

    def numbers(names: list[str]) -> str:
        return f"{sum(named[name].numel() for name in names):,} in {len(names)} tensors"

    table.add_row("student", f"{recipe.model.size}, {sum(p.numel() for p in named.values()):,} parameters")
    if recipe.model.start:
        table.add_row("starts from", _plain(recipe.model.start))
    table.add_row("moved by NorMuon", numbers(_matrices(split)))
    table.add_row("moved by AdamW", numbers(split.adamw))
    table.add_row("teacher", _plain(f"{recipe.teacher.name}, {_teacher(plan)}"))
    if (size := plan.cache_bytes()) is not None:
        said = f"up to {size / 1e9:,.1f} GB in {recipe.teacher.cache}"
        limit = recipe.teacher.cache_gb
        table.add_row("cache of targets", _plain(said if limit is None else f"{said}, but at most {limit:g}"))
    table.add_row("pictures", "not counted" if plan.pictures is None else f"{plan.pictures:,}")
    batch = f"{recipe.batch} × {recipe.accumulate} accumulated × {_count(plan.world_size, 'process')}"
    table.add_row("batch", f"{global_batch(recipe, plan.world_size):,} pictures: {batch}")
    for name, value in _length_rows(plan):
        table.add_row(name, value)
    schedule = recipe.schedule
    table.add_row("learning rate", f"{schedule.low:g} → {schedule.peak:g} → {schedule.low:g}")
    student, teacher = PASSES * plan.flops(), plan.teacher_flops()
    theirs = f"teacher about {teacher / 1e9:,.2f} ({teacher / (student + teacher):.0%})" if teacher else "no teacher's"
    table.add_row(
        "GFLOPs per image",
        f"{(student + teacher) / 1e9:,.2f}: student {student / 1e9:,.2f} ({PASSES} passes), {theirs}",
    )
    if plan.images is not None:
        table.add_row("FLOPs in all", f"{plan.images * plan.step_flops():.3g}")
    resolutions, budgets = recipe.grid()
    cells = f"{_count(len(resolutions), 'resolution')} × {_count(len(budgets), 'budget')}"
    table.add_row("validation", f"every {recipe.validation.every:,} steps and at the end, {cells}")
    table.add_row("checkpoints", f"every {recipe.checkpoints.every:,} steps, {_gib(_checkpoint_bytes(plan))} each")
    table.add_row("time", _time(plan))
    return table


def _teacher(plan: Plan) -> str:
    if not plan.teacher:
        return "not loaded for a plan: its work, memory and width are not in the figures"
    return f"{plan.teacher['parameters']:,} parameters, width {plan.teacher['width']}, stride {plan.teacher['stride']}"


def _length_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    length, schedule = plan.length, plan.recipe.schedule
    if length is None:
        yield "epochs", f"{schedule.epochs:g}, {schedule.warmup:g} of them warm-up"
        yield "steps", "unknown: name the pictures by data.train, or their number by --pictures"
        return
    yield "steps per epoch", "unknown" if length.per_epoch is None else f"{length.per_epoch:,}"
    yield "steps", f"{length.steps:,}, {length.warmup:,} of them warm-up"
    yield "images seen", f"{plan.images:,}"


def _checkpoint_bytes(plan: Plan) -> int:
    memory = plan.memory()
    return memory.weights + memory.normuon + memory.adamw + memory.ema


def _count(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def _gib(count: int) -> str:
    return f"{count / 2**30:,.3f} GiB"


def _matrices(split: Split) -> list[str]:
    return split.normuon_qkv + split.normuon


def _time(plan: Plan) -> str:
    seconds = plan.seconds()
    if seconds is None:
        return "measured after the first steps"
    rate = f"{plan.images_per_s:,.0f} images/s" if plan.images_per_s else f"{plan.tflops:,.0f} TFLOP/s per process"
    return f"{duration(seconds)}, at {rate}; validation comes on top"


def _budget_table(plan: Plan) -> Table:
    table = _table("Budgets", "cores", "of the steps", "of the tokens", "GFLOPs per image")
    for budget, share in plan.budgets.items():
        tokens = plan.tokens(budget=budget) / plan.tokens()
        table.add_row(str(budget), f"{share:.1%}", f"{tokens:.1%}", _giga(plan.flops(budget=budget)))
    return table


def _resolution_table(plan: Plan) -> Table:
    phases = plan.recipe.resolutions
    ends = ["to the end" if p.until is None else f"to step {p.until:,}" for p in phases] if len(phases) > 1 else []
    table = _table("Resolutions", "px", *ends, "of the steps", "of the tokens", "patches", "GFLOPs per image")
    for size, share in sorted(plan.resolutions.items()):
        odds = [f"{shares(p.odds).get(size, 0):.1%}" for p in phases] if len(phases) > 1 else []
        tokens, count = plan.tokens(size) / plan.tokens(), patches(plan.config, size, size)
        table.add_row(str(size), *odds, f"{share:.1%}", f"{tokens:.1%}", f"{count:,}", _giga(plan.flops(size)))
    return table


def _giga(flops: float) -> str:
    return f"{flops / 1e9:,.2f}" if flops else "–"


def _memory_table(plan: Plan) -> Table:
    memory, maps = plan.memory(), plan.recipe.teacher.resident
    size, cores = max((size, cores) for size, cores, share in plan.cases() if share)
    about = {
        "weights": "float32",
        "gradients": "float32",
        "normuon": "momentum, and a number per row",
        "adamw": "two moments",
        "ema": "running mean of the weights",
        "teacher": "weights, float32",
        "activations": f"about: {plan.recipe.batch} × {size} px with {cores} cores, as autograd keeps them",
        "resident": "pictures, and what the teacher said of them" if maps and plan.teacher else "pictures",
    }
    table = _table("Memory of one process", "", "GiB", "")
    for name, count in memory._asdict().items():
        if count:
            table.add_row(name, f"{count / 2**30:,.3f}", about[name])
    more = ""
    if plan.recipe.data.resident and plan.pictures is None:
        more = "resident pictures (not counted), "
    elif maps and not plan.teacher:
        more = "resident maps (their width is not known), "
    more += "the teacher's own pass and workspaces come on top"
    table.add_row("in all", f"{sum(memory) / 2**30:,.3f}", more)
    if plan.recipe.parallel == "fsdp" and plan.world_size > 1:
        kept = sum(memory) - memory.teacher - memory.activations - memory.resident
        shared = sum(memory) - kept + kept // plan.world_size
        table.add_row("shared out", f"{shared / 2**30:,.3f}", f"weights and states, by {plan.world_size}")
    return table


def _plain(text: str) -> Text:
    """What a recipe names, for any console: a `str` would be read as markup."""
    return Text(shorten(printable(text), 200))


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None)
    table.show_header = any(heads)
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    return table
