"""The run engine under distillation and fine-tuning: step loop, resume, signals, checkpoints.

It also logs, handles non-finite gradients, unreadable images and full disks, and saves the results in the end.
Everything random is a function of the seed and the step, everything else is in the checkpoint: a run that was killed
continues bit for bit, and several processes compute what one would with the whole batch. A subclass says what a step
is, what is validated, what a checkpoint holds and what is left in the end (see `distill` and `finetune.run`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from veca.data.index import DataError
from veca.errors import ArgumentError, VecaError
from veca.train.checkpoints import Checkpoint, TensorFiles, newest_checkpoint, remove_old_checkpoints, write_checkpoint
from veca.train.ema import Ema
from veca.train.logger import ProgressLine, RunLogger, peak_memory_gib
from veca.train.meter import TrainMeter
from veca.train.parallel import World, copy_into, gathered, sum_of, to_host
from veca.utils.files import atomic_path
from veca.utils.signals import Interrupted, deferred_signals

MAX_NONFINITE_STEPS = 3
"""Abort after this many consecutive steps without a finite gradient."""
STOP_CHECK_STEPS, STOP_CHECK_SECONDS = 10, 3.0
"""Several processes agree on stopping after this many steps or seconds, well within the 30 s that torchrun waits."""


Say = Callable[[str], None]
"""Shows a message to the user."""


class TrainingError(VecaError, ValueError):
    """Training cannot continue; the last good checkpoint stays."""


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

    loss_names: ClassVar[tuple[str, ...]] = ("total",)
    """Metrics that are averaged over the processes when they are logged."""
    data_errors: ClassVar[tuple[type[Exception], ...]] = (DataError,)
    """What `train_step` raises for unusable data, before anything has changed."""
    write_report: ClassVar[staticmethod[[Path], Path]]
    """Writes the report of a run's folder, whatever is there, and returns its path."""
    nonfinite_advice: ClassVar[str]
    """What to do about non-finite gradients."""
    save_with_validation: ClassVar[bool] = False
    """Write a checkpoint after each validation too, the one before the first step included."""
    stop_check_steps: ClassVar[int] = STOP_CHECK_STEPS
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
        self.checkpoint: Checkpoint | None = None
        if not restart:
            self.checkpoint = newest_checkpoint(folder / "checkpoints", self.notices.append)
            steps = gathered(self.checkpoint and self.checkpoint.step, world)
            if len(set(steps)) > 1:
                raise ArgumentError(f"processes find different checkpoints in {folder} ({steps}): they must share it")
        self.step = self.checkpoint.step if self.checkpoint else 0
        self.stop_signal, self.preparing = 0, False
        self._last_check, self._next_check = (self.step, time.monotonic()), self.step + 1

    def resume_counts(self, budgets: Iterable[int], resolutions: Iterable[int] = ()) -> None:
        """Start the meter and the counters, from the checkpoint where there is one; the EMA too."""
        facts: Mapping[str, Any] = self.checkpoint.facts if self.checkpoint else {}
        totals = {"images": facts.get("images", 0), "seconds": facts.get("seconds", 0.0)}
        # Speed is measured anew: it may be another machine. Totals continue.
        self.meter = TrainMeter(budgets, resolutions, **totals)
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
    def settings(self) -> dict[str, Any]:
        """All settings of the run, as plain data."""

    @abstractmethod
    def write_settings(self) -> None:
        """Write the settings to the folder, and with `restart` remove what the old run left."""

    @abstractmethod
    def batches(self) -> AbstractContextManager[Any]:
        """Context manager of the batches from `step` on."""

    @abstractmethod
    def train_step(self, batches: Iterator[Any]) -> None:
        """One optimizer step: updates the model, `ema`, `meter`, `skipped_steps` and `step`."""

    @abstractmethod
    def extra_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """The learning rate of the last step and further columns of metrics.csv, beside `values`."""

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
        """Save the model and the results of a run whose steps are done."""

    @abstractmethod
    def memory_advice(self) -> str:
        """For an error when the device is out of memory: what needed it, and what to set."""

    def prepare(self) -> None:  # noqa: B027  # most runs need none
        """Work before the first step that has its own progress bars. Signals end it at once."""

    def is_finished(self) -> bool:
        """Whether there is nothing left to do, not even the final save."""
        return False

    def log_unreadable(self) -> None:  # noqa: B027
        """Log images that could not be used since the last call, in all processes."""

    def checkpoint_metadata(self) -> dict[str, dict[str, str]]:
        """Metadata of the files of a checkpoint."""
        return {}

    def save_weights_only(self, tensors: TensorFiles) -> str:
        """Try to save at least the weights when a checkpoint cannot be written; says where they are."""
        return f"the best weights so far are in {self.folder}"

    # The run

    def run(self) -> Path | None:
        """Train to the end; the path of the report, in the first process."""
        if self.is_finished():  # nothing is loaded or written again but the report
            self.say(f"{self.folder} is done; --overwrite begins anew in it.")
            return self._report()
        if self.world.first:
            self.write_settings()
        try:
            with self._make_logger() as self.log:
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
        line: AbstractContextManager[ProgressLine | None] = contextlib.nullcontext()
        if self.world.first:
            line = ProgressLine(self.steps, start=self.step)
        with line as self.progress, deferred_signals(self._on_signal):
            # With nothing saved yet, a signal ends the run at once; with a checkpoint of step 0 it waits for a step.
            self.preparing = not self.save_with_validation
            for notice in self.notices:
                self.event(notice)
            if self.step >= self.steps:
                self.say(f"All {self.step:,} steps are done: the model and the report are written again.")
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
        except self.data_errors:
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
        # After the last step the run ends anyway: a signal then must not keep it from its results.
        stop = self._should_stop() and not last
        due = self.step % self.save_every == 0 or (validated and self.save_with_validation)
        if last or stop or due:
            self._save(required=last or stop)
        if stop:
            self.event(f"stopped: by {signal.Signals(self.stop_signal).name}, at step {self.step:,}")
            gathered(None, self.world)  # torchrun ends all when one leaves: not before the first has saved
            raise Interrupted(self.stop_signal)

    def _on_signal(self, number: int) -> None:
        first, self.stop_signal = not self.stop_signal, number
        if self.preparing and first:  # decoding and compiling take minutes, and there is nothing to save yet
            raise Interrupted(number)

    def _should_stop(self) -> bool:
        """Whether any process has received a signal; asked only now and then, since it synchronises all."""
        if self.world.size == 1:
            return bool(self.stop_signal)
        if self.step < self._next_check:
            return False
        # Between two checks processes run ahead freely; the slowest sets how many steps fit into STOP_CHECK_SECONDS.
        step, then = self._last_check
        self._last_check = self.step, time.monotonic()
        pace = (self._last_check[1] - then) / (self.step - step)
        signals, paces = zip(*gathered((self.stop_signal, pace), self.world), strict=True)
        self.stop_signal = max(signals)
        steps = min(self.stop_check_steps, int(STOP_CHECK_SECONDS / max(paces)))
        self._next_check = self.step + max(1, steps)
        return bool(self.stop_signal)

    # Logging

    def _make_logger(self) -> AbstractContextManager[RunLogger | None]:
        if not self.world.first:
            return contextlib.nullcontext()
        first_step = self.step + 1 if self.resumed else 0
        return RunLogger(self.folder, wandb=self.wandb, resume_step=first_step, config=self.settings())

    def event(self, text: str) -> None:
        """Add a line to events.txt and show it, in the first process."""
        if self.log and self.progress:
            self.log.event(self.step, text)
            self.progress.say(text)

    def _log_metrics(self) -> None:
        values = self.meter.values()
        sums = sum_of([values[name] for name in self.loss_names], self.world)
        values |= {name: total / self.world.size for name, total in zip(self.loss_names, sums, strict=True)}
        values |= {"memory_gib": peak_memory_gib(self.device), **self.extra_metrics(values)}
        self.log_unreadable()
        if values["nonfinite"]:
            self.event(f"skipped: {values['nonfinite']:.0f} steps without a finite loss or gradient")
        if self.log and self.progress:
            self.log.train(self.step, values)
            self.progress.update(self.step, values)

    # Checkpoints

    def totals(self) -> dict[str, float]:
        """Images, seconds of training and skipped steps so far."""
        skipped, _ = self.skipped_steps.read()
        return {"images": self.meter.images, "seconds": self.meter.seconds, "skipped": skipped}

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
            folder = self.folder / "checkpoints"
            try:
                write_checkpoint(folder, self.step, facts, tensors, self.checkpoint_metadata())
            except OSError as error:
                reason = error.strerror or error
                if required:
                    what = f"the checkpoint of step {self.step:,} cannot be written ({reason})"
                    way_out = f"Make room in {self.folder} and run it again: it continues from the last checkpoint"
                    raise TrainingError(f"{what}; {self.save_weights_only(tensors)}. {way_out}") from error
                self.event(f"unsaved: checkpoint at step {self.step:,}: {reason}")
            else:
                remove_old_checkpoints(folder, self.keep, self.step)
                self.event(f"checkpoint: step {self.step:,}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and folders of an earlier run."""
        for name in names:
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        with atomic_path(self.folder / name) as part:
            part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
