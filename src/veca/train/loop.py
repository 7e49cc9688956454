"""The training loop: a student learns its teacher's features, one budget and one resolution per step.

Whatever is drawn is a function of the seed and the step, whatever is kept is in the checkpoint: a run that was killed
goes on as if it had not been, and several processes do what one would with the batch of all.

A run's folder: `recipe.yaml`, `split.json` (which optimizer moves what), the tables, `checkpoints/`, `best/` (the
weights with the lowest mean over the validation grid), and in the end `model.safetensors`, `summary.json` and
`report.html`. `veca.load` takes the folder, `best/` and each checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import veca
from veca.checkpoint import save_tensors
from veca.config import VecaConfig, get_config
from veca.files import atomic_path
from veca.flops import model_flops
from veca.model import Veca
from veca.train.checkpoints import Saved, forget_old, newest_checkpoint, write_checkpoint
from veca.train.data import Batch, Pictures, TrainBatches, to_model_input, validation_batches
from veca.train.log import LiveLine, Meter, RunLog, memory_gib
from veca.train.normuon import local
from veca.train.objective import Losses, distillation_losses
from veca.train.optimizers import Optimizers, make_optimizers, split_parameters
from veca.train.parallel import (
    World,
    any_of,
    broadcast,
    fill,
    gathered,
    replicate,
    shard,
    share_again,
    sum_of,
    unsynced,
    whole,
)
from veca.train.plan import PASSES, run_length
from veca.train.recipe import Recipe, RecipeError
from veca.train.report import write_report
from veca.train.schedule import draw, learning_rate, seed_of
from veca.train.tables import Grid, grid_means
from veca.train.teachers import Standardized, Targets, Teacher, load_teacher, output_dim_for, start_patch_embed

MOST_BAD = 3
"""So many steps in a row without a finite gradient are no accident."""
AGREE_EVERY = 10
"""Steps after which several processes ask each other whether to stop."""
STATISTICS_PICTURES = 1024
"""At most so many training pictures make a teacher's statistics, where there are none for validation."""
_FREE = (
    *("data.workers", "data.augment_on", "log_every", "checkpoints", "validation", "compile", "teacher.micro_batch"),
    *("schedule", "precision", "parallel", "batch"),
)
"""Keys of a recipe that a run which continues may change; the batch of all processes together may not."""


class TrainingError(ValueError):
    """Training cannot go on; the last good checkpoint stays."""


