"""A fine-tune as a whole: the head first, on frozen features, then all of the network, a budget per step.

What is drawn is a function of the seed and the step, what is kept is in the checkpoint: a run that was killed goes on
as if it had not been, and several processes do together what one would. The folder has the best weights so far
(`model.safetensors`, `config.json`), the tables of a run, `checkpoints/`, and in the end `result.json` and
`report.html`.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca.checkpoint import load_or_random, weights_hash
from veca.checkpoint.pretrained import find_shipped
from veca.config import VecaConfig
from veca.data.augment import COLOURS, OPS, Augmentation, augment_batch, choose
from veca.data.datasets import DatasetError, ProbeData, limit_splits, load_dataset
from veca.data.datasets.base import evenly_spaced
from veca.data.datasets.batches import LabelledBatch, UnreadableImageError, join_some
from veca.data.views import seeded
from veca.errors import ArgumentError
from veca.heads.metrics import Confusion, percent_by_class
from veca.images import normalize
from veca.report.gallery import save_picture
from veca.train.checkpoints import forget_old, newest_checkpoint, write_checkpoint
from veca.train.finetune.groups import parameter_groups
from veca.train.finetune.report import is_tuned, write_report
from veca.train.finetune.settings import ClassifySettings, Settings, check_same
from veca.train.finetune.tasks import frozen_copy, make_task
from veca.train.log import LiveLine, Meter, RunLog, memory_gib
from veca.train.parallel import (
    World,
    all_rows,
    broadcast,
    first_alone,
    gathered,
    processes,
    replicate,
    run_folder,
    sum_of,
    summed,
    whole,
)
from veca.train.schedule import draw, learning_rate, seed_of
from veca.train.state import Ema
from veca.train.stop import Interrupted, signals
from veca.utils.device import choose_device, describe_versions
from veca.utils.files import atomic_path

WARMUP, CLIP = 0.1, 1.0
"""The share of the steps in which the rate rises, before it falls along a half cosine; the longest gradient."""
PROBED = 0.1
"""The share of the rate for a head that starts from a probe: it is good already, and what it reads is wide."""
LOG_EVERY, SAVE_EVERY, KEEP = 10, 500, 2
"""Steps between rows of the log, and between checkpoints that no validation makes; how many of these are kept."""
MOST_BAD = 3
"""So many steps in a row without a finite gradient are no accident."""
GALLERY, MOST_CONFUSIONS, MATRIX = 12, 30, 40
"""Pictures in the report; pairs of classes taken for each other; up to so many classes have a whole matrix."""
MADE = (
    "model.safetensors", "config.json", "preprocessor_config.json", "head.safetensors", "result.json", "report.html"
)  # fmt: skip
"""Files of a model that was scored, and of a run that came to its end; tables begin anew by themselves."""
Say = Callable[[str], None]


def finetune(
    model: str,
    data: str,
    folder: Path,
    settings: Settings,
    *,
    root: Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    restart: bool = False,
    say: Say = print,
) -> Path | None:
    """Fine-tune `model` on `data` (as `load_dataset` takes it) and leave everything in `folder`.

    The path of the report comes back, in the first process.
    """
    with processes(device) as world:
        rule = f"a multiple of {world.size}, the number of processes that share it out"
        settings.require("batch", settings.batch % world.size == 0, rule)
        if world.size == 1:  # alone it runs on any kind of device
            world = world._replace(device=choose_device(device))
        with warnings.catch_warnings():
            if not world.first:  # the first process speaks for all
                warnings.simplefilter("ignore")
            sets = limit_splits(load_dataset(data, root, settings.task), limit)
        with run_folder(folder := Path(folder), world):
            return Tuner(model, sets, folder, settings, world, restart=restart, say=say).run()


class Tuner:
    """One process of a run."""

    def __init__(
        self,
        model: str,
        data: ProbeData,
        folder: Path,
        settings: Settings,
        world: World,
        *,
        restart: bool = False,
        say: Say = print,
    ) -> None:
        self.folder, self.settings, self.data, self.model, self.world = folder, settings, data, model, world
        self.say = say = say if world.first else lambda text: None
        _check_data(data, settings.task)
        _check_folder(folder, model)
        for problem in data.problems:
            say(f"{data.name}: {problem}. The score is not the benchmark's.")
        self.device = world.device
        self.precision = settings.precision or ("bfloat16" if self.device.type == "cuda" else "float32")
        backbone = load_or_random(model)
        self.budgets = settings.budgets(backbone.config)
        if backbone.provenance.get("weights") == "random":
            say(f"The weights are random: none ship for {model} yet. Name trained ones, or expect little.")
        self.origin = {"sha256": weights_hash(backbone), "provenance": backbone.provenance}
        # What is not trained here is not to be called trained.
        backbone.config = VecaConfig.from_dict({**backbone.config.to_dict(), "budgets": list(self.budgets)})
        self.task = make_task(backbone, data, settings)
        self.backbone = backbone
        self.network = self.task.network.to(self.device).train()
        head = PROBED if settings.head == "probe" else 1.0
        groups = parameter_groups(self.network, backbone.config.depth, settings.layer_decay, settings.decay, head)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate)
        self.ema = Ema(self.network, settings.ema)
        an_epoch = len(data.splits["train"]) / settings.batch
        self.steps = max(1, round(settings.epochs * an_epoch))
        self.every = settings.every or max(1, min(round(an_epoch), math.ceil(self.steps / 4)))
        self.step, self.stop, self.bad, self.resumed = 0, 0, 0, False
        self.best: list[float] = []
        """Score and negative loss on val of the best so far, and its step."""
        self.before: dict[int, dict[str, float]] = {}
        self.meter = Meter(self.budgets)
        self.notices: list[str] = []
        if restart and world.first:
            for name in ("checkpoints", "features", "gallery"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in MADE if is_tuned(folder) else ():  # what others put there is not an old run's
                (folder / name).unlink(missing_ok=True)
        if not restart:
            self._resume()
        self.learner = replicate(self.network, world, "ddp")

    # The run

    def run(self) -> Path | None:
        if self.step == self.steps and (self.folder / "result.json").is_file():
            self.say(f"{self.folder} is done; --restart begins anew in it.")
            return write_report(self.folder) if self.world.first else None
        with self._logging() as log:
            if not self.resumed:
                self._start_head()
            with self._shown() as live, signals(self._note):
                for notice in self.notices:
                    self._event(log, live, notice)
                if not self.resumed:
                    self._validate(log, live)
                    self._save(log)
                try:
                    for batch in self.task.training(self.step, self.steps, self.world.rank, self.world.size):
                        self._advance(batch, log, live)
                except (RuntimeError, ValueError):
                    if self.stop:  # a signal to all processes ends those that decode, when they have just been started
                        raise Interrupted(self.stop) from None
                    raise
            return self._finish(log)

    def _note(self, number: int) -> None:
        self.stop = number

    @contextlib.contextmanager
    def _logging(self) -> Iterator[RunLog | None]:
        if not self.world.first:
            yield None
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.folder / "finetune.json") as part:
            part.write_text(json.dumps(self._asked(), indent=1) + "\n", encoding="utf-8")
        first = self.step + 1 if self.resumed else 0
        with RunLog(self.folder, resume_step=first, config=self._asked()) as log:
            yield log

    def _shown(self) -> LiveLine | contextlib.nullcontext[None]:
        return LiveLine(self.steps, start=self.step) if self.world.first else contextlib.nullcontext()

    def _event(self, log: RunLog | None, live: LiveLine | None, text: str) -> None:
        if log and live:
            log.event(self.step, text)
            live.say(text)

    def _start_head(self) -> None:
        if self.settings.head == "new":
            return
        place = self.folder / "features"
        cores = max(self.budgets)
        with first_alone(self.world):
            if self.world.first:
                self.task.probe(frozen_copy(self.backbone, self.model, self.device, self.precision), cores, place)
                shutil.rmtree(place, ignore_errors=True)
        broadcast(list(self.network.state_dict().values()), self.world)
        self.ema = Ema(self.network, self.settings.ema)
        scored = self.score(self.data.report, self._some())
        self.before = {cores: self.task.metrics(meter) for cores, (meter, _) in scored.items()}

    def _advance(self, batch: LabelledBatch, log: RunLog | None, live: LiveLine | None) -> None:
        """A step, and whatever is due after it."""
        self._learn(batch)
        last, stop = self.step == self.steps, max(gathered(self.stop, self.world))
        if last or self.step % LOG_EVERY == 0:
            values = self.meter.values()
            values |= {"learning_rate": self._rate(self.step - 1), "memory_gib": memory_gib(self.device)}
            if log and live:
                log.train(self.step, values)
                live.update(self.step, values)
        due = last or self.step % self.every == 0
        if due:
            self._validate(log, live)
        if due or stop or self.step % SAVE_EVERY == 0:
            with self.meter.pause():
                self._save(log)
        if stop and not last:
            self._event(log, live, f"stopped: by {signal.Signals(stop).name}, at step {self.step:,}")
            gathered(None, self.world)  # torchrun ends the others when one leaves: not before all is saved
            raise Interrupted(stop)

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.steps, round(WARMUP * self.steps), self.settings.rate, 0.0)

    def _learn(self, batch: LabelledBatch) -> None:
        """A step of all processes. The loss is a mean over what counts in the batch of all, pictures or pixels: the
        mean over the own share has that share's weight in it.
        """
        settings, step, world = self.settings, self.step, self.world
        own = len(batch.labels), int((batch.labels != self.task.ignore).sum())
        counts, valid = zip(*gathered(own, world), strict=True)
        if not sum(counts):
            raise UnreadableImageError(f"a whole batch of {self.data.name} train cannot be read, at step {step:,}")
        place = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        budget = draw(self.budgets, "budget", settings.seed, step)
        chance = seeded(seed_of("augment", settings.seed, step))
        pixels = batch.pixels.to(self.device, non_blocking=True)
        images = normalize(self._augmented(pixels, chance, sum(counts), place))
        labels = batch.labels.to(self.device, non_blocking=True)
        parts = [(1.0, labels)]
        if mixed := settings.mixup if isinstance(settings, ClassifySettings) else 0.0:
            share = chance.betavariate(mixed, mixed)
            others, theirs = (all_rows(rows, counts, world).flip(0)[place] for rows in (images, labels))
            images, parts = share * images + (1 - share) * others, [(share, labels), (1 - share, theirs)]
        torch.manual_seed(seed_of("model", settings.seed, step))
        with self._autocast():
            scores = self.learner(_not_empty(images), budget, labels.shape[1:])
        loss = sum(part * self.task.loss(scores, _not_empty(each)) for part, each in parts)
        loss = loss * (world.size * valid[world.rank] / max(1, sum(valid)))  # DDP takes the mean of the gradients
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        fine = bool(norm.isfinite())
        if fine:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(step) * group["scale"]
            self.optimizer.step()
            self.ema.update(torch.zeros((), device=self.device))
        self.optimizer.zero_grad()
        self.bad = 0 if fine else self.bad + 1
        if self.bad == MOST_BAD:
            raise ArgumentError(
                f"{MOST_BAD} steps in a row had no finite gradient, the last at step {step:,}: lower --rate, or take "
                "--set precision=float32, in another --out"
            )
        total = summed(loss.detach() / world.size, world)
        self.meter.update({"total": total, "gradient_norm": norm}, sum(counts), budget, settings.size)
        self.step += 1

    def _augmented(self, pixels: Tensor, chance: Any, count: int, place: slice) -> Tensor:
        """`pixels` are those at `place` in a batch of `count`; what is drawn for a picture follows from its place."""
        if self.settings.augment == "flip":  # crops and flips are done where pictures are decoded
            return pixels
        among = COLOURS if self.settings.augment == "colour" else range(len(OPS))
        drawn = [(chance.getrandbits(32), chance.getrandbits(32), chance.random() < 0.5) for _ in range(count)]
        op, bin, negative = np.array(drawn, np.uint64)[place].T
        chosen = choose(op, bin, negative.astype(np.bool_), among)
        return augment_batch(pixels, Augmentation(*map(torch.from_numpy, chosen)))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    # Scores

    def _some(self) -> list[int]:
        """Of the budgets the least, the one in the middle and the most: enough to choose by."""
        found = list(self.budgets)
        return sorted({found[0], found[len(found) // 2], found[-1]})

    @torch.no_grad()
    def score(self, split: str, budgets: Iterable[int]) -> dict[int, tuple[Confusion, float]]:
        """What was taken for what in a split, and the mean loss, at each budget; the weights are those of the EMA.

        Processes share the batches out; all have the sums.
        """
        classes = len(self.data.classes)
        meters = {cores: Confusion(classes, self.task.ignore, self.device) for cores in budgets}
        losses = dict.fromkeys(meters, 0.0)
        count = 0
        self.network.eval()
        with self.ema.in_place():
            for pixels, labels in self.task.scoring(split, self.world.rank, self.world.size):
                images, labels = normalize(pixels.to(self.device)), labels.to(self.device).long()
                count += len(images)
                for cores, meter in meters.items():
                    with self._autocast():
                        scores = self.network(images, cores, labels.shape[1:])
                    losses[cores] += len(images) * float(self.task.loss(scores, labels))
                    meter.update(scores.argmax(1), labels)
        self.network.train()
        seen, *totals = sum_of([count, *losses.values()], self.world)
        if not seen:  # nothing could be chosen, or said, by such a score
            raise UnreadableImageError(f"no picture of {self.data.name} {split} can be read; mend them")
        for meter in meters.values():
            summed(meter.totals, self.world)
        return {cores: (meters[cores], total / seen) for cores, total in zip(meters, totals, strict=True)}

    def _validate(self, log: RunLog | None, live: LiveLine | None) -> None:
        with self.meter.pause():
            scored = self.score("val", self._some())
            found = {c: {**self.task.metrics(meter), "loss": loss} for c, (meter, loss) in scored.items()}
            name = self.task.metric
            mean, loss = (math.fsum(v[key] for v in found.values()) / len(found) for key in (name, "loss"))
            said = ", ".join(f"C={cores} {values[name]:.2f}" for cores, values in found.items())
            if log and live:
                log.validation(self.step, {(self.settings.size, cores): values for cores, values in found.items()})
                live.say(f"val at step {self.step:,}: {name} {mean:.2f} ({said}), loss {loss:.4f}")
            # A probe is no candidate: its head was chosen on val, and looks better there than it is.
            if self.step and (not self.best or [mean, -loss] > self.best[:2]):
                self.best = [mean, -loss, self.step]
                if self.world.first:
                    with self.ema.in_place():
                        self.task.save(self.folder, self._provenance())

    # What it leaves

    def _asked(self) -> dict[str, Any]:
        counts = {name: len(split) for name, split in self.data.splits.items()}
        about = {"name": self.data.name, "fingerprint": self.data.fingerprint, **counts}
        return {"model": self.model, "weights": self.origin["sha256"], "data": about, **self.settings.to_dict()}

    def _provenance(self) -> dict[str, Any]:
        score = {f"val {self.task.metric}": self.best[0], "step": self.best[2]}
        asked = {**self._asked(), "started_from": self.origin["provenance"]}
        return {"weights": "fine-tuned", "classes": self.data.classes, **score, "finetune": asked}

    def _save(self, log: RunLog | None) -> None:
        if not log:  # not the first process
            return
        log.flush()  # a run that goes on from here does not write these rows again
        state = self.optimizer.state
        kept = {
            f"{name}/{key}": whole(value)
            for name, parameter in self.network.named_parameters()
            for key, value in state.get(parameter, {}).items()
        }
        tensors = {"network": {k: whole(v) for k, v in self.network.state_dict().items()}, "optimizer": kept}
        if self.ema.decay:
            tensors["ema"] = {name: whole(value) for name, value in self.ema.named()}
        facts = {
            "asked": self._asked(), "best": self.best, "before": self.before, "images": self.meter.images,
            "seconds": self.meter.seconds, "under_way": self.meter.under_way(),
        }  # fmt: skip
        folder = self.folder / "checkpoints"
        write_checkpoint(folder, self.step, facts, tensors)
        forget_old(folder, KEEP, self.step)

    def _resume(self) -> None:
        saved = newest_checkpoint(self.folder / "checkpoints", self.notices.append)
        steps = gathered(saved and saved.step, self.world)
        if any(step != steps[0] for step in steps):
            raise ArgumentError(
                f"processes find different checkpoints in {self.folder} ({steps}): they must share the folder"
            )
        if saved is None:
            return
        facts = saved.facts
        check_same(facts.get("asked", {}), self._asked(), self.folder)
        self.network.load_state_dict(saved.tensors["network"])
        parameters = dict(self.network.named_parameters())
        for key, value in saved.tensors["optimizer"].items():
            name, entry = key.split("/")
            self.optimizer.state[parameters[name]][entry] = value.to(self.device) if value.ndim else value
        for name, value in self.ema.named():
            value.copy_(saved.tensors["ema"][name])
        self.step, self.best, self.resumed = saved.step, facts["best"], True
        self.before = {int(cores): values for cores, values in facts["before"].items()}
        self.meter = Meter(self.budgets, images=facts["images"], seconds=facts["seconds"])
        self.meter.take_up([facts["under_way"]], 0, 1, self.device)
        self.notices.append(f"resumed: from step {self.step:,}")

    def _finish(self, log: RunLog | None) -> Path | None:
        """The best weights on the pictures that count, at all budgets, and the report."""
        began = time.perf_counter()
        if self.world.first:
            self.task.load(self.folder)
        broadcast(list(self.network.state_dict().values()), self.world)
        self.ema = Ema(self.network, None)
        task, report = self.task, self.data.report
        scored = self.score(report, self.budgets)
        most = max(self.budgets)
        meter = scored[most][0]
        for each in gathered(task.skipped, self.world):
            for split, names in each.items():
                task.skipped.setdefault(split, set()).update(names)
        if log is None:
            return None
        bad = {split: sorted(names) for split, names in task.skipped.items() if names}
        problems = [f"{len(names):,} of {split} cannot be read: {join_some(names)}" for split, names in bad.items()]
        for problem in problems:
            log.event(self.step, f"skipped: {problem}")
            self.say(f"Left out: {problem}")
        log.flush()
        result: dict[str, Any] = {
            "asked": self._asked(), "metric": task.metric, "scored_on": report, "cores": most,
            "classes": self.data.classes, "problems": [*self.data.problems, *problems], "steps": self.steps,
            "best": {"score": self.best[0], "step": self.best[2]},
            "before": self.before, "after": {cores: task.metrics(found) for cores, (found, _) in scored.items()},
            "per_class": percent_by_class(self.data.classes, task.per_class(meter).tolist()),
            "confusions": _confusions(meter.counts),
            "matrix": meter.counts.tolist() if len(self.data.classes) <= MATRIX else None,
            "gallery": self._gallery(report, most),
            "images": self.meter.images, "seconds": self.meter.seconds,
            "scoring_seconds": time.perf_counter() - began, "versions": describe_versions(self.device),
        }  # fmt: skip
        with atomic_path(self.folder / "result.json") as part:
            part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return write_report(self.folder)

    @torch.no_grad()
    def _gallery(self, split: str, cores: int) -> list[dict[str, str]]:
        self.network.eval()
        found = []
        for i in evenly_spaced(len(self.data.splits[split]), GALLERY):
            batch = self.task.one(split, i)
            if batch is None:
                continue
            with self._autocast():
                scores = self.network(normalize(batch.pixels.to(self.device)), cores, batch.labels.shape[1:])
            shown = self.task.shown(split, i, scores[0].cpu(), batch.labels[0])
            found.append(
                {
                    key: value if isinstance(value, str) else save_picture(value, self.folder, _file(i, key))
                    for key, value in shown.items()
                }
            )
        return found


def _not_empty(rows: Tensor) -> Tensor:
    """Where no picture of a process's share could be read, a black one: it weighs nothing."""
    return rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])


