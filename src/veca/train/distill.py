"""Distillation of a student from a frozen teacher, one budget, width and resolution per step.

A run's folder has `recipe.yaml`, `split.json` (which optimizer updates which parameters), the log, `checkpoints/`,
`best/` (the weights with the lowest mean loss over the validation grid), and in the end `model.safetensors`,
`summary.json` and `report.html`; `classifier.safetensors` where the student learned from logits. `veca.load` takes the
folder, `best/` and each checkpoint.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import veca
from veca.checkpoint.format import save_tensors
from veca.config import VecaConfig
from veca.data.device_cache import DeviceImageCache, DeviceLoader
from veca.data.gpu_decode import can_resize, undecodable_reason
from veca.data.index import ImageIndex
from veca.data.loader import train_loader
from veca.data.sampler import TrainSampler
from veca.data.transforms import PairMixer
from veca.elastic import make_elastic
from veca.model import Veca
from veca.optimized import RECOMPILE_LIMIT
from veca.teachers import (
    AnyTeacher,
    Standardized,
    Teacher,
    TeacherGroup,
    inherit_weights,
    load_teacher,
    members,
    output_dim_for,
    replace_output,
    start_patch_embed,
)
from veca.teachers.outputs import CLASSIFIER, write_classifier
from veca.train import parallel
from veca.train.checkpoints import TensorFiles, module_tensors, optimizer_tensors, restore_optimizer
from veca.train.engine import RunEngine, Say, draw, learning_rate, step_seed
from veca.train.logger import grid_means
from veca.train.objective import Losses, PassLoader, TeacherMaps, TeacherRunner, teacher_losses, validate
from veca.train.optimizers import Ema, make_optimizers, split_parameters, step_optimizers
from veca.train.parallel import World
from veca.train.plan import PASSES, expected_flops, run_length, shares
from veca.train.recipe import Recipe, RecipeError, Setting, TeacherRecipe
from veca.train.report import write_distill_report
from veca.train.student import Student
from veca.utils.device import on_stream, side_stream
from veca.utils.files import atomic_path
from veca.utils.timing import matrix_rate

CALIBRATION_BATCH, CALIBRATION_BATCHES = 32, 8
"""Training images that channels are ordered by: images per forward pass, and passes."""
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
    device: str = "auto",
    restart: bool = False,
    wandb: str | None = None,
    say: Say = print,
) -> Path | None:
    """Train as the recipe says and leave everything in `folder`; the path of the report, in the first process.

    A run of the same recipe in the folder is continued, unless it is to `restart`.
    """
    with parallel.processes(device) as world, torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        recipe.pass_batch(world.size)  # an impossible one is refused before anything is written
        with parallel.run_folder(folder, world):
            run = Distillation(recipe, folder, world, restart, say)
            run.wandb = wandb
            return run.run()


class Distillation(RunEngine):
    """One process of a distillation run."""

    model: Veca
    result_file = "summary.json"
    write_report = staticmethod(write_distill_report)
    nonfinite_advice = "The last checkpoint is from before; lower schedule.peak or use precision=float32, and run again"

    def __init__(self, recipe: Recipe, folder: Path, world: World, restart: bool = False, say: Say = print) -> None:
        super().__init__(folder, world, restart, say)
        facts: Mapping[str, Any] = self.checkpoint.facts if self.checkpoint else {}
        _check_recipe(recipe, folder, facts)  # before anything large is loaded
        self.recipe = recipe
        self.teacher = make_teacher(recipe).to(world.device)
        teacher_losses(recipe, self.teacher)  # refused here, if a teacher lacks what they need
        self.model = make_student(recipe, self.teacher).to(world.device)
        self.runner = TeacherRunner(self.teacher, recipe, world, self.model.config.patch_size)
        if recipe.data.aspect is not None:
            self.runner.check_rectangles(recipe.data.aspect)
        # After all that may refuse the recipe: the index of many images takes long, and is a file in the folder.
        self.images, self.validation = _find_images(recipe, folder, world)
        for images in filter(None, (self.images, self.validation)):
            self.notices += images.describe_problems()
        if recipe.model.elastic is not None and not self.checkpoint:
            calibrate(self.model, self.runner, self.images)
        # Its kernels go before those of the teacher, which fill the gaps.
        self.stream = side_stream(self.device, "student", priority=-1) if self.device.type == "cuda" else None
        self.sharded = recipe.parallel == "fsdp" and world.size > 1
        if self.sharded:  # before the optimizers, which must hold the sharded parameters
            parallel.shard(self.model)
        self.model.set_grad_checkpointing(recipe.grad_checkpointing)
        product_dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        self.optimizers = make_optimizers(self.model, recipe.schedule.peak, recipe.weight_decay, product_dtype)
        self.ema = Ema(self.model, recipe.ema)
        _, self.steps, self.warmup = run_length(recipe, len(self.images))
        self.log_every, self.save_every, self.keep = recipe.log_every, recipe.checkpoints.every, recipe.checkpoints.keep
        self.validate_every = None if self.validation is None else recipe.validation.every
        *grid, widths = recipe.grid()
        self.validated_on: list[Any] = [None if self.validation is None else self.validation.fingerprint, *grid]
        self.validated_on += [widths] if widths != [1.0] else []  # as before there were widths
        self.best = float("inf")
        """Lowest mean of the validation loss so far."""
        self.last_validation: float | None = facts.get("validation")
        self.unreadable_count, self.unreadable_names = facts.get("corrupt", 0), set[str]()
        if self.checkpoint:
            self._restore(facts, self.checkpoint.tensors)
        else:  # a resumed run has the statistics in its checkpoint
            self.runner.fit_statistics(self.images, self.validation)
        widths = sorted(self.model.config.widths) if len(self.model.config.widths) > 1 else []
        self.resume_counts(recipe.budgets, () if recipe.data.aspect else recipe.grid()[0], widths)
        if recipe.compile:  # all blocks share one graph, for any budget, width and resolution
            for block in self.model.blocks:
                block.compile(dynamic=True)
            self.teacher.compile(dynamic=False)
            self.say("The first steps compile the model, which takes a minute or so.")
        student = Student(self.model, recipe, teacher_losses(recipe, self.teacher))
        self.student: Any = student if self.sharded else parallel.replicate(student, world)

    def _restore(self, facts: Mapping[str, Any], files: TensorFiles) -> None:
        """Continue from a checkpoint; refuses other images, or another number of them per step."""
        recipe, folder = self.recipe, self.folder
        if facts["pictures"] != self.images.fingerprint:
            way_out = f"Bring those back, or begin anew: --overwrite, or another --out with model.start={folder}/best"
            raise RecipeError(
                f"data.train: these are not the pictures that {folder} was trained with so far. {way_out}"
            )
        # Earlier versions counted the images of one pass of all processes.
        before = facts.get("images_per_step") or facts["batch"] * facts["recipe"]["accumulate"]
        if before != recipe.batch:
            rule = f"the run in {folder} has had {before} images per step, over all processes"
            raise RecipeError(f"batch={recipe.batch}: {rule}. Set batch={before} to continue it")
        for name, tensor in self.model.state_dict().items():
            parallel.copy_into(tensor, files["model"][name])
        for kind, optimizer in self.optimizers.items():
            own = {key.removeprefix(kind): x for key, x in files["optimizers"].items() if key.startswith(kind)}
            restore_optimizer(self.model, optimizer, own)
        for name, tensor in files.get("teacher", {}).items():
            self.teacher.get_buffer(name).copy_(tensor)
        if facts.get("validated_on", self.validated_on) != self.validated_on:  # such losses cannot be compared
            self.notices.append(
                "changed: validation has other pictures, sizes, budgets or widths; best/ is chosen anew"
            )
        elif facts["best"] is not None:
            self.best = facts["best"]

    # Steps

    @cached_property
    def settings(self) -> dict[Setting, float]:
        return self.recipe.settings()

    def draws(self, step: int) -> tuple[Setting, int]:
        """Setting and resolution of a step, the same in every process."""
        recipe, seed = self.recipe, self.recipe.seed
        return draw(self.settings, "budget", seed, step), draw(recipe.odds_at(step), "resolution", seed, step)

    def resolution_at(self, position: int) -> int:
        """Resolution of an image by its place in the stream of images, where a batch has several."""
        recipe = self.recipe
        return draw(recipe.odds_at(position // recipe.batch), "image resolution", recipe.seed, position)

    def batches(self) -> PassLoader:
        recipe, data, world = self.recipe, self.recipe.data, self.world
        sampler = TrainSampler(
            len(self.images), self.runner.pass_batch, lambda i: self.draws(i // recipe.accumulate)[1],
            rank=world.rank, world_size=world.size, seed=recipe.seed, short_side=data.short_side,
            crops=data.crops, augment=data.augment, num_variants=data.views, start=self.step * recipe.accumulate,
            aspect=data.aspect, patch=self.model.config.patch_size,
            resolution_at=None if data.aspect is None else self.resolution_at,
        )  # fmt: skip
        mixer = None
        if data.mixup or data.cutmix:
            place = self.step * recipe.accumulate, recipe.accumulate, world.rank, world.size
            mixer = PairMixer(data.mixup, data.cutmix, data.mix_prob, recipe.seed, *place)
        if data.resident is None:
            on_gpu = self.device.type == "cuda" and data.augment_on != "cpu"
            device = self.device if can_resize(self.device) and data.aspect is None else None
            if data.decode == "gpu" and (reason := undecodable_reason(self.device)):
                raise RecipeError(f"data.decode=gpu: {reason}. Set data.decode=cpu")
            options = "gpu" if on_gpu else "cpu", device, data.decode == "gpu"
            loader = train_loader(self.images, sampler, data.workers, data.max_pixels, *options)
            return PassLoader(loader, self.runner, mixer)
        cache = self.decode_images(data.resident)
        maps = self.compute_maps(cache, recipe.teacher.resident) if recipe.teacher.resident else None
        return PassLoader(DeviceLoader(cache, sampler, maps), self.runner, mixer)

    def decode_images(self, side: int) -> DeviceImageCache:
        data = self.recipe.data
        return DeviceImageCache(self.images, side, self.device, data.workers, data.max_pixels, self.world.first)

    def compute_maps(self, cache: DeviceImageCache, precision: str) -> TeacherMaps:
        """The teacher's maps of all cached images."""
        dtypes = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
        return TeacherMaps(cache, self.runner, dtypes[precision], self.world.first)

    def train_step(self, batches: PassLoader) -> None:
        with on_stream(self.stream):
            self._train_step(batches)

    def _train_step(self, batches: PassLoader) -> None:
        recipe, passes = self.recipe, self.recipe.accumulate
        setting, resolution = self.draws(self.step)
        losses: list[Losses] = []
        for i in range(passes):
            images, targets, skipped = next(batches)
            self.runner.unreadable += skipped
            # Seeded per step, so that a resumed run repeats it, whatever was drawn before.
            torch.manual_seed(step_seed("model", recipe.seed, self.step))
            # As DDP's no_sync: it exchanges accumulated gradients in the last pass only; FSDP2 exchanges them in each.
            self.student.require_backward_grad_sync = i == passes - 1
            with self.runner.autocast():
                losses.append(self.student(images, setting, targets))
            (losses[-1].total / passes).backward()
            batches.prefetch()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = parallel.unshard(torch.nn.utils.get_total_norm(gradients))
        # Whether to skip the step is decided on the device: asking would make the host wait for every step.
        finite = torch.stack([norm, *(each.total.detach() for each in losses)]).isfinite().all()
        skip = parallel.all_reduced((~finite).float(), self.world, torch.distributed.ReduceOp.MAX)
        self.rate = learning_rate(self.step, self.steps, self.warmup, recipe.schedule.peak, recipe.schedule.low)
        step_optimizers(self.optimizers, self.rate, skip)
        self.ema.update(skip)
        self.skipped_steps.update(skip)
        # Means over the passes stay on the device until they are logged.
        found = [each.values() for each in losses]
        means = {name: torch.stack([each[name].detach() for each in found]).mean() for name in found[0]}
        budget, width = setting
        drawn = budget, None if recipe.data.aspect else resolution, width if len(self.model.config.widths) > 1 else None
        self.meter.update({**means, "gradient_norm": norm}, recipe.batch, *drawn)
        self.step += 1

    def memory_advice(self) -> str:
        recipe, ((budget, _), resolution) = self.recipe, self.draws(self.step)
        what = f"{self.runner.pass_batch} images per pass at {resolution} px with {budget} cores, at step {self.step:,}"
        way_out = f"set accumulate={2 * recipe.accumulate}, or grad_checkpointing=true"
        return f"{what}; {way_out}{', or data.resident=null' if recipe.data.resident else ''}"

    # Logging and validation

    def extra_metrics(self, images_per_s: float) -> dict[str, float]:
        """The share of a large matrix product's speed that the student's products reach; nan where not on a GPU."""
        recipe = self.recipe
        sizes, settings = shares(recipe.odds_at(self.step - 1)), shares(self.settings)
        flops = PASSES * expected_flops(self.model.config, sizes, settings)
        return {"floor_share": images_per_s / self.world.size * flops / self._peak_rate}

    @cached_property
    def _peak_rate(self) -> float:
        """FLOP/s of a large matrix product."""
        dtype = torch.bfloat16 if self.recipe.precision == "bfloat16" else torch.float32
        return matrix_rate(self.device, dtype) if self.device.type == "cuda" else float("nan")

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
            names = (f"{size} px C={cores}" + (f" w={width:g}" if width != 1 else "") for size, cores, width in grid)
            cells = ", ".join(f"{n} {values['total']:.4f}" for n, values in zip(names, grid.values(), strict=True))
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
        if not any(parallel.gathered(failed, self.world)):
            self.best = mean

    # Checkpoints and results

    def checkpoint_tensors(self) -> dict[str, dict[str, Tensor]]:
        files = {"model": module_tensors(self.model), "optimizers": {}}
        for kind, optimizer in self.optimizers.items():
            states = optimizer_tensors(self.model, optimizer)
            files["optimizers"] |= {kind + key: tensor for key, tensor in states.items()}
        buffers = dict(self.teacher.named_buffers())
        statistics = [name for name in buffers if name.rpartition(".")[2] in ("means", "deviations")]
        if statistics:
            files["teacher"] = {name: buffers[name].cpu() for name in statistics}
        return files

    def checkpoint_facts(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "pictures": self.images.fingerprint,
            "images_per_step": self.recipe.batch,
            "teacher": self.teacher.about,
            "best": self.best if self.best < float("inf") else None,
            "validation": self.last_validation,
            "validated_on": self.validated_on,
            "corrupt": self.unreadable_count,
            "versions": {"veca": veca.__version__, "torch": torch.__version__},
        }

    def model_metadata(self) -> dict[str, str]:
        """That of a model, so that `veca.load` takes a checkpoint."""
        description = {"config": self.model.config.to_dict(), "provenance": self._provenance()}
        return {"format": "pt", "veca": json.dumps(description)}

    def _provenance(self, **more: Any) -> dict[str, Any]:
        if self.model.provenance:
            more["started_from"] = self.model.provenance
        return {
            "weights": "distilled", "teacher": self.teacher.about, "recipe": self.recipe.to_dict(),
            "images": self.meter.images, "step": self.step, **more,
        }  # fmt: skip

    def _save_weights(self, folder: Path) -> None:
        """Save the (averaged) weights, which all processes must gather, as a model."""
        with self.ema.swapped_in():
            tensors = module_tensors(self.model)
        if self.world.first:
            self._write_weights(tensors, folder)

    def _write_weights(self, tensors: dict[str, Tensor], folder: Path) -> None:
        save_tensors(tensors, self.model.config.to_dict(), self._provenance(validation=self.last_validation), folder)

    def _write_classifier(self) -> None:
        """Leave the first classifier whose logits the student learned from beside the model."""
        losses = teacher_losses(self.recipe, self.teacher)
        for loss, teacher in zip(losses, members(self.teacher), strict=True):
            if loss.classifier is not None:
                own = teacher.teacher if isinstance(teacher, Standardized) else teacher
                write_classifier(self.folder / CLASSIFIER, *loss.classifier, own.name, own.classes)
                return

    def save_weights_only(self, tensors: TensorFiles) -> str:
        try:  # the averaged parameters replace the trained ones; buffers come from the model
            self._write_weights({**tensors["model"], **tensors.get("ema", {})}, self.folder)
        except OSError:
            return "nor can its weights"
        return f"its weights are in {self.folder}"

    def write_settings(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove(("summary.json",))
        if self.restart:
            self.remove(("checkpoints", "best", "model.safetensors", "config.json", "report.html", CLASSIFIER))
        with atomic_path(self.folder / "recipe.yaml") as part:
            part.write_text(self.recipe.to_yaml(), encoding="utf-8")
        self.write_json("split.json", split_parameters(self.model))
        return self.recipe.to_dict()

    def finish(self) -> None:
        self._save_weights(self.folder)
        if self.world.first:
            self._write_classifier()
            more = {"total_steps": self.steps, "model": self.recipe.model.size}
            self.write_json("summary.json", self.checkpoint_facts() | self.totals() | more)


def make_teacher(recipe: Recipe) -> AnyTeacher:
    """The frozen teacher, or all of them as one."""
    teachers = [_load_teacher(settings) for settings in (recipe.teacher, *recipe.teachers)]
    return TeacherGroup(teachers) if recipe.teachers else teachers[0]


def _load_teacher(settings: TeacherRecipe) -> Teacher | Standardized:
    """A frozen teacher, standardized where the recipe or its kind asks for it."""
    teacher = load_teacher(settings.name, settings.meet, settings.trust_remote_code)
    teacher.glance = settings.glance
    standardize = teacher.raw if settings.standardize is None else settings.standardize
    return Standardized(teacher) if standardize else teacher


def make_student(recipe: Recipe, teacher: AnyTeacher) -> Veca:
    """A student with new weights, which follow from the seed, or with those the recipe starts from."""
    config = recipe.model.config()
    config = VecaConfig.from_dict({**config.to_dict(), "output_dim": output_dim_for(config, teacher)})
    if recipe.model.start not in (None, "teacher"):
        model = veca.load(recipe.model.start)
        if recipe.model.elastic is not None:
            model.config = dataclasses.replace(model.config, widths=config.widths)
        if model.config.output_dim != config.output_dim:
            replace_output(model, config.output_dim, members(teacher)[0], recipe.seed)
        fields = [field.name for field in dataclasses.fields(VecaConfig)]
        pairs = {name: (getattr(model.config, name), getattr(config, name)) for name in fields}
        if different := [f"{name}: {theirs}, not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]:
            raise RecipeError(f"model.start={recipe.model.start} is another model ({'; '.join(different)})")
        return model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Veca(config)
    if recipe.model.start == "teacher":
        inherit_weights(model, teacher)
    elif recipe.model.patch_embed_from_teacher:
        start_patch_embed(model, teacher)
    return model.train()


def calibrate(model: Veca, runner: TeacherRunner, images: ImageIndex) -> None:
    """Make `model` elastic at its widths, by the first training images; the same in every process."""
    resolution = runner.recipe.grid()[0][0]
    if runner.world.first:
        batches = runner.centres(images, resolution, CALIBRATION_BATCH, alone=True)
        make_elastic(model, itertools.islice(batches, CALIBRATION_BATCHES), model.config.widths)
    parallel.broadcast([parameter.detach() for parameter in model.parameters()], runner.world)


def _find_images(recipe: Recipe, folder: Path, world: World) -> tuple[ImageIndex, ImageIndex | None]:
    """Training and validation images; the first process writes the index, the others read it."""
    if not recipe.data.train:
        raise RecipeError("data.train: no pictures to train on; name folders, globs or tar shards")
    folder.mkdir(parents=True, exist_ok=True)
    if not world.first:
        parallel.gathered(None, world)  # wait for the index
    train = ImageIndex.build(recipe.data.train, folder / "train.index", progress=world.first)
    validation = None
    if recipe.data.validation:
        validation = ImageIndex.build(recipe.data.validation, folder / "validation.index", progress=world.first)
    if world.first:
        parallel.gathered(None, world)
    return train, validation


def _check_recipe(recipe: Recipe, folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to start from weights that the run would overwrite, and to resume with another recipe, except for keys
    that do not change what is learned.
    """
    if recipe.model.start is not None and (start := Path(recipe.model.start)).exists():
        source, out = (start if start.is_dir() else start.parent).resolve(), folder.resolve()
        if source in (out, out / "best") or source.parent == out / "checkpoints":
            raise RecipeError(f"model.start={start} is in {folder}, where it would be written over: take another --out")
    if facts and "recipe" not in facts:
        raise RecipeError(f"{folder} holds a run of `veca finetune`: take another --out")
    if facts:
        earlier = facts["recipe"]
        with contextlib.suppress(RecipeError):  # of a key that is gone
            earlier = Recipe.from_dict(earlier).to_dict()  # with keys that came later
        before, now = (dict(_flatten(values)) for values in (earlier, recipe.to_dict()))
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        fixed = [key for key in keys if not key.startswith(tuple(f"{free}." for free in _CHANGEABLE_KEYS))]
        if changed := [f"{key[:-1]}: {before.get(key)!r}, now {now.get(key)!r}" for key in fixed]:
            way_out = "Take another --out, or --overwrite to begin anew in it"
            raise RecipeError(f"{folder} holds a run of another recipe ({'; '.join(changed)}). {way_out}")


def _flatten(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested settings by its key, as `resolutions.0.odds.256.`"""
    if isinstance(values, Mapping | list):
        for name, part in values.items() if isinstance(values, Mapping) else enumerate(values):
            yield from _flatten(part, f"{key}{name}.")
    else:
        yield key, values
