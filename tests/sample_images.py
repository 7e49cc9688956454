"""Images for tests: tensors for a model, Pillow images of several kinds, encoded files, and a video."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def random_images(batch: int = 2, height: int = 48, width: int = 80, seed: int = 1) -> Tensor:
    """Normalised images (batch, 3, height, width)."""
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def noise_image(seed: int = 0, width: int = 60, height: int = 44) -> Image.Image:
    """Pixels that do not depend on their neighbours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def noise_png(seed: int = 0, width: int = 48, height: int = 32) -> bytes:
    return encode(noise_image(seed, width, height))


def smooth_image(seed: int = 0, width: int = 60, height: int = 44, grain: int = 0) -> Image.Image:
    """Colours that change slowly, plus noise of up to ± `grain`: closest to a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
    if not grain:
        return smooth
    pixels = np.asarray(smooth).astype(int)
    return Image.fromarray((pixels + rng.integers(-grain, grain + 1, pixels.shape)).clip(0, 255).astype(np.uint8))


def fractal_image(width: int = 300, height: int = 200) -> Image.Image:
    """The same detailed image at any size."""
    return Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 50).convert("RGB")


def encode(image: Image.Image, file_format: str = "PNG") -> bytes:
    """The bytes of a file that holds `image`."""
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


def random_pixels(height: int = 64, width: int = 96) -> Tensor:
    """Two images (2, 3, height, width) with values from 0 to 1, not normalised."""
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def write_video(path: Path, seconds: int = 5, rate: int = 10, width: int = 96, height: int = 64) -> Path:
    """A video whose left half gets brighter by 5 with each frame; the right half is black."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 2_000_000
        for number in range(seconds * rate):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[:, : width // 2] = 5 * number
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path
