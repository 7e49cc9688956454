"""Contact sheets: what a search has found, as one HTML page with thumbnails in it."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from veca.data.records import RecordDecoder
from veca.data.sources import Item, is_container, unpack_files
from veca.data.video import file_of_frame
from veca.images import MAX_PIXELS, PATCH
from veca.report.page import data_uri, write_page
from veca.search.index import DuplicateGroup, Match, PixelBox, SearchIndex

_SIDE = 192
"""Sides of a thumbnail, if it were square; of others, as many pixels."""
_MAX_GROUPS = 500
"""Groups of duplicates on a page: of more it would be too large to open."""
_MISSING = Image.new("RGB", (_SIDE, _SIDE), (128, 128, 128))


def write_query_sheet(
    path: Path, index: SearchIndex, image: str, matches: Sequence[Match], box: PixelBox | None
) -> None:
    """Write a page of an image, with its region, and of what is like it."""
    asked = Match(image, 1.0, 0, 0, box)
    pictures = _read_thumbnails([image, *(match.path for match in matches)], index)
    strips = [("Asked for", [_entry(asked, pictures, "")])]
    strips += [("Found", [_entry(match, pictures, f"{match.score:.3f}") for match in matches])]
    _write_sheet(path, "Search by image", index, strips, {"Found": len(matches)})


def write_duplicates_sheet(path: Path, index: SearchIndex, groups: Sequence[DuplicateGroup], threshold: float) -> None:
    """Write a page of groups of duplicates."""
    shown = groups[:_MAX_GROUPS]
    pictures = _read_thumbnails((match.path for group in shown for match in group.images), index)
    strips = [
        (f"Group {number:,}", [_entry(match, pictures, f"{match.score:.3f}") for match in group.images])
        for number, group in enumerate(shown, 1)
    ]
    left_out = f", the first {_MAX_GROUPS:,} of which are shown" if len(groups) > _MAX_GROUPS else ""
    facts = {"Groups": f"{len(groups):,}{left_out}", "Cosine with the first": f"at least {threshold:g}"}
    _write_sheet(path, "Duplicates", index, strips, facts)


def _write_sheet(
    path: Path, name: str, index: SearchIndex, strips: Sequence[tuple[str, Any]], facts: Mapping[str, Any]
) -> None:
    about = {"Index": index.folder, "Images": f"{len(index):,}", "Model": index.description.model, **facts}
    write_page(path, "search.html", name=name, banner=False, facts=about, strips=strips)


def _entry(match: Match, pictures: Mapping[str, Image.Image], score: str) -> tuple[str, str, str]:
    """Thumbnail, alternative text and caption of an image."""
    picture = pictures.get(match.path)
    problem = "" if picture else "missing" if match.missing else "cannot be read"
    caption = ", ".join(filter(None, [score, match.path, problem]))
    return _encode(picture or _MISSING, match), match.path, caption


def _encode(picture: Image.Image, match: Match) -> str:
    """A thumbnail as the `src` of an <img>, with the region outlined if there is one."""
    if match.box is not None and picture is not _MISSING:
        picture = picture.copy()
        width, height = picture.info["full_size"]
        across, down = picture.width / width, picture.height / height
        x, y, w, h = match.box
        outline = (x * across, y * down, (x + w) * across - 1, (y + h) * down - 1)
        ImageDraw.Draw(picture).rectangle(outline, outline="#e0245e", width=3)
    data = io.BytesIO()
    picture.save(data, "WEBP", quality=75)
    return data_uri(data.getvalue(), "webp")


def _read_thumbnails(paths: Iterable[str], index: SearchIndex) -> dict[str, Image.Image]:
    """Thumbnails of images by path, without those that are missing or cannot be read."""
    wanted, decoder = dict.fromkeys(paths), RecordDecoder(_SIDE, "native", MAX_PIXELS, "cpu", (_SIDE // PATCH) ** 2)
    thumbnails = dict[str, Image.Image]()
    for item in find_items(list(wanted), index.description.column, index.description.settings.fps):
        record = decoder(item)
        if not record.error:
            picture = Image.fromarray(np.ascontiguousarray(record.pixels.transpose(1, 2, 0)))
            picture.info["full_size"] = record.size
            thumbnails[record.name] = picture
    return thumbnails


def find_items(paths: Sequence[str], column: str | None, fps: float | None) -> Iterator[Item]:
    """Where images are: files, or members of archives, which are read as far as need be."""
    archives: dict[str, set[str]] = {}
    for path in paths:
        archive = file_of_frame(path)
        while archive and not is_container(Item(archive, archive)):
            archive = archive.rpartition("/")[0]
        if archive:
            archives.setdefault(archive, set()).add(path)
        else:
            yield Item(path, path)
    for archive, names in archives.items():
        for item in unpack_files([Item(archive, archive)], column, fps=fps):
            if item.name in names:
                names.discard(item.name)
                yield item
            if not names:
                break
