"""Plan of a distillation run before it starts (`--dry-run`): length, draws, FLOPs and memory.

Every number follows from the recipe and the model, which is built on the meta device. Two are estimates, and marked so:
the activations, by what autograd keeps, and the teacher's FLOPs, by the size of a ViT of its width.

Symbols: N patches, C cores, S = C + N tokens, D width, M hidden width, H heads, L blocks; e bytes per number in matrix
products (2 in bfloat16, else 4).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from veca.config import VecaConfig
from veca.data.index import DataError, ImageIndex
from veca.flops import model_flops, num_patches
from veca.model import Veca
from veca.teachers.load import KNOWN_TEACHERS
from veca.train.optimizers import split_parameters
from veca.train.recipe import Recipe, RecipeError, Setting, TeacherRecipe
from veca.utils.console import as_message
from veca.utils.text import printable, quoted, shorten

Key = TypeVar("Key")
FLOAT_BYTES = 4
"""Weights, gradients, optimizer states and the residual stream are float32."""
PASSES = 3
"""A training step costs three forward passes: one forward, and two matrix products for each one in the backward."""


def run_length(recipe: Recipe, images: int | None) -> tuple[int | None, int, int]:
    """Steps per epoch (None: not known), in all, and of warm-up. An epoch is whole batches: the remainder is left out.

    >>> run_length(Recipe.from_dict({"schedule": {"epochs": 10, "warmup": 1}, "batch": 256}), images=1000)
    (3, 30, 3)
    """
    schedule = recipe.schedule
    per_epoch = None if images is None else images // recipe.batch
    if schedule.steps is not None:
        return per_epoch, schedule.steps, round(schedule.warmup)
    if not per_epoch:
        raise RecipeError(f"{images or 0:,} pictures make no step of batch={recipe.batch:,}: name more, or lower batch")
    steps = max(1, round((schedule.epochs or 0) * per_epoch))
    return per_epoch, steps, min(steps - 1, round(schedule.warmup * per_epoch))


def shares(odds: Mapping[Key, float]) -> dict[Key, float]:
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


def expected_flops(config: VecaConfig, sizes: Mapping[int, float], settings: Mapping[Setting, float]) -> float:
    """FLOPs of a forward pass per image, over resolutions and settings with these shares."""
    return sum(a * b * model_flops(config, r, r, c, w) for r, a in sizes.items() for (c, w), b in settings.items())


class RunPlan:
    """The numbers of a plan.

    A teacher has `width`, `stride`, `parameters`; `depth` (attention blocks) or `flops_per_pixel` (of a CNN) and
    `bytes` (of its weights) where known; it is empty where the teacher is not known.
    """

    def __init__(
        self, recipe: Recipe, config: VecaConfig, images: int | None, processes: int, teacher: Mapping[str, Any],
        *more_teachers: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.recipe, self.config, self.images, self.processes, self.teacher = recipe, config, images, processes, teacher
        self.teachers = teacher, *more_teachers
        self.pass_batch = recipe.pass_batch(processes)
        self.length = None if images is None and recipe.schedule.steps is None else run_length(recipe, images)
        self.settings = shares(recipe.settings())
        # A run of unknown length is taken to be so long that its last phase of resolutions dominates.
        self.resolutions = resolution_odds(recipe, self.length[1] if self.length else 1e9)
        self.flops = expected_flops(config, self.resolutions, self.settings)
        """Of the student's forward pass per image."""
        # Resolution and budget of the most expensive step.
        self.largest_draw = max(filter(self.resolutions.get, self.resolutions)), recipe.largest_setting()[0]
        with torch.device("meta"):
            self.model = Veca(config)
        split = split_parameters(self.model)
        matrices = [self.model.get_parameter(name) for name in split["normuon_qkv"] + split["normuon"]]
        self.trained = sum(parameter.numel() for parameter in self.model.parameters())
        self.by_normuon = sum(matrix.numel() for matrix in matrices)
        self.states = {
            "weights": self.trained,
            "gradients": self.trained,
            "normuon": self.by_normuon + sum(map(len, matrices)),  # momentum, and a number per row
            "adamw": 2 * (self.trained - self.by_normuon) + len(split["adamw"]),  # two moments, and step counts
            "ema": self.trained if recipe.ema else 0,
        }
        """How many numbers are kept, by purpose."""

    def teacher_flops(self) -> float:
        """Approximate FLOPs of the teachers' forward passes per image, of those that are known.

        They are 2 per weight and cell, and attention among all cells; of a CNN, by the pixels it sees. Unless its
        `depth` is given, it is that of a ViT of its width, whose blocks have 12 D² weights.
        """
        pairs = zip((self.recipe.teacher, *self.recipe.teachers), self.teachers, strict=True)
        return sum(self._flops_of(settings, teacher) for settings, teacher in pairs)

    def _flops_of(self, settings: TeacherRecipe, teacher: Mapping[str, Any]) -> float:
        if not teacher or settings.resident:  # it runs only before the first step
            return 0.0
        meet, stride = settings.meet, teacher["stride"]
        zoom = stride / self.config.patch_size if meet == "input" else 1
        sides = [(meet if isinstance(meet, int) else size * zoom, part) for size, part in self.resolutions.items()]
        if settings.glance:
            sides.append((settings.glance, 1.0))
        if per_pixel := teacher.get("flops_per_pixel"):
            return float(sum(per_pixel * side**2 * share for side, share in sides))
        width, weights = teacher["width"], teacher["parameters"]
        depth = teacher.get("depth", round(weights / (12 * width**2)))
        cells = [((side / stride) ** 2, share) for side, share in sides]
        return float(sum((2 * weights * n + 4 * width * n**2 * depth) * share for n, share in cells))

    def memory(self) -> dict[str, int]:
        """Bytes on the device of one process, by purpose."""
        shards = self.processes if self.recipe.parallel == "fsdp" else 1
        return {name: FLOAT_BYTES * count // shards for name, count in self.states.items()} | {
            "teacher": sum(t.get("bytes", FLOAT_BYTES * t.get("parameters", 0)) for t in self.teachers),
            "activations": self.activations(*self.largest_draw),
            "resident": self._resident(),
        }

    def _resident(self) -> int:
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

    def activations(self, size: int, cores: int) -> int:
        """Approximate bytes that the kernels keep for the backward pass of one forward pass on images of this size.

        Per token and block: both sums of the residual stream in float32 (2 · 4 D); the inputs of the matrix products in
        their precision: both normalised tokens, q, k, v, the attention output (6 e D), the output of fc1 and the gated
        half (3 e M); and the log-sum-exp of each head (4 H). Per core and block except the first, its update (4 D). At
        the ends: the last sum (4 D per token), pixels (e · 3 p² per patch), and in the loss three maps of the output
        width (4 D per patch); `output_proj` keeps its input. In bfloat16 also a copy of all matrices.
        """
        c, n = self.config, num_patches(self.config, size, size)
        s, e = n + cores, 2 if self.recipe.precision == "bfloat16" else 4
        block = s * (2 * FLOAT_BYTES * c.embed_dim + e * (6 * c.embed_dim + 3 * c.mlp_dim) + FLOAT_BYTES * c.num_heads)
        moves = (c.depth - 1) * cores * FLOAT_BYTES * c.embed_dim
        ends = s * FLOAT_BYTES * c.embed_dim + n * (e * c.in_chans * c.patch_size**2 + 3 * FLOAT_BYTES * c.num_features)
        ends += e * s * c.embed_dim if c.output_dim else 0
        products = 4 * c.embed_dim**2 + 3 * c.embed_dim * c.mlp_dim
        copies = e * (c.depth * products + c.embed_dim * (c.output_dim or 0)) if e < FLOAT_BYTES else 0
        return self.pass_batch * (c.depth * block + moves + ends) + copies


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
    names, config = [each.name for each in (recipe.teacher, *recipe.teachers)], recipe.model.config()
    teachers: list[Mapping[str, Any]] = [KNOWN_TEACHERS.get(name, {}) for name in names]
    width = sum(teacher["width"] for teacher in teachers) if all(teachers) else config.num_features
    if config.output_dim is None and config.embed_dim != width:
        config = VecaConfig.from_dict({**config.to_dict(), "output_dim": width})
    return Group(plan_tables(RunPlan(recipe, config, images, processes, *teachers)), *notes)


