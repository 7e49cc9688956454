"""Plan of a distillation run before it starts (`--dry-run`): length, draws, FLOPs and memory.

Every number follows from the recipe and the model, which is built on the meta device. Two are estimates, and marked so:
the activations, by what autograd keeps, and the teacher's FLOPs, by the size of a ViT of its width.

Symbols: N patches, C cores, S = C + N tokens, D width, M hidden width, H heads, L blocks; e bytes per number in matrix
products (2 in bfloat16, else 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from veca.config import VecaConfig, get_config
from veca.data.index import DataError, ImageIndex
from veca.flops import model_flops, num_patches
from veca.model import Veca
from veca.teachers.load import KNOWN_TEACHERS
from veca.train.optimizers import split_parameters
from veca.train.recipe import Recipe, RecipeError
from veca.utils.console import as_message
from veca.utils.text import printable, quoted, shorten

FLOAT_BYTES = 4
"""Weights, gradients, optimizer states and the residual stream are float32."""
_UNKNOWN_STEPS = 10**9
"""Length assumed for a run of unknown length: its last phase of resolutions dominates."""
PASSES = 3
"""A training step costs three forward passes: one forward, and two matrix products for each one in the backward."""


class RunLength(NamedTuple):
    """Length of a run in steps. `per_epoch` is None where the number of images is not known."""

    per_epoch: int | None
    steps: int
    warmup: int


def run_length(recipe: Recipe, images: int | None) -> RunLength:
    """Steps of a recipe on so many images. An epoch is whole batches: the remainder is left out.

    >>> run_length(Recipe.from_dict({"schedule": {"epochs": 10, "warmup": 1}, "batch": 256}), images=1000)
    RunLength(per_epoch=3, steps=30, warmup=3)
    """
    schedule = recipe.schedule
    per_epoch = None if images is None else images // recipe.batch
    if schedule.steps is not None:
        return RunLength(per_epoch, schedule.steps, round(schedule.warmup))
    if per_epoch is None:
        way_out = "the number of pictures is not known. Set schedule.steps, and schedule.epochs to null"
        raise RecipeError(f"schedule.epochs={schedule.epochs}: {way_out}")
    if not per_epoch:
        raise RecipeError(f"{images:,} pictures make no step of batch={recipe.batch:,}: name more, or lower batch")
    steps = max(1, round((schedule.epochs or 0) * per_epoch))
    return RunLength(per_epoch, steps, min(steps - 1, round(schedule.warmup * per_epoch)))


def shares(odds: Mapping[int, float]) -> dict[int, float]:
    """Odds as fractions of 1.

    >>> shares({8: 1, 64: 3})
    {8: 0.25, 64: 0.75}
    """
    total = sum(odds.values())
    return {key: odd / total for key, odd in odds.items()} if total else {}


def resolution_odds(recipe: Recipe, steps: float) -> dict[int, float]:
    """Shares of the resolutions over the first `steps` steps, all phases together.

    >>> phases = [{"odds": {256: 1}, "until": 100}, {"odds": {256: 1, 512: 1}}]
    >>> resolution_odds(Recipe.from_dict({"resolutions": phases}), 400)
    {256: 0.625, 512: 0.375}
    """
    odds: dict[int, float] = {}
    begin, steps = 0.0, max(1.0, steps)
    for phase in recipe.resolutions:
        end = steps if phase.until is None else min(steps, phase.until)
        for size, share in shares(phase.odds).items():
            odds[size] = odds.get(size, 0) + share * max(0.0, end - begin) / steps
        begin = max(begin, end)
    return odds


def flops_at(step: int, config: VecaConfig, recipe: Recipe) -> float:
    """Expected FLOPs of the student per image in training step `step`, over its budgets and resolutions."""
    sizes, budgets = shares(recipe.odds_at(step)), shares(recipe.budgets)
    return PASSES * sum(a * b * model_flops(config, r, r, c) for r, a in sizes.items() for c, b in budgets.items())


class PlannedMemory(NamedTuple):
    """Bytes on the device of one process."""

    weights: int
    gradients: int
    normuon: int
    """The momentum of each number, and one number per row."""
    adamw: int
    """Two moments of each number, and a step count per parameter."""
    ema: int
    teacher: int
    activations: int
    """At the largest resolution and budget; an estimate."""
    resident: int
    """Images kept there, and the teacher's maps of them; 0 where their number is not known."""


