"""Fine-tuning of a backbone: the head first, on frozen features, then the whole network.

A run's folder has the best weights so far (`model.safetensors`, `config.json`), the log, `checkpoints/`, and in the end
`result.json` and `report.html`.
"""

import contextlib
import copy
import dataclasses
import math
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca.checkpoint.format import FINETUNE_RESULT, FINETUNE_SETTINGS, HEAD, PREPROCESSOR, weights_hash
from veca.checkpoint.loading import find_pretrained, load_or_random
from veca.config import VecaConfig
from veca.data.crops import CropReader
from veca.data.datasets import DatasetError, ProbeData, limit_splits, load_dataset
from veca.data.datasets.base import evenly_spaced
from veca.data.datasets.batches import UnreadableImageError, join_some
from veca.data.datasets.native import PackedBatch
from veca.data.transforms import COLOUR_OPS, OPS, Augmentation, augment_batch, choose_ops, seeded_random
from veca.errors import ArgumentError
from veca.heads.dense import DenseMetrics
from veca.heads.features import FrozenVeca
from veca.heads.metrics import describe_spread
from veca.heads.networks import load_network
from veca.images import normalize
from veca.images.pack import pack
from veca.packed import PackedImages
from veca.report.gallery import save_picture
from veca.train import parallel
from veca.train.checkpoints import module_tensors, optimizer_tensors, restore_optimizer
from veca.train.engine import RunEngine, Say, draw, learning_rate, step_seed
from veca.train.finetune.settings import FinetuneSettings, check_same_settings
from veca.train.finetune.tasks import TASK_CLASSES, AnyBatch, FinetuneTask
from veca.train.logger import is_finetune_run
from veca.train.optimizers import Ema, layer_decay_groups
from veca.train.parallel import World
from veca.train.report import write_finetune_report
from veca.utils.device import choose_device, describe_versions
from veca.utils.signals import Interrupted

WARMUP, MAX_NORM = 0.1, 1.0
"""Share of the steps with a rising learning rate, before it falls along a half cosine; largest gradient norm."""
PROBED_HEAD_RATE = 0.1
"""Share of the learning rate for a head that starts from a probe, which is good already."""
PREDICTED_IMAGES = 12
"""Images in the report."""
MODEL_FILES = ("model.safetensors", "config.json", PREPROCESSOR, HEAD, FINETUNE_RESULT, "report.html")
"""Files of the scored model and of a finished run."""


def finetune(
    model: str,
    data: str,
    folder: Path,
    settings: FinetuneSettings,
    *,
    root: Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    restart: bool = False,
    say: Say = print,
) -> Path | None:
    """Fine-tune `model` on `data` (as `load_dataset` takes it) and leave everything in `folder`.

    Returns the path of the report, in the first process.
    """
    with parallel.processes(device) as world:
        rule = f"a multiple of {world.size}, the number of processes that share it out"
        settings.require("batch", settings.batch % world.size == 0, rule)
        if world.size == 1:  # alone it runs on any kind of device
            world = world._replace(device=choose_device(device))
        with warnings.catch_warnings(action=None if world.first else "ignore"):  # the first process speaks for all
            dataset = limit_splits(load_dataset(data, root, settings.task), limit)
        with parallel.run_folder(folder := Path(folder), world):
            return Finetuning(model, dataset, folder, settings, world, restart, say).run()


