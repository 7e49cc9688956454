"""Distillation of a student from a frozen teacher, one budget and one resolution per step.

A run's folder has `recipe.yaml`, `split.json` (which optimizer updates which parameters), the log, `checkpoints/`,
`best/` (the weights with the lowest mean loss over the validation grid), and in the end `model.safetensors`,
`summary.json` and `report.html`. `veca.load` takes the folder, `best/` and each checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import veca
from veca.checkpoint.format import save_tensors
from veca.config import VecaConfig, get_config
from veca.data.device_cache import DeviceImageCache, DeviceLoader
from veca.data.index import ImageIndex
from veca.data.loader import Batch, ImageLoader, to_model_input, train_loader
from veca.data.sampler import TrainSampler
from veca.model import Veca
from veca.optimized import RECOMPILE_LIMIT
from veca.teachers import Standardized, Teacher, load_teacher, output_dim_for, start_patch_embed
from veca.train import parallel
from veca.train.checkpoints import TensorFiles, module_tensors, optimizer_tensors, restore_module, restore_optimizer
from veca.train.csv_log import grid_means
from veca.train.ema import Ema
from veca.train.engine import RunEngine, Say
from veca.train.objective import Losses, Student
from veca.train.optimizers import Optimizers, make_optimizers, split_parameters
from veca.train.parallel import World
from veca.train.plan import flops_at, run_length
from veca.train.recipe import Recipe, RecipeError
from veca.train.report import write_distill_report
from veca.train.schedule import draw, learning_rate, step_seed
from veca.train.teacher_maps import TeacherMaps
from veca.train.validation import TeacherRunner, validate
from veca.utils.files import atomic_path
from veca.utils.timing import matrix_rate

_STATISTICS = ("means", "deviations")
"""Buffers of a standardized teacher."""
_CHANGEABLE_KEYS = (
    "data.train", "data.validation", "data.workers", "data.augment_on", "grad_checkpointing", "log_every",
    "checkpoints", "validation", "compile", "teacher.micro_batch", "schedule", "precision", "parallel", "batch",
    "accumulate",
)  # fmt: skip
"""Keys of a recipe that may change when a run is resumed. Images may have moved, but must be the same; the number of
images per step is checked on its own."""


def distill(
    recipe: Recipe,
    folder: Path,
    *,
    device: str = "auto",
    restart: bool = False,
    wandb: str | None = None,
    say: Say = print,
) -> Path | None:
    """Train as the recipe says and leave everything in `folder`; the path of the report, in the first process.

    A run of the same recipe in the folder is continued, unless it is to `restart`.
    """
    with parallel.processes(device) as world:
        recipe.pass_batch(world.size)  # an impossible one is refused before anything is written
        with parallel.run_folder(folder, world):
            run = Distillation(recipe, folder, world, restart, say)
            run.wandb = wandb
            return run.run()


class Distillation(RunEngine):
    """One process of a distillation run."""

    model: Veca
    loss_names = Losses._fields
    write_report = staticmethod(write_distill_report)
    nonfinite_advice = "The last checkpoint is from before; lower schedule.peak or use precision=float32, and run again"

    def __init__(self, recipe: Recipe, folder: Path, world: World, restart: bool = False, say: Say = print) -> None:
        _check_start(recipe, folder)
        super().__init__(folder, world, restart, say)
        self.recipe = recipe
        facts: Mapping[str, Any] = self.checkpoint.facts if self.checkpoint else {}
        if self.checkpoint:  # before anything large is loaded
            _check_recipe(facts, recipe, folder)
        self.images, self.validation = _find_images(recipe, folder, world)
        for images in filter(None, (self.images, self.validation)):
            self.notices += images.describe_problems()
        self.teacher = make_teacher(recipe).to(world.device)
        self.model = make_student(recipe, self.teacher).to(world.device)
        self.sharded = recipe.parallel == "fsdp"
        if self.sharded:  # before the optimizers, which must hold the sharded parameters
            parallel.shard(self.model, world)
        self.model.set_grad_checkpointing(recipe.grad_checkpointing)
        self.optimizers = make_optimizers(self.model, recipe.schedule.peak, recipe.weight_decay, _product_dtype(recipe))
        self.ema = Ema(self.model, recipe.ema)
        self.runner = TeacherRunner(self.teacher, recipe, world, self.model.config.patch_size)
        _, self.steps, self.warmup = run_length(recipe, len(self.images))
        self.log_every, self.save_every, self.keep = recipe.log_every, recipe.checkpoints.every, recipe.checkpoints.keep
        self.validate_every = None if self.validation is None else recipe.validation.every
        self.best = float("inf")
        """Lowest mean of the validation loss so far."""
        self.last_validation: float | None = None
        self.unreadable_count, self.unreadable_names = facts.get("corrupt", 0), set[str]()
        if self.checkpoint:
            _check_data(facts, self.images, recipe, folder)
            self._restore(self.checkpoint.tensors)
            self._restore_best(facts)
        else:  # a resumed run has the statistics in its checkpoint
            self.runner.fit_statistics(self.images, self.validation)
        self.resume_counts(recipe.budgets, recipe.grid()[0])
        if recipe.compile:  # all blocks share one graph, for any budget and resolution
            for block in self.model.blocks:
                block.compile(dynamic=True)
            self.teacher.compile(dynamic=False)
        self.student = parallel.replicate(Student(self.model, recipe), world, recipe.parallel)

    # Steps

    def draws(self, step: int) -> tuple[int, int]:
        """Budget and resolution of a step, the same in every process."""
        recipe, seed = self.recipe, self.recipe.seed
        budget = draw(recipe.budgets, "budget", seed, step)
        return budget, draw(recipe.odds_at(step), "resolution", seed, step)

    def batches(self) -> ImageLoader | DeviceLoader:
        if self.recipe.compile:
            self.say("The first steps compile the model, which takes a minute or so.")
        recipe, data = self.recipe, self.recipe.data
        sampler = TrainSampler(
            len(self.images), recipe.pass_batch(self.world.size), lambda i: self.draws(i // recipe.accumulate)[1],
            rank=self.world.rank, world_size=self.world.size, seed=recipe.seed, short_side=data.short_side,
            crops=data.crops, augment=data.augment, num_variants=data.views, start=self.step * recipe.accumulate,
        )  # fmt: skip
        if data.resident is None:
            on_gpu = self.device.type == "cuda" and data.augment_on != "cpu"
            return train_loader(self.images, sampler, data.workers, data.max_pixels, "gpu" if on_gpu else "cpu")
        progress = self.world.first
        cache = DeviceImageCache(self.images, data.resident, self.device, data.workers, data.max_pixels, progress)
        maps = None
        if precision := recipe.teacher.resident:
            dtype = torch.bfloat16 if precision == "bfloat16" else torch.float8_e4m3fn
            maps = TeacherMaps(cache, self.runner, dtype, progress)
        return DeviceLoader(cache, sampler, maps)

    def train_step(self, batches: Iterator[Batch]) -> None:
        recipe, passes = self.recipe, self.recipe.accumulate
        budget, resolution = self.draws(self.step)
        losses: list[Losses] = []
        for i in range(passes):
            batch = next(batches)
            self.runner.unreadable += batch.skipped
            images = to_model_input(batch, self.device)
            targets = self.runner.targets(images) if batch.targets is None else batch.targets
            # Seeded per step, so that a resumed run repeats it, whatever was drawn before.
            torch.manual_seed(step_seed("model", recipe.seed, self.step))
            with parallel.sync_gradients(self.student, last=i == passes - 1):
                with self.runner.autocast():
                    losses.append(self.student(images, budget, targets))
                (losses[-1].total / passes).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = parallel.unshard(torch.nn.utils.get_total_norm(gradients))
        # Whether to skip the step is decided on the device: asking would make the host wait for every step.
        finite = torch.stack([norm, *(each.total.detach() for each in losses)]).isfinite().all()
        skip = parallel.all_reduced((~finite).float(), self.world, torch.distributed.ReduceOp.MAX)
        schedule = recipe.schedule
        self.optimizers.step(learning_rate(self.step, self.steps, self.warmup, schedule.peak, schedule.low), skip)
        self.optimizers.zero_grad()
        self.ema.update(skip)
        self.skipped_steps.update(skip)
        # Means over the passes stay on the device until they are logged.
        means = {name: torch.stack([getattr(x, name).detach() for x in losses]).mean() for name in self.loss_names}
        self.meter.update({**means, "gradient_norm": norm}, recipe.batch, budget, resolution)
        self.step += 1

    def run(self) -> Path | None:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return super().run()

    def memory_advice(self) -> str:
        recipe, (budget, resolution) = self.recipe, self.draws(self.step)
        size = recipe.pass_batch(self.world.size)
        ways = {
            f"accumulate={2 * recipe.accumulate}": size > 1,
            "grad_checkpointing=true": not recipe.grad_checkpointing,
            "teacher.resident=null": recipe.teacher.resident is not None,
            "data.resident=null": recipe.data.resident is not None,
        }
        what = f"{size} images per pass at {resolution} px with {budget} cores, at step {self.step:,}"
        return f"{what}; set {', or '.join(way for way, helps in ways.items() if helps)}"

    # Logging and validation

    def settings(self) -> dict[str, Any]:
        return self.recipe.to_dict()

    def extra_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        share = values["images_per_s"] / self.world.size * flops_at(self.step - 1, self.model.config, self.recipe)
        rate = float(self.optimizers.adamw.param_groups[0]["lr"])
        return {"learning_rate": rate, "floor_share": share / self._peak_rate}

    @cached_property
    def _peak_rate(self) -> float:
        """FLOP/s of a large matrix product on this GPU; nan on other devices, where it says little."""
        return matrix_rate(self.device, _product_dtype(self.recipe)) if self.device.type == "cuda" else float("nan")

    def log_unreadable(self) -> None:
        unreadable = [pair for pairs in parallel.gathered(self.runner.unreadable, self.world) for pair in pairs]
        self.runner.unreadable, self.unreadable_count = [], self.unreadable_count + len(unreadable)
        for name, reason in dict(unreadable).items():
            if name not in self.unreadable_names:  # once: it comes again every epoch
                self.unreadable_names.add(name)
                self.event(f"corrupt: {name}, {reason}")

    def validate(self) -> None:
        assert self.validation is not None
        with self.ema.swapped_in():
            grid = validate(self.model, self.runner, self.validation)
        self.last_validation = mean = grid_means(grid)["total"]
        if self.log and self.progress:
            self.log.validation(self.step, grid)
            cells = ", ".join(f"{size} px C={cores} {values['total']:.4f}" for (size, cores), values in grid.items())
            self.progress.say(f"validation at step {self.step:,}: {mean:.4f} ({cells})")
        if mean >= self.best:
            return
        failed = False
        try:
            self._save_weights(self.folder / "best")
        except OSError as error:
            failed = True
            self.event(f"unsaved: best weights, at step {self.step:,}: {error.strerror or error}")
        # All processes must agree on the best: a full disk is seen by the first alone.
        if not parallel.any_of(failed, self.world):
            self.best = mean

    # Checkpoints and results

    def checkpoint_tensors(self) -> dict[str, dict[str, Tensor]]:
        files = {"model": module_tensors(self.model), "optimizers": {}}
        for kind, optimizer in zip(Optimizers._fields, self.optimizers, strict=True):
            files["optimizers"] |= optimizer_tensors(self.model, optimizer, f"{kind}/")
        if isinstance(self.teacher, Standardized):
            files["teacher"] = {name: parallel.to_host(getattr(self.teacher, name)) for name in _STATISTICS}
        return files

    def _restore(self, files: TensorFiles) -> None:
        restore_module(self.model, files["model"])
        for kind, optimizer in zip(Optimizers._fields, self.optimizers, strict=True):
            restore_optimizer(self.model, optimizer, files["optimizers"], f"{kind}/")
        if isinstance(self.teacher, Standardized):
            for name in _STATISTICS:
                getattr(self.teacher, name).copy_(files["teacher"][name])

    def _restore_best(self, facts: Mapping[str, Any]) -> None:
        """The loss to beat; losses on other images, resolutions or budgets cannot be compared with."""
        self.last_validation = facts.get("validation")
        if facts.get("validated_on", self._validated_on()) != self._validated_on():
            self.notices.append("changed: validation has other pictures, sizes or budgets; best/ is chosen anew")
        elif facts["best"] is not None:
            self.best = facts["best"]

    def _validated_on(self) -> list[Any]:
        return [None if self.validation is None else self.validation.fingerprint, *map(list, self.recipe.grid())]

    def checkpoint_facts(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "pictures": self.images.fingerprint,
            "images_per_step": self.recipe.batch,
            "teacher": self.teacher.about,
            "best": self.best if self.best < float("inf") else None,
            "validation": self.last_validation,
            "validated_on": self._validated_on(),
            "corrupt": self.unreadable_count,
            "versions": {"veca": veca.__version__, "torch": torch.__version__},
        }

    def checkpoint_metadata(self) -> dict[str, dict[str, str]]:
        """That of a model, so that `veca.load` takes a checkpoint."""
        config, provenance = self.model.config.to_dict(), self._provenance({})
        return {"model": {"format": "pt", "veca": json.dumps({"config": config, "provenance": provenance})}}

    def _provenance(self, more: Mapping[str, Any]) -> dict[str, Any]:
        provenance = {
            "weights": "distilled", "teacher": self.teacher.about, "recipe": self.recipe.to_dict(),
            "images": self.meter.images, "step": self.step, **more,
        }  # fmt: skip
        return provenance | ({"started_from": self.model.provenance} if self.model.provenance else {})

    def _save_weights(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Save these tensors, or the (averaged) weights, which all processes must gather, as a model."""
        if tensors is None:
            with self.ema.swapped_in():
                tensors = module_tensors(self.model)
        if self.world.first:
            provenance = self._provenance({"validation": self.last_validation})
            save_tensors(tensors, self.model.config.to_dict(), provenance, folder)

    def save_weights_only(self, tensors: TensorFiles) -> str:
        try:  # the averaged parameters replace the trained ones; buffers come from the model
            self._save_weights(self.folder, {**tensors["model"], **tensors.get("ema", {})})
        except OSError:
            return "nor can its weights"
        return f"its weights are in {self.folder}"

    def write_settings(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.restart:
            self.remove(("checkpoints", "best", "model.safetensors", "config.json", "report.html"))
        if self.step < self.steps:  # a summary belongs to a run that is done
            self.remove(("summary.json",))
        with atomic_path(self.folder / "recipe.yaml") as part:
            part.write_text(self.recipe.to_yaml(), encoding="utf-8")
        split = split_parameters(self.model)._asdict()
        self.write_json("split.json", split)
        counts = {kind: sum(self.model.get_parameter(name).numel() for name in names) for kind, names in split.items()}
        moved = f"NorMuon moves {counts['normuon'] + counts['normuon_qkv']:,} parameters, AdamW {counts['adamw']:,}"
        self.say(f"{moved}; which: {self.folder / 'split.json'}")

    def finish(self) -> None:
        self._save_weights(self.folder)
        if self.world.first:
            more = {"total_steps": self.steps, "model": self.recipe.model.size}
            self.write_json("summary.json", self.checkpoint_facts() | self.totals() | more)


def make_teacher(recipe: Recipe) -> Teacher | Standardized:
    """The frozen teacher, standardized where the recipe or its kind asks for it."""
    teacher = load_teacher(recipe.teacher.name, recipe.teacher.meet, recipe.teacher.trust_remote_code)
    teacher.glance = recipe.teacher.glance
    standardize = teacher.raw if recipe.teacher.standardize is None else recipe.teacher.standardize
    return Standardized(teacher) if standardize else teacher


def make_student(recipe: Recipe, teacher: Teacher | Standardized) -> Veca:
    """A student with new weights, which follow from the seed, or with those the recipe starts from."""
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


def _product_dtype(recipe: Recipe) -> torch.dtype:
    return torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32


def _find_images(recipe: Recipe, folder: Path, world: World) -> tuple[ImageIndex, ImageIndex | None]:
    """Training and validation images; the first process writes the index, the others read it."""
    if not recipe.data.train:
        raise RecipeError("data.train: no pictures to train on; name folders, globs or tar shards")

    def find() -> tuple[ImageIndex, ImageIndex | None]:
        train = ImageIndex.build(recipe.data.train, folder / "train.index", progress=world.first)
        if not recipe.data.validation:
            return train, None
        return train, ImageIndex.build(recipe.data.validation, folder / "validation.index", progress=world.first)

    folder.mkdir(parents=True, exist_ok=True)
    images = find() if world.first else None
    parallel.gathered(None, world)  # the others wait for the index
    return images or find()


def _check_start(recipe: Recipe, folder: Path) -> None:
    """Refuse to start from weights that the run would overwrite."""
    if recipe.model.start is None or not (start := Path(recipe.model.start)).exists():
        return
    source, folder = (start if start.is_dir() else start.parent).resolve(), folder.resolve()
    if source in (folder, folder / "best") or source.parent == folder / "checkpoints":
        raise RecipeError(f"model.start={start} is in {folder}, where it would be written over: take another --out")


def _check_recipe(facts: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """Refuse to resume with another recipe, except for keys that do not change what is learned."""
    if "recipe" not in facts:
        raise RecipeError(f"{folder} holds a run of `veca finetune`: take another --out")
    changed = [
        f"{key}: {before!r}, now {now!r}"
        for key, before, now in _recipe_differences(facts["recipe"], recipe.to_dict())
        if not f"{key}.".replace("[", ".").startswith(tuple(f"{free}." for free in _CHANGEABLE_KEYS))
    ]
    if changed:
        way_out = "Take another --out, or --overwrite to begin anew in it"
        raise RecipeError(f"{folder} holds a run of another recipe ({'; '.join(changed)}). {way_out}")


def _check_data(facts: Mapping[str, Any], images: ImageIndex, recipe: Recipe, folder: Path) -> None:
    """Refuse to resume with other images, or another number of them per step."""
    if facts["pictures"] != images.fingerprint:
        way_out = f"Bring those back, or begin anew: --overwrite, or another --out with model.start={folder}/best"
        raise RecipeError(f"data.train: these are not the pictures that {folder} was trained with so far. {way_out}")
    # Earlier versions counted the images of one pass of all processes.
    before = facts.get("images_per_step") or facts["batch"] * facts["recipe"]["accumulate"]
    if before != recipe.batch:
        rule = f"the run in {folder} has had {before} images per step, over all processes"
        raise RecipeError(f"batch={recipe.batch}: {rule}. Set batch={before} to continue it")


def _recipe_differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every difference."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        old, new = ({str(name): value for name, value in side.items()} for side in (old, new))  # JSON makes keys text
        for name in dict.fromkeys([*old, *new]):
            yield from _recipe_differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from _recipe_differences(*pair, f"{key}[{i}]")
    elif old != new:
        yield key, old, new
