"""A teacher's targets on disk: each view of a picture is asked for once, then read back.

A folder holds one subfolder per description of what its targets are (teacher, statistics, pictures, views), named by
the description's hash: whatever changes a target leads to another subfolder. In it each resolution has one file of
equal slots, one per view of a picture, and a file has only the slots that were written. A slot is `VTC1`, a CRC-32 and
the numbers. The checksum starts from the description, the picture, the view and the resolution, and is tried on every
read: a slot that a killed process, a full disk or a second writer left half written is no hit, nor is one with a bit
that flipped; it is computed and written again. So there is no index and no lock, and any number of processes may read
and write at once.

Targets are rounded to the cache's precision whether they were read or computed, so a run learns the same from both.
Which pictures a teacher takes along can show in the last bits of its features: the cache has what was stored first.

Shapes: B pictures, N patches, D the teacher's width.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import queue
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca.data.loader import Batch, Pictures
from veca.teachers import Standardized, Targets, Teacher
from veca.train.recipe import Recipe, RecipeError
from veca.utils.files import atomic_path
from veca.version import __version__

SPARE = 10 * 10**9
"""Bytes of a disk that are left for others, checkpoints above all."""
READERS = 4
"""Threads that read a batch; one checks about 2 GB/s."""
WAITING = 2
"""Batches that may wait to be written. More are not stored this time, so that a slow disk does not hold up training."""
_MAGIC = b"VTC1"
_HEAD = len(_MAGIC) + 4
_PAGE = 4096
"""Slots start at multiples of it: no two machines on a shared file system then write to the same page."""


class Found(NamedTuple):
    """What the cache has of a batch, on the CPU."""

    targets: Targets
    """Of all pictures; nothing in particular where one is missing."""
    missing: Tensor
    """(M) int64, the places in the batch that the cache has nothing for."""


class _Slot(NamedTuple):
    offset: int
    seed: int
    """What its checksum starts from."""


def slot_bytes(resolution: int, patch_size: int, width: int, dtype: torch.dtype = torch.float16) -> int:
    """Disk space of the targets of one view."""
    numbers = ((resolution // patch_size) ** 2 + 1) * width
    return -(-(_HEAD + numbers * dtype.itemsize) // _PAGE) * _PAGE


def cache_bytes(pictures: int, views: int, resolutions: Iterable[int], patch_size: int, width: int) -> int:
    """Disk space of a cache that has everything.

    >>> f"{cache_bytes(118_287, 1, [256], patch_size=16, width=1280) / 1e9:.1f} GB"
    '78.0 GB'
    """
    return pictures * views * sum(slot_bytes(size, patch_size, width) for size in resolutions)


def cache_about(recipe: Recipe, teacher: Teacher | Standardized, fingerprint: str) -> dict[str, Any]:
    """All that a target depends on besides picture, view and resolution, as plain data.

    The weights and statistics are taken by their bytes: a name says little about a local folder. How many views there
    are is left out, since the first ones stay what they are when more are asked for.
    """
    about, digest = teacher.about, hashlib.sha256()
    for name, tensor in sorted(teacher.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    versions = {"veca": __version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions[about["library"]] = importlib.metadata.version(about["library"])
    return {
        "teacher": about,
        "weights": digest.hexdigest(),
        "precision": recipe.precision,
        "pictures": fingerprint,
        "seed": recipe.seed,
        "short_side": recipe.data.short_side,
        **({"crops": list(recipe.data.crops)} if recipe.data.crops else {}),
        **({"resident": recipe.data.resident} if recipe.data.resident else {}),
        "augment": recipe.data.augment,
        "versions": versions,
    }


def open_cache(
    recipe: Recipe,
    teacher: Teacher | Standardized,
    pictures: Pictures,
    patch_size: int,
    say: Callable[[str], None] = print,
) -> TargetCache | None:
    """The cache a recipe asks for; the teacher has its statistics by now."""
    if recipe.teacher.cache is None:
        return None
    most = None if recipe.teacher.cache_gb is None else round(recipe.teacher.cache_gb * 1e9)
    return TargetCache(
        recipe.teacher.cache, cache_about(recipe, teacher, pictures.fingerprint), pictures=len(pictures),
        width=teacher.width, patch_size=patch_size, most_bytes=most, say=say,
    )  # fmt: skip


class TargetCache:
    """The targets that `about` describes (see `cache_about`), of so many pictures, in a folder that others may share.

    Nothing that goes wrong with the disk ends a run: what cannot be read is computed, and what cannot be written is
    not; `say` hears of that, once. `most_bytes` limits the whole folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        about: Mapping[str, Any],
        *,
        pictures: int,
        width: int,
        patch_size: int,
        dtype: torch.dtype = torch.float16,
        most_bytes: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.pictures, self.width, self.patch_size = Path(folder), pictures, width, patch_size
        self.dtype, self.most_bytes, self.say = dtype, most_bytes, say
        layout = {"pictures": pictures, "width": width, "patch_size": patch_size, "dtype": str(dtype)}
        text = json.dumps({"about": about, "layout": layout}, indent=1, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()
        self.path = self.folder / self.key[:16]
        try:
            with atomic_path(self.path / "about.json") as part:
                part.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise RecipeError(f"teacher.cache={folder}: cannot be written ({reason}); name another folder") from error
        self.hits = self.misses = self.dropped = 0
        """Pictures read, computed, and computed but not stored because the disk is slow."""
        self._pin = torch.cuda.is_available()
        self._files: dict[int, int] = {}
        self._coming: deque[tuple[Tensor, Tensor, int, Callable[[], Found]]] = deque(maxlen=2)
        self._readers = ThreadPoolExecutor(READERS, "read targets")
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._writer: threading.Thread | None = None
        self._ended = False
        self._notes: dict[str, bool] = {}

    def __enter__(self) -> TargetCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        if self._writer is not None:
            self._jobs.put(None)
            self._writer.join()
            self._writer = None
        self._tell()
        self._readers.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])

    def flush(self) -> None:
        """Wait until what was put is written."""
        self._jobs.join()
        self._tell()

    # What a training loop calls

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the targets of each are read while the one before it is learnt."""
        before: Batch | None = None
        for batch in batches:
            self.expect(batch.indices, batch.views, batch.images.shape[-1])
            if before is not None:
                yield before
            before = batch
        if before is not None:
            yield before

    def targets(self, batch: Batch, images: Tensor, compute: Callable[[Tensor], Targets], together: int = 1) -> Targets:
        """Of a batch, whose `images` are as the model takes them, on their device: read, or computed and stored.

        What is missing is computed in multiples of `together`, filled up with pictures that are not, or as the whole
        batch: to a teacher that is compiled for the pictures it takes at a time, every other number would be news.
        """
        self._tell()
        resolution, device = images.shape[-1], images.device
        found = self.get(batch.indices, batch.views, resolution)
        missing = found.missing
        self.hits, self.misses = self.hits + len(images) - len(missing), self.misses + len(missing)
        if len(missing) == len(images):
            fresh = self.round(compute(images))
            self.put(batch.indices, batch.views, resolution, fresh)
            return fresh
        have = Targets(*(tensor.to(device, non_blocking=True) for tensor in found.targets))
        if len(missing):
            rest = torch.ones(len(images), dtype=torch.bool).index_fill_(0, missing, False).nonzero().flatten()
            asked = torch.cat([missing, rest[: -len(missing) % together]]).to(device)
            fresh = Targets(*(tensor[: len(missing)] for tensor in self.round(compute(images[asked]))))
            rows = asked[: len(missing)]
            self.put(batch.indices[missing], batch.views[missing], resolution, fresh)
            for tensor, new in zip(have, fresh, strict=True):
                tensor[rows] = new
        return have

    def round(self, targets: Targets) -> Targets:
        """As the cache gives them back, bit for bit; laid out alike too, for sums depend on it."""
        return Targets(*(tensor.detach().to(self.dtype).contiguous() for tensor in targets))

    # Reading

    def expect(self, indices: Tensor, views: Tensor, resolution: int) -> None:
        """Begin to read what `get` will be asked for."""
        self._coming.append((indices, views, resolution, self._begin(indices, views, resolution)))

    def get(self, indices: Tensor, views: Tensor, resolution: int) -> Found:
        """What there is of these pictures."""
        for i, (pictures, seen, size, finish) in enumerate(self._coming):
            if size == resolution and torch.equal(pictures, indices) and torch.equal(seen, views):
                del self._coming[i]
                return finish()
        return self._begin(indices, views, resolution)()

    def _begin(self, indices: Tensor, views: Tensor, resolution: int) -> Callable[[], Found]:
        file, slots = self._file(resolution), self._slots(indices, views, resolution)
        shapes = (self.width,), ((resolution // self.patch_size) ** 2, self.width)
        targets = Targets(*(torch.empty(len(slots), *s, dtype=self.dtype, pin_memory=self._pin) for s in shapes))
        cls, patches = (_rows(tensor) for tensor in targets)

        def read(first: int) -> list[int]:
            each = range(first, len(slots), READERS)
            return [row for row in each if not _read(file, slots[row], cls[row], patches[row])]

        parts = self._readers.map(read, range(READERS))
        return lambda: Found(targets, torch.tensor(sorted(chain.from_iterable(parts)), dtype=torch.int64))

    def _slots(self, indices: Tensor, views: Tensor, resolution: int) -> list[_Slot]:
        size, found = slot_bytes(resolution, self.patch_size, self.width, self.dtype), []
        for picture, view in zip(indices.tolist(), views.tolist(), strict=True):
            seed = zlib.crc32(f"{self.key} {picture} {view} {resolution}".encode())
            found.append(_Slot((view * self.pictures + picture) * size, seed))
        return found

    def _file(self, resolution: int) -> int:
        if resolution not in self._files:
            with contextlib.suppress(OSError):
                self._files[resolution] = os.open(self.path / f"{resolution}.targets", os.O_RDWR | os.O_CREAT, 0o666)
        return self._files.get(resolution, -1)  # which can be neither read nor written: that is dealt with there

    # Writing

    def put(self, indices: Tensor, views: Tensor, resolution: int, targets: Targets) -> None:
        """Have targets written, soon; not at all where the disk is full or cannot keep up."""
        if self._ended:
            return
        if self._jobs.full():
            self.dropped += len(indices)
            return
        file, slots = self._file(resolution), self._slots(indices, views, resolution)
        host = Targets(*(torch.empty(t.shape, dtype=self.dtype, pin_memory=self._pin) for t in targets))
        for there, here in zip(host, self.round(targets), strict=True):
            there.copy_(here, non_blocking=True)
        copied = torch.cuda.Event() if targets.cls.is_cuda else None
        if copied is not None:
            copied.record()

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            cls, patches = (_rows(tensor) for tensor in host)
            for row in range(self._room(resolution, len(slots))):
                if not all(tensor[row].sum(dtype=torch.float32).isfinite() for tensor in host):
                    self._note(f"there are targets that {self.dtype} cannot hold; set teacher.standardize=true")
                else:
                    _write(file, slots[row], cls[row], patches[row])

        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="write targets", daemon=True)
            self._writer.start()
        self._jobs.put(write)

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._ended:
                    job()
            except Exception as error:  # whatever a disk does, the run goes on
                self._end(f"{self.path} cannot be written ({getattr(error, 'strerror', None) or error})")
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _room(self, resolution: int, wanted: int) -> int:
        """How many of so many slots may still be written."""
        room, full = shutil.disk_usage(self.folder).free - SPARE, f"{SPARE / 1e9:g} GB are left free for checkpoints"
        if self.most_bytes is not None:
            left = self.most_bytes - sum(path.stat().st_blocks * 512 for path in self.folder.glob("*/*.targets"))
            if left < room:
                room, full = left, f"{self.folder} is to take at most {self.most_bytes / 1e9:g} GB"
        fits = max(0, room // slot_bytes(resolution, self.patch_size, self.width, self.dtype))
        if fits < wanted:
            self._end(full)
        return min(fits, wanted)

    def _end(self, reason: str) -> None:
        self._ended = True
        self._note(f"{reason}. No more targets are stored; those that are stay in use")

    def _note(self, text: str) -> None:
        self._notes.setdefault(text, False)

    def _tell(self) -> None:
        """Say what is new; in the caller's thread, where it meets no progress bar half drawn."""
        for text, told in list(self._notes.items()):
            if not told:
                self._notes[text] = True
                self.say(f"teacher.cache: {text}")


def _rows(tensor: Tensor) -> list[memoryview]:
    return [row.data for row in tensor.flatten(1).view(torch.uint8).numpy()]


def _checksum(slot: _Slot, cls: memoryview, patches: memoryview) -> bytes:
    return zlib.crc32(patches, zlib.crc32(cls, slot.seed)).to_bytes(4, "little")


def _read(file: int, slot: _Slot, cls: memoryview, patches: memoryview) -> bool:
    """Fill the arrays from a slot; whether it is all there."""
    head = bytearray(_HEAD)
    try:
        # A slot that was never written is not worth reading as a whole.
        if os.pread(file, len(_MAGIC), slot.offset) != _MAGIC:
            return False
        count = os.preadv(file, [head, cls, patches], slot.offset)
    except OSError:
        return False
    return count == _HEAD + cls.nbytes + patches.nbytes and head == _MAGIC + _checksum(slot, cls, patches)


def _write(file: int, slot: _Slot, cls: memoryview, patches: memoryview) -> None:
    head = _MAGIC + _checksum(slot, cls, patches)
    if os.pwritev(file, [head, cls, patches], slot.offset) != _HEAD + cls.nbytes + patches.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
