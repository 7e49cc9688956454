"""The run engine under distillation and fine-tuning: step loop, resume, signals, checkpoints.

It also logs, handles non-finite gradients, unreadable images and full disks, and saves the results in the end.
Everything random is a function of the seed and the step, everything else is in the checkpoint: a run that was killed
continues bit for bit, and several processes compute what one would with the whole batch. A subclass says what a step
is, what is validated, what a checkpoint holds and what is left in the end (see `distill` and `finetune.run`).
"""

import contextlib
import hashlib
import json
import math
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from veca.errors import ArgumentError, VecaError
from veca.train.checkpoints import TensorFiles, newest_checkpoint, remove_old_checkpoints, write_checkpoint
from veca.train.logger import ProgressLine, RunLogger, peak_memory_gib
from veca.train.optimizers import Ema
from veca.train.parallel import World, all_reduced, copy_into, gathered, sum_of, to_host
from veca.utils.files import atomic_path
from veca.utils.signals import Interrupted, deferred_signals

MAX_NONFINITE_STEPS = 3
"""Abort after this many consecutive steps without a finite gradient."""
Key = TypeVar("Key")
Say = Callable[[str], None]
"""Shows a message to the user."""


class TrainingError(VecaError, ValueError):
    """Training cannot continue; the last good checkpoint stays."""


def learning_rate(step: int, total: int, warmup: int, peak: float, low: float) -> float:
    """Linear warm-up from `low` to `peak` in `warmup` steps, then a half cosine down to `low` at step `total`.

    >>> [learning_rate(step, total=8, warmup=4, peak=5.0, low=1.0) for step in (0, 2, 4, 6, 8)]
    [1.0, 3.0, 5.0, 3.0, 1.0]
    """
    progress = (step - warmup) / max(1, total - warmup)
    share = step / warmup if step < warmup else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * share


def draw(odds: Mapping[Key, float], stream: str, seed: int, step: int) -> Key:
    """One of the keys, with probability proportional to its odds. Streams with different names are independent.

    >>> draw({8: 1, 16: 1, 64: 0}, "budget", seed=0, step=7) in (8, 16)
    True
    """
    remaining = step_seed(stream, seed, step) / 2**64 * sum(odds.values())
    for key, odd in odds.items():
        remaining -= odd
        if remaining < 0:
            return key
    return [key for key, odd in odds.items() if odd][-1]  # rounding: the last possible one


def step_seed(stream: str, seed: int, step: int) -> int:
    """A seed of 64 bits for one step of one stream."""
    return int.from_bytes(hashlib.sha256(f"{stream} {seed} {step}".encode()).digest()[:8])


