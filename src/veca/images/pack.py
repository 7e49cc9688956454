"""Pack images of any mix of sizes into one batch: `veca.pack`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError, NonFiniteError
from veca.images.load import normalize, to_tensor
from veca.images.resize import PATCH, check_max_patches, native_sizes, resample
from veca.packed import PackedImages


def pack(
    images: Sequence[Tensor | Image.Image] | Mapping[str, Tensor],
    max_patches: int | None = None,
    patch_size: int = PATCH,
    device: str | torch.device | None = None,
) -> PackedImages:
    """Images of any mix of sizes as one batch for the model; nothing is padded or cropped.

    `images` are normalised float tensors (channels, height, width), or images to be normalised: RGB of Pillow, or uint8
    tensors. Sides become the nearest multiples of `patch_size`; an image of more than `max_patches` patches is shrunk,
    its aspect ratio kept. Also accepted are the dictionaries of timm's NaFlex loaders and of SigLIP 2's processor.

    >>> batch = pack([torch.zeros(3, 64, 100), Image.new("RGB", (1024, 512))], max_patches=100)
    >>> batch.grids
    ((4, 6), (7, 14))
    """
    check_max_patches(max_patches)
    if not (isinstance(patch_size, int) and patch_size >= 1):
        raise ArgumentError(f"patch_size={patch_size!r}; it must be an integer, at least 1")
    if isinstance(images, Mapping):
        if max_patches is not None:
            raise ArgumentError("max_patches goes with images; those of a dictionary are cut into patches already")
        packed = PackedImages.from_padded(images, patch_size)
    else:
        if isinstance(images, Tensor | Image.Image) or not isinstance(images, Sequence):
            raise ArgumentError(f"images are {type(images).__name__}; expected a list of images of any sizes")
        fitted = [_fit(image, i, max_patches, patch_size, device) for i, image in enumerate(images)]
        channels = sorted({len(image) for image in fitted})
        if len(channels) > 1:
            raise ArgumentError(
                f"images of the pack have {' and '.join(map(str, channels))} channels; all need as many"
            )
        grids = tuple((image.shape[1] // patch_size, image.shape[2] // patch_size) for image in fitted)
        pixels = [cut_patches(image, patch_size) for image in fitted]
        packed = PackedImages(torch.cat(pixels) if pixels else torch.empty(0, 0), grids)
    return packed if device is None else packed.to(device)


def cut_patches(image: Tensor, side: int = PATCH) -> Tensor:
    """An image (channels, H, W) as patches (N, channels · side · side), row by row."""
    patches = image.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # (channels, rows, side, columns, side)
    return patches.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


def _fit(image: Any, index: int, max_patches: int | None, patch: int, device: str | torch.device | None) -> Tensor:
    """An image as a normalised tensor (channels, H, W), sides multiples of `patch`."""
    where = f"image {index} of the pack"
    if isinstance(image, Image.Image):
        if 0 in image.size or image.mode != "RGB":
            found = f"has {image.width}×{image.height} pixels of mode {image.mode}"
            raise ArgumentError(f"{where} {found}; expected RGB, no side 0. images.open_image converts others")
        height, width = native_sizes(image.height, image.width, max_patches, patch)
        return normalize(to_tensor(resample(image, (width, height), (0, 0, *image.size))).to(device))
    if not isinstance(image, Tensor):
        raise ArgumentError(f"{where} is {type(image).__name__}; expected a tensor or an image of Pillow")
    if image.ndim != 3 or 0 in image.shape:
        raise ArgumentError(
            f"{where} has shape {tuple(image.shape)}; expected (channels, height, width), none of them 0"
        )
    image = image.to(device)
    if image.dtype == torch.uint8:
        if len(image) != 3:
            raise ArgumentError(f"{where} is uint8 of {len(image)} channels; only RGB, 3 channels, is normalised here")
        image = normalize(image)
    elif not image.is_floating_point():
        raise ArgumentError(f"{where} is {image.dtype}; expected normalised floats, or uint8 to be normalised")
    # Only on the CPU: elsewhere the device would have to be waited for.
    elif image.device.type == "cpu" and not image.isfinite().all():
        raise NonFiniteError(f"{where} has values that are NaN or infinite; replace them, or leave it out")
    size = native_sizes(image.shape[1], image.shape[2], max_patches, patch)
    if size == tuple(image.shape[1:]):
        return image
    resized = F.interpolate(image[None].float(), size, mode="bicubic", antialias=True)
    return resized[0].to(image.dtype)
