"""Settings of an embed run, its report and its error."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from veca.config import MlpWidth
from veca.data.records import DecodeChoice
from veca.data.video import MAX_FPS
from veca.errors import VecaError
from veca.images import MAX_PIXELS, PATCH, Fit
from veca.inputs import resolve_width
from veca.model import Veca
from veca.utils.settings import Bounds, Positive, Settings

Precision = Literal["float32", "bfloat16", "float16"]
SaveDtype = Literal["float32", "float16"]

ANEW = "start anew with --overwrite (overwrite=True)"
"""The way out of most errors, for messages."""


class EmbedError(VecaError, ValueError):
    """A run of `embed` that cannot start, continue or finish."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedSettings(Settings):
    """Everything but the model and the images that the features depend on."""

    error: ClassVar[type[VecaError]] = EmbedError

    cores: int | None = None
    """Budget; None: all cores of the model."""
    width: MlpWidth | None = None
    """Share of the MLP's channels that patches use; None: the model's own."""
    size: Positive = 512
    """Side in pixels, as in `veca.images.fit_image`."""
    fit: Fit = "crop"
    max_patches: Positive | None = None
    """With fit "native", shrink images of more patches; None: of more than size × size pixels have."""
    dense: bool = False
    """Save the patch features."""
    cells: Positive | None = None
    """With `dense`, save their means over a grid of cells × cells instead of all of them."""
    with_global: bool = True
    """Save the global feature."""
    batch: Positive | None = None
    """Images of size × size per forward pass; of larger images, as many as have no more pixels in total. None: chosen
    for the device (`veca.embed.tuning`)."""
    precision: Precision = "float32"
    """Precision of the computation; other than float32: autocast."""
    save_dtype: SaveDtype | None = None
    """Type of the saved features; None: float16 if dense, float32 if not."""
    fps: Annotated[float, Bounds(gt=0, le=MAX_FPS)] | None = None
    """Frames per second of videos, which have their time in a column of its own; None: videos are not read."""
    max_pixels: Positive = MAX_PIXELS
    stream_above: Positive | None = None
    """With dense, files of images that have more patches, at their own size, are computed whole, by tiles, each into a
    file of its own (`veca.embed.large`); None: those of more than `max_pixels`."""
    decode: DecodeChoice = "auto"
    """Decoder: "gpu" decodes ordinary JPEGs on the GPU and the rest as "cpu" does; "cpu" is fast, its pixels differ
    from Pillow's by a few grey levels; "pillow" is exact; "auto" is "gpu" where there is one, or else "cpu"."""
    compile: bool = False
    """Compile the model where no fused kernels run: faster after a start of about half a minute."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dense and not self.with_global:
            raise EmbedError("nothing to save: ask for the global feature, for dense features, or for both")
        self.require("cells", self.dense or self.cells is None, "None unless dense is true")
        native = self.fit == "native" or self.max_patches is None
        self.require("max_patches", native, "None unless fit is 'native'")
        self.require("stream_above", self.dense or self.stream_above is None, "None unless dense is True")

    @property
    def batch_size(self) -> int:
        """The batch, once it is chosen."""
        assert self.batch is not None
        return self.batch

    def resolve(self, model: Veca) -> Self:
        """These settings with every None filled in; raises EmbedError if the model cannot run with them."""
        bank, step = model.config.num_cores, math.lcm(model.config.patch_size, PATCH)
        budget = bank if self.cores is None else self.cores
        self.require("cores", 1 <= budget <= bank, f"from 1 to {bank}; leave it out for all {bank}")
        nearest = max(step, round(self.size / step) * step)
        self.require("size", self.size % step == 0, f"a multiple of {step}. Nearest: {nearest}")
        save_dtype = self.save_dtype or ("float16" if self.dense else "float32")
        size, max_patches = self.size, self.max_patches
        if self.fit == "native":  # sizes of batches and parts are reckoned in squares of as many patches
            max_patches = max_patches or (size // step) ** 2
            size = max(1, math.isqrt(max_patches)) * step
        side = size // model.config.patch_size
        self.require("cells", (self.cells or 1) <= side, f"at most {side}, the patches along a side")
        width = self.width or model.width or 1.0
        resolve_width(width, model.config, model._warned)
        return dataclasses.replace(
            self, cores=budget, width=width, save_dtype=save_dtype, size=size, max_patches=max_patches
        )


class EmbedReport(NamedTuple):
    """Result of a run."""

    pictures: int
    """Rows in `out`."""
    failures: int
    """Rows in `<out>.failures.csv`; there is no such file without failures."""
    resumed: int
    """Images and failures among these that an earlier, interrupted run had finished."""
    seconds: float
    out: Path | str
    """The file, the folder or the address of the folder."""
    resumed_failures: int = 0
    """How many of `resumed` are failures."""
    rates: dict[str, float] = {}  # noqa: RUF012 (never changed)
    """Images per second of each stage while it is at work, of this process."""
    bottleneck: str = ""
    """The slowest of the stages."""
    how: str = ""
    """Batch size, processes and decoder, in words."""
    shrunk: int = 0
    """Images among `pictures` that lost pixels: larger than the size, or with fit "native" than `max_patches`."""
    max_patches: int | None = None
    """Limit of fit "native"."""
    streamed: int = 0
    """Images that are not in `out` but, as they are large, in files of their own in `<out>.large`."""
