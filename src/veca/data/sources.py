"""Find images in files, folders, globs, tar shards, Parquet files and videos, local or at any address fsspec reads.

Sources are walked once, in a fixed order. At most one folder's names, or the listing of one address, is held in memory,
so any number of images can be streamed.
"""

import glob
import gzip
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from veca.data import parquet
from veca.data.remote import MAX_IMAGE_BYTES, SourceError, as_text, is_remote, list_remote, open_source
from veca.data.tar import TarError, TarReader, iter_members
from veca.data.video import FrameError, read_frames
from veca.images import EXTENSIONS, MAX_PIXELS, ImageError
from veca.images.decode import max_bytes
from veca.images.formats import VIDEOS, collect_unsupported, select_images

SHARDS = (".tar", ".tar.gz", ".tgz")
TABLES = (".parquet",)

_LABELS = {"seg", "depth", "mask", "label"}
_REFUSED_KINDS = {
    "sparse": "a sparse file in an archive; only regular files are read. Pack it again without --sparse",
    "other": "a link or special file in an archive; only regular files are read",
}

# Called with an archive's path and how many of its bytes (uncompressed) were read: images may be far apart in it
OnRead = Callable[[str, int], None]


class Item(NamedTuple):
    """An encoded image, small enough to send to another process: a file, a span of a file, bytes, or an error.

    `stamp` identifies the version of the file it is in: "SIZE DATE_OR_CHECKSUM", each part empty where unknown.
    `number` counts the images of one shard or table, or of one run of plain image files.
    """

    name: str
    path: str = ""
    # Offset and size in bytes
    span: tuple[int, int] | None = None
    data: bytes | None = None
    error: str = ""
    stamp: str = ""
    number: int = 0

    @property
    def is_local_file(self) -> bool:
        """Whether it is a file of its own on this machine."""
        return bool(self.path) and self.data is None and self.span is None and not is_remote(self.path)

    @property
    def file_size(self) -> int:
        """Size in bytes of the file it is in, -1 where unknown."""
        size = self.stamp.partition(" ")[0]
        return int(size) if size.isdigit() else -1


def iter_items(
    sources: Sequence[str],
    column: str | None = None,
    max_pixels: int = MAX_PIXELS,
    on_read: OnRead | None = None,
    fps: float | None = None,
) -> Iterator[Item]:
    """Yield all images of all sources, in order, as the sources are walked.

    Those of a Parquet file are in `column` (None: in the only one that can hold images). An image with more bytes than
    `max_pixels` can take comes as an error. Of videos, `fps` frames per second are images (None: videos in folders are
    left out, others are an error).
    """
    return unpack_files(_list_all(sources, fps is not None), column, max_pixels, on_read, fps)


def unpack_files(
    files: Iterable[Item],
    column: str | None = None,
    max_pixels: int = MAX_PIXELS,
    on_read: OnRead | None = None,
    fps: float | None = None,
) -> Iterator[Item]:
    """Yield the images of files, archives, tables and videos, numbered, as `iter_items` does."""
    number, limit = 0, min(MAX_IMAGE_BYTES, max_bytes(max_pixels))
    for file in map(add_stamp, files):
        if is_container(file):
            if is_video(file):
                yield from _frame_items(file, fps, max_pixels)
            elif file.path.lower().endswith(TABLES):
                yield from table_items(file.path, column, limit, file.stamp)
            else:
                read = is_remote(file.path)
                yield from shard_items(file.path, read=read, limit=limit, on_read=on_read, stamp=file.stamp)
            number = 0
        else:
            too_large = is_remote(file.path) and file.file_size > limit
            error = f"{file.file_size:,} bytes; at most {limit:,} are read" if too_large else file.error
            yield Item(file.name, file.path, error=error, stamp=file.stamp, number=number)
            number += 1


def add_stamp(file: Item) -> Item:
    """Return a local file with its stamp; a remote one has it from its listing."""
    if file.stamp or not file.path or is_remote(file.path):
        return file
    try:
        info = os.stat(file.path)
    except OSError as error:  # a broken link, or a file that has just been deleted
        return Item(file.name, file.path, error=f"{(error.strerror or str(error)).lower()}; check the path")
    return Item(file.name, file.path, stamp=f"{info.st_size} {info.st_mtime_ns}")


def is_container(file: Item) -> bool:
    """Tell whether a file holds images instead of being one."""
    return file.path.lower().endswith(SHARDS + TABLES + VIDEOS)


def is_video(file: Item) -> bool:
    """Tell whether a file is a video, by its name."""
    return file.path.lower().endswith(VIDEOS)


def find_empty_source(
    sources: Sequence[str], column: str | None = None, on_read: OnRead | None = None, fps: float | None = None
) -> str:
    """Return what to say of the first source without any image; empty if all have one."""
    for source in sources:
        with collect_unsupported() as left_out:
            first = next(iter_items([source], column, on_read=on_read, fps=fps), None)
        if first is None:
            # Archives in a folder are only read if they are named.
            hint = f"; archives are named, as '{os.path.join(source, '*.tar')}'" if os.path.isdir(source) else ""
            return left_out.append_to(f"{source}: no images there ({', '.join(sorted(EXTENSIONS))}){hint}")
    return ""