@dataclass(frozen=True)
class RunPlan:
    """The numbers of a plan."""

    recipe: Recipe
    config: VecaConfig
    images: int | None
    """Number of training images; None: not known."""
    processes: int = 1
    teacher: Mapping[str, Any] = field(default_factory=dict)
    """`width`, `stride`, `parameters`; `depth` (attention blocks) or `flops_per_pixel` (of a CNN) and `bytes` (of its
    weights) where known; empty where it was not loaded."""

    @property
    def length(self) -> RunLength | None:
        """None where it is given in epochs and the number of images is not known."""
        if self.images is None and self.recipe.schedule.steps is None:
            return None
        return run_length(self.recipe, self.images)

    @property
    def budgets(self) -> dict[int, float]:
        """Share of the steps of each."""
        return shares(self.recipe.budgets)

    @property
    def resolutions(self) -> dict[int, float]:
        return resolution_odds(self.recipe, self.length.steps if self.length else _UNKNOWN_STEPS)

    def model(self) -> Veca:
        """The student on the meta device."""
        with torch.device("meta"):
            return Veca(self.config)

    def draws(self, resolution: int | None = None, budget: int | None = None) -> list[tuple[int, int, float]]:
        """Resolution, budget and share of the steps of each pair, or of the pairs with this resolution or budget."""
        draws = [(size, cores, a * b) for size, a in self.resolutions.items() for cores, b in self.budgets.items()]
        return [draw for draw in draws if resolution in (None, draw[0]) and budget in (None, draw[1])]

    def tokens(self, resolution: int | None = None, budget: int | None = None) -> float:
        """Mean number of tokens of the student per image; of one resolution or budget, its part of the mean."""
        return sum((num_patches(self.config, s, s) + c) * share for s, c, share in self.draws(resolution, budget))

    def flops(self, resolution: int | None = None, budget: int | None = None) -> float:
        """Mean FLOPs of the student's forward pass per image, over the steps with this resolution or budget."""
        draws = self.draws(resolution, budget)
        total = sum(share for _, _, share in draws)
        return sum(model_flops(self.config, s, s, c) * share for s, c, share in draws) / total if total else 0.0

    def teacher_flops(self) -> float:
        """Approximate FLOPs of the teacher's forward pass per image: 2 per weight and cell, and attention among all
        cells; of a CNN, by the pixels it sees.

        Unless its `depth` is given, it is that of a ViT of its width, whose blocks have 12 D² weights.
        """
        if not self.teacher or self.recipe.teacher.resident:  # it runs only before the first step
            return 0.0
        meet, stride = self.recipe.teacher.meet, self.teacher["stride"]
        zoom = stride / self.config.patch_size if meet == "input" else 1
        sides = [(meet if isinstance(meet, int) else size * zoom, part) for size, part in self.resolutions.items()]
        if glance := self.recipe.teacher.glance:
            sides.append((glance, 1.0))
        if per_pixel := self.teacher.get("flops_per_pixel"):
            return sum(per_pixel * side**2 * share for side, share in sides)
        width, weights = self.teacher["width"], self.teacher["parameters"]
        depth = self.teacher.get("depth", round(weights / (12 * width**2)))
        cells = [((side / stride) ** 2, share) for side, share in sides]
        return sum((2 * weights * n + 4 * width * n**2 * depth) * share for n, share in cells)

    def memory(self) -> PlannedMemory:
        model = self.model()
        named, split = dict(model.named_parameters()), split_parameters(model)
        count = sum(p.numel() for p in named.values())
        trained = sum(p.numel() for p in named.values() if p.requires_grad)
        matrices = [named[name] for name in split.normuon_qkv + split.normuon]
        drawn = [(num_patches(self.config, size, size), cores) for size, cores, share in self.draws() if share]
        return PlannedMemory(
            weights=FLOAT_BYTES * count,
            gradients=FLOAT_BYTES * trained,
            normuon=FLOAT_BYTES * sum(p.numel() + len(p) for p in matrices),
            adamw=FLOAT_BYTES * sum(2 * named[name].numel() + 1 for name in split.adamw),
            ema=FLOAT_BYTES * count if self.recipe.ema else 0,
            teacher=self.teacher.get("bytes", FLOAT_BYTES * self.teacher.get("parameters", 0)),
            activations=max(self.activations(n, cores) for n, cores in drawn),
            resident=self.resident(),
        )

    def resident(self) -> int:
        """Bytes of the images kept on the device, and of the teacher's maps and global features of them."""
        side, precision, images = self.recipe.data.resident, self.recipe.teacher.resident, self.images or 0
        if side is None:
            return 0
        width = self.teacher.get("width", 0) if precision else 0
        cells = num_patches(self.config, side, side)
        if (glance := self.recipe.teacher.glance) and self.teacher.get("pooled"):  # the map of the second pass
            across = side // self.config.patch_size
            zoom = across / max(1, round(across / self.recipe.data.short_side))
            cells += max(1, round(glance * zoom / self.teacher["stride"])) ** 2
        return images * (3 * side**2 + width * (cells * (2 if precision == "bfloat16" else 1) + 2))

    def activations(self, n: int, cores: int) -> int:
        """Approximate bytes that the kernels keep for the backward pass of one forward pass on images of `n` patches.

        Per token and block: both sums of the residual stream in float32 (2 · 4 D); the inputs of the matrix products in
        their precision: both normalised tokens, q, k, v, the attention output (6 e D), the output of fc1 and the gated
        half (3 e M); and the log-sum-exp of each head (4 H). Per core and block except the first, its update (4 D). At
        the ends: the last sum (4 D per token), pixels (e · 3 p² per patch), and in the loss three maps of the output
        width (4 D per patch); `output_proj` keeps its input. In bfloat16 also a copy of all matrices.
        """
        c, s = self.config, n + cores
        e = 2 if self.recipe.precision == "bfloat16" else 4
        block = s * (2 * FLOAT_BYTES * c.embed_dim + e * (6 * c.embed_dim + 3 * c.mlp_dim) + FLOAT_BYTES * c.num_heads)
        moves = (c.depth - 1) * cores * FLOAT_BYTES * c.embed_dim
        ends = s * FLOAT_BYTES * c.embed_dim + n * (e * c.in_chans * c.patch_size**2 + 3 * FLOAT_BYTES * c.num_features)
        ends += e * s * c.embed_dim if c.output_dim else 0
        products = 4 * c.embed_dim**2 + 3 * c.embed_dim * c.mlp_dim
        copies = e * (c.depth * products + c.embed_dim * (c.output_dim or 0)) if e < FLOAT_BYTES else 0
        return self.recipe.pass_batch(self.processes) * (c.depth * block + moves + ends) + copies


