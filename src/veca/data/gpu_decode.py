"""Finish images on a GPU: decode JPEGs by torchvision's binding of nvJPEG, and resize all as Pillow does.

Only JPEGs whose header was checked come here. The decoder does not report damage in their coded data and leaves pixels
of earlier images there, so a kernel checks these data meanwhile. What fails or what the decoder refuses is decoded by
the CPU, image by image; a decoder that does not answer is given up, and the CPU does all that follows.
"""

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.records import Decode, DecodeChoice, Record, RecordDecoder
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
        decoded = dict(zip(jpegs, _decode_valid([sources[i] for i in jpegs], device), strict=True))
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


def _decode_valid(sources: Sequence[NDArray[np.uint8]], device: torch.device) -> list[Tensor | None]:
    """Decode files together; None for those that are damaged or refused."""
    from veca.kernels.jpeg_scan import check_scans

    if not sources:
        return []
    files = [torch.from_numpy(source) for source in sources]
    check = check_scans(files, device)  # meanwhile: the decoder has a stream of its own
    images = _decode_some(files, device)
    return [image if valid else None for image, valid in zip(images, check.wait(), strict=True)]


def _decode_some(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decode files together; None for those that are refused."""
    try:
        return list(decode_jpegs(files, device))
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


class GpuDecoder(AbstractContextManager["GpuDecoder"]):
    """Finishes the images of records on a GPU, task by task, in order and in a thread.

    `refused` counts the images that the CPU had to decode. `on_work` is told the stage, "decode", and of each task how
    many images it has and how many seconds it took.
    """

    def __init__(self, device: torch.device, on_work: Callable[[str, int, float], object] = lambda *_: None) -> None:
        self.device, self.works, self.refused, self._on_work = device, True, 0, on_work
        self._tasks: queue.SimpleQueue[tuple[Future[list[Record]], list[Record]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        self._tasks.put(None)

    def submit(self, records: list[Record], decoder: RecordDecoder) -> Callable[[], list[Record]]:
        """Have the images of a task finished; returns a function that waits for the records and returns them."""
        future: Future[list[Record]] = Future()
        if self._thread is None:
            # A daemon: the interpreter does not wait for it if the GPU hangs.
            self._thread = threading.Thread(target=self._run, name="gpu decoder", daemon=True)
            self._thread.start()
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
            done = [record for i, record in enumerate(some) if i not in refused] if refused else some
            for i, record in enumerate(done):
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
