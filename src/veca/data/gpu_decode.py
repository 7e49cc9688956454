"""Finish images on a GPU: decode JPEGs by nvJPEG, and resize all as Pillow does.

Only JPEGs whose header was checked come here. The decoder does not report damage in their coded data and leaves pixels
of earlier images there, so a kernel checks these data first. What fails or what the decoder refuses is decoded by the
CPU, image by image; a decoder that does not answer is given up, and the CPU does all that follows.
"""

import importlib.util
import io
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.nvjpeg import DecodedJpegs, load_library, nvjpeg_of
from veca.data.records import Decode, DecodeChoice, Record, RecordDecoder, ShapeGroup, TaskRecords
from veca.errors import ArgumentError, warn_caller
from veca.images import to_tensor
from veca.images.load import apply_crop
from veca.images.resize import Crop
from veca.utils.device import side_stream

# After this many seconds without an answer the GPU is given up.
PATIENCE = 60.0
# Threads that give the GPU tasks: while its engines decode one, the next is prepared and the last resized.
THREADS = 2
# Pixels that are decoded at a time: three bytes each
_PIXELS = 1 << 28


def can_resize(device: torch.device) -> bool:
    """Whether images can be resized on a device: by a kernel in Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def undecodable_reason(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on a device; empty if they can. Decodes one, which compiles all kernels."""
    if not can_resize(device):
        return f"{device} is no NVIDIA GPU with Triton"
    from veca.kernels.jpeg_scan import check_scans

    # Sizes that are multiples of 16, as most are: kernels are compiled for that.
    stream, crops = io.BytesIO(), [Crop((0, 0, 48, 32), 16, 16, 16, 16)]
    Image.new("RGB", (48, 32)).save(stream, "JPEG")
    files, pixels = [np.frombuffer(stream.getvalue(), np.uint8)], [np.zeros((32, 48, 3), np.uint8)]
    try:
        load_library()
        with ThreadPoolExecutor(thread_name_prefix="compile") as threads:  # each compiles kernels of its own
            parts = (
                threads.submit(check_scans, files, device),
                threads.submit(decode_jpegs, files, device),
                threads.submit(finish_crops, pixels, crops, (16, 16), device),
            )
            for part in parts:
                part.result()
        _, refused = finish_crops(files, crops, (16, 16), device)
    except ImportError as error:
        return f"{error}: pip install 'veca[gpu]'"
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return "its decoder refuses an ordinary JPEG" if refused else ""


def decode_jpegs(files: Sequence[NDArray[np.uint8]], device: torch.device) -> DecodedJpegs:
    """Decode JPEG files to RGB on the device; all or none."""
    return nvjpeg_of(torch.cuda.current_device() if device.index is None else device.index).decode(files)


def finish_crops(
    sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, list[int]]:
    """Decode and resize images to uint8 (B, 3, height, width) on a GPU; and which cannot be: their pixels are anything.

    Sources are JPEG files, or pixels (height, width, 3). Results may be used on the device's default stream.
    """
    out, refused = torch.empty(len(sources), 3, *shape, dtype=torch.uint8, device=device), list[int]()
    for part in _parts(sources, crops):
        pixels, jpegs = ([i for i in part if sources[i].ndim == kind] for kind in (3, 1))
        if pixels:
            _finish_pixels(pixels, sources, crops, out)
        if jpegs:
            refused += _finish_jpegs(jpegs, sources, crops, out)
    hand_over([out], device)
    return out, sorted(refused)


