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
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import veca
from veca.bench.machine import matrix_rate
from veca.checkpoint import save_tensors
from veca.data.device_cache import Resident, ResidentBatches, Taught
from veca.data.loader import Batch, DataError, TrainBatches, to_model_input
from veca.errors import VecaError
from veca.optimized import RECOMPILE_LIMIT
from veca.train.cache import TargetCache, open_cache
from veca.train.checkpoints import Saved, forget_old, newest_checkpoint, write_checkpoint
from veca.train.log import LiveLine, Meter, RunLog, memory_gib
from veca.train.objective import Losses, Student
from veca.train.optimizers import make_optimizers, split_parameters
from veca.train.parallel import World, any_of, gathered, largest, replicate, shard, sum_of, unsynced
from veca.train.plan import flops_at, run_length
from veca.train.recipe import Recipe, RecipeError
from veca.train.report import write_report
from veca.train.schedule import draw, learning_rate, seed_of
from veca.train.start import check_data, check_recipe, check_start, find_pictures, make_student, make_teacher
from veca.train.state import Ema, Watch, restore, tensors_of, weights_of
from veca.train.stop import Interrupted, signals
from veca.train.tables import Grid, grid_means
from veca.train.validation import Lessons, validate
from veca.utils.files import atomic_path

MOST_BAD = 3
"""So many steps in a row without a finite gradient are no accident."""
AGREE_STEPS, AGREE_SECONDS = 10, 3.0
"""After so many steps, or so long, several processes ask each other whether to stop; torchrun waits for 30 s."""