class Interrupted(Exception):
    """Asked to stop, and did: everything is saved."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Student(nn.Module):
    """The model with its loss, so that what comes out of a forward pass is what goes into the backward one."""

    def __init__(self, model: Veca, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.objective = model, recipe.objective
        self.losses = torch.compile(distillation_losses, dynamic=True) if recipe.compile else distillation_losses

    def forward(self, images: Tensor, budget: int, targets: Targets) -> Losses:
        out = self.model(images, budget)
        weights = self.objective.dense_weight, self.objective.mse_weight
        return self.losses(out.cls, out.patches, *targets, *weights)


class Watch:
    """Counts steps that were skipped, on the device; the host looks without waiting, and so a little late."""

    def __init__(self, device: torch.device, total: int = 0) -> None:
        self.counts = torch.tensor([0, total, 0], dtype=torch.int32, device=device)  # in a row, in all, most in a row
        self._seen = torch.tensor([0, total, 0], dtype=torch.int32, pin_memory=device.type == "cuda")

    def update(self, skip: Tensor) -> None:
        row, total, most = self.counts.unbind()
        row = (row + 1) * skip.int()
        self.counts = torch.stack([row, total + skip.int(), torch.maximum(most, row)])
        self._seen.copy_(self.counts, non_blocking=True)

    def seen(self) -> tuple[int, int]:
        """Steps skipped in all, and most in a row."""
        _, total, most = self._seen.tolist()
        return total, most


class Trainer:
    """One process of a run."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        world: World,
        *,
        restart: bool = False,
        wandb: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.recipe, self.folder, self.world, self.wandb, self.restart = recipe, folder, world, wandb, restart
        self.say = say if world.first else lambda text: None
        saved = None if restart else newest_checkpoint(folder / "checkpoints", self.say)
        if saved is not None:
            check_recipe(saved.facts["recipe"], recipe.to_dict(), folder)
        self.pictures, self.validation = find_pictures(recipe, folder, world)
        self.teacher = make_teacher(recipe).to(world.device)
        self.model = make_student(recipe, self.teacher).to(world.device)
        self.config = self.model.config
        if recipe.parallel == "fsdp":
            shard(self.model, world)
        self.optimizers = make_optimizers(self.model, recipe.schedule.peak, recipe.weight_decay, _products(recipe))
        self.length = run_length(recipe, len(self.pictures), world.size)
        self.step, self.best, self.corrupt = 0, float("inf"), 0
        parameters = list(self.model.parameters())
        self.ema = [local(p).detach().clone() for p in parameters] if recipe.ema else []
        images, seconds, skipped = 0, 0.0, 0
        if saved is not None:
            images, seconds, skipped = self._restore(saved)
        elif isinstance(self.teacher, Standardized):
            self._take_statistics(self.teacher)
        self.resumed = saved is not None
        self.meter = Meter(recipe.budgets, recipe.grid()[0], images=images, seconds=seconds)
        if saved is not None:
            self.meter.take_up(saved.facts["under_way"], world.rank, world.size, world.device)
        self.watch = Watch(world.device, skipped)
        if recipe.compile:
            for block in self.model.blocks:
                block.compile(dynamic=True)
        self.student = replicate(Student(self.model, recipe), world, recipe.parallel)
        self.stop = 0
        self.skipped: list[tuple[str, str]] = []
        self.named: set[str] = set()

    # A step

    def draws(self, step: int) -> tuple[int, int]:
        """Budget and resolution of a step, the same in every process."""
        seed = self.recipe.seed
        return draw(self.recipe.budgets, "budget", seed, step), draw(
            self.recipe.odds_at(step), "resolution", seed, step
        )

    def train_step(self, batches: Iterator[Batch]) -> None:
        recipe, passes = self.recipe, self.recipe.accumulate
        budget, resolution = self.draws(self.step)
        found: list[Losses] = []
        for i in range(passes):
            batch = next(batches)
            self.skipped += batch.skipped
            images = to_model_input(batch, self.world.device)
            targets = self.targets(images)
            torch.manual_seed(seed_of("model", recipe.seed, self.step))
            with unsynced(self.student, last=i == passes - 1):
                with self._autocast():
                    losses = self.student(images, budget, targets)
                (losses.total / passes).backward()
            found.append(losses)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        skip = (~norm.isfinite()).float()  # alike everywhere: gradients are those of all processes
        rate = learning_rate(
            self.step, self.length.steps, self.length.warmup, recipe.schedule.peak, recipe.schedule.low
        )
        self.optimizers.step(rate, skip)
        self.optimizers.zero_grad()
        if recipe.ema:
            torch._foreach_lerp_(self.ema, [local(p).detach() for p in self.model.parameters()], 1 - recipe.ema)
        self.watch.update(skip)
        names = Losses._fields
        means = {name: torch.stack([getattr(part, name).detach() for part in found]).mean() for name in names}
        taken = recipe.batch * passes * self.world.size
        self.meter.update({**means, "gradient_norm": norm}, taken, budget, resolution)
        self.step += 1

    @torch.no_grad()
    def targets(self, images: Tensor) -> Targets:
        """The teacher's, a few pictures at a time."""
        at_once = self.recipe.teacher.micro_batch
        if isinstance(at_once, dict):
            fitting = [count for size, count in at_once.items() if size >= images.shape[-1]]
            at_once = min(fitting) if fitting else min(at_once.values())
        grid = tuple(side // self.config.patch_size for side in images.shape[-2:])
        with self._autocast():
            parts = [self.teacher(part, grid) for part in images.split(at_once)]
        return Targets(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    # The run

    def run(self) -> Path:
        """Train to the end; the folder then holds the model and a report."""
        recipe, steps = self.recipe, self.length.steps
        self._write_recipe()
        where: Literal["cpu", "gpu"] = (
            "gpu" if recipe.data.augment_on != "cpu" and self.world.device.type == "cuda" else "cpu"
        )
        stream = TrainBatches(
            self.pictures, resolution_of=lambda f: self.draws(f // recipe.accumulate)[1], batch=recipe.batch,
            rank=self.world.rank, world=self.world.size, seed=recipe.seed, short_side=recipe.data.short_side,
            augment=recipe.data.augment, views=recipe.data.views, workers=recipe.data.workers,
            max_pixels=recipe.data.max_pixels, start=self.step * recipe.accumulate, where=where,
        )  # fmt: skip
        with self._logging() as (log, live), self._signals(), stream:
            if self.resumed:
                self._event(log, live, f"resumed: from step {self.step:,}")
            batches = iter(stream)
            while self.step < steps:
                self.train_step(batches)
                last = self.step == steps
                if last or self.step % recipe.log_every == 0:
                    self._log(log, live)
                if self.validation is not None and (last or self.step % recipe.validation.every == 0):
                    self._validate(log, live)
                if last or self.step % recipe.checkpoints.every == 0:
                    self._save(log, live, must=last)
                if self._asked_to_stop():
                    self._save(log, live, must=True)
                    self._event(log, live, f"stopped: by {signal.Signals(self.stop).name}, at step {self.step:,}")
                    raise Interrupted(self.stop)
        return self._finish()

    def _asked_to_stop(self) -> bool:
        total, most = self.watch.seen()
        if most >= MOST_BAD:
            raise TrainingError(
                f"{most} steps in a row had no finite gradient, the last before step {self.step:,} ({total} in all). "
                "The last checkpoint is from before; lower schedule.peak, or use precision=float32, and run again"
            )
        if self.world.size == 1:
            return bool(self.stop)
        if self.step % AGREE_EVERY:
            return False
        numbers = [int(n) for n in gathered(self.stop, self.world)]
        self.stop = max(numbers)
        return bool(self.stop)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step at hand; the second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # What it leaves behind

    @contextlib.contextmanager
    def _logging(self) -> Iterator[tuple[RunLog | None, LiveLine | None]]:
        if not self.world.first:
            yield None, None
            return
        config = self.recipe.to_dict()
        log = RunLog(self.folder, wandb=self.wandb, resume_step=self.step + 1, config=config)
        with log, LiveLine(self.length.steps, start=self.step) as live:
            yield log, live

    def _log(self, log: RunLog | None, live: LiveLine | None) -> None:
        values = self.meter.values()
        names = [*Losses._fields]
        for name, total in zip(names, sum_of([values[n] for n in names], self.world), strict=True):
            values[name] = total / self.world.size
        values["learning_rate"] = self.optimizers.adamw.param_groups[0]["lr"]
        values["memory_gib"] = memory_gib(self.world.device)
        values["floor_share"] = values["images_per_s"] / self.world.size * self._work() / self._floor
        self._note_corrupt(log, live)
        if values["nonfinite"]:
            self._event(log, live, f"skipped: {values['nonfinite']:.0f} steps without a finite loss or gradient")
        if log is not None and live is not None:
            log.train(self.step, values)
            live.update(self.step, values)

    def _note_corrupt(self, log: RunLog | None, live: LiveLine | None) -> None:
        lost = [pair for pairs in gathered(self.skipped, self.world) for pair in pairs]
        self.skipped, self.corrupt = [], self.corrupt + len(lost)
        for name, reason in dict(lost).items():
            if name not in self.named:  # it comes again every epoch
                self.named.add(name)
                self._event(log, live, f"corrupt: {name}, {reason}")

    def _work(self) -> float:
        """FLOPs of the student per picture, at the budgets and resolutions that come on average."""
        odds = self.recipe.odds_at(self.step - 1)
        pairs = [(r, c, a * b) for r, a in odds.items() for c, b in self.recipe.budgets.items()]
        work = sum(share * model_flops(self.config, r, r, c) for r, c, share in pairs)
        return PASSES * work / sum(share for *_, share in pairs)

    @cached_property
    def _floor(self) -> float:
        """FLOP/s of a large matrix product here; nan where it is not known to matter."""
        if self.world.device.type != "cuda":
            return float("nan")
        a, b = (torch.randn(8192, 8192, device=self.world.device, dtype=_products(self.recipe)) for _ in range(2))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a @ b
        start.record()
        for _ in range(4):
            a @ b
        end.record()
        end.synchronize()
        return 4 * 2 * 8192**3 / (start.elapsed_time(end) / 1e3)

    def _event(self, log: RunLog | None, live: LiveLine | None, text: str) -> None:
        if log is not None and live is not None:
            log.event(self.step, text)
            live.say(text)

    def _validate(self, log: RunLog | None, live: LiveLine | None) -> None:
        with self.meter.pause(), self.handed_out():
            grid = self.validate()
        mean = grid_means(grid)["total"]
        if log is not None and live is not None:
            log.validation(self.step, grid)
            live.say(f"validation at step {self.step:,}: {mean:.4f} ({_shown(grid)})")
        if mean < self.best:
            failed = ""
            with self.meter.pause(), self.handed_out():
                try:
                    self._write_weights(self.folder / "best", {"validation": mean})
                except OSError as error:
                    failed = error.strerror or str(error)
                    self._event(log, live, f"unsaved: best weights, at step {self.step:,}: {failed}")
            if not any_of(bool(failed), self.world):
                self.best = mean

    @torch.no_grad()
    def validate(self) -> Grid:
        """Losses on the validation pictures at each resolution and budget."""
        assert self.validation is not None
        resolutions, budgets = self.recipe.grid()
        batch, found = self.recipe.validation.batch or self.recipe.batch, {}
        self.model.eval()
        try:
            for resolution in resolutions:
                sums = torch.zeros(len(budgets), len(Losses._fields), device=self.world.device, dtype=torch.float64)
                count = 0
                for images, number in self._in_step(self._centres(self.validation, resolution, batch), resolution):
                    targets = self.targets(images)
                    for row, budget in zip(sums, budgets, strict=True):
                        with self._autocast():
                            out = self.model(images, budget)
                        weights = self.recipe.objective.dense_weight, self.recipe.objective.mse_weight
                        losses = distillation_losses(out.cls, out.patches, *targets, *weights)
                        row += number * torch.stack(list(losses)).double()
                    count += number
                totals = sum_of([*sums.flatten().tolist(), float(count)], self.world)
                means = torch.tensor(totals[:-1]).view(sums.shape) / max(1.0, totals[-1])
                for budget, row in zip(budgets, means.tolist(), strict=True):
                    found[resolution, budget] = dict(zip(Losses._fields, row, strict=True))
        finally:
            share_again(self.model)
            self.model.train()
        return found

    def _in_step(self, batches: Iterator[Tensor], resolution: int) -> Iterator[tuple[Tensor, int]]:
        """Batches, and how many pictures of each count: as many in every process, since shared-out parameters are put
        together by all of them. A process that has none left sees a blank one.
        """
        blank = torch.zeros(1, 3, resolution, resolution, device=self.world.device)
        while True:
            images = next(batches, None)
            if not any_of(images is not None, self.world):
                return
            yield (blank, 0) if images is None else (images, len(images))

    def _centres(self, pictures: Pictures, resolution: int, batch: int) -> Iterator[Tensor]:
        data = self.recipe.data
        found = validation_batches(
            pictures,
            resolution,
            batch,
            self.world.rank,
            self.world.size,
            data.workers,
            data.short_side,
            data.max_pixels,
        )
        with found as batches:
            for one in batches:
                self.skipped += one.skipped
                if len(one.images):
                    yield to_model_input(one, self.world.device)

    @torch.no_grad()
    def _take_statistics(self, teacher: Standardized) -> None:
        """Over the validation pictures, or some of the others where there are none; alike in every process."""
        self.say(f"statistics of {teacher.name}")
        pictures, most = (self.validation, None) if self.validation else (self.pictures, STATISTICS_PICTURES)
        resolution, batch = self.recipe.grid()[0][0], self.recipe.batch
        side = resolution // self.config.patch_size
        if self.world.first:
            data = self.recipe.data
            workers = data.workers
            found = validation_batches(pictures, resolution, batch, 0, 1, workers, data.short_side, data.max_pixels)
            with found as batches:
                images = (to_model_input(one, self.world.device) for one in batches if len(one.images))
                teacher.fit(_first(images, most), (side, side))
        broadcast([teacher.means, teacher.deviations], self.world)

    # Checkpoints

    def _save(self, log: RunLog | None, live: LiveLine | None, must: bool) -> None:
        """A disk that is full stops nothing but the last checkpoint: the one before it stays, the next is tried."""
        with self.meter.pause():
            tensors = self._tensors()
            self._note_corrupt(log, live)
            facts = self._facts() | {"under_way": gathered(self.meter.under_way(), self.world)}
            if not self.world.first or not tensors:
                return
            folder = self.folder / "checkpoints"
            metadata = {"model": {"format": "pt", "veca": json.dumps(self._about({"step": self.step}))}}
            try:
                if log is not None:  # a run that goes on from here does not write these rows again
                    log.flush()
                write_checkpoint(folder, self.step, facts, tensors, metadata)
            except OSError as error:
                if must:
                    raise
                self._event(log, live, f"unsaved: checkpoint at step {self.step:,}: {error.strerror or error}")
            else:
                forget_old(folder, self.recipe.checkpoints.keep, self.step)
                self._event(log, live, f"checkpoint: step {self.step:,}")

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """By file; whole, on the host. Shared-out ones are put together by all processes."""
        if not self.world.first and self.recipe.parallel == "ddp":
            return {}
        named = dict(self.model.named_parameters())
        tensors = {"model": {name: whole(tensor) for name, tensor in self.model.state_dict().items()}}
        states = tensors["optimizers"] = {}
        for kind, optimizer in zip(Optimizers._fields, self.optimizers, strict=True):
            for name, parameter in named.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    states[f"{kind}/{name}/{key}"] = whole(value)
        if self.ema:
            pairs = zip(named.items(), self.ema, strict=True)
            tensors["ema"] = {name: whole(_like(value, parameter)) for (name, parameter), value in pairs}
        if isinstance(self.teacher, Standardized):
            tensors["teacher"] = {k: whole(getattr(self.teacher, k)) for k in ("means", "deviations")}
        return tensors

    def _facts(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "pictures": self.pictures.fingerprint,
            "batch": self.recipe.batch * self.world.size,
            "teacher": self.teacher.about,
            "best": self.best if self.best < float("inf") else None,
            "images": self.meter.images,
            "seconds": self.meter.seconds,
            "skipped": self.watch.seen()[0],
            "corrupt": self.corrupt,
            "versions": {"veca": veca.__version__, "torch": torch.__version__},
        }

    def _restore(self, saved: Saved) -> tuple[int, float, int]:
        """Take everything up where it was; images, seconds and skipped steps so far."""
        facts, tensors = saved.facts, saved.tensors
        if facts["pictures"] != self.pictures.fingerprint:
            raise RecipeError(
                f"data.train: these are not the pictures that {self.folder} was trained with so far. Bring those back, "
                f"or begin anew: --restart, or another --out with model.start={self.folder}/best"
            )
        batch = self.recipe.batch * self.world.size
        if facts["batch"] != batch:
            raise RecipeError(
                f"batch={self.recipe.batch} × {self.world.size} processes: the run has had {facts['batch']} pictures "
                f"per forward pass. Set batch={facts['batch'] / self.world.size:g} to go on"
            )
        named = dict(self.model.named_parameters())
        for name, tensor in self.model.state_dict().items():
            fill(tensor, tensors["model"][name])
        optimizers = dict(zip(Optimizers._fields, self.optimizers, strict=True))
        for key, value in tensors["optimizers"].items():
            kind, name, entry = key.split("/")
            parameter = named[name]
            kept = torch.empty_like(parameter, dtype=value.dtype) if value.shape == parameter.shape else None
            state = optimizers[kind].state[parameter]
            state[entry] = value.to(parameter.device) if kept is None else kept
            if kept is not None:
                fill(kept, value)
        for (name, parameter), kept in zip(named.items(), self.ema, strict=False):
            fill(_like(kept, parameter), tensors["ema"][name])
        if isinstance(self.teacher, Standardized):
            for name in ("means", "deviations"):
                getattr(self.teacher, name).copy_(tensors["teacher"][name])
        self.step, self.corrupt = saved.step, facts["corrupt"]
        self.best = float("inf") if facts["best"] is None else facts["best"]
        return facts["images"], facts["seconds"], facts["skipped"]

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """The model with the weights people get: their running mean where there is one."""
        if not self.ema:
            yield
            return
        now = [local(p) for p in self.model.parameters()]
        kept = [p.detach().clone() for p in now]
        with torch.no_grad():
            torch._foreach_copy_(now, self.ema)
            try:
                yield
            finally:
                torch._foreach_copy_(now, kept)

    def _about(self, more: Mapping[str, Any]) -> dict[str, Any]:
        provenance = {
            "weights": "distilled",
            "teacher": self.teacher.about,
            "recipe": self.recipe.to_dict(),
            "images": self.meter.images,
            "step": self.step,
            **more,
        }
        return {"config": self.config.to_dict(), "provenance": provenance}

    def _write_weights(self, folder: Path, more: Mapping[str, Any]) -> None:
        tensors = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        if self.world.first:
            about = self._about(more)
            save_tensors(tensors, about["config"], about["provenance"], folder)

    def _write_recipe(self) -> None:
        if not self.world.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.restart:
            for name in ("checkpoints", "best"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        split = split_parameters(self.model)
        with atomic_path(self.folder / "recipe.yaml") as part:
            part.write_text(self.recipe.to_yaml(), encoding="utf-8")
        with atomic_path(self.folder / "split.json") as part:
            part.write_text(json.dumps(split._asdict(), indent=1) + "\n", encoding="utf-8")
        counts = {
            kind: sum(self.model.get_parameter(n).numel() for n in names) for kind, names in split._asdict().items()
        }
        moved = counts["normuon"] + counts["normuon_qkv"]
        self.say(f"NorMuon moves {moved:,} parameters, AdamW {counts['adamw']:,}; which: {self.folder / 'split.json'}")

    def _finish(self) -> Path:
        with self.handed_out():
            self._write_weights(self.folder, {"validation": self.best if self.best < float("inf") else None})
        if self.world.first:
            facts = self._facts() | {"total_steps": self.length.steps, "model": self.recipe.model.size}
            with atomic_path(self.folder / "summary.json") as part:
                part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            return write_report(self.folder)
        return self.folder / "report.html"


def make_teacher(recipe: Recipe) -> Teacher | Standardized:
    asked = recipe.teacher
    teacher = load_teacher(asked.name, asked.meet, asked.trust_remote_code)
    wanted = teacher.raw if asked.standardize is None else asked.standardize
    return Standardized(teacher) if wanted else teacher


def make_student(recipe: Recipe, teacher: Teacher | Standardized) -> Veca:
    """New weights, always the same for a seed, or those the recipe starts from."""
    config = get_config(recipe.model.size, **recipe.model.overrides)
    config = VecaConfig.from_dict({**config.to_dict(), "output_dim": output_dim_for(config, teacher)})
    if recipe.model.start is not None:
        model = veca.load(recipe.model.start)
        ours, theirs = config.to_dict(), model.config.to_dict()
        if different := [f"{key}: {theirs[key]}, not {ours[key]}" for key in ours if ours[key] != theirs[key]]:
            raise RecipeError(f"model.start={recipe.model.start} is another model ({'; '.join(different)})")
        return model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Veca(config)
    if recipe.model.patch_embed_from_teacher:
        start_patch_embed(model, teacher)
    return model.train()


def find_pictures(recipe: Recipe, folder: Path, world: World) -> tuple[Pictures, Pictures | None]:
    """Training and validation pictures; the first process makes the index, the others read it."""
    if not recipe.data.train:
        raise RecipeError("data.train: no pictures to train on; name folders, globs or tar shards")

    def find() -> tuple[Pictures, Pictures | None]:
        train = Pictures.find(recipe.data.train, folder / "train.index", progress=world.first)
        if not recipe.data.validation:
            return train, None
        return train, Pictures.find(recipe.data.validation, folder / "validation.index", progress=world.first)

    folder.mkdir(parents=True, exist_ok=True)
    found = find() if world.first else None
    gathered(None, world)
    return found or find()


def check_recipe(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """A run goes on with the recipe it began with, but for what does not change what it learns."""
    different = [
        f"{key}: {before!r}, now {now!r}"
        for key, before, now in _differences(old, new)
        if not any(key == free or key.startswith(f"{free}.") for free in _FREE)
    ]
    if different:
        raise RecipeError(
            f"{folder} holds a run of another recipe ({'; '.join(different)}). "
            "Take another --out, or --restart to begin anew in it"
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        old, new = ({str(k): v for k, v in side.items()} for side in (old, new))  # JSON makes keys text
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{where}[{i}]")
    elif old != new:
        yield where, old, new


def _products(recipe: Recipe) -> torch.dtype:
    return torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32


def _shown(grid: Grid) -> str:
    return ", ".join(f"{r} px C={c} {values['total']:.4f}" for (r, c), values in grid.items())


def _first(images: Iterator[Tensor], most: int | None) -> Iterator[Tensor]:
    seen = 0
    for some in images:
        yield some
        seen += len(some)
        if most is not None and seen >= most:
            return


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A process's part of something shared out as `parameter` is, as that something."""
    if part is parameter or not hasattr(parameter, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    shared = cast(DTensor, parameter)
    return DTensor.from_local(part, shared.device_mesh, shared.placements, shape=shared.shape, stride=shared.stride())