def plan_tables(plan: RunPlan) -> Group:
    config, phases = plan.config, plan.recipe.resolutions if len(plan.recipe.resolutions) > 1 else ()
    until = ["to the end" if phase.until is None else f"to step {phase.until:,}" for phase in phases]
    resolutions = []
    for size, share in sorted(plan.resolutions.items()):
        odds = [f"{shares(phase.odds).get(size, 0):.1%}" for phase in phases]
        flops = expected_flops(config, {size: 1.0}, plan.settings)
        patches = num_patches(config, size, size)
        resolutions.append((f"{size}", *odds, f"{share:.1%}", f"{patches:,}", f"{flops / 1e9:,.2f}"))
    widths = [_make_table("Widths", ("width", "of the steps", "GFLOPs per image"), _setting_rows(plan, 1))]
    return Group(
        _make_table("The run", ("", ""), _run_rows(plan).items()),
        _make_table("Budgets", ("cores", "of the steps", "GFLOPs per image"), _setting_rows(plan, 0)),
        *(widths if len(config.widths) > 1 else []),
        _make_table("Resolutions", ("px", *until, "of the steps", "patches", "GFLOPs per image"), resolutions),
        _make_table("Memory of one process", ("", "GiB", ""), _memory_rows(plan)),
    )


def _setting_rows(plan: RunPlan, axis: int) -> list[tuple[str, str, str]]:
    """Share and FLOPs of each budget (axis 0) or width (axis 1)."""
    rows = []
    for choice in dict.fromkeys(setting[axis] for setting in plan.settings):
        odds = {setting: odd for setting, odd in plan.settings.items() if setting[axis] == choice}
        flops = expected_flops(plan.config, plan.resolutions, shares(odds))
        rows.append((f"{choice:g}", f"{sum(odds.values()):.1%}", f"{flops / 1e9:,.2f}"))
    return rows