class TrainMeter:
    """Means of the losses and images per second.

    `update` only queues work on the device; `values` is the one place that waits for it. The speed leaves out `pause`d
    time and the first step of each number of images, budget, resolution and width: those may compile.
    `images` and `seconds` are the totals of a resumed run so far.
    """

    def __init__(
        self,
        budgets: Iterable[int] = (),
        resolutions: Iterable[int] = (),
        widths: Iterable[float] = (),
        images: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.images, self.seconds, self.rate = images, seconds, math.nan
        choices: dict[str, Iterable[float]] = {"budget": budgets, "resolution": resolutions, "width": widths}
        self._counts = {name: dict.fromkeys(keys, 0) for name, keys in choices.items()}
        self.names: list[str] = []
        """Of the losses."""
        self._sums: Tensor | None = None
        """Sums of the losses over steps with finite ones, and the number of these steps, on the device."""
        self._steps, self._seen = 0, set[tuple[float | None, ...]]()
        self._timed = [0, 0.0]  # images and seconds that count for the speed, since the last `values`
        self._last_tick, self._counts_for_speed = perf_counter(), False

    @torch.no_grad()
    def update(
        self,
        losses: Mapping[str, Tensor],
        images: int,
        budget: int | None = None,
        resolution: int | None = None,
        width: float | None = None,
    ) -> None:
        """Add one optimizer step: its losses, scalars on the device, its number of images and what was drawn for it."""
        values = torch.stack([value.float() for value in losses.values()])
        # A non-finite step must not spoil the mean of the others; it is counted instead.
        finite = values.isfinite().all()
        row = torch.cat([torch.where(finite, values, 0.0), finite.float()[None]])
        self._sums = row if self._sums is None else self._sums + row
        self.names = list(losses)
        # Shapes that occur for the first time may compile, which is not training speed.
        kind = (images, budget, resolution, width)
        self._counts_for_speed = kind in self._seen
        self._tick()
        self._timed[0] += images * self._counts_for_speed
        self._seen.add(kind)
        self.images += images
        self._steps += 1
        for counts, drawn in zip(self._counts.values(), kind[1:], strict=True):
            if drawn is not None:
                counts[drawn] = counts.get(drawn, 0) + 1

    def _tick(self) -> None:
        """Count the time since the last tick as training, and for the speed if its step does."""
        now = perf_counter()
        self.seconds += now - self._last_tick
        self._timed[1] += (now - self._last_tick) * self._counts_for_speed
        self._last_tick = now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of the block, as validation. Call `values` first, which waits for the device."""
        self._tick()
        try:
            yield
        finally:
            self._last_tick = perf_counter()

    def values(self) -> dict[str, float]:
        """What to log of the steps since the last call; this waits for the device.

        Means of the losses over the steps with finite ones, the number of the others (`nonfinite`), how often each
        budget, resolution and width was drawn (`budget_8`, `resolution_256`, `width_0.25`, …), `images` and `seconds`
        of training in all, and `images_per_s` (the last one known, nan until there is one).
        """
        *sums, count = self._sums.tolist() if self._sums is not None else [0.0]
        self._tick()
        values = {name: total / count if count else math.nan for name, total in zip(self.names, sums, strict=False)}
        if self._timed[0] and self._timed[1] > 0:
            self.rate = self._timed[0] / self._timed[1]
        values |= {"nonfinite": self._steps - count, "images": self.images, "seconds": self.seconds}
        values["images_per_s"] = self.rate
        for name, counts in self._counts.items():
            values |= {f"{name}_{drawn:g}": times for drawn, times in counts.items()}
            counts.update(dict.fromkeys(counts, 0))
        self._sums, self._steps, self._timed = None, 0, [0, 0.0]
        return values

    def state(self) -> dict[str, Any]:
        """What was added since the last `values`, as plain data for a checkpoint; this waits for the device too."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"sums": sums, "steps": self._steps, **{f"{name}s": counts for name, counts in self._counts.items()}}

    def restore(self, states: Sequence[Mapping[str, Any]], rank: int, size: int, device: torch.device) -> None:
        """Continue from the `state` of each process; if their number has changed, each continues from the mean."""
        own = states[rank if len(states) == size else 0]
        self._steps = own["steps"]
        if own["sums"] is not None:
            sums = [state["sums"] for state in states] if len(states) != size else [own["sums"]]
            self._sums = torch.tensor(sums, dtype=torch.float32, device=device).mean(0)
        for name, counts in self._counts.items():
            drawn = own.get(f"{name}s", {})  # earlier versions had no widths
            counts.update({json.loads(text): times for text, times in drawn.items()})  # JSON makes keys text


class SkippedSteps:
    """Counts skipped steps on the device; the host reads the counts without waiting, and so a little late."""

    def __init__(self, device: torch.device, total: int = 0) -> None:
        counts = [0, total, 0]  # consecutive, total, most consecutive
        self._counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self._on_host = torch.tensor(counts, dtype=torch.int32, pin_memory=device.type == "cuda")

    def update(self, skip: Tensor) -> None:
        """`skip`, a scalar on the device, is 1 if the step was skipped."""
        consecutive, total, most = self._counts.unbind()
        consecutive = (consecutive + 1) * skip.int()
        self._counts = torch.stack([consecutive, total + skip.int(), torch.maximum(most, consecutive)])
        self._on_host.copy_(self._counts, non_blocking=True)

    def read(self) -> tuple[int, int]:
        """Skipped steps in all, and most in a row."""
        _, total, most = self._on_host.tolist()
        return total, most


class RunEngine(ABC):
    """One process of a run. A subclass sets the attributes below in its constructor and calls `resume_counts`."""

    model: nn.Module
    """The module whose weights are averaged, saved and validated."""
    ema: Ema
    steps: int
    """Length of the run."""
    log_every: int
    save_every: int
    keep: int
    """Number of checkpoints that are kept."""
    validate_every: int | None
    """None: there is nothing to validate on."""
    rate: float
    """Learning rate of the last step."""

    result_file: ClassVar[str]
    write_report: "ClassVar[staticmethod[[Path], Path]]"
    """Writes the report of a run's folder, whatever is there, and returns its path."""
    nonfinite_advice: ClassVar[str]
    """What to do about non-finite gradients."""
    save_with_validation: ClassVar[bool] = False
    """Write a checkpoint after each validation too, the one before the first step included."""
    wandb: str | None = None
    """A project of Weights & Biases to report to."""
    sharded = False
    """Whether all processes must take part in gathering the tensors of a checkpoint."""

    def __init__(self, folder: Path, world: World, restart: bool, say: Say) -> None:
        self.folder, self.world, self.device, self.restart = folder, world, world.device, restart
        self.say = say if world.first else lambda text: None
        self.notices: list[str] = []
        """Events from before there is a log."""
        self.log: RunLogger | None = None
        self.progress: ProgressLine | None = None
        self.checkpoint = None if restart else newest_checkpoint(folder / "checkpoints", self.notices.append)
        self.step = self.checkpoint.step if self.checkpoint else 0
        if len(set(steps := gathered(self.step, world))) > 1:
            raise ArgumentError(f"processes find different checkpoints in {folder} ({steps}): they must share it")
        self.stop_signal, self.preparing = 0, False

    def resume_counts(
        self, budgets: Iterable[int], resolutions: Iterable[int] = (), widths: Iterable[float] = ()
    ) -> None:
        """Start the meter and the counters, from the checkpoint where there is one; the EMA too."""
        facts: Mapping[str, Any] = self.checkpoint.facts if self.checkpoint else {}
        # Speed is measured anew: it may be another machine. Totals continue.
        self.meter = TrainMeter(budgets, resolutions, widths, facts.get("images", 0), facts.get("seconds", 0.0))
        self.skipped_steps = SkippedSteps(self.device, facts.get("skipped", 0))
        if self.checkpoint:
            states = facts["under_way"]
            states = states if isinstance(states, list) else [states]  # a single one in older fine-tuning checkpoints
            self.meter.restore(states, self.world.rank, self.world.size, self.device)
            for name, average in self.ema.named():
                copy_into(average, self.checkpoint.tensors["ema"][name])
            self.notices.append(f"resumed: from step {self.step:,}")
        self.resumed = self.checkpoint is not None
        self.checkpoint = None  # its tensors have been copied

    # What a kind of run defines

    @abstractmethod
    def write_settings(self) -> dict[str, Any]:
        """Write all settings to the folder and return them; with `restart` remove what the old run left."""

    @abstractmethod
    def batches(self) -> AbstractContextManager[Any]:
        """Context manager of the batches from `step` on."""

    @abstractmethod
    def train_step(self, batches: Any) -> None:
        """One optimizer step: updates the model, `ema`, `meter`, `skipped_steps`, `rate` and `step`.

        A VecaError comes from the data, before anything has changed.
        """

    @abstractmethod
    def validate(self) -> None:
        """Validate, log the result and save the weights if they are the best so far."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, dict[str, Tensor]]: ...

    @abstractmethod
    def checkpoint_facts(self) -> dict[str, Any]:
        """Plain data to resume from, beside what the engine itself adds."""

    @abstractmethod
    def finish(self) -> None:
        """Save the model and the results of a run whose steps are done, `result_file` last."""

    @abstractmethod
    def memory_advice(self) -> str:
        """For an error when the device is out of memory: what needed it, and what to set."""

    # What it may override

    def prepare(self) -> None:  # noqa: B027
        """Work before the first step that has its own progress bars. Signals end it at once."""

    def log_unreadable(self) -> None:  # noqa: B027
        """Log images that could not be used since the last call, in all processes."""

    def extra_metrics(self, images_per_s: float) -> dict[str, float]:
        """Further columns of metrics.csv."""
        return {}

    def save_weights_only(self, tensors: TensorFiles) -> str:
        """Try to save at least the weights when a checkpoint cannot be written; says where they are."""
        return f"the best weights so far are in {self.folder}"

    def model_metadata(self) -> dict[str, str] | None:
        """Metadata of the file `model` of a checkpoint."""
        return None

    # The run

    def run(self) -> Path | None:
        """Train to the end; the path of the report, in the first process."""
        if self.step >= self.steps and (self.folder / self.result_file).is_file():
            self.say(f"{self.folder} is done; --overwrite begins anew in it.")
            return self._report()
        log: AbstractContextManager[RunLogger | None] = contextlib.nullcontext()
        if self.world.first:
            first_step = self.step + 1 if self.resumed else 0
            log = RunLogger(self.folder, wandb=self.wandb, resume_step=first_step, config=self.write_settings())
        try:
            with log as self.log:
                self.prepare()
                self._train()
                self.finish()
        except BaseException as error:
            with contextlib.suppress(Exception):  # a report of what there is, where that can still be written
                self._report()
            if isinstance(error, torch.OutOfMemoryError):
                advice = f"no memory on {self.device} for {self.memory_advice()}. Checkpoints stay"
                raise TrainingError(f"{advice}. PyTorch said: {error}") from error
            raise
        return self._report()

    def _report(self) -> Path | None:
        return self.write_report(self.folder) if self.world.first else None

    def _train(self) -> None:
        line = ProgressLine(self.steps, start=self.step) if self.world.first else contextlib.nullcontext()
        with line as self.progress, deferred_signals(self._on_signal):
            # With nothing saved yet, a signal ends the run at once; with a checkpoint of step 0 it waits for a step.
            self.preparing = not self.save_with_validation
            for notice in self.notices:
                self.event(notice)
            if self.step >= self.steps:
                return
            # The baseline: what training has to improve on. A resumed run has it in its log already.
            if not self.resumed and self.validate_every is not None:
                with self.meter.pause():
                    self.validate()
                if self.save_with_validation:
                    self._save(required=False)
            with self.batches() as batches:
                if self.stop_signal and self.preparing:  # it came while the loader was starting, which defers signals
                    raise Interrupted(self.stop_signal)
                iterator = iter(batches)
                while self.step < self.steps:
                    self._advance(iterator)

    def _advance(self, batches: Iterator[Any]) -> None:
        """One step, and whatever is due after it."""
        try:
            self.train_step(batches)
        except VecaError:
            # Nothing has changed yet, so this step can be repeated. With several processes, the others do not know.
            if self.world.size == 1:
                self._save(required=False)
            raise
        self.preparing = False
        last = self.step == self.steps
        if last or self.step % self.log_every == 0:
            self._log_metrics()
        validated = self.validate_every is not None and (last or self.step % self.validate_every == 0)
        if validated:
            with self.meter.pause():
                self.validate()
        skipped, consecutive = self.skipped_steps.read()
        if consecutive >= MAX_NONFINITE_STEPS:
            what = f"{consecutive} steps in a row had no finite gradient, the last before step {self.step:,}"
            raise TrainingError(f"{what} ({skipped} in all). {self.nonfinite_advice}")
        # All processes stop together. Only the hosts wait for each other here, not for their devices.
        number = int(all_reduced(torch.tensor(self.stop_signal), self.world, torch.distributed.ReduceOp.MAX))
        # After the last step the run ends anyway: a signal then must not keep it from its results.
        stop = bool(number) and not last
        due = self.step % self.save_every == 0 or (validated and self.save_with_validation)
        if last or stop or due:
            self._save(required=last or stop)
        if stop:
            self.event(f"stopped: by {signal.Signals(number).name}, at step {self.step:,}")
            gathered(None, self.world)  # torchrun ends all when one leaves: not before the first has saved
            raise Interrupted(number)

    def _on_signal(self, number: int) -> None:
        first, self.stop_signal = not self.stop_signal, number
        if self.preparing and first:  # decoding and compiling take minutes, and there is nothing to save yet
            raise Interrupted(number)

    # Logging

    def event(self, text: str) -> None:
        """Add a line to events.txt and show it, in the first process."""
        if self.log and self.progress:
            self.log.event(self.step, text)
            self.progress.say(text)

    def _log_metrics(self) -> None:
        values, names = self.meter.values(), self.meter.names
        sums = sum_of([values[name] for name in names], self.world)
        values |= {name: total / self.world.size for name, total in zip(names, sums, strict=True)}
        values |= {"memory_gib": peak_memory_gib(self.device), "learning_rate": self.rate}
        values |= self.extra_metrics(values["images_per_s"])
        self.log_unreadable()
        if values["nonfinite"]:
            self.event(f"skipped: {values['nonfinite']:.0f} steps without a finite loss or gradient")
        if self.log and self.progress:
            self.log.train(self.step, values)
            self.progress.update(self.step, values)

    # Checkpoints

    def totals(self) -> dict[str, float]:
        """Images, seconds of training and skipped steps so far."""
        return {"images": self.meter.images, "seconds": self.meter.seconds, "skipped": self.skipped_steps.read()[0]}

    def _save(self, required: bool) -> None:
        """Write a checkpoint. On a full disk the one before it stays and the run continues, unless it is `required`."""
        with self.meter.pause():
            self.log_unreadable()
            states = gathered(self.meter.state(), self.world)
            if not (self.world.first or self.sharded):
                return
            # Gathering sharded tensors takes all processes; writing them is for the first alone.
            tensors = self.checkpoint_tensors()
            if self.ema.decay:
                tensors["ema"] = {name: to_host(average) for name, average in self.ema.named()}
            if not self.world.first:
                return
            if self.log:  # a run resumed from here does not write these rows again
                with contextlib.suppress(OSError):  # the logger warns; the weights are worth more than its rows
                    self.log.flush()
            facts = {**self.checkpoint_facts(), **self.totals(), "under_way": states}
            try:
                folder, metadata = self.folder / "checkpoints", self.model_metadata()
                remove_old_checkpoints(write_checkpoint(folder, self.step, facts, tensors, metadata), self.keep)
            except OSError as error:
                reason = error.strerror or error
                if required:
                    way_out = f"Make room in {self.folder} and run it again: it continues from the last checkpoint"
                    what = f"the checkpoint of step {self.step:,} cannot be written ({reason})"
                    raise TrainingError(f"{what}; {self.save_weights_only(tensors)}. {way_out}") from error
                self.event(f"unsaved: checkpoint at step {self.step:,}: {reason}")
            else:
                self.event(f"checkpoint: step {self.step:,}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and folders of an earlier run."""
        for name in names:
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        with atomic_path(self.folder / name) as part:
            part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
