"""Crops of images by the decoder that was asked for: read in worker processes, finished there or together on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.gpu_decode import can_resize, choose_decoder, finish_crops, hand_over
from veca.data.records import Decode, DecodeChoice, for_resizing, read_jpeg
from veca.data.transforms import Window
from veca.images import MAX_PIXELS, ImageError
from veca.images.load import Decoder, PlanCrop, crop_pixels, open_for_crop
from veca.images.resize import Crop


class PlannedCrop(NamedTuple):
    """A crop that is left to a GPU: of a JPEG file, or of pixels (height, width, 3); `window` is cut from the result.

    `label` is what else is known of the image.
    """

    source: NDArray[np.uint8]
    crop: Crop
    window: Window | None = None
    label: Any = None


@dataclass(frozen=True)
class CropReader:
    """Reads crops of images: pixels (3, height, width), or what a GPU makes them of."""

    decode: Decode = "pillow"
    device: torch.device | None = None
    """The GPU that finishes the crops; None: they are finished where they are read."""

    @classmethod
    def choose(cls, choice: DecodeChoice, device: torch.device) -> Self:
        """Return the reader for images that go to `device`, which resizes them unless Pillow is to do all."""
        decode = choose_decoder(choice, device)
        return cls(decode, device if decode != "pillow" and can_resize(device) else None)

    def describe(self) -> dict[str, str]:
        """Return plain data for cache keys and protocols; nothing for Pillow's pixels, as before there was a choice."""
        return {} if self.decode == "pillow" else {"decode": self.decode}

    def read(self, source: str | bytes, plan: PlanCrop, at_least: int) -> NDArray[np.uint8] | PlannedCrop:
        """Read the crop that `plan` makes of the image's size, in a worker.

        Except by Pillow's decoder, an image may be decoded at reduced size as long as its short side has `at_least`
        pixels. `plan` may be called twice.
        """
        jpeg = read_jpeg(source, MAX_PIXELS) if self.decode == "gpu" else None
        if jpeg is not None:
            data, size, orientation = jpeg
            crop = plan(*size)._replace(orientation=orientation)
            if not crop.grows_first:
                return PlannedCrop(data, crop)
        image, crop, _ = open_for_crop(source, plan, at_least=None if self.decode == "pillow" else at_least)
        return self.crop(image, crop)

    def crop(self, image: Image.Image, crop: Crop) -> NDArray[np.uint8] | PlannedCrop:
        """Crop an upright RGB image, or leave that to the GPU."""
        if self.device is not None:
            return PlannedCrop(*for_resizing(image, crop))
        decoder: Decoder = "pillow" if self.decode == "pillow" else "cpu"
        return crop_pixels(crop, image, decoder).numpy()


def finish_planned(planned: Sequence[PlannedCrop], device: torch.device) -> list[Tensor | ImageError]:
    """Make crops on a GPU: uint8 (3, height, width) of each, to be used on the device's default stream.

    What that refuses to decode is decoded by the CPU, or is an error.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, each in enumerate(planned):
        by_shape.setdefault((each.crop.height, each.crop.width), []).append(i)
    finished = dict[int, Tensor | ImageError]()
    for shape, some in by_shape.items():
        sources, crops = [planned[i].source for i in some], [planned[i].crop for i in some]
        made, refused = finish_crops(sources, crops, shape, device)
        finished |= zip(some, made, strict=True)
        finished |= {some[i]: _finish_on_cpu(planned[some[i]], device) for i in refused}
    for i, each in enumerate(planned):
        pixels = finished[i]
        if each.window is not None and isinstance(pixels, Tensor):
            finished[i] = each.window.cut(pixels)
    hand_over((pixels for pixels in finished.values() if isinstance(pixels, Tensor)), device)
    return [finished[i] for i in range(len(planned))]


def _finish_on_cpu(planned: PlannedCrop, device: torch.device) -> Tensor | ImageError:
    upright = planned.crop._replace(orientation=1)
    try:
        image, crop, _ = open_for_crop(planned.source.tobytes(), lambda *_: upright)
    except ImageError as error:
        return error
    return crop_pixels(crop, image, "cpu").to(device)
