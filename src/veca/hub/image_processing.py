"""The image processor of VECA's transformers models: images of any kind → what the models take."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor, get_size_dict
from transformers.image_transforms import center_crop, to_pil_image
from transformers.image_utils import ChannelDimension, PILImageResampling, make_flat_list_of_images

from veca.errors import ArgumentError
from veca.hub.saved_code import SavedWithCode
from veca.images import MEAN, PATCH, STD, Fit, fit_image, open_image, to_tensor
from veca.images.load import apply_crop, plan_fit
from veca.images.pack import cut_patches
from veca.utils.text import did_you_mean

OPTIONS: dict[str, Any] = {
    "do_resize": True,
    "resample": PILImageResampling.BICUBIC,
    "do_center_crop": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "data_format": ChannelDimension.FIRST,
    "input_data_format": None,
    "device": None,
}
"""Options as of transformers' own processors, and what they are where nobody names them; `do_center_crop`: by `fit`."""


class VecaImageProcessor(SavedWithCode, BaseImageProcessor):
    """Preprocessing as by `veca.images.load_image`; `fit` is explained in `veca.images.fit_image`.

    `size` is a side in pixels or, as usual in transformers, {"height": …, "width": …} or {"shortest_edge": …}. With
    `fit="native"` images keep their size, up to `max_num_patches` or the patches of `size`, and come as padded patches
    with a mask and their grids, as from SigLIP 2's processor.

    `OPTIONS` are those of transformers' own processors, at creation or at the call. Without `do_center_crop` the image
    is resized to `size` as it is; without `do_resize` it keeps its size.
    """

    _auto_classes: ClassVar[dict[str, str]] = {"AutoImageProcessor": "VecaImageProcessor"}

    def __init__(
        self,
        size: int | dict[str, int] = 512,
        fit: Fit = "crop",
        image_mean: tuple[float, ...] | list[float] = MEAN,
        image_std: tuple[float, ...] | list[float] = STD,
        max_num_patches: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size, self.fit = get_size_dict(size, default_to_square=fit in ("crop", "stretch")), fit
        self.image_mean, self.image_std = list(image_mean), list(image_std)
        self.max_num_patches = max_num_patches

    def preprocess(
        self,
        images: Any,
        size: int | dict[str, int] | None = None,
        fit: Fit | None = None,
        return_tensors: Any = None,
        max_num_patches: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **options: Any,
    ) -> BatchFeature:
        """Images (Pillow, arrays, tensors, paths, URLs; one or a list) → normalised tensors (3, H, W)."""
        chosen = self._options(options)
        fit = fit or self.fit
        side = self.size if size is None else get_size_dict(size, default_to_square=fit in ("crop", "stretch"))
        if chosen["do_center_crop"]:
            fit = "crop"
        elif chosen["do_center_crop"] is False and fit == "crop":
            fit = "keep" if "shortest_edge" in side else "stretch"
        sides = tuple(side.values())
        target = sides[0] if len(set(sides)) == 1 else (side["height"], side["width"])
        limit = self.max_num_patches if max_num_patches is None else max_num_patches
        mean, std = (
            torch.tensor(each).view(-1, 1, 1) for each in (image_mean or self.image_mean, image_std or self.image_std)
        )
        tensors = []
        flat: Any = make_flat_list_of_images(self.fetch_images(images))
        for image in flat:
            pixels = to_tensor(_fit(_open(image, chosen["input_data_format"]), target, fit, limit, chosen)).float()
            # What came as shares of 1 is 8-bit by now.
            scale: Any = chosen["rescale_factor"] if chosen["do_rescale"] else 1 / 255 if _is_share(image) else 1
            pixels = pixels / 255 if scale == 1 / 255 else pixels * scale
            tensors.append(((pixels - mean) / std if chosen["do_normalize"] else pixels).to(chosen["device"]))
        if fit == "native":
            if not tensors:
                raise ArgumentError("there are no images; give at least one")
            return BatchFeature(pad_patches(tensors), tensor_type=return_tensors)
        if ChannelDimension(chosen["data_format"]) == ChannelDimension.LAST:
            tensors = [each.permute(1, 2, 0) for each in tensors]
        return BatchFeature({"pixel_values": tensors}, tensor_type=return_tensors)

    def _options(self, told: dict[str, Any]) -> dict[str, Any]:
        """The value of each of `OPTIONS`: that of the call, or else of the processor."""
        for name in set(told) - set(OPTIONS):
            known = ", ".join(OPTIONS)
            raise ArgumentError(f"unknown option {name!r}{did_you_mean(name, OPTIONS)}. Known: {known}")
        default = {name: getattr(self, name, value) for name, value in OPTIONS.items()}
        return default | {name: value for name, value in told.items() if value is not None}


def _is_share(image: Any) -> bool:
    """Whether pixels are numbers from 0 to 1, which transformers' processors take as rescaled already."""
    return not isinstance(image, Image.Image) and bool(np.issubdtype(np.asarray(image).dtype, np.floating))


def _open(image: Any, data_format: Any) -> Image.Image:
    return open_image(image if isinstance(image, Image.Image) else to_pil_image(image, input_data_format=data_format))


def _fit(image: Image.Image, target: Any, fit: Fit, limit: int | None, options: dict[str, Any]) -> Image.Image:
    """`fit_image` with another filter, or without resizing."""
    if options["do_resize"] and options["resample"] == PILImageResampling.BICUBIC:
        return fit_image(image, target, fit, max_patches=limit)
    if options["do_resize"]:
        crop = plan_fit(*image.size, target, fit, max_patches=limit)
        size = crop.columns, crop.rows
        return apply_crop(crop._replace(box=(0, 0, *size)), image.resize(size, options["resample"], crop.box))
    if options["do_center_crop"]:
        sides = (target, target) if isinstance(target, int) else target
        return Image.fromarray(center_crop(np.asarray(image), sides))
    return image


def pad_patches(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Images (3, H, W) as padded patches (B, N, 16 · 16 · 3), channels last, with their mask and grids."""
    patches = [cut_patches(image).unflatten(1, (3, -1)).mT.flatten(1) for image in images]
    mask = [torch.ones(len(each), dtype=torch.int32) for each in patches]
    shapes = [[side // PATCH for side in image.shape[1:]] for image in images]
    pixels, valid = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (patches, mask))
    return {"pixel_values": pixels, "pixel_attention_mask": valid, "spatial_shapes": torch.tensor(shapes)}