def hand_over(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Finish tensors of the current stream that are read on the default stream of their device."""
    if device.type == "cuda":
        for tensor in tensors:  # its memory must not be used again before it has been read
            tensor.record_stream(torch.cuda.default_stream(device))
        torch.cuda.current_stream(device).synchronize()


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


def _finish_jpegs(
    indices: Sequence[int], sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], out: Tensor
) -> list[int]:
    """Decode and resize some of the images; returns those that are damaged or refused."""
    from veca.kernels.jpeg_scan import check_scans

    valid = check_scans([sources[i] for i in indices], out.device)
    damaged = [i for i, fine in zip(indices, valid, strict=True) if not fine]
    whole = [i for i, fine in zip(indices, valid, strict=True) if fine]
    return damaged + _decode_some(whole, sources, crops, out)


def _decode_some(
    indices: Sequence[int], sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], out: Tensor
) -> list[int]:
    """Decode images together, and resize them; returns those that are refused."""
    if not indices:
        return []
    try:
        decoded = decode_jpegs([sources[i] for i in indices], out.device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except torch.AcceleratorError:  # the device is lost for this process
        raise
    except RuntimeError:
        pass
    else:
        fine = _covered(decoded.sizes, [crops[i] for i in indices])
        _resample(decoded.locate()[fine], [i for i, kept in zip(indices, fine, strict=True) if kept], crops, out)
        return [i for i, kept in zip(indices, fine, strict=True) if not kept]
    if len(indices) == 1:
        return list(indices)
    middle = len(indices) // 2
    return [i for half in (indices[:middle], indices[middle:]) for i in _decode_some(half, sources, crops, out)]


def _covered(sizes: NDArray[np.int64], crops: Sequence[Crop]) -> NDArray[np.bool_]:
    """Whether decoded images, height and width of each (B, 2), are as large as their headers told."""
    turned = np.array([crop.orientation >= 5 for crop in crops])
    upright = np.where(turned[:, None], sizes, sizes[:, ::-1])
    return np.all(np.array([crop.source for crop in crops]) <= upright, axis=1)


def _finish_pixels(
    indices: Sequence[int], sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], out: Tensor
) -> None:
    """Resize some of the images, which are sent to the device as one array."""
    from veca.kernels.resample import locate

    arrays = [sources[i] for i in indices]
    sent = torch.empty(sum(array.size for array in arrays), dtype=torch.uint8, pin_memory=out.is_cuda)
    np.concatenate([array.reshape(-1) for array in arrays], out=sent.numpy())
    pixels = sent.to(out.device, non_blocking=True)
    _resample(locate(pixels.data_ptr(), [array.shape for array in arrays]), indices, crops, out)


def _resample(places: NDArray[np.int64], indices: Sequence[int], crops: Sequence[Crop], out: Tensor) -> None:
    """Resize images into the rows of `out` that are `indices`."""
    from veca.kernels.resample import resample_crops

    if not indices:
        return
    first, last = indices[0], indices[-1] + 1
    consecutive = last - first == len(indices)
    target = out[first:last] if consecutive else out.new_empty(len(indices), *out.shape[1:])
    resample_crops(places, [crops[i] for i in indices], target)
    if not consecutive:
        out[list(indices)] = target


_Shape: TypeAlias = tuple[int, int]


class _Finished(NamedTuple):
    """What the GPU made of a group: pixels, and of which images it refused to: theirs are anything."""

    pixels: Tensor
    refused: list[int]


class GpuDecoder(AbstractContextManager["GpuDecoder"]):
    """Finishes the images of records on a GPU, task by task, in threads.

    `refused` counts the images that the CPU had to decode. `on_work` is told the stage, "decode", and of each task how
    many images it has and how many seconds it took.
    """

    def __init__(self, device: torch.device, on_work: Callable[[str, int, float], object] = lambda *_: None) -> None:
        self.device, self.works, self.refused, self._on_work = device, True, 0, on_work
        self._tasks: queue.SimpleQueue[tuple[Future[dict[_Shape, _Finished]], TaskRecords] | None] = queue.SimpleQueue()
        self._threads = list[threading.Thread]()

    def __exit__(self, *error: object) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def submit(self, records: TaskRecords, decoder: RecordDecoder) -> Callable[[], TaskRecords]:
        """Have the images of a task finished; returns a function that waits for the records and returns them."""
        if all(group.sources is None for group in records.groups.values()):
            return lambda: records
        future: Future[dict[_Shape, _Finished]] = Future()
        if not self._threads:
            # Daemons: the interpreter does not wait for them if the GPU hangs.
            names = (f"gpu decoder {i}" for i in range(THREADS))
            self._threads = [threading.Thread(target=self._run, args=(name,), name=name, daemon=True) for name in names]
            for thread in self._threads:
                thread.start()
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

    def _run(self, name: str) -> None:
        on_gpu = self.device.type == "cuda"
        stream: Any = torch.cuda.stream(side_stream(self.device, name)) if on_gpu else nullcontext()
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
            pixels, refused = finished.get(shape, _Finished(torch.empty(group.count, 0), list(range(group.count))))
            on_gpu[shape] = iter([None if i in refused else image for i, image in enumerate(pixels)])
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
