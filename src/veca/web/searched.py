"""A search index in the explorer: images like the present one or a region of it are found, shown and opened."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from veca.data.records import read_item
from veca.errors import VecaError
from veca.images import open_image
from veca.model import Veca
from veca.search.index import Match, PixelBox, SearchIndex
from veca.search.sheet import find_items
from veca.search.store import SearchError
from veca.web.folder import THUMBNAIL_SIDE
from veca.web.images import MAX_ASPECT, SHORT_SIDE, StoredImage, crop_image
from veca.web.jobs import ByteCache, JobSteps, RequestError
from veca.web.schemas import IndexInfo, IndexMatch, IndexMatches

_THUMBNAIL_BYTES = 2**26


class SearchedIndex:
    """An index of one of the explorer's models. Of the paths in it, only file names are told."""

    def __init__(self, index: SearchIndex, model: str) -> None:
        self.index, self.model = index, model
        self._paths = {_id_of(path): path for path in index.paths}
        self._thumbnails: ByteCache[bytes] = ByteCache(_THUMBNAIL_BYTES, len)

    @property
    def info(self) -> IndexInfo:
        return IndexInfo(model=self.model, images=len(self.index), regions=self.index.has_regions)

    def search(
        self, image: StoredImage, box: PixelBox | None, count: int, cores: int, width: float
    ) -> JobSteps[IndexMatches]:
        """The images most like `image`, or like the region `box` of it."""
        try:
            found = self.index.query(image.image, count, box=box, cores=cores, width=width)
        except SearchError as error:  # a box that is not within the image
            raise RequestError(422, str(error)) from error
        yield
        yield from self._read_thumbnails([match.path for match in found])
        return IndexMatches(matches=[self._describe(match) for match in found])

    def _describe(self, match: Match) -> IndexMatch:
        id = _id_of(match.path)
        readable = self.thumbnail(id) is not None
        shown = match.box and _shown_part(match.width, match.height, match.box)
        title = PurePath(match.path).name
        return IndexMatch(id=id, title=title, similarity=match.score, box=shown, readable=readable)

    def thumbnail(self, id: str) -> bytes | None:
        """A JPEG, of an image that was found not long ago."""
        return self._thumbnails.get(id)

    def open(self, id: str) -> StoredImage | None:
        """The image, or None: it is not in the index, or cannot be read; the reason would tell its path."""
        path = self._paths.get(id)
        return None if path is None else next(self._open([path], SHORT_SIDE), None)

    def _read_thumbnails(self, paths: Sequence[str]) -> JobSteps[None]:
        missing = [path for path in paths if self._thumbnails.get(_id_of(path)) is None]
        for image in self._open(missing, THUMBNAIL_SIDE):
            self._thumbnails.put(image.id, image.jpeg(THUMBNAIL_SIDE))
            yield

    def _open(self, paths: Sequence[str], at_least: int) -> Iterator[StoredImage]:
        settings = self.index.description.settings
        for item in find_items(paths, self.index.description.column, settings.fps):
            try:
                source = read_item(item)
                yield crop_image(_id_of(item.name), open_image(source, at_least=at_least))
            except (VecaError, OSError):  # it is gone, or is no image any more
                continue


def open_searched(folder: Path, models: Mapping[str, Veca]) -> SearchedIndex:
    """The index in `folder`, which is of one of `models`."""
    index = SearchIndex.open(folder)
    return SearchedIndex(index, index.use_one_of(models))


def _id_of(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]  # links outlive the server


def _shown_part(width: int, height: int, box: PixelBox) -> tuple[float, float, float, float]:
    """A box in pixels of an image as x, y, width and height in parts of what the explorer shows of it."""
    shown = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
    sides = []
    for start, length, full, part in zip(box[:2], box[2:], (width, height), shown, strict=True):
        first = (start - (full - part) / 2) / part
        first, last = max(0.0, first), min(1.0, first + length / part)
        sides.append((first, max(0.0, last - first)))
    (x, across), (y, down) = sides
    return x, y, across, down