def _run_rows(plan: RunPlan) -> dict[str, str]:
    recipe, schedule = plan.recipe, plan.recipe.schedule
    resolutions, budgets, widths = recipe.grid()
    student, teacher = PASSES * plan.flops, plan.teacher_flops()
    work = student + teacher
    share = f"teacher about {teacher / 1e9:,.2f} ({teacher / work:.0%})" if teacher else "no teacher's"
    unknown = "not loaded for a plan: its work, memory and width are not in the figures"
    facts = "{parameters:,} parameters, width {width}, stride {stride}"
    names = [each.name for each in (recipe.teacher, *recipe.teachers)]
    known = [facts.format_map(each) if each else unknown for each in plan.teachers]
    state = FLOAT_BYTES * (sum(plan.states.values()) - plan.states["gradients"])
    shared = f"{plan.pass_batch} × {recipe.accumulate} accumulated × {plan.processes} processes"
    grid = f"{', '.join(map(str, resolutions))} px, {', '.join(map(str, budgets))} cores"
    grid += f", widths {', '.join(f'{width:g}' for width in widths)}" if widths != [1.0] else ""
    rows = {
        "student": f"{recipe.model.size}, {plan.trained:,} parameters",
        "starts from": recipe.model.start or "new weights",
        "moved by NorMuon": f"{plan.by_normuon:,} parameters",
        "moved by AdamW": f"{plan.trained - plan.by_normuon:,} parameters",
        "teacher": "; ".join(f"{name}, {about}" for name, about in zip(names, known, strict=True)),
        "pictures": "not counted" if plan.images is None else f"{plan.images:,}",
        "batch": f"{recipe.batch:,} pictures: {shared}",
        "steps": f"unknown: name the pictures of {schedule.epochs} epochs by data.train, or their number by --images",
        "learning rate": f"{schedule.low:g} → {schedule.peak:g} → {schedule.low:g}",
        "GFLOPs per image": f"{work / 1e9:,.2f}: student {student / 1e9:,.2f} ({PASSES} passes), {share}",
        "validation": f"every {recipe.validation.every:,} steps and at the end: {grid}",
        "checkpoints": f"every {recipe.checkpoints.every:,} steps, {state / 2**30:,.3f} GiB each",
    }
    if plan.length is not None:
        per_epoch, steps, warmup = plan.length
        rows["steps"] = f"{steps:,}, {warmup:,} of them warm-up"
        rows["steps per epoch"] = "unknown" if per_epoch is None else f"{per_epoch:,}"
        rows["images seen"] = f"{steps * recipe.batch:,}"
        rows["FLOPs in all"] = f"{steps * recipe.batch * work:.3g}"
    return rows


def _memory_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    memory, maps, (size, cores) = plan.memory(), plan.recipe.teacher.resident, plan.largest_draw
    notes = {
        "activations": f"about: {plan.pass_batch} × {size} px with {cores} cores, as autograd keeps them",
        "resident": "pictures, and the teacher's maps of them" if maps and plan.teacher else "pictures",
    }
    missing = "resident maps (their width is not known), " if maps and not plan.teacher else ""
    if plan.recipe.data.resident and plan.images is None:
        missing = "resident pictures (not counted), "
    rows = [(name, count, notes.get(name, "")) for name, count in memory.items() if count]
    total = sum(memory.values())
    rows.append(("in all", total, f"{missing}the teacher's own pass and workspaces come on top"))
    return [(name, f"{count / 2**30:,.3f}", text) for name, count, text in rows]


def _make_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=any(heads))
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i and head else "left", no_wrap=not i)
    for row in rows:
        table.add_row(*(Text(shorten(printable(cell), 200)) for cell in row))  # rich would read a `str` as markup
    return table
