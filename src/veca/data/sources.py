"""Find images in files, folders, globs, tar shards and Parquet files, local or at any address fsspec reads.

Sources are walked once, in a fixed order. At most one folder's names, or the listing of one address, is held in memory,
so any number of images can be streamed.
"""

from __future__ import annotations

import glob
import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from veca.data import parquet
from veca.data.remote import MAX_IMAGE_BYTES, SourceError, as_text, fixed_part, is_remote, list_remote, open_source
from veca.data.tar import Member, TarError, TarReader, iter_members
from veca.images import EXTENSIONS, MAX_PIXELS
from veca.images.decode import max_bytes
from veca.images.formats import UNSUPPORTED, report_unsupported

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
    def file_size(self) -> int:
        """Size in bytes of the file it is in, -1 where unknown."""
        size = self.stamp.partition(" ")[0]
        return int(size) if size.isdigit() else -1


def iter_items(
    sources: Sequence[str], column: str | None = None, max_pixels: int = MAX_PIXELS, on_read: OnRead | None = None
) -> Iterator[Item]:
    """Yield all images of all sources, in order, as the sources are walked.

    Those of a Parquet file are in `column` (None: in the only one that can hold images). An image with more bytes than
    `max_pixels` can take comes as an error.
    """
    return unpack_files(_list_all(sources), column, max_pixels, on_read)


def unpack_files(
    files: Iterable[Item], column: str | None = None, max_pixels: int = MAX_PIXELS, on_read: OnRead | None = None
) -> Iterator[Item]:
    """Yield the images of files, archives and tables, numbered, as `iter_items` does."""
    number, limit = 0, min(MAX_IMAGE_BYTES, max_bytes(max_pixels))
    for file in map(add_stamp, files):
        if is_container(file):
            if file.path.lower().endswith(TABLES):
                items = table_items(file.path, column, limit)
            else:
                items = shard_items(file.path, read=is_remote(file.path), limit=limit, on_read=on_read)
            # Not `_replace`: it is slow, and leaves memory behind in the interpreter's list of free tuples
            yield from (Item(*item[:-2], file.stamp, i) for i, item in enumerate(items))
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
    return file.path.lower().endswith(SHARDS + TABLES)


def count_images(sources: Sequence[str], unpack: bool = True, on_read: OnRead | None = None) -> int | None:
    """Count the images; None if that would mean to fetch a remote shard, or without `unpack` to decompress one."""
    total = 0
    for file in _list_all(sources):
        if file.path.lower().endswith(TABLES):
            with suppress(Exception), open_source(file.path) as raw:
                total += pq.read_metadata(raw).num_rows
        elif not is_container(file):
            total += 1
        elif is_remote(file.path) or (_is_compressed(file.path) and not unpack):
            return None
        else:  # with this limit no image is read, only headers
            total += sum(1 for _ in shard_items(file.path, limit=-1, on_read=on_read))
    return total


def _list_all(sources: Sequence[str]) -> Iterator[Item]:
    return chain.from_iterable(list_files(source)[1] for source in sources)


def list_files(source: str, containers: tuple[str, ...] = SHARDS + TABLES) -> tuple[str, Iterator[Item]]:
    """List the files of one source: its root folder or address, and its files in order, none of them opened.

    They are images; a glob also finds files with suffixes in `containers`, and a single file is listed in any case.
    """
    if is_remote(source):
        root, files = list_remote(source, containers)
        return root, (Item(as_text(address), address, stamp=stamp) for address, stamp in files)
    if os.path.isdir(source):
        return str(Path(fixed_part(f"{source}/"))), _walk(source, ("**", "*"), ())
    if os.path.lexists(source):
        return os.path.dirname(source), iter([Item(as_text(source), source)])
    if not glob.has_magic(source):
        raise SourceError(f"{source!r}: no such file or folder")
    parts = Path(source).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root, pattern = str(Path(*parts[:fixed])), parts[fixed:]
    if not os.path.isdir(root):
        return root, iter(())
    return root, _walk(root, (*pattern, "*") if pattern[-1] == "**" else pattern, containers)


