"""Partitions: consecutive images whose features go to one file, and what its footer says about it.

A partition is a tar shard, a Parquet file, or some thousand consecutive image files: it follows from the inputs and the
settings alone. While it is in progress, finished rows may be saved as *slices*, files of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from veca.data.sources import Item, add_stamp, is_container, list_files

PARTITION = 4096
"""Image files in a partition; rounded to whole parts (`veca.embed.batches`)."""


class Partition(NamedTuple):
    """Consecutive image files, or one container: a tar shard or a Parquet file."""

    number: int
    files: list[Item]

    @property
    def name(self) -> str:
        return f"{self.number:08d}.parquet"

    def slice_name(self, index: int) -> str:
        return f"_{self.number:08d}-{index:04d}.parquet"

    def digests(self, images: int | None = None) -> dict[str, str]:
        """Digests of the names, sizes and dates of the files that hold the first `images`, or all."""
        files = self.files if is_container(self.files[0]) else self.files[:images]
        sizes = (f"{file.name}\0{file.stamp.partition(' ')[0]}" for file in files)
        dates = (f"{file.name}\0{file.stamp}" for file in files)
        texts = {"digest": (file.name for file in files), "sizes": sizes, "dates": dates}
        return {key: hashlib.sha256("\0".join(text).encode()).hexdigest() for key, text in texts.items()}


def plan_partitions(sources: Sequence[str], length: int) -> Iterator[Partition]:
    """Divide the sources into partitions of one container or `length` image files; nothing is opened."""
    number, files = 0, list[Item]()
    for file in (file for source in sources for file in list_files(source)[1]):
        if files and (is_container(file) or is_container(files[0]) or len(files) == length):
            yield Partition(number, files)
            number, files = number + 1, []
        files.append(file)
    if files:
        yield Partition(number, files)


def stamp_files(partition: Partition) -> Partition:
    """The partition with size and date of every local file."""
    return partition._replace(files=list(map(add_stamp, partition.files)))


@dataclass
class PartitionState:
    """What the footer of a partition's file says about it."""

    digest: str = ""  # of the names of its files
    sizes: str = ""  # of names and sizes; empty in partitions of former versions, as the next
    dates: str = ""  # of names, sizes and dates
    pictures: int = 0  # rows
    failures: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class SliceState(PartitionState):
    """What the footer of a slice says about it, and what it takes to continue after it."""

    # Images are counted from the start of the partition, failures included.
    end: int = 0  # the first image after the slice
    groups: list[int] = field(default_factory=list)  # of each row group, the first image of its part
    part: int = 0  # the first image of the part in progress
    part_bytes: int = 0  # features of that part so far

    def next(self) -> SliceState:
        """An empty slice after this one."""
        return SliceState(end=self.end, part=self.part, part_bytes=self.part_bytes)
