"""The batch size of an embed run that names none: from the device and the image size, and on a GPU by a measurement."""

import itertools
import time

import torch

from veca.embed.settings import EmbedSettings
from veca.images import normalize
from veca.model import Veca
from veca.optimized import FastVeca

# Pixels per forward pass: enough to fill a large GPU; on a CPU so few that its caches hold what a layer returns, which
# depends on the width of the model: for one of 192 channels this number; and images at most
_PIXELS, _PIXELS_ON_CPU, _WIDTH_ON_CPU = 256 * 256**2, 16 * 256**2, 192
_IMAGES, _IMAGES_ON_CPU = 1024, 64
# A batch this much slower than the fastest is taken if it is smaller.
_TOLERANCE = 1.03
_REPEATS = 3


def default_batch(settings: EmbedSettings, device: torch.device, width: int) -> int:
    """The batch size by rule: a number of pixels, on a CPU of a model that has `width` channels."""
    pixels, images = _PIXELS, _IMAGES
    if device.type != "cuda":
        pixels, images = _PIXELS_ON_CPU * _WIDTH_ON_CPU // width, _IMAGES_ON_CPU
    return min(max(1, pixels // settings.size**2), images)


def choose_batch(model: Veca, settings: EmbedSettings, device: torch.device) -> int:
    """The smallest batch whose rate is near that of the best, of a few around the rule's, measured on a GPU."""
    rule = default_batch(settings, device, model.config.embed_dim)
    if device.type != "cuda":
        return rule
    if isinstance(model, FastVeca):
        model.compile_kernels(rule, settings.size, settings.cores, not settings.dense, settings.width)
    best, rate = 1, 0.0
    dtype: torch.dtype = getattr(torch, settings.precision)
    with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for batch in sorted({max(1, rule // 4), max(1, rule // 2), rule, 2 * rule}):
            images = normalize(torch.zeros(batch, 3, settings.size, settings.size, dtype=torch.uint8, device=device))
            try:
                # The first run compiles, the second may record a graph.
                for repeat in itertools.count():
                    if repeat == 2:
                        torch.cuda.synchronize(device)
                        began = time.perf_counter()
                    Veca.forward(model, images, cores=settings.cores, cls_only=not settings.dense, width=settings.width)
                    if repeat == 1 + _REPEATS:
                        break
                torch.cuda.synchronize(device)
            except torch.OutOfMemoryError:
                break
            found = batch * _REPEATS / (time.perf_counter() - began)
            if found > rate * _TOLERANCE:
                best, rate = batch, found
    torch.cuda.empty_cache()
    return best