class TrainingError(VecaError, ValueError):
    """Training cannot go on; the last good checkpoint stays."""


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
        self.notices: list[str] = []
        check_start(recipe, folder)
        saved = None if restart else newest_checkpoint(folder / "checkpoints", self.notices.append)
        steps = gathered(saved and saved.step, world)
        if any(step != steps[0] for step in steps):
            raise RecipeError(f"processes find different checkpoints in {folder} ({steps}): they must share the folder")
        if saved is not None:
            check_recipe(saved.facts, recipe, folder)
        self.pictures, self.validation = find_pictures(recipe, folder, world)
        for found in filter(None, (self.pictures, self.validation)):
            self.notices += found.complaints()
        self.teacher = make_teacher(recipe).to(world.device)
        self.model = make_student(recipe, self.teacher).to(world.device)
        if recipe.parallel == "fsdp":
            shard(self.model, world)
        self.model.set_grad_checkpointing(recipe.grad_checkpointing)
        self.optimizers = make_optimizers(self.model, recipe.schedule.peak, recipe.weight_decay, _products(recipe))
        self.ema = Ema(self.model, recipe.ema)
        self.lessons = Lessons(self.teacher, recipe, world, self.model.config.patch_size)
        self.length = run_length(recipe, len(self.pictures), world.size)
        self.last: float | None = None  # the mean of the last validation
        if saved is None:
            self.step, self.best, self.corrupt, images, seconds, skipped = 0, float("inf"), 0, 0, 0.0, 0
            self.lessons.take_statistics(self.pictures, self.validation)
        else:
            check_data(saved.facts, self.pictures, recipe, world, self.folder)
            restore(saved.tensors, self.model, self.optimizers, self.ema, self.teacher)
            self.step, self.corrupt = saved.step, saved.facts["corrupt"]
            self._take_best(saved)
            images, seconds, skipped = (saved.facts[name] for name in ("images", "seconds", "skipped"))
            self.notices.append(f"resumed: from step {self.step:,}")
        self.meter = Meter(recipe.budgets, recipe.grid()[0], images=images, seconds=seconds)
        if saved is not None:
            self.meter.take_up(saved.facts["under_way"], world.rank, world.size, world.device)
        self.watch = Watch(world.device, skipped)
        if recipe.compile:  # blocks are alike: what is compiled for one serves all, at any budget and resolution
            for block in self.model.blocks:
                block.compile(dynamic=True)
            self.teacher.compile(dynamic=False)
        self.student = replicate(Student(self.model, recipe), world, recipe.parallel)
        self.cache: TargetCache | None = None
        self.stop, self.preparing = 0, False
        self.agreed, self.agree_at = (self.step, time.monotonic()), self.step + 1
        self.named: set[str] = set()

    # A step

    def draws(self, step: int) -> tuple[int, int]:
        """Budget and resolution of a step, the same in every process."""
        recipe, seed = self.recipe, self.recipe.seed
        budget = draw(recipe.budgets, "budget", seed, step)
        return budget, draw(recipe.odds_at(step), "resolution", seed, step)

    def train_step(self, batches: Iterator[Batch]) -> None:
        recipe, passes = self.recipe, self.recipe.accumulate
        budget, resolution = self.draws(self.step)
        found: list[Losses] = []
        for i in range(passes):
            batch = next(batches)
            self.lessons.skipped += batch.skipped
            images = to_model_input(batch, self.world.device)
            if batch.targets is not None:
                targets = batch.targets
            elif self.cache is None:
                targets = self.lessons.targets(images)
            else:
                targets = self.cache.targets(batch, images, self.lessons.targets, self.lessons.at_once(resolution))
            torch.manual_seed(seed_of("model", recipe.seed, self.step))
            with unsynced(self.student, last=i == passes - 1):
                with self.lessons.autocast():
                    losses = self.student(images, budget, targets)
                (losses.total / passes).backward()
            found.append(losses)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        fine = torch.stack([norm, *(losses.total.detach() for losses in found)]).isfinite().all()
        skip = largest((~fine).float(), self.world)
        _, steps, warmup = self.length
        self.optimizers.step(learning_rate(self.step, steps, warmup, recipe.schedule.peak, recipe.schedule.low), skip)
        self.optimizers.zero_grad()
        self.ema.update(skip)
        self.watch.update(skip)
        names = Losses._fields
        means = {name: torch.stack([getattr(part, name).detach() for part in found]).mean() for name in names}
        taken = recipe.batch * passes * self.world.size
        self.meter.update({**means, "gradient_norm": norm}, taken, budget, resolution)
        self.step += 1

    # The run

    def run(self) -> Path:
        """Train to the end; the folder then holds the model and a report."""
        self._write_recipe()
        try:
            with (
                self._logging() as (log, live),
                signals(self._note),
                torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            ):
                self.preparing = True
                for notice in self.notices:
                    self._event(log, live, notice)
                if self.step < self.length.steps:
                    self._train(log, live)
                else:
                    self.say(f"All {self.step:,} steps are done: the model and the report are written again.")
        except torch.OutOfMemoryError as error:
            self._report_end()
            raise TrainingError(self._no_room(error)) from error
        except BaseException:
            self._report_end()
            raise
        return self._finish()

    def _train(self, log: RunLog | None, live: LiveLine | None) -> None:
        if self.recipe.compile:
            self.say("The first steps compile the model, which takes a minute or so.")
        if not self.step and self.validation is not None:  # what there is to gain
            self._validate(log, live)
        with self.batches() as stream, self._caching(log, live):
            if self.stop:
                raise Interrupted(self.stop)
            batches = iter(stream) if self.cache is None else self.cache.ahead(iter(stream))
            while self.step < self.length.steps:
                self._advance(batches, log, live)

    def _no_room(self, error: torch.OutOfMemoryError) -> str:
        recipe, (budget, resolution) = self.recipe, self.draws(self.step)
        ways = [f"batch={recipe.batch // 2} with accumulate={2 * recipe.accumulate}"] * (recipe.batch > 1)
        ways += ["grad_checkpointing=true"] * (not recipe.grad_checkpointing)
        ways += ["teacher.resident=null"] * (recipe.teacher.resident is not None)
        ways += ["data.resident=null"] * (recipe.data.resident is not None)
        return (
            f"no memory on {self.world.device} for batch={recipe.batch} at {resolution} px with {budget} cores, at "
            f"step {self.step:,}; set {', or '.join(ways)}. Checkpoints stay. It said: {error}"
        )

    def _advance(self, batches: Iterator[Batch], log: RunLog | None, live: LiveLine | None) -> None:
        """A step, and whatever is due after it."""
        recipe = self.recipe
        try:
            self.train_step(batches)
        except DataError:  # nothing has moved yet
            if self.world.size == 1:
                self._save(log, live, must=False)
            raise
        self.preparing = False
        last = self.step == self.length.steps
        if last or self.step % recipe.log_every == 0:
            self._log(log, live)
        if self.validation is not None and (last or self.step % recipe.validation.every == 0):
            self._validate(log, live)
        stop = self._asked_to_stop() and not last
        if last or stop or self.step % recipe.checkpoints.every == 0:
            self._save(log, live, must=last or stop)
        if stop:
            self._event(log, live, f"stopped: by {signal.Signals(self.stop).name}, at step {self.step:,}")
            raise Interrupted(self.stop)

    @contextlib.contextmanager
    def _caching(self, log: RunLog | None, live: LiveLine | None) -> Iterator[None]:
        """The teacher's targets on disk while the block runs, if the recipe names a place for them."""

        def say(text: str) -> None:
            self._event(log, live, text)

        self.cache = open_cache(self.recipe, self.teacher, self.pictures, self.model.config.patch_size, say)
        with self.cache or contextlib.nullcontext():
            yield
        self.cache = None

    def batches(self) -> TrainBatches | ResidentBatches:
        """The pictures of the steps to come."""
        recipe, data = self.recipe, self.recipe.data
        common: dict[str, Any] = {
            "resolution_of": lambda f: self.draws(f // recipe.accumulate)[1], "batch": recipe.batch,
            "rank": self.world.rank, "world": self.world.size, "seed": recipe.seed, "short_side": data.short_side,
            "crops": data.crops, "augment": data.augment, "views": data.views, "start": self.step * recipe.accumulate,
        }  # fmt: skip
        if data.resident is not None:
            side, most = data.resident, data.max_pixels
            kept = Resident(self.pictures, side, self.world.device, data.workers, most, progress=self.world.first)
            taught = None
            if recipe.teacher.resident is not None:
                dtype = torch.bfloat16 if recipe.teacher.resident == "bfloat16" else torch.float8_e4m3fn
                taught = Taught(kept, self.lessons, dtype, data.short_side, progress=self.world.first)
            return ResidentBatches(kept, compile=recipe.compile, taught=taught, **common)
        on_gpu = self.world.device.type == "cuda" and data.augment_on != "cpu"
        where: Any = "gpu" if on_gpu else "cpu"
        return TrainBatches(self.pictures, workers=data.workers, max_pixels=data.max_pixels, where=where, **common)

    def _asked_to_stop(self) -> bool:
        total, most = self.watch.seen()
        if most >= MOST_BAD:
            raise TrainingError(
                f"{most} steps in a row had no finite gradient, the last before step {self.step:,} ({total} in all). "
                "The last checkpoint is from before; lower schedule.peak, or use precision=float32, and run again"
            )
        if self.world.size == 1:
            return bool(self.stop)
        if self.step < self.agree_at:
            return False
        before, then = self.agreed
        self.agreed = self.step, time.monotonic()
        pace = (self.agreed[1] - then) / (self.step - before)
        stops, paces = zip(*gathered((self.stop, pace), self.world), strict=True)
        self.stop, self.agree_at = max(stops), self.step + max(1, min(AGREE_STEPS, int(AGREE_SECONDS / max(paces))))
        return bool(self.stop)

    def _note(self, number: int) -> None:
        first, self.stop = not self.stop, number
        if self.preparing and first:  # to decode, ask and compile takes minutes, and nothing is learnt yet to be saved
            raise Interrupted(number)

    # What it leaves behind

    @contextlib.contextmanager
    def _logging(self) -> Iterator[tuple[RunLog | None, LiveLine | None]]:
        if not self.world.first:
            yield None, None
            return
        config = self.recipe.to_dict()
        log = RunLog(self.folder, wandb=self.wandb, resume_step=self.step + 1 if self.step else 0, config=config)
        with log, LiveLine(self.length.steps, start=self.step) as live:
            yield log, live

    def _log(self, log: RunLog | None, live: LiveLine | None) -> None:
        values, names = self.meter.values(), [*Losses._fields]
        for name, total in zip(names, sum_of([values[n] for n in names], self.world), strict=True):
            values[name] = total / self.world.size
        values["learning_rate"] = self.optimizers.adamw.param_groups[0]["lr"]
        values["memory_gib"] = memory_gib(self.world.device)
        work = flops_at(self.step - 1, self.model.config, self.recipe)
        values["floor_share"] = values["images_per_s"] / self.world.size * work / self._floor
        self._note_corrupt(log, live)
        if values["nonfinite"]:
            self._event(log, live, f"skipped: {values['nonfinite']:.0f} steps without a finite loss or gradient")
        if log is not None and live is not None:
            log.train(self.step, values)
            live.update(self.step, values)

    def _note_corrupt(self, log: RunLog | None, live: LiveLine | None) -> None:
        lost = [pair for pairs in gathered(self.lessons.skipped, self.world) for pair in pairs]
        self.lessons.skipped, self.corrupt = [], self.corrupt + len(lost)
        for name, reason in dict(lost).items():
            if name not in self.named:  # it comes again every epoch
                self.named.add(name)
                self._event(log, live, f"corrupt: {name}, {reason}")

    @cached_property
    def _floor(self) -> float:
        """FLOP/s of a large matrix product here; nan where it is not known to matter."""
        if self.world.device.type != "cuda":
            return float("nan")
        return matrix_rate(self.world.device, _products(self.recipe))

    def _event(self, log: RunLog | None, live: LiveLine | None, text: str) -> None:
        if log is not None and live is not None:
            log.event(self.step, text)
            live.say(text)

    def _validate(self, log: RunLog | None, live: LiveLine | None) -> None:
        assert self.validation is not None
        with self.meter.pause(), self.ema.in_place():
            grid = validate(self.model, self.lessons, self.validation)
        self.last = mean = grid_means(grid)["total"]
        if log is not None and live is not None:
            log.validation(self.step, grid)
            live.say(f"validation at step {self.step:,}: {mean:.4f} ({_shown(grid)})")
        if mean < self.best:
            failed = ""
            with self.meter.pause(), self.ema.in_place():
                try:
                    self._write_weights(self.folder / "best", {"validation": mean})
                except OSError as error:
                    failed = error.strerror or str(error)
                    self._event(log, live, f"unsaved: best weights, at step {self.step:,}: {failed}")
            if not any_of(bool(failed), self.world):
                self.best = mean

    # Checkpoints

    def _save(self, log: RunLog | None, live: LiveLine | None, must: bool) -> None:
        """A disk that is full stops nothing but the last checkpoint: the one before it stays, the next is tried."""
        with self.meter.pause():
            self._note_corrupt(log, live)
            under_way = gathered(self.meter.under_way(), self.world)
            if not self.world.first and self.recipe.parallel == "ddp":
                return
            tensors = tensors_of(self.model, self.optimizers, self.ema, self.teacher)
            if not self.world.first:
                return
            folder = self.folder / "checkpoints"
            metadata = {"model": {"format": "pt", "veca": json.dumps(self._about({}))}}
            if log is not None:  # a run that goes on from here does not write these rows again
                with contextlib.suppress(OSError):  # the log tells; what was learnt is worth more than its rows
                    log.flush()
            try:
                write_checkpoint(folder, self.step, self._facts() | {"under_way": under_way}, tensors, metadata)
            except OSError as error:
                if must:
                    raise TrainingError(self._unsaved(tensors, error)) from error
                self._event(log, live, f"unsaved: checkpoint at step {self.step:,}: {error.strerror or error}")
            else:
                forget_old(folder, self.recipe.checkpoints.keep, self.step)
                self._event(log, live, f"checkpoint: step {self.step:,}")

    def _unsaved(self, tensors: Mapping[str, Mapping[str, Tensor]], error: OSError) -> str:
        """For weights alone there may still be room."""
        about, folder = self._about({"validation": self.last}), self.folder
        kept = f"its weights are in {folder}"
        try:
            weights = {**tensors["model"], **tensors.get("ema", {})}
            save_tensors(weights, about["config"], about["provenance"], folder)
        except OSError:
            kept = "nor can its weights"
        return (
            f"the checkpoint of step {self.step:,} cannot be written ({error.strerror or error}); {kept}. Make room in "
            f"{folder} and run it again: it goes on from the last checkpoint, or begins anew where there is none"
        )

    def _take_best(self, saved: Saved) -> None:
        """What a run that goes on has to beat; losses of other pictures, sizes or budgets cannot be compared."""
        best, self.last = saved.facts["best"], saved.facts.get("validation")
        self.best = float("inf") if best is None else best
        if saved.facts.get("validated_on", self._validated_on()) != self._validated_on():
            self.best = float("inf")
            self.notices.append("changed: validation has other pictures, sizes or budgets; best/ is chosen anew")

    def _validated_on(self) -> list[Any]:
        return [None if self.validation is None else self.validation.fingerprint, *map(list, self.recipe.grid())]

    def _facts(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "pictures": self.pictures.fingerprint,
            "batch": self.recipe.batch * self.world.size,
            "teacher": self.teacher.about,
            "best": self.best if self.best < float("inf") else None,
            "validation": self.last,
            "validated_on": self._validated_on(),
            "images": self.meter.images,
            "seconds": self.meter.seconds,
            "skipped": self.watch.seen()[0],
            "corrupt": self.corrupt,
            "versions": {"veca": veca.__version__, "torch": torch.__version__},
        }

    def _about(self, more: Mapping[str, Any]) -> dict[str, Any]:
        provenance = {
            "weights": "distilled",
            "teacher": self.teacher.about,
            "recipe": self.recipe.to_dict(),
            "images": self.meter.images,
            "step": self.step,
            **more,
        }
        if self.model.provenance:
            provenance["started_from"] = self.model.provenance
        return {"config": self.model.config.to_dict(), "provenance": provenance}

    def _write_weights(self, folder: Path, more: Mapping[str, Any]) -> None:
        tensors = weights_of(self.model)
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
        if self.step < self.length.steps:  # what an end has left is not of this run, or not of its end
            for name in ("summary.json", *(["model.safetensors", "config.json", "report.html"] * self.restart)):
                (self.folder / name).unlink(missing_ok=True)
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
        with self.ema.in_place():
            self._write_weights(self.folder, {"validation": self.last})
        if self.world.first:
            facts = self._facts() | {"total_steps": self.length.steps, "model": self.recipe.model.size}
            with atomic_path(self.folder / "summary.json") as part:
                part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            return write_report(self.folder)
        return self.folder / "report.html"

    def _report_end(self) -> None:
        """A report of a run that ends before its end, where that can still be written."""
        if self.world.first:
            with contextlib.suppress(Exception):
                write_report(self.folder)


def _products(recipe: Recipe) -> torch.dtype:
    return torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32


def _shown(grid: Grid) -> str:
    return ", ".join(f"{r} px C={c} {values['total']:.4f}" for (r, c), values in grid.items())