class Finetuning(RunEngine):
    """One process of a fine-tuning run."""

    log_every, save_every, keep = 10, 500, 2
    result_file = FINETUNE_RESULT
    write_report = staticmethod(write_finetune_report)
    nonfinite_advice = "Lower --rate, or use --set precision=float32, in another --out"
    save_with_validation = True

    def __init__(
        self, name: str, data: ProbeData, folder: Path, options: FinetuneSettings, world: World, restart: bool, say: Say
    ) -> None:
        if data.task != (task := options.task) or not {"train", "val"} <= data.splits.keys():
            found = f"{data.name} has labels to {data.task}, and the splits {', '.join(data.splits)}"
            raise DatasetError(f"{found}; `veca finetune {task}` needs labels to {task}, to learn from train and val")
        _check_folder(folder, name)
        super().__init__(folder, world, restart, say)
        reader = CropReader.choose(options.decode, self.device)
        options = dataclasses.replace(options, decode=reader.decode)
        self.options, self.data, self.model_name = options, data, name
        for problem in data.problems:
            self.say(f"{data.name}: {problem}. The score is not the benchmark's.")
        self.precision = options.precision or ("bfloat16" if self.device.type == "cuda" else "float32")
        self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, self.precision == "bfloat16")
        backbone = load_or_random(name)
        backbone.width = options.width
        self.budgets = options.budgets(backbone.config)
        budgets = list(self.budgets)
        # The smallest, the middle and the largest budget: enough to choose the best weights by.
        self.validation_budgets = sorted({budgets[0], budgets[len(budgets) // 2], budgets[-1]})
        if backbone.provenance.get("weights") == "random":
            self.say(f"The weights are random: none ship for {name} yet. Name trained ones, or expect little.")
        self.origin = {"sha256": weights_hash(backbone), "provenance": backbone.provenance}
        # The saved model lists the budgets it was fine-tuned with.
        backbone.config = VecaConfig.from_dict({**backbone.config.to_dict(), "budgets": list(self.budgets)})
        self.task: FinetuneTask = TASK_CLASSES[task](backbone, data, options, reader)
        self.backbone = backbone
        self.model = self.task.network.to(self.device).train()
        head_rate = PROBED_HEAD_RATE if options.head == "probe" else 1.0
        groups = layer_decay_groups(self.model, backbone.config.depth, options.layer_decay, options.decay, head_rate)
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate)
        self.ema = Ema(self.model, options.ema)
        epoch_steps = len(data.splits["train"]) / options.batch
        self.steps = max(1, round(options.epochs * epoch_steps))
        self.validate_every = options.every or max(1, min(round(epoch_steps), math.ceil(self.steps / 4)))
        self.best: list[float] = []
        """Score and negative loss on val of the best weights so far, and their step."""
        self.before: dict[int, dict[str, float]] = {}
        """Scores of the linear probe the head starts from, by budget."""
        if self.checkpoint:
            facts = self.checkpoint.facts
            check_same_settings(facts.get("asked", {}), self.settings(), folder)
            self.model.load_state_dict(self.checkpoint.tensors["network"])
            restore_optimizer(self.model, self.optimizer, self.checkpoint.tensors["optimizer"])
            self.best, self.before = facts["best"], {int(cores): scores for cores, scores in facts["before"].items()}
        self.resume_counts(self.budgets)
        self.replica = parallel.replicate(self.model, world)

    def prepare(self) -> None:
        """Fit the head as a linear probe of the frozen features, in the first process, and score it."""
        if self.resumed or self.options.head == "new":
            return
        with parallel.first_alone(self.world):
            if self.world.first:
                frozen = copy.deepcopy(self.backbone)
                frozen.reset_classifier(0)
                model = FrozenVeca(frozen, self.model_name, self.device, self.precision)
                self.task.probe(model, max(self.budgets), self.folder / "features")
                shutil.rmtree(self.folder / "features", ignore_errors=True)
        parallel.broadcast(list(self.model.state_dict().values()), self.world)
        self.ema = Ema(self.model, self.options.ema)  # the average starts from the fitted head
        scores = self.score(self.data.report, self.validation_budgets)
        self.before = {cores: self.task.read_metrics(metrics) for cores, (metrics, _) in scores.items()}

    # Steps

    def batches(self) -> contextlib.closing[Any]:
        return contextlib.closing(self.task.training(self.steps, self.step, self.world.rank, self.world.size))

    def train_step(self, batches: Iterator[AnyBatch]) -> None:
        """The loss is that of the batch of all processes; its gradient in each is that of the own part."""
        try:
            batch = next(batches)
        except (RuntimeError, ValueError):
            if self.stop_signal:  # a signal to the whole group also ends decoding processes that have just started
                raise Interrupted(self.stop_signal) from None
            raise
        settings, step, world = self.options, self.step, self.world
        # Unreadable images make shares of different sizes, possibly empty.
        counts = parallel.gathered(len(batch.pixels), world)
        if not sum(counts):
            bad = join_some(sorted(set().union(*self.task.skipped.values())))
            problem = f"a whole batch of {self.data.name} train cannot be read: {bad}"
            raise UnreadableImageError(f"{problem}. Mend them, or take a larger --batch-size")
        # Rows of this process in the batch of all.
        own = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
        budget = draw(self.budgets, "budget", settings.seed, step)
        rng = seeded_random(step_seed("augment", settings.seed, step))
        augmentation = self._draw_ops(rng, sum(counts), own)
        if isinstance(batch, PackedBatch):
            batch = batch.or_black(self.backbone.config.patch_size, self.task.ignore)
        images: Any = self._normalized(batch.pixels, augmentation)
        labels = batch.labels.to(self.device, non_blocking=True)
        weighted_labels = [(1.0, labels)]
        if mixup := getattr(settings, "mixup", 0.0):
            share = rng.betavariate(mixup, mixup)
            # Partners come from the batch of all processes, whatever their number.
            partners, partner_labels = (parallel.all_rows(x, counts, world).flip(0)[own] for x in (images, labels))
            images = share * images + (1 - share) * partners
            weighted_labels = [(share, labels), (1 - share, partner_labels)]
        torch.manual_seed(step_seed("model", settings.seed, step))
        with self.autocast():
            scores = self.replica(_not_empty(images), budget, batch.size)
        total, ignore = partial(parallel.with_others, world=world), self.task.ignore
        loss = torch.stack([
            weight * self.task.loss(scores, _not_empty(each, ignore), batch.size, total)
            for weight, each in weighted_labels
        ]).sum()  # fmt: skip
        (world.size * loss).backward()  # DDP takes the mean of the gradients, not their sum
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        # Unlike in distillation the host waits here: this AdamW is not fused, and cannot skip a step on the device.
        finite = bool(norm.isfinite())
        self.rate = learning_rate(step, self.steps, round(WARMUP * self.steps), settings.rate, 0.0)
        skip = torch.tensor(float(not finite), device=self.device)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * group["scale"]
            self.optimizer.step()
        self.ema.update(skip)
        self.skipped_steps.update(skip)
        self.optimizer.zero_grad()
        self.meter.update({"total": loss.detach(), "gradient_norm": norm}, sum(counts), budget, settings.size)
        self.step += 1

    def _draw_ops(self, rng: Any, count: int, own: slice) -> Augmentation | None:
        """Operations of the rows `own` of a batch of `count`; what is drawn for an image follows from its place."""
        if self.options.augment == "flip":  # crops and flips are done by the decoding processes
            return None
        ops = COLOUR_OPS if self.options.augment == "colour" else range(len(OPS))
        drawn = [(rng.getrandbits(32), rng.getrandbits(32), rng.random() < 0.5) for _ in range(count)]
        op, strength, negative = np.array(drawn, np.uint64)[own].T
        chosen = choose_ops(op, strength, negative.astype(np.bool_), ops)
        return Augmentation(*map(torch.from_numpy, chosen))

    def _normalized(
        self, pixels: Tensor | Sequence[Tensor], augmentation: Augmentation | None = None
    ) -> Tensor | PackedImages:
        """Images on the device, augmented and normalised; a list of them is packed."""
        if isinstance(pixels, Tensor):
            pixels = pixels.to(self.device, non_blocking=True)
            return normalize(pixels if augmentation is None else augment_batch(pixels, augmentation))
        images = [image.to(self.device, non_blocking=True) for image in pixels]
        if augmentation is not None:
            each = zip(*(values.split(1) for values in augmentation), strict=True)
            images = [augment_batch(x[None], Augmentation(*ops))[0] for x, ops in zip(images, each, strict=False)]
        return pack(images, patch_size=self.backbone.config.patch_size)

    def memory_advice(self) -> str:
        count, limit = self.options.batch // self.world.size, self.options.patch_limit(self.backbone.config.patch_size)
        size = f"up to {limit:,} patches" if limit else f"{self.options.size} px"
        return f"{count} images per process at {size}; halve --batch-size and divide --rate by 1.4"

    # Scores

    @torch.no_grad()
    def score(self, split: str, budgets: Iterable[int]) -> dict[int, tuple[DenseMetrics, float]]:
        """Metrics and mean loss on a split at each budget, with the averaged weights.

        The batches are distributed over the processes; all get the sums.
        """
        metrics = {cores: self.task.make_metrics(self.device) for cores in budgets}
        losses = dict.fromkeys(metrics, 0.0)
        count = 0
        self.model.eval()
        with self.ema.swapped_in():
            for batch in self.task.scoring(split, self.world.rank, self.world.size):
                images, labels = self._normalized(batch.pixels), batch.labels.to(self.device)
                count += len(batch.pixels)
                for cores, own in metrics.items():
                    with self.autocast():
                        scores = self.model(images, cores, batch.size)
                    losses[cores] += len(batch.pixels) * float(self.task.loss(scores, labels, batch.size))
                    self.task.update_metrics(own, scores, labels, batch.size)
        self.model.train()
        scored, *totals = parallel.sum_of([count, *losses.values()], self.world)
        if not scored:
            raise UnreadableImageError(f"no picture of {self.data.name} {split} can be read; mend them")
        for own in metrics.values():
            parallel.all_reduced(own.totals, self.world)
        return {cores: (metrics[cores], total / scored) for cores, total in zip(metrics, totals, strict=True)}

    def validate(self) -> None:
        scores = {
            cores: {**self.task.read_metrics(metrics), "loss": loss}
            for cores, (metrics, loss) in self.score("val", self.validation_budgets).items()
        }
        name = self.task.metric
        mean, loss = (math.fsum(values[key] for values in scores.values()) / len(scores) for key in (name, "loss"))
        if self.log and self.progress:
            self.log.validation(
                self.step, {(self.options.size, cores, 1.0): values for cores, values in scores.items()}
            )
            form = f".{self.task.digits}f"
            parts = ", ".join(f"C={cores} {values[name]:{form}}" for cores, values in scores.items())
            self.progress.say(f"val at step {self.step:,}: {name} {mean:{form}} ({parts}), loss {loss:.4f}")
        # Step 0 is a candidate too, the head of the probe on the features as they were: no run ends below its start.
        if not self.best or self._rank(mean, -loss) > self._rank(*self.best[:2]):
            self.best = [mean, -loss, self.step]
            if self.world.first:
                with self.ema.swapped_in():
                    self.task.save(self.folder, self._provenance())

    def _rank(self, score: float, negative_loss: float) -> list[float]:
        """For comparison, higher is better; a score that is not a number is worse than all others."""
        signed = score if self.task.higher_is_better else -score
        return [-math.inf if math.isnan(each) else each for each in (signed, negative_loss)]

    # Checkpoints and results

    def settings(self) -> dict[str, Any]:
        counts = {name: len(split) for name, split in self.data.splits.items()}
        about = {"name": self.data.name, "fingerprint": self.data.fingerprint, **counts}
        return {"model": self.model_name, "weights": self.origin["sha256"], "data": about, **self.options.to_dict()}

    def write_settings(self) -> dict[str, Any]:
        if self.restart:
            # Without finetune.json the model files are not those of an old run.
            self.remove(("checkpoints", "features", "gallery", *(MODEL_FILES if is_finetune_run(self.folder) else ())))
        self.write_json(FINETUNE_SETTINGS, settings := self.settings())
        return settings

    def _provenance(self) -> dict[str, Any]:
        score = {f"val {self.task.metric}": self.best[0], "step": self.best[2]}
        settings = {**self.settings(), "started_from": self.origin["provenance"]}
        return {"weights": "fine-tuned", "classes": self.data.classes, **score, "finetune": settings}

    def checkpoint_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"network": module_tensors(self.model), "optimizer": optimizer_tensors(self.model, self.optimizer)}

    def checkpoint_facts(self) -> dict[str, Any]:
        return {"asked": self.settings(), "best": self.best, "before": self.before}

    def finish(self) -> None:
        """Score the best weights at all budgets, and write the results."""
        began, task = time.perf_counter(), self.task
        if self.world.first:  # what is scored is what was saved
            self.model.load_state_dict(load_network(self.folder).state_dict())
        parallel.broadcast(list(self.model.state_dict().values()), self.world)
        self.ema = Ema(self.model, None)  # the saved weights are the averaged ones already
        split, largest = self.data.report, max(self.budgets)
        scores = self.score(split, self.budgets)
        for skipped in parallel.gathered(task.skipped, self.world):
            for name, images in skipped.items():
                task.skipped.setdefault(name, set()).update(images)
        if not self.log:
            return
        unreadable = {name: sorted(images) for name, images in task.skipped.items() if images}
        problems = [f"{len(bad):,} of {name} cannot be read: {join_some(bad)}" for name, bad in unreadable.items()]
        for problem in problems:
            self.log.event(self.step, f"skipped: {problem}")
            self.say(f"Left out: {problem}")
        note = "" if self.best[2] else self._describe_start()
        if note:
            self.log.event(self.step, f"kept: {note}")
            self.say(note)
        after = {cores: task.read_metrics(metrics) for cores, (metrics, _) in scores.items()}
        errors = task.describe_errors(scores[largest][0])
        self.say(self._describe_result(split, after, errors.get("scored")))
        self.write_json(FINETUNE_RESULT, {
            "asked": self.settings(), "metric": task.metric, "unit": task.unit, "scored_on": split, "cores": largest,
            "classes": self.data.classes, "problems": [*self.data.problems, *problems], "steps": self.steps,
            "best": {"score": self.best[0], "step": self.best[2]}, "note": note,
            "before": self.before, "after": after, **errors,
            "gallery": self._save_gallery(split, largest),
            "images": self.meter.images, "seconds": self.meter.seconds,
            "scoring_seconds": time.perf_counter() - began, "versions": describe_versions(self.device),
        })  # fmt: skip

    def _describe_result(self, split: str, after: Mapping[int, Mapping[str, float]], scored: int | None) -> str:
        """The score at the largest budget and that of the probe, with their uncertainty if `scored` is known."""
        task, cores = self.task, max(after)

        def describe(scores: Mapping[str, float]) -> str:
            value = scores[task.metric]
            return f"{value:.{task.digits}f}{describe_spread(value, scored)} {task.unit}"

        text = f"{task.metric} on {split}, C = {cores}: {describe(after[cores])}"
        return f"{text}; the linear probe it began from {describe(self.before[cores])}" if self.before else text

    def _describe_start(self) -> str:
        """What to say of a run whose first weights were the best."""
        head = "a linear probe on frozen features" if self.options.head == "probe" else "a new head"
        score = f"{self.task.metric} {self.best[0]:.{self.task.digits}f} {self.task.unit} on val"
        return f"No step of training was better than the start: the weights of step 0 are kept, with {head} ({score})."

    @torch.no_grad()
    def _save_gallery(self, split: str, cores: int) -> list[dict[str, str]]:
        """Predictions for a few images, spread over the split, as image files and captions."""
        self.model.eval()
        gallery = []
        for i in evenly_spaced(len(self.data.splits[split]), PREDICTED_IMAGES):
            if batch := self.task.load_one(split, i):
                with self.autocast():
                    scores = self.model(normalize(batch.pixels.to(self.device)), cores, batch.size)
                image = self.task.open_image(split, i)
                entry = {"image": image, **self.task.illustrate(scores[0].cpu(), batch.labels[0])}
                for kind in entry.keys() & {"image", "label", "prediction"}:
                    name = f"{i}-{kind}.{'webp' if kind == 'image' else 'png'}"
                    entry[kind] = save_picture(entry[kind], self.folder, name)
                gallery.append(entry)
        return gallery


def _not_empty(rows: Any, fill: int = 0) -> Any:
    """A black image in place of an empty share of the batch, or a label that does not count. Packs are never empty."""
    return rows if len(rows) else rows.new_full((1, *rows.shape[1:]), fill)


def _check_folder(folder: Path, model: str) -> None:
    """Refuse to write over the weights to start from, or over a distillation run, even with `restart`."""
    source = Path(model) if Path(model).exists() else find_pretrained(model)
    if source and folder.exists() and folder.samefile(source if source.is_dir() else source.parent):
        raise ArgumentError(f"--out {folder} is the model's own folder, which it would overwrite; take another --out")
    if (folder / "recipe.yaml").is_file() and not is_finetune_run(folder):
        raise ArgumentError(f"{folder} holds a run of `veca distill`; take another --out")
