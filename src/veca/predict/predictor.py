"""A fine-tuned model with the preprocessing it was validated with: images in, predictions in their own pixels out.

Shapes: images of H × W pixels, as they are upright; h × w as the model sees them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from veca.checkpoint.format import FINETUNE_RESULT, FINETUNE_SETTINGS, CheckpointError, StrPath
from veca.config import MlpWidth
from veca.errors import VecaError
from veca.heads.networks import Classifier, DepthEstimator, Network, Segmenter, load_network
from veca.images import PATCH, Fit, Source, normalize
from veca.images.load import load_pixels
from veca.images.pack import pack
from veca.model import Veca
from veca.packed import PackedImages
from veca.utils.settings import Positive, Settings


@dataclass(frozen=True, eq=False)
class ClassPrediction:
    """All classes of an image, the most probable first."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class MaskPrediction:
    """The class of each pixel of an image."""

    mask: Tensor
    """(H, W): class numbers, on the CPU; uint8, or int32 with more than 256 classes."""
    classes: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True, eq=False)
class DepthPrediction:
    """The depth at each pixel of an image."""

    depth: Tensor
    """(H, W): metres, float32, on the CPU."""


Prediction: TypeAlias = ClassPrediction | MaskPrediction | DepthPrediction


@dataclass(frozen=True, kw_only=True)
class PredictSettings(Settings):
    """How predictions are made; by default as the run was validated."""

    cores: Positive | None = None
    """Budget; None: all cores."""
    width: MlpWidth | None = None
    size: Positive = 512
    fit: Fit = "crop"
    max_patches: Positive | None = None
    """With fit "native", shrink images of more patches; None: of more than size × size pixels have."""
    batch: Positive = 32
    """Images per forward pass."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the computation; None: bfloat16 on a GPU, float32 elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("size", self.size % PATCH == 0, f"a multiple of {PATCH}")
        native = self.fit == "native" or self.max_patches is None
        self.require("max_patches", native, "None unless fit is 'native'")


class Predictor:
    """A fine-tuned model that takes images as they are; made by `load_finetuned`.

    `network` is the model with its head, `network.backbone` the backbone.
    """

    def __init__(self, network: Network, settings: PredictSettings) -> None:
        self.network, self.settings = network, settings
        config, self.classes = network.backbone.config, _class_names(network)
        settings.require("cores", (settings.cores or 1) <= config.num_cores, f"from 1 to {config.num_cores}")
        whole = settings.fit in ("keep", "stretch", "native") or isinstance(network, Classifier)
        settings.require("fit", whole, "keep, stretch or native: a map needs the whole image")
        network.backbone.width = settings.width

    @property
    def task(self) -> Literal["classify", "segment", "depth"]:
        if isinstance(self.network, Classifier):
            return "classify"
        return "segment" if isinstance(self.network, Segmenter) else "depth"

    @property
    def device(self) -> torch.device:
        return self.network.backbone.norm.weight.device

    @overload
    def predict(self, images: list[Source] | tuple[Source, ...]) -> list[Prediction]: ...
    @overload
    def predict(self, images: Source) -> Any: ...
    def predict(self, images: Any) -> Any:
        """The prediction for an image, a `Prediction` of the model's task, or a list of them for a list of images.

        Images are paths, bytes, streams or Pillow images. One that cannot be read raises `ImageError`.
        """
        if not isinstance(images, list | tuple):
            return self.predict([images])[0]
        settings, predictions = self.settings, list[Prediction]()
        for start in range(0, len(images), settings.batch):
            loaded = [
                load_pixels(image, settings.size, settings.fit, max_patches=settings.max_patches)
                for image in images[start : start + settings.batch]
            ]
            pixels, sizes = zip(*loaded, strict=True)
            predictions += self.predict_pixels(pixels, [(rows, columns) for columns, rows in sizes])
        return predictions

    @torch.inference_mode()
    def predict_pixels(self, pixels: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        """Predictions for a batch of images (3, h, w), uint8, resized as the settings say from (H, W) in `sizes`."""
        batch, cores = self._make_batch(pixels), self.settings.cores
        precision = self.settings.precision or ("bfloat16" if self.device.type == "cuda" else "float32")
        with torch.autocast(self.device.type, torch.bfloat16, precision == "bfloat16"):
            if isinstance(self.network, Classifier):
                shares, order = self.network(batch, cores).softmax(1).cpu().sort(dim=1, descending=True, stable=True)
                names = (tuple(self.classes[i] for i in numbers) for numbers in order.tolist())
                return [ClassPrediction(*pair) for pair in zip(names, map(tuple, shares.tolist()), strict=True)]
            maps = self.network.predict(batch, sizes, cores)
        if isinstance(self.network, Segmenter):
            return [MaskPrediction(each.cpu(), self.classes) for each in maps]
        low, high = self.network.head.low, self.network.head.high  # to which depths are clamped to be scored
        return [DepthPrediction(each.clamp(low, high).cpu()) for each in maps]

    def _make_batch(self, pixels: Sequence[Tensor]) -> Tensor | PackedImages:
        images = [each.to(self.device, non_blocking=True) for each in pixels]
        if len({each.shape for each in images}) == 1:
            return normalize(torch.stack(images))
        return pack(images, patch_size=self.network.backbone.config.patch_size)


def load_finetuned(source: StrPath, device: str | torch.device | None = None, **changes: Any) -> Predictor:
    """The model that `veca finetune` left in a folder, ready for images; or any model with classes, as `load` takes it.

    `changes` are settings that differ from those the run was validated with, where they are not None: `cores`, `width`,
    `size`, `fit`, `max_patches`, `batch` and `precision`.

    >>> import tempfile, veca
    >>> from PIL import Image
    >>> backbone = veca.create_model("veca_tiny", num_classes=2)
    >>> backbone.provenance = {"classes": ["cat", "dog"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     veca.save(backbone, folder)
    ...     model = load_finetuned(folder, size=64)
    >>> sorted(model.predict(Image.new("RGB", (80, 60))).classes)
    ['cat', 'dog']
    """
    folder = Path(source)
    if (folder / FINETUNE_SETTINGS).is_file() and not (folder / FINETUNE_RESULT).is_file():
        problem = "its run has not come to its end; the same `veca finetune` command continues it"
        raise CheckpointError(f"{source}: {problem}")
    network = load_network(source, device)
    if (patch := network.backbone.config.patch_size) != PATCH:
        raise CheckpointError(f"{source}: its patches have {patch} pixels; images are resized to patches of {PATCH}")
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        trained = PredictSettings.from_dict(_trained_settings(network)).to_dict()
    except (VecaError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: its provenance has no settings of `veca finetune`: {error}") from error
    if given.keys() & {"fit", "size"}:  # the limit was that of the run's own
        trained["max_patches"] = None
    return Predictor(network, PredictSettings.from_dict({**trained, **given}))


def validated_settings(backbone: Veca) -> PredictSettings | None:
    """The settings that `veca finetune classify` validated a model with; None if that is not what made it."""
    if not (backbone.num_classes and isinstance(backbone.provenance.get("finetune"), Mapping)):
        return None
    try:
        return PredictSettings.from_dict(_trained_settings(Classifier(backbone)))
    except (VecaError, TypeError, ValueError) as error:
        raise CheckpointError(f"the provenance of the model has no settings of `veca finetune`: {error}") from error


def _trained_settings(network: Network) -> dict[str, Any]:
    """Of `PredictSettings`, those that a run was validated with, by the provenance of its weights."""
    asked = network.backbone.provenance.get("finetune", {})
    if not isinstance(asked, Mapping) or not asked:
        return {} if isinstance(network, Classifier) else {"fit": "keep"}
    names = ("width", "size", "max_patches", "batch", "precision")
    whole = "crop" if isinstance(network, Classifier) else "keep"
    fit = "native" if asked.get("fit") == "native" else whole
    found = {name: asked[name] for name in names if asked.get(name) is not None}
    return {**found, "fit": fit, "cores": max(network.backbone.config.budgets)}


def _class_names(network: Network) -> tuple[str, ...]:
    """Names of the classes, or numbers where there are none; none of depth."""
    if isinstance(network, Segmenter):
        return tuple(network.classes)
    if isinstance(network, DepthEstimator):
        return ()
    names, count = network.backbone.provenance.get("classes"), network.backbone.num_classes
    named = isinstance(names, list | tuple) and len(names) == count
    return tuple(map(str, names if named else range(count)))  # type: ignore[arg-type]
