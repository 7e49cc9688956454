"""Decode JPEGs on a GPU by torchvision's binding of nvJPEG, and resize them there, in a thread of its own.

Only files whose header was checked come here. What the decoder refuses is decoded by the CPU, image by image; a decoder
that does not answer is given up, and the CPU decodes all that follows.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from veca.data.records import Decode, DecodeChoice, Record, RecordDecoder
from veca.errors import ArgumentError, warn_caller

# After this many seconds without an answer the decoder is given up.
PATIENCE = 60.0
# Pixels that are decoded at a time: three bytes each
_PIXELS = 1 << 28


def unusable_reason(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on a device; empty if they can. Decodes one."""
    if device.type != "cuda":
        return f"{device} is no NVIDIA GPU"
    try:
        import triton  # noqa: F401 (resizes what is decoded)
        from torchvision.io import encode_jpeg

        tiny = encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        (image,) = _decode([tiny], device)
    except ImportError as error:
        return f"it needs {error.name}, which is not installed: pip install 'veca[gpu]'"
    except (RuntimeError, ValueError) as error:  # built without nvJPEG
        return str(error).splitlines()[0]
    return "" if image.shape == (3, 16, 16) else "its decoder gives images of the wrong size"


def _decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    return list(decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device))


class GpuDecoder(AbstractContextManager["GpuDecoder"]):
    """Decodes the JPEGs among records on a GPU, task by task, in order.

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
        """Have the JPEGs of a task decoded; returns a function that waits for the records and returns them."""
        future: Future[list[Record]] = Future()
        if self._thread is None:
            # A daemon: the interpreter does not wait for it if the decoder hangs.
            self._thread = threading.Thread(target=self._run, name="gpu decoder", daemon=True)
            self._thread.start()
        if self.works and any(record.jpeg is not None for record in records):
            self._tasks.put((future, records))
        else:
            future.set_result(records)

        def wait() -> list[Record]:
            try:
                decoded = future.result(PATIENCE if self.works else 0.0)
            except TimeoutError:
                if self.works:
                    self.works = False
                    warn_caller(f"the JPEG decoder of {self.device} does not answer: the CPU decodes what follows")
                decoded = records
            return [self._on_cpu(record, decoder) if record.jpeg is not None else record for record in decoded]

        return wait

    def _on_cpu(self, record: Record, decoder: RecordDecoder) -> Record:
        self.refused += 1
        made = decoder.from_source(record.name, record.jpeg.tobytes(), record.stamp, record.number)
        made.last = record.last
        return made

    def _run(self) -> None:
        stream = torch.cuda.Stream(self.device)
        while (task := self._tasks.get()) is not None:
            future, records = task
            began = time.perf_counter()
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.inference_mode():
                    decoded = self._decode_task(records, stream)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._on_work("decode", len(records), time.perf_counter() - began)
                future.set_result(decoded)

    def _decode_task(self, records: list[Record], stream: torch.cuda.Stream) -> list[Record]:
        """The records with pixels on the GPU; those that it refused are left as they were."""
        from veca.kernels.resample import resample_crops

        decoded = list(records)
        by_shape: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for part in self._parts(records):
            for i, image in zip(part, self._decode_some([records[i] for i in part]), strict=True):
                if image is not None:
                    by_shape.setdefault(records[i].shape, []).append((i, image))
            for shape, some in by_shape.items():
                out = torch.empty(len(some), 3, *shape, dtype=torch.uint8, device=self.device)
                resample_crops([image for _, image in some], [records[i].crop for i, _ in some], out)  # type: ignore[misc]
                # The model reads it on another stream: its memory must not be used again before that is done.
                out.record_stream(torch.cuda.default_stream(self.device))
                for (i, _), pixels in zip(some, out, strict=True):
                    r = records[i]
                    decoded[i] = Record(r.name, r.size, pixels, "", r.stamp, r.number, shape=r.shape, last=r.last)
            by_shape.clear()
        stream.synchronize()
        return decoded

    def _parts(self, records: list[Record]) -> list[list[int]]:
        """Indices of the JPEGs, in parts of at most `_PIXELS` pixels."""
        parts, pixels = list[list[int]](), 0
        for i, record in enumerate(records):
            if record.jpeg is not None:
                width, height = record.size
                if not parts or pixels + width * height > _PIXELS:
                    parts.append([])
                    pixels = 0
                parts[-1].append(i)
                pixels += width * height
        return parts

    def _decode_some(self, records: Sequence[Record]) -> list[Tensor | None]:
        """Decode files together; None for those that are refused."""
        try:
            images = _decode([torch.from_numpy(record.jpeg) for record in records], self.device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            images = None
        except torch.AcceleratorError:  # the device is lost for this process
            raise
        except RuntimeError:
            images = None
        if images is not None:
            return [image if _fits(image, record) else None for image, record in zip(images, records, strict=True)]
        if len(records) == 1:
            return [None]
        middle = len(records) // 2
        return self._decode_some(records[:middle]) + self._decode_some(records[middle:])


def _fits(image: Tensor, record: Record) -> bool:
    """Whether a decoded image has the size that its header told."""
    assert record.crop is not None
    width, height = record.size
    turned = record.crop.orientation >= 5
    return tuple(image.shape) == (3, width, height) if turned else tuple(image.shape) == (3, height, width)


def choose_decoder(choice: DecodeChoice, device: torch.device, check: bool = True) -> Decode:
    """Which decoder is used: with "auto" the GPU's where there is one; `check` decodes an image by it."""
    if choice in ("cpu", "pillow"):
        return choice
    reason = unusable_reason(device) if check or device.type != "cuda" else ""
    if reason and choice == "gpu":
        raise ArgumentError(f"decode='gpu': {reason}. Use decode='cpu'")
    return "cpu" if reason else "gpu"
