"""Finish images on a GPU: decode JPEGs by torchvision's binding of nvJPEG, and resize all as Pillow does.

Only JPEGs whose header was checked come here. What the decoder refuses is decoded by the CPU, image by image; a decoder
that does not answer is given up, and the CPU does all that follows.
"""

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.records import Decode, DecodeChoice, Record, RecordDecoder, ShapeGroup, TaskRecords
from veca.errors import ArgumentError, warn_caller
from veca.images import to_tensor
from veca.images.load import apply_crop
from veca.images.resize import Crop

# After this many seconds without an answer the GPU is given up.
PATIENCE = 60.0
# Pixels that are decoded at a time: three bytes each
_PIXELS = 1 << 28
_RGB = 3  # of torchvision's ImageReadMode


def can_resize(device: torch.device) -> bool:
    """Whether images can be resized on a device: by a kernel in Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def undecodable_reason(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on a device; empty if they can. Decodes one."""
    if not can_resize(device):
        return f"{device} is no NVIDIA GPU with Triton"
    try:
        load_decoder()
        tiny = torch.ops.image.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8), 75)
        (image,) = decode_jpegs([tiny], device)
    except ImportError as error:
        return f"{error}: pip install 'veca[gpu]'"
    except (RuntimeError, AttributeError, ValueError) as error:  # built without nvJPEG
        return str(error).splitlines()[0]
    return "" if tuple(image.shape) == (3, 16, 16) else "its decoder gives images of the wrong size"


@cache
def load_decoder() -> None:
    """Load torchvision's operators for images, without the rest of it, which would take seconds to import."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise ImportError("it needs torchvision, which is not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in folder.glob("image*.so")]
    if found:
        torch.ops.load_library(str(found[0]))
    if not hasattr(torch.ops.image, "decode_jpegs_cuda"):
        importlib.import_module("torchvision.io")


def decode_jpegs(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files, uint8 tensors on the CPU, to RGB (3, height, width) on the device; all or none."""
    return list(torch.ops.image.decode_jpegs_cuda(list(files), _RGB, device))


def finish_crops(
    sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, list[int]]:
    """Decode and resize images to uint8 (B, 3, height, width) on a GPU, B all that can be; and which cannot.

    Sources are JPEG files, or pixels (height, width, 3). Results may be used on the device's default stream.
    """
    from veca.kernels.resample import resample_crops

    images = list[Tensor | None]()
    for part in _parts(sources, crops):
        jpegs = [i for i in part if sources[i].ndim == 1]
        decoded = dict(zip(jpegs, _decode_some([sources[i] for i in jpegs], device), strict=True))
        for i, image in decoded.items():
            if image is not None and not _covers(image, crops[i]):
                decoded[i] = None
        images += [decoded[i] if i in decoded else _upload(sources[i], device) for i in part]
    refused = [i for i, image in enumerate(images) if image is None]
    kept = [(image, crop) for image, crop in zip(images, crops, strict=True) if image is not None]
    out = torch.empty(len(kept), 3, *shape, dtype=torch.uint8, device=device)
    if kept:
        resample_crops([image for image, _ in kept], [crop for _, crop in kept], out)
    if out.is_cuda:
        # It is read on another stream: its memory must not be used again before that is done.
        out.record_stream(torch.cuda.default_stream(device))
        torch.cuda.current_stream(device).synchronize()
    return out, refused


def _parts(sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop]) -> list[list[int]]:
    """All indices in order, in parts that are decoded at a time."""
    parts, pixels = [list[int]()], 0
    for i, (source, crop) in enumerate(zip(sources, crops, strict=True)):
        # Of a JPEG, at least what its crop covers
        size = source.size // 3 if source.ndim == 3 else int(crop.source[0] * crop.source[1])
        if parts[-1] and pixels + size > _PIXELS:
            parts.append([])
            pixels = 0
        parts[-1].append(i)
        pixels += size
    return parts


def _covers(image: Tensor, crop: Crop) -> bool:
    """Whether a decoded image is as large as its header told."""
    height, width = image.shape[1:] if crop.orientation < 5 else image.shape[:0:-1]
    return crop.source[0] <= width and crop.source[1] <= height


def _upload(pixels: NDArray[np.uint8], device: torch.device) -> Tensor:
    return torch.from_numpy(pixels).to(device, non_blocking=True).permute(2, 0, 1)


def _decode_some(files: Sequence[NDArray[np.uint8]], device: torch.device) -> list[Tensor | None]:
    """Decode files together; None for those that are refused."""
    if not files:
        return []
    try:
        return list(decode_jpegs([torch.from_numpy(file) for file in files], device))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except torch.AcceleratorError:  # the device is lost for this process
        raise
    except RuntimeError:
        pass
    if len(files) == 1:
        return [None]
    middle = len(files) // 2
    return _decode_some(files[:middle], device) + _decode_some(files[middle:], device)