def show_plan(recipe: Recipe, images: int | None = None, processes: int = 1) -> Group:
    """Tables of what a run of the recipe would be, on so many images, or on those that exist. Loads and writes nothing.

    A recipe whose images do not exist yet has a plan too, with a note that says why they are not counted.
    """
    if not 1 <= processes < 2**63 or (images is not None and not 1 <= images < 2**63):
        given = f"processes={quoted(processes)}, pictures={quoted(images)}"
        raise RecipeError(f"{given}: a plan is for at least 1 of each, and fewer than 2^63")
    notes: list[Text] = []
    if images is None:
        try:
            images = len(ImageIndex.build(recipe.data.train))
        except DataError as error:
            notes.append(Text(as_message(f"data.train: {error}"), style="yellow"))
    teacher = KNOWN_TEACHERS.get(recipe.teacher.name, {})
    config = get_config(recipe.model.size, **recipe.model.overrides)
    if teacher and config.output_dim is None and config.embed_dim != teacher["width"]:
        config = VecaConfig.from_dict({**config.to_dict(), "output_dim": teacher["width"]})
    return Group(plan_tables(RunPlan(recipe, config, images, processes, teacher)), *notes)


def plan_tables(plan: RunPlan) -> Group:
    return Group(_run_table(plan), _budget_table(plan), _resolution_table(plan), _memory_table(plan))