def _file(i: int, key: str) -> str:
    return f"{i}-{key}.{'webp' if key == 'image' else 'png'}"


def _confusions(counts: Tensor) -> list[list[int]]:
    """(class, what it was taken for, how often): the most frequent, which are no hits."""
    wrong = counts.cpu().clone().fill_diagonal_(0).flatten()
    most = wrong.topk(min(MOST_CONFUSIONS, len(wrong)))
    pairs: Sequence[tuple[int, int]] = list(zip(most.indices.tolist(), most.values.tolist(), strict=True))
    return [[place // len(counts), place % len(counts), count] for place, count in pairs if count]


def _check_folder(folder: Path, model: str) -> None:
    """What is there stays whole, --restart or not: the weights to start from, and runs that are none of ours."""
    source = Path(model) if Path(model).exists() else find_shipped(model)
    if source and folder.exists() and folder.samefile(source if source.is_dir() else source.parent):
        raise ArgumentError(
            f"--out {folder} is the model's own folder, which would be written over; take another --out"
        )
    if (folder / "recipe.yaml").is_file() and not is_tuned(folder):
        raise ArgumentError(f"{folder} holds a run of `veca distill`; take another --out")


def _check_data(data: ProbeData, task: str) -> None:
    if data.task != task:
        raise DatasetError(f"{data.name} has labels to {data.task}; `veca finetune` learns one class for each picture "
                           "(classify) or pixel (segment)")  # fmt: skip
    if missing := [split for split in ("train", "val") if split not in data.splits]:
        raise DatasetError(f"{data.name} has no {' and no '.join(missing)}: nothing can be learned, or chosen, from it")