_Shape: TypeAlias = tuple[int, int]


class _Finished(NamedTuple):
    """What the GPU made of a group: the pixels of all that it did not refuse, and which it did."""

    pixels: Tensor
    refused: list[int]


class GpuDecoder(AbstractContextManager["GpuDecoder"]):
    """Finishes the images of records on a GPU, task by task, in order and in a thread.

    `refused` counts the images that the CPU had to decode. `on_work` is told the stage, "decode", and of each task how
    many images it has and how many seconds it took.
    """

    def __init__(self, device: torch.device, on_work: Callable[[str, int, float], object] = lambda *_: None) -> None:
        self.device, self.works, self.refused, self._on_work = device, True, 0, on_work
        self._tasks: queue.SimpleQueue[tuple[Future[dict[_Shape, _Finished]], TaskRecords] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        self._tasks.put(None)

    def submit(self, records: TaskRecords, decoder: RecordDecoder) -> Callable[[], TaskRecords]:
        """Have the images of a task finished; returns a function that waits for the records and returns them."""
        if all(group.sources is None for group in records.groups.values()):
            return lambda: records
        future: Future[dict[_Shape, _Finished]] = Future()
        if self._thread is None:
            # A daemon: the interpreter does not wait for it if the GPU hangs.
            self._thread = threading.Thread(target=self._run, name="gpu decoder", daemon=True)
            self._thread.start()
        if self.works:
            self._tasks.put((future, records))

        def wait() -> TaskRecords:
            finished: dict[_Shape, _Finished] = {}
            try:
                finished = future.result(PATIENCE if self.works else 0.0)
            except TimeoutError:
                if self.works:
                    self.works = False
                    warn_caller(f"the JPEG decoder of {self.device} does not answer: the CPU decodes what follows")
            return self._combine(records, finished, decoder)

        return wait

    def _run(self) -> None:
        on_gpu = self.device.type == "cuda"
        stream: Any = torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else nullcontext()
        while (task := self._tasks.get()) is not None:
            future, records = task
            began = time.perf_counter()
            try:
                with stream, torch.inference_mode():
                    finished = self._finish(records)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._on_work("decode", len(records), time.perf_counter() - began)
                future.set_result(finished)

    def _finish(self, records: TaskRecords) -> dict[_Shape, _Finished]:
        """The pixels of each group on the GPU, and which of its images that refused."""
        return {
            shape: _Finished(*finish_crops(group.sources, group.crops, shape, self.device))  # type: ignore[arg-type]
            for shape, group in records.groups.items()
            if group.sources is not None
        }

    def _combine(self, records: TaskRecords, finished: dict[_Shape, _Finished], decoder: RecordDecoder) -> TaskRecords:
        """Records with the pixels that the GPU made; those that it did not make are made here."""
        if all(shape in finished and not finished[shape].refused for shape in records.groups):
            groups = {shape: ShapeGroup(len(made.pixels), made.pixels) for shape, made in finished.items()}
            return replace(records, groups=groups)
        on_gpu = dict[_Shape, Iterator[Tensor | None]]()
        for shape, group in records.groups.items():
            pixels, refused = finished.get(shape, _Finished(torch.empty(0), list(range(group.count))))
            kept = iter(pixels)
            on_gpu[shape] = iter([None if i in refused else next(kept) for i in range(group.count)])
        images = [self._finish_one(record, on_gpu, decoder) for record in records]
        combined = TaskRecords.collect(images)
        for group in combined.groups.values():
            if any(isinstance(pixels, Tensor) for pixels in group.pixels):
                group.pixels = torch.stack([torch.as_tensor(pixels, device=self.device) for pixels in group.pixels])
        return combined

    def _finish_one(
        self, record: Record, on_gpu: dict[_Shape, Iterator[Tensor | None]], decoder: RecordDecoder
    ) -> Record:
        """The record of an image with its pixels: those that the GPU made, or else made here."""
        if record.error:
            return record
        pixels: Any = next(on_gpu[record.shape])
        if pixels is None:
            self.refused += 1
            if record.source.ndim == 1:
                return decoder.from_source(record.name, record.source.tobytes())
            assert record.crop is not None
            pixels = to_tensor(apply_crop(record.crop, Image.fromarray(record.source))).numpy()
        return Record(record.name, record.size, pixels, shape=record.shape)


def choose_decoder(choice: DecodeChoice, device: torch.device, check: bool = True) -> Decode:
    """Which decoder is used: with "auto" the GPU's where there is one; `check` decodes an image by it."""
    if choice in ("cpu", "pillow"):
        return choice
    reason = undecodable_reason(device) if check or device.type != "cuda" else ""
    if reason and choice == "gpu":
        raise ArgumentError(f"--decode gpu (decode='gpu'): {reason}. Use cpu, or auto")
    return "cpu" if reason else "gpu"
