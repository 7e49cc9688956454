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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from veca.errors import ArgumentError, VecaError
from veca.train.checkpoints import TensorFiles, newest_checkpoint, remove_old_checkpoints, write_checkpoint
from veca.train.logger import ProgressLine, RunLogger, peak_memory_gib
from veca.train.meter import SkippedSteps, TrainMeter
from veca.train.optimizers import Ema
from veca.train.parallel import World, all_reduced, copy_into, gathered, sum_of, to_host
from veca.utils.files import atomic_path
from veca.utils.signals import Interrupted, deferred_signals

MAX_NONFINITE_STEPS = 3
"""Abort after this many consecutive steps without a finite gradient."""
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


def draw(odds: Mapping[int, float], stream: str, seed: int, step: int) -> int:
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
    """Written by `finish`, last: a run that has it is done."""
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

    def resume_counts(self, budgets: Iterable[int], resolutions: Iterable[int] = ()) -> None:
        """Start the meter and the counters, from the checkpoint where there is one; the EMA too."""
        facts: Mapping[str, Any] = self.checkpoint.facts if self.checkpoint else {}
        # Speed is measured anew: it may be another machine. Totals continue.
        self.meter = TrainMeter(budgets, resolutions, facts.get("images", 0), facts.get("seconds", 0.0))
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

    def prepare(self) -> None:  # noqa: B027  # most runs need none
        """Work before the first step that has its own progress bars. Signals end it at once."""

    @abstractmethod
    def batches(self) -> AbstractContextManager[Any]:
        """Context manager of the batches from `step` on."""

    @abstractmethod
    def train_step(self, batches: Iterator[Any]) -> None:
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

    def model_metadata(self) -> dict[str, str] | None:  # noqa: B027
        """Metadata of the file `model` of a checkpoint."""

    @abstractmethod
    def finish(self) -> None:
        """Save the model and the results of a run whose steps are done."""

    @abstractmethod
    def memory_advice(self) -> str:
        """For an error when the device is out of memory: what needed it, and what to set."""

    def log_unreadable(self) -> None:  # noqa: B027
        """Log images that could not be used since the last call, in all processes."""

    def save_weights_only(self, tensors: TensorFiles) -> str:
        """Try to save at least the weights when a checkpoint cannot be written; says where they are."""
        return f"the best weights so far are in {self.folder}"

    # The run

    def run(self) -> Path | None:
        """Train to the end; the path of the report, in the first process."""
        if self.step >= self.steps and (self.folder / self.result_file).is_file():
            self.say(f"{self.folder} is done; --overwrite begins anew in it.")
            return self._report()
        log: AbstractContextManager[RunLogger | None] = contextlib.nullcontext()
        if self.world.first:
            self.write_settings()
            first_step = self.step + 1 if self.resumed else 0
            log = RunLogger(self.folder, wandb=self.wandb, resume_step=first_step, config=self.settings())
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
            folder = self.folder / "checkpoints"
            try:
                write_checkpoint(folder, self.step, facts, tensors, self.model_metadata())
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