def _walk(root: str, pattern: Sequence[str], containers: tuple[str, ...]) -> Iterator[Item]:
    """Yield images whose path from `root` matches, sorted, without hidden ones. Holds one folder's names at a time."""
    problems: list[OSError] = []
    unsupported = Counter[str]()
    complete = 1 << len(pattern)
    # A stack, because folders may be nested deeper than Python can recurse.
    folders = [("" if Path(root) == Path() else str(Path(root)), _skip_stars(1, pattern))]
    while folders:
        folder, state = folders.pop()
        try:
            subfolders, names = _scan_folder(folder or ".")
        except OSError as error:
            problems.append(error)
            continue
        for name in names:
            if not _match_part(name, state, pattern) & complete:
                continue
            path = os.path.join(folder, name)  # creating a Path for each of millions would dominate the walk
            suffix = os.path.splitext(name)[1].lower()
            if suffix in EXTENSIONS or name.lower().endswith(containers):
                yield Item(as_text(path), path)
            elif suffix in UNSUPPORTED:
                unsupported[suffix] += 1
        for name in reversed(subfolders):
            if (below := _match_part(name, state, pattern)) & ~complete:
                folders.append((os.path.join(folder, name), below))
    report_unsupported((root, *pattern), unsupported)
    yield from (Item(as_text(str(p.filename)), error=f"folder cannot be listed: {p.strerror}") for p in problems)


def _scan_folder(folder: str) -> tuple[list[str], list[str]]:
    """List subfolders and files, sorted, without hidden ones and links to folders."""
    subfolders, names = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:
                is_folder = False
            if not is_folder:
                names.append(entry.name)
            elif not entry.is_symlink():
                subfolders.append(entry.name)
    return sorted(subfolders), sorted(names)


def _match_part(name: str, state: int, pattern: Sequence[str]) -> int:
    """Advance a glob match by one part of a path. Bit i of a state: pattern[:i] matches; the last bit: all of it."""
    after = 0
    for i, part in enumerate(pattern):
        if state >> i & 1 and (part == "**" or fnmatchcase(name, part)):
            after |= 1 << (i if part == "**" else i + 1)
    return _skip_stars(after, pattern)


def _skip_stars(state: int, pattern: Sequence[str]) -> int:
    """`**` may match no folder at all, so the part after it may match at once."""
    for i, part in enumerate(pattern):
        if part == "**" and state >> i & 1:
            state |= 1 << i + 1
    return state


def is_image_name(member: str) -> bool:
    """Tell whether a member of an archive is an image, by its name; labels beside one (`7.seg.png`) are not."""
    *stem, suffix = member.rpartition("/")[2].lower().split(".")
    return f".{suffix}" in EXTENSIONS and any(stem[:1]) and not _LABELS.intersection(stem[1:])


def shard_items(
    path: str,
    wanted: Callable[[str], bool] = is_image_name,
    read: bool = False,
    limit: int = MAX_IMAGE_BYTES,
    on_read: OnRead | None = None,
) -> Iterator[Item]:
    """Yield the members of a tar archive whose names are `wanted`, as spans, or as bytes with `read`.

    Members of a compressed archive always come as bytes; those of more than `limit` bytes as errors.
    """
    compressed, last = _is_compressed(path), "its start"
    try:
        with open_source(path) as raw, gzip.open(raw) if compressed else nullcontext(raw) as file:
            reader = TarReader(file, None if on_read is None else lambda size: on_read(path, size))
            for member in iter_members(reader):
                if member.kind != "folder" and (member.error or wanted(member.name)):
                    yield _member_item(path, reader, member, compressed or read, limit)
                last = member.name
    except SourceError:
        raise
    except Exception as error:  # a damaged archive may raise almost anything
        yield Item(as_text(path), error=as_text(f"damaged archive, nothing was read after {last}: {error}"))


def _member_item(path: str, reader: TarReader, member: Member, read: bool, limit: int) -> Item:
    name, error = as_text(f"{path}/{member.name}"), member.error or _REFUSED_KINDS.get(member.kind, "")
    if not error and member.size > limit:
        error = f"{member.size:,} bytes in an archive; at most {limit:,} are read"
    if error:
        return Item(name, error=error)
    if not read:
        return Item(name, path, span=(member.offset, member.size))
    data = reader.read(member.size)
    if len(data) < member.size:
        raise TarError(f"it ends within {member.name}")
    return Item(name, data=data)


def _is_compressed(path: str) -> bool:
    return path.lower().endswith("gz")


def table_items(path: str, column: str | None = None, limit: int = MAX_IMAGE_BYTES) -> Iterator[Item]:
    """Yield the rows of a Parquet file, named by their numbers, with the bytes of the images in `column`.

    Rows of more than `limit` bytes come as errors.
    """
    row = 0
    try:
        with open_source(path) as raw, pq.ParquetFile(raw) as table:
            column = _image_column(path, table.schema_arrow, column)
            for value in parquet.iter_values(raw, table, column, limit):
                rows = f"rows {row} to {row + value.rows - 1} are not read: " if value.rows > 1 else ""
                error = f"{rows}{value.error}" if value.error else ""
                yield Item(as_text(f"{path}/{row}"), data=value.data, error=error)
                row += value.rows
    except SourceError:
        raise
    except Exception as error:  # a damaged table may raise almost anything
        yield Item(as_text(path), error=as_text(f"damaged table, nothing was read from row {row} on: {error}"))


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
