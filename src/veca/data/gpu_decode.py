"""Finish images on a GPU: decode JPEGs by nvJPEG, and resize all as Pillow does.

Only JPEGs whose header was checked come here. The decoder does not report damage in their coded data and leaves pixels
of earlier images there, so a kernel checks these data meanwhile. What fails or what the decoder refuses is decoded by
the CPU, image by image; a decoder that does not answer is given up, and the CPU does all that follows.
"""

import importlib.util
import io
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.nvjpeg import DecodedJpegs, load_library, nvjpeg_of
from veca.data.records import Decode, DecodeChoice, Record, RecordDecoder
from veca.errors import ArgumentError, warn_caller
from veca.images import to_tensor
from veca.images.load import apply_crop
from veca.images.resize import Crop

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
    # Sizes that are multiples of 16, as most are: kernels are compiled for that.
    stream, crop = io.BytesIO(), Crop((0, 0, 48, 32), 16, 16, 16, 16)
    Image.new("RGB", (48, 32)).save(stream, "JPEG")
    try:
        load_library()
        with torch.inference_mode():
            _, refused = finish_crops([np.frombuffer(stream.getvalue(), np.uint8)], [crop], (16, 16), device)
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
        for kind in (1, 3):
            some = [i for i in part if sources[i].ndim == kind]
            finish = _finish_jpegs if kind == 1 else _finish_pixels
            if some:
                refused += finish(some, sources, crops, out)
    if out.is_cuda:
        # It is read on another stream: its memory must not be used again before that is done.
        out.record_stream(torch.cuda.default_stream(device))
        torch.cuda.current_stream(device).synchronize()
    return out, sorted(refused)


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
    """Decode and resize some of the images together; returns those that are damaged or refused."""
    from veca.kernels.jpeg_scan import check_scans

    files = [sources[i] for i in indices]
    check = check_scans(files, out.device)
    try:
        decoded = decode_jpegs(files, out.device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except torch.AcceleratorError:  # the device is lost for this process
        raise
    except RuntimeError:
        pass
    else:
        fine = _covered(decoded.sizes, [crops[i] for i in indices]) & check.wait()
        _resample(decoded.locate()[fine], [i for i, kept in zip(indices, fine, strict=True) if kept], crops, out)
        return [i for i, kept in zip(indices, fine, strict=True) if not kept]
    if len(indices) == 1:
        return list(indices)
    middle = len(indices) // 2
    halves = indices[:middle], indices[middle:]
    return [i for half in halves for i in _finish_jpegs(half, sources, crops, out)]


def _covered(sizes: NDArray[np.int64], crops: Sequence[Crop]) -> NDArray[np.bool_]:
    """Whether decoded images, height and width of each (B, 2), are as large as their headers told."""
    turned = np.array([crop.orientation >= 5 for crop in crops])
    upright = np.where(turned[:, None], sizes, sizes[:, ::-1])
    return np.all(np.array([crop.source for crop in crops]) <= upright, axis=1)


def _finish_pixels(
    indices: Sequence[int], sources: Sequence[NDArray[np.uint8]], crops: Sequence[Crop], out: Tensor
) -> list[int]:
    """Resize some of the images; none is refused."""
    images = [torch.from_numpy(sources[i]).to(out.device, non_blocking=True).permute(2, 0, 1) for i in indices]
    from veca.kernels.resample import locate

    _resample(locate(images), indices, crops, out)
    return []


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


class GpuDecoder(AbstractContextManager["GpuDecoder"]):
    """Finishes the images of records on a GPU, task by task, in threads.

    `refused` counts the images that the CPU had to decode. `on_work` is told the stage, "decode", and of each task how
    many images it has and how many seconds it took.
    """

    def __init__(self, device: torch.device, on_work: Callable[[str, int, float], object] = lambda *_: None) -> None:
        self.device, self.works, self.refused, self._on_work = device, True, 0, on_work
        self._tasks: queue.SimpleQueue[tuple[Future[list[Record]], list[Record]] | None] = queue.SimpleQueue()
        self._threads = list[threading.Thread]()

    def __exit__(self, *error: object) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def submit(self, records: list[Record], decoder: RecordDecoder) -> Callable[[], list[Record]]:
        """Have the images of a task finished; returns a function that waits for the records and returns them."""
        future: Future[list[Record]] = Future()
        if not self._threads:
            # Daemons: the interpreter does not wait for them if the GPU hangs.
            names = (f"gpu decoder {i}" for i in range(THREADS))
            self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
            for thread in self._threads:
                thread.start()
        if self.works and any(record.source is not None for record in records):
            self._tasks.put((future, records))
        else:
            future.set_result(records)

        def wait() -> list[Record]:
            try:
                finished = future.result(PATIENCE if self.works else 0.0)
            except TimeoutError:
                if self.works:
                    self.works = False
                    warn_caller(f"the JPEG decoder of {self.device} does not answer: the CPU decodes what follows")
                finished = records
            return [self._on_cpu(record, decoder) if record.source is not None else record for record in finished]

        return wait

    def _on_cpu(self, record: Record, decoder: RecordDecoder) -> Record:
        self.refused += 1
        if record.source.ndim == 1:
            made = decoder.from_source(record.name, record.source.tobytes(), record.stamp, record.number)
        else:
            assert record.crop is not None
            pixels = to_tensor(apply_crop(record.crop, Image.fromarray(record.source))).numpy()
            made = Record(record.name, record.size, pixels, "", record.stamp, record.number, shape=record.shape)
        made.last = record.last
        return made

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

    def _finish(self, records: list[Record]) -> list[Record]:
        """Set the pixels of records on the GPU; those that it refused are left as they were."""
        by_shape: dict[tuple[int, int], list[Record]] = {}
        for record in records:
            if record.source is not None:
                by_shape.setdefault(record.shape, []).append(record)
        for shape, some in by_shape.items():
            sources, crops = [record.source for record in some], [record.crop for record in some]
            pixels, refused = finish_crops(sources, crops, shape, self.device)  # type: ignore[arg-type]
            for i, record in enumerate(some):
                if i not in refused:
                    record.pixels, record.source = (pixels, i), None
        return records


def choose_decoder(choice: DecodeChoice, device: torch.device, check: bool = True) -> Decode:
    """Which decoder is used: with "auto" the GPU's where there is one; `check` decodes an image by it."""
    if choice in ("cpu", "pillow"):
        return choice
    reason = undecodable_reason(device) if check or device.type != "cuda" else ""
    if reason and choice == "gpu":
        raise ArgumentError(f"--decode gpu (decode='gpu'): {reason}. Use cpu, or auto")
    return "cpu" if reason else "gpu"