def count_images(sources: Sequence[str], unpack: bool = True, on_read: OnRead | None = None) -> int | None:
    """Count the images; None if that would mean to fetch a remote shard, or without `unpack` to decompress one."""
    total = 0
    for count in _counts(sources, unpack, on_read):
        if count is None:
            return None
        total += count
    return total


@contextmanager
def counting_images(sources: Sequence[str], on_total: Callable[[int], object], videos: bool = False) -> Iterator[None]:
    """Count the images in a thread while the block runs; call `on_total` if `count_images` knows without unpacking."""
    ended = threading.Event()

    def count() -> None:
        total = 0
        with suppress(Exception):  # reported by whoever reads the images
            for number in _counts(sources, unpack=False, videos=videos):
                if number is None or ended.is_set():
                    return
                total += number
            on_total(total)

    thread = threading.Thread(target=count, name="count images", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _counts(
    sources: Sequence[str], unpack: bool, on_read: OnRead | None = None, videos: bool = False
) -> Iterator[int | None]:
    """Yield numbers of images, as they are found, whose sum is the number of all; None for a file that is not read."""
    for file in _list_all(sources, videos):
        if file.path.lower().endswith(TABLES):
            with suppress(Exception), open_source(file.path) as raw:
                yield pq.read_metadata(raw).num_rows
        elif not is_container(file):
            yield 1
        elif is_remote(file.path) or is_video(file) or (file.path.lower().endswith("gz") and not unpack):
            yield None
        else:  # with a limit of -1 no image is unpacked, only headers
            limit = -1 if file.path.lower().endswith("gz") else MAX_IMAGE_BYTES
            yield from (1 for _ in shard_items(file.path, limit=limit, on_read=on_read))


def _list_all(sources: Sequence[str], videos: bool = False) -> Iterator[Item]:
    return chain.from_iterable(list_files(source, videos=videos)[1] for source in sources)


def list_files(
    source: str, containers: tuple[str, ...] = SHARDS + TABLES, videos: bool = False
) -> tuple[str, Iterator[Item]]:
    """List the files of one source: its root folder or address, and its files in order, none of them opened.

    They are images, and `videos` if asked for; a glob also finds files with suffixes in `containers`, and a single file
    is listed in any case.
    """
    also = VIDEOS if videos else ()
    containers += also
    if is_remote(source):
        root, files = list_remote(source, containers)
        return root, (Item(as_text(address), address, stamp=stamp) for address, stamp in files)
    pattern: tuple[str, ...] = ("**", "*")
    if os.path.isdir(source):
        root, containers = str(Path(source)), also
    elif os.path.lexists(source):
        return os.path.dirname(source), iter([Item(as_text(source), source)])
    elif glob.has_magic(source):
        parts = Path(source).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root, pattern = str(Path(*parts[:fixed])), (*parts[fixed:], "*") if parts[-1] == "**" else parts[fixed:]
    else:
        raise SourceError(f"{source!r}: no such file or folder")
    problems: list[OSError] = []
    paths = select_images(_walk(root, pattern, problems), source, containers) if os.path.isdir(root) else ()
    reasons = ((str(p.filename), f"folder cannot be listed: {p.strerror}") for p in problems)
    errors = (Item(as_text(folder), error=reason) for folder, reason in reasons)
    return root, chain((Item(as_text(path), path) for path in paths), errors)


def _walk(root: str, pattern: Sequence[str], problems: list[OSError]) -> Iterator[str]:
    """Yield the files whose path from `root` matches, sorted, without hidden ones and links to folders.

    Holds one folder's names at a time. Folders that cannot be listed are added to `problems`.
    """
    # Bit i of a state: pattern[:i] matches the path so far. `**` may match no folder at all.
    state = (2 << next(i for i, part in enumerate(pattern) if part != "**")) - 1
    # A stack, because folders may be nested deeper than Python can recurse.
    folders = [("" if root == "." else root, state)]
    while folders:
        folder, state = folders.pop()
        names, subfolders = list[str](), list[str]()
        try:
            with os.scandir(folder or ".") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        subfolders.append(entry.name)
                    elif not (entry.is_symlink() and os.path.isdir(entry.path)):
                        names.append(entry.name)
        except OSError as error:
            problems.append(error)
            continue
        # Paths are strings: creating a Path for each of millions would dominate the walk.
        matching = (name for name in sorted(names) if _match_part(name, state, pattern) >> len(pattern))
        yield from (os.path.join(folder, name) for name in matching)
        below = ((name, _match_part(name, state, pattern)) for name in sorted(subfolders, reverse=True))
        folders += [(os.path.join(folder, name), state) for name, state in below if state % (1 << len(pattern))]


def _match_part(name: str, state: int, pattern: Sequence[str]) -> int:
    """Return the state of `_walk` after one more part of a path; hidden names match nothing."""
    after = 0
    for i, part in enumerate(pattern):
        if state >> i & 1 and name[0] != "." and (part == "**" or fnmatchcase(name, part)):
            after |= 1 << (i if part == "**" else i + 1)
        if part == "**" and after >> i & 1:
            after |= 1 << i + 1
    return after


def is_image_name(member: str) -> bool:
    """Tell whether a member of an archive is an image, by its name; labels beside one (`7.seg.png`) are not."""
    stem, _, suffix = member.rpartition("/")[2].lower().rpartition(".")
    if f".{suffix}" not in EXTENSIONS:
        return False
    name, _, kinds = stem.partition(".")
    return bool(name) and (not kinds or _LABELS.isdisjoint(kinds.split(".")))


def shard_items(
    path: str,
    wanted: Callable[[str], bool] = is_image_name,
    read: bool = False,
    limit: int = MAX_IMAGE_BYTES,
    on_read: OnRead | None = None,
    stamp: str = "",
) -> Iterator[Item]:
    """Yield the members of a tar archive whose names are `wanted`, as spans, or as bytes with `read`.

    Members of a compressed archive always come as bytes; those of more than `limit` bytes as errors.
    """
    compressed, last, number = path.lower().endswith("gz"), "its start", 0
    try:
        with open_source(path) as raw, gzip.open(raw) if compressed else nullcontext(raw) as file:
            reader = TarReader(file, None if on_read is None else lambda size: on_read(path, size))
            for member in iter_members(reader):
                if member.kind != "folder" and (member.error or wanted(member.name)):
                    name, data = as_text(f"{path}/{member.name}"), b""  # releases the data of the member before
                    error = member.error or _REFUSED_KINDS.get(member.kind, "")
                    if not error and member.size > limit:
                        error = f"{member.size:,} bytes in an archive; at most {limit:,} are read"
                    if error:
                        yield Item(name, "", None, None, error, stamp, number)
                    elif not (compressed or read):
                        yield Item(name, path, (member.offset, member.size), None, "", stamp, number)
                    elif len(data := reader.read(member.size)) == member.size:
                        yield Item(name, "", None, data, "", stamp, number)
                    else:
                        raise TarError(f"it ends within {member.name}")
                    number += 1
                last = member.name
    except SourceError:
        raise
    except Exception as error:  # a damaged archive may raise almost anything
        reason = as_text(f"damaged archive, nothing was read after {last}: {error}")
        yield Item(as_text(path), error=reason, stamp=stamp, number=number)


def table_items(path: str, column: str | None = None, limit: int = MAX_IMAGE_BYTES, stamp: str = "") -> Iterator[Item]:
    """Yield the rows of a Parquet file, named by their numbers, with the bytes of the images in `column`.

    Rows of more than `limit` bytes come as errors.
    """
    row = number = 0
    try:
        # pyarrow reads its own files without the interpreter's lock. Its type hints lack paths that are not UTF-8.
        opened: Any = open_source(path) if is_remote(path) else pa.OSFile(os.fsencode(path), "rb")  # type: ignore[arg-type]
        with opened as raw, pq.ParquetFile(raw) as table:
            column = _image_column(path, table.schema_arrow, column)
            for data, error, rows in parquet.iter_values(raw, table, column, limit):
                which = f"rows {row} to {row + rows - 1} are not read: " if rows > 1 else ""
                yield Item(as_text(f"{path}/{row}"), "", None, data, f"{which}{error}", stamp, number)
                row, number = row + rows, number + 1
    except SourceError:
        raise
    except Exception as error:  # a damaged table may raise almost anything
        reason = as_text(f"damaged table, nothing was read from row {row} on: {error}")
        yield Item(as_text(path), error=reason, stamp=stamp, number=number)


def _frame_items(file: Item, fps: float | None, max_pixels: int) -> Iterator[Item]:
    """Yield frames of a video, and as the last one an error if it could not be read to its end."""
    if fps is None:
        raise SourceError(f"{file.name}: a video; frames of it are read by veca embed --fps 2 (fps=2)")
    number = 0
    try:
        for number, (name, data) in enumerate(read_frames(file.path, fps, max_pixels), 1):
            yield Item(name, "", None, data, "", file.stamp, number - 1)
    except (FrameError, ImageError) as error:
        yield Item(file.name, error=as_text(str(error)), stamp=file.stamp, number=number)


def _image_column(path: str, schema: pa.Schema, wanted: str | None) -> str:
    """Choose a column of bytes, or of structs with a field `bytes`, as Hugging Face writes them."""

    def holds_bytes(kind: pa.DataType) -> bool:
        if isinstance(kind, pa.StructType):
            return kind.get_field_index("bytes") >= 0 and holds_bytes(kind.field("bytes").type)
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    columns = [field.name for field in schema if holds_bytes(field.type)]
    if wanted is None and (len(columns) == 1 or "image" in columns):
        return "image" if "image" in columns else columns[0]
    if wanted in columns:
        return str(wanted)
    listed = f"there are {', '.join(columns)}: name one with --column" if columns else "it has none"
    which = "which column has the pictures is not clear" if wanted is None else f"no column of pictures {wanted!r}"
    raise SourceError(f"{as_text(path)}: {which}; of bytes {listed}")