def _run_table(plan: RunPlan) -> Table:
    recipe, schedule, length = plan.recipe, plan.recipe.schedule, plan.length
    model, memory = plan.model(), plan.memory()
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    split, (resolutions, budgets) = split_parameters(model), recipe.grid()
    student, teacher = PASSES * plan.flops(), plan.teacher_flops()
    work = student + teacher
    share = f"teacher about {teacher / 1e9:,.2f} ({teacher / work:.0%})" if teacher else "no teacher's"
    about = "not loaded for a plan: its work, memory and width are not in the figures"
    if plan.teacher:
        about = "{parameters:,} parameters, width {width}, stride {stride}".format_map(plan.teacher)
    state = memory.weights + memory.normuon + memory.adamw + memory.ema

    def numbers(names: list[str]) -> str:
        return f"{sum(counts[name] for name in names):,} in {len(names)} tensors"

    rows = {
        "student": f"{recipe.model.size}, {sum(counts.values()):,} parameters",
        "starts from": recipe.model.start,
        "moved by NorMuon": numbers(split.normuon_qkv + split.normuon),
        "moved by AdamW": numbers(split.adamw),
        "teacher": f"{recipe.teacher.name}, {about}",
        "pictures": "not counted" if plan.images is None else f"{plan.images:,}",
        "batch": f"{recipe.batch:,} pictures: {recipe.pass_batch(plan.processes)} × {recipe.accumulate} accumulated × "
        f"{_plural(plan.processes, 'process')}",
    }
    if length is None:
        rows["epochs"] = f"{schedule.epochs:g}, {schedule.warmup:g} of them warm-up"
        rows["steps"] = "unknown: name the pictures by data.train, or their number by --images"
    else:
        rows["steps per epoch"] = "unknown" if length.per_epoch is None else f"{length.per_epoch:,}"
        rows["steps"] = f"{length.steps:,}, {length.warmup:,} of them warm-up"
        rows["images seen"] = f"{length.steps * recipe.batch:,}"
    rows |= {
        "learning rate": f"{schedule.low:g} → {schedule.peak:g} → {schedule.low:g}",
        "GFLOPs per image": f"{work / 1e9:,.2f}: student {student / 1e9:,.2f} ({PASSES} passes), {share}",
        "FLOPs in all": None if length is None else f"{length.steps * recipe.batch * work:.3g}",
        "validation": f"every {recipe.validation.every:,} steps and at the end, "
        f"{_plural(len(resolutions), 'resolution')} × {_plural(len(budgets), 'budget')}",
        "checkpoints": f"every {recipe.checkpoints.every:,} steps, {state / 2**30:,.3f} GiB each",
        "time": "measured after the first steps",
    }
    table = _make_table("The run", "", "")
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(shorten(printable(value), 200)))  # rich would read a `str` as markup
    return table


def _plural(number: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def _budget_table(plan: RunPlan) -> Table:
    table = _make_table("Budgets", "cores", "of the steps", "of the tokens", "GFLOPs per image")
    for budget, share in plan.budgets.items():
        tokens = plan.tokens(budget=budget) / plan.tokens()
        table.add_row(str(budget), f"{share:.1%}", f"{tokens:.1%}", _giga(plan.flops(budget=budget)))
    return table


def _resolution_table(plan: RunPlan) -> Table:
    phases = plan.recipe.resolutions
    ends = ["to the end" if p.until is None else f"to step {p.until:,}" for p in phases] if len(phases) > 1 else []
    table = _make_table("Resolutions", "px", *ends, "of the steps", "of the tokens", "patches", "GFLOPs per image")
    for size, share in sorted(plan.resolutions.items()):
        odds = [f"{shares(p.odds).get(size, 0):.1%}" for p in phases] if len(phases) > 1 else []
        tokens, count = plan.tokens(size) / plan.tokens(), num_patches(plan.config, size, size)
        table.add_row(str(size), *odds, f"{share:.1%}", f"{tokens:.1%}", f"{count:,}", _giga(plan.flops(size)))
    return table


def _giga(flops: float) -> str:
    return f"{flops / 1e9:,.2f}" if flops else "–"


def _memory_table(plan: RunPlan) -> Table:
    memory, maps, images = plan.memory(), plan.recipe.teacher.resident, plan.recipe.pass_batch(plan.processes)
    size, cores = max((size, cores) for size, cores, share in plan.draws() if share)
    about = {
        "weights": "float32",
        "gradients": "float32",
        "normuon": "momentum, and a number per row",
        "adamw": "two moments",
        "ema": "running mean of the weights",
        "teacher": "weights, float32",
        "activations": f"about: {images} × {size} px with {cores} cores, as autograd keeps them",
        "resident": "pictures, and the teacher's maps of them" if maps and plan.teacher else "pictures",
    }
    table = _make_table("Memory of one process", "", "GiB", "")
    for name, count in memory._asdict().items():
        if count:
            table.add_row(name, f"{count / 2**30:,.3f}", about[name])
    missing = "resident maps (their width is not known), " if maps and not plan.teacher else ""
    if plan.recipe.data.resident and plan.images is None:
        missing = "resident pictures (not counted), "
    missing += "the teacher's own pass and workspaces come on top"
    table.add_row("in all", f"{sum(memory) / 2**30:,.3f}", missing)
    if plan.recipe.parallel == "fsdp" and plan.processes > 1:
        states = sum(memory) - memory.teacher - memory.activations - memory.resident
        sharded = sum(memory) - states + states // plan.processes
        table.add_row("sharded", f"{sharded / 2**30:,.3f}", f"weights and states, by {plan.processes}")
    return table


def _make_table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None)
    table.show_header = any(heads)
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    return table
