"""The model at work: decoded images go through it in batches and become rows of features.

Batches are formed within a *part*: up to `PART_IMAGES` consecutive images of one partition, fewer where their features
are large. Parts follow from the settings and the order of the images alone, so batches and therefore the bits of the
features do not depend on interruptions, on the number of workers or on the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from veca.config import VecaConfig
from veca.data.loader import Record
from veca.embed.settings import EmbedSettings
from veca.errors import NonFiniteError
from veca.images import normalize
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason

PART_IMAGES = 1024
PART_BYTES = 256 << 20
"""Bytes of features in a part, about; also of decoded images that wait for their batch."""


def prepare_model(model: Veca, settings: EmbedSettings, device: torch.device) -> Veca:
    """Move the model to the device and optimize it where that is supported."""
    model.to(device).eval()
    for tensor in chain(model.parameters(), model.buffers()):
        # Weights mapped from a file may be unaligned, and on CPUs the bits of small matrix products depend on it.
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    dtype: torch.dtype = getattr(torch, settings.precision)
    supported = supports_fused(model.config, device, dtype) and not unfusable_reason(model)
    return optimize(model, dtype=dtype) if supported else model


def feature_bytes(config: VecaConfig, settings: EmbedSettings, height: int, width: int) -> int:
    """Bytes of the saved features of one image of height × width pixels."""
    vectors = settings.with_global + settings.dense * (height * width // config.patch_size**2)
    return vectors * config.num_features * np.dtype(settings.save_dtype).itemsize


def part_limits(config: VecaConfig, settings: EmbedSettings) -> tuple[int, int]:
    """Images in a part, a multiple of the batch size, and the bytes of features after which it ends early."""
    image = feature_bytes(config, settings, settings.size, settings.size)
    max_bytes = max(PART_BYTES, settings.batch * image)
    return max(1, min(PART_IMAGES, max_bytes // image) // settings.batch) * settings.batch, max_bytes


def partition_length(config: VecaConfig, settings: EmbedSettings, images: int) -> int:
    """Image files in a partition: about `images`, in whole parts."""
    part_images, _ = part_limits(config, settings)
    return max(1, images // part_images) * part_images


@dataclass(slots=True)
class _Entry:
    """One image: its row, with the features once its batch has run, or the reason why it has none."""

    name: str
    error: str
    numbers: tuple[int | None, ...] = ()  # width, height, rows, columns, cores
    features: dict[str, NDArray[Any]] = field(default_factory=dict)
    nbytes: int = 0


class FeatureBatcher:
    """Collects decoded images, runs the model on batches of one shape, and returns rows in input order.

    An image whose features are not finite is an error, or with `skip_nonfinite` a failure.
    """

    def __init__(
        self, model: Veca, settings: EmbedSettings, device: torch.device, schema: pa.Schema, skip_nonfinite: bool
    ) -> None:
        self.model, self.settings, self.device = prepare_model(model, settings, device), settings, device
        self.schema, self.skip_nonfinite = schema, skip_nonfinite
        # A subclass may return something else when called, as timm's models do.
        plain = type(self.model).forward is Veca.forward
        self._forward = self.model if plain else partial(Veca.forward, self.model)
        self.part_images, self._max_part_bytes = part_limits(model.config, settings)
        self.part_bytes = 0  # features of the part in progress; set by `PartitionWriter` where a part begins
        self._entries: list[_Entry] = []
        self._settled = 0  # entries before this one are finished: none of them waits for its batch
        # Decoded images that wait for their batch, by shape (height, width).
        self.waiting: dict[tuple[int, int], list[tuple[_Entry, NDArray[np.uint8]]]] = {}
        self._waiting_bytes = 0

    @property
    def part_is_full(self) -> bool:
        """Whether images larger than size × size have filled the part before it had `part_images`."""
        return self.part_bytes > self._max_part_bytes

    def add(self, record: Record) -> None:
        entry = _Entry(record.name, record.error)
        self._entries.append(entry)
        if record.pixels is not None:
            s, config = self.settings, self.model.config
            height, width = shape = record.pixels.shape[1:]
            entry.numbers = (*record.size, height // config.patch_size, width // config.patch_size, s.cores)
            entry.nbytes = feature_bytes(config, s, height, width)
            self.part_bytes += entry.nbytes
            self._waiting_bytes += record.pixels.nbytes
            group = self.waiting.setdefault(shape, [])
            group.append((entry, record.pixels))
            batch_pixels = s.batch * s.size**2
            if len(group) >= min(s.batch, max(1, batch_pixels // (height * width))):
                self._run_batch(self.waiting.pop(shape))
            elif self._waiting_bytes > max(PART_BYTES, 3 * batch_pixels):
                self.flush()
        if not self.waiting:
            self._settled = len(self._entries)

    def flush(self) -> None:
        """Run the model on all images that wait, full batches or not."""
        while self.waiting:
            self._run_batch(self.waiting.pop(next(iter(self.waiting))))
        self._settled = len(self._entries)

    def _run_batch(self, group: list[tuple[_Entry, NDArray[np.uint8]]]) -> None:
        s, entries = self.settings, [entry for entry, _ in group]
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in group]))
        self._waiting_bytes -= pixels.nbytes
        autocast = torch.autocast(self.device.type, getattr(torch, s.precision), enabled=s.precision != "float32")
        with torch.inference_mode(), autocast:
            output = self._forward(normalize(pixels.to(self.device)), cores=s.cores, cls_only=not s.dense)
        for name in self.schema.names[6:]:
            # copy=True: a view of the first token would keep all tokens in memory.
            features = getattr(output, name).to("cpu", getattr(torch, s.save_dtype), copy=True).flatten(1).numpy()
            for entry, row in zip(entries, features, strict=True):
                entry.features[name] = row
            bad = [entry for entry in entries if not np.isfinite(entry.features[name]).all()]
            if bad:
                self._note_nonfinite(bad, len(bad) == len(group), getattr(output, name))

    def _note_nonfinite(self, bad: list[_Entry], whole_batch: bool, output: torch.Tensor) -> None:
        weights = chain(self.model.parameters(), self.model.buffers())  # an optimized model has buffers alone
        if whole_batch and not all(tensor.isfinite().all() for tensor in weights):
            hint = "the weights have NaN or infinity in them"
        elif bool(output.isfinite().all()):
            hint = "float16 cannot hold them: save float32 (--save-dtype)"
        elif self.settings.precision == "float16":
            hint = "float16 may overflow: compute in bfloat16 or float32 (--precision)"
        else:
            hint = "look at the weights, and at --precision"
        for entry in bad:
            entry.error = f"its features are not finite: {hint}"
            if not self.skip_nonfinite:
                way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
                raise NonFiniteError(f"{entry.name}: {entry.error}; {way}")

    def take(self) -> tuple[int, int, pa.Table, list[tuple[str, str]]]:
        """Remove the finished images; returns their number, the bytes of their features, their rows and failures."""
        entries, self._entries = self._entries[: self._settled], self._entries[self._settled :]
        self._settled = 0
        good = [entry for entry in entries if not entry.error]
        columns: dict[str, Any] = {"path": [entry.name for entry in good]}
        columns |= {name: [entry.numbers[i] for entry in good] for i, name in enumerate(self.schema.names[1:6])}
        for name in self.schema.names[6:]:
            rows = [np.empty(0, self.settings.save_dtype), *(entry.features[name] for entry in good)]
            ends, values = pa.array(np.cumsum([row.size for row in rows])), pa.array(np.concatenate(rows))
            columns[name] = pa.LargeListArray.from_arrays(ends, values).cast(self.schema.field(name).type)
        failures = [(entry.name, entry.error) for entry in entries if entry.error]
        return len(entries), sum(entry.nbytes for entry in entries), pa.table(columns, self.schema), failures
