"""`SearchIndex`: ask an index for the images most like an image or a region of one, or for its duplicates.

Shapes: N images of the index, D width, G × G cells of an image. Scores are cosines.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize as to_unit_length

from veca.checkpoint.format import weights_hash
from veca.checkpoint.loading import load_or_random
from veca.config import MlpWidth
from veca.data.remote import is_remote
from veca.data.video import file_of_frame
from veca.errors import VecaError, needs_extra
from veca.images import ImageTooLargeError, Source, nearest_sizes, normalize, open_image
from veca.images.load import Decoder, crop_pixels, open_for_fit, plan_fit
from veca.kernels.onednn import PackedWeights
from veca.model import Veca
from veca.search.store import IndexDescription, IndexFolder, IndexTables, SearchError

PixelBox = tuple[int, int, int, int]
"""x and y of the top left corner, width and height, in pixels of the upright image."""

_BLOCK_SCORES = 1 << 24
"""Scores of a block of images with all others, while duplicates are looked for: 64 MiB."""
_PART_ROWS = 8192
"""Rows that are float32 at a time meanwhile."""


class Match(NamedTuple):
    """An image of the index, and how alike it is."""

    path: str
    score: float
    """Cosine: 1 is the same."""
    width: int
    height: int
    box: PixelBox | None = None
    """Of a query by region: the cell that is most like it."""
    missing: bool = False
    """Whether the file is no longer where it was."""


class DuplicateGroup(NamedTuple):
    """Images that are all alike the first of them."""

    images: tuple[Match, ...]
    """`score` is that with the first."""


class SearchIndex:
    """An index of images, as `update_index` makes it."""

    def __init__(
        self, folder: Path, description: IndexDescription, tables: IndexTables, model: Veca | None, device: torch.device
    ) -> None:
        """Use `open`."""
        self.folder, self.description, self.device = folder, description, device
        self._tables, self._model, self._checked = tables, model, False
        self._packed: Any = nullcontext()

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], *, model: Veca | None = None, device: str | torch.device = "cpu"
    ) -> Self:
        """Open the index in `folder`.

        Features are mapped into memory, and the model (None: the one that the index names) is loaded by a query.
        """
        store = IndexFolder(folder)
        description = store.read()
        return cls(store.path, description, store.read_tables(description), model, torch.device(device))

    def __len__(self) -> int:
        return len(self._tables.images)

    @property
    def paths(self) -> list[str]:
        """The images of the index, as matches name them."""
        return [str(path) for path in self._tables.images["path"].to_pylist()]

    @property
    def has_regions(self) -> bool:
        """Whether the index has features of the cells of images, for queries by region."""
        return self._tables.regions is not None

    @property
    def model(self) -> Veca:
        """The model that the features are of; raises SearchError if it is another one."""
        if not self._checked:
            name = self.description.model
            if self._model is None:
                try:
                    self._model = load_or_random(name)
                except VecaError as error:
                    reason = f"is of the model {name}, which cannot be loaded ({error})"
                    raise SearchError(f"{self.folder} {reason}; name it by --model (model=…)") from error
            if weights_hash(self._model) != self.description.weights:
                way = f"give that one by --model (model=…), or make an index with this one; {name} was its name"
                raise SearchError(f"{self.folder} is of another model, with other weights: {way}")
            self._model.to(self.device).eval()
            self._packed = PackedWeights(self._model) if self.device.type == "cpu" else self._packed
            self._checked = True
        assert self._model is not None
        return self._model

    def use_one_of(self, models: Mapping[str, Veca]) -> str:
        """Compute queries with the one of these models that the index is of; its name."""
        about = self.description
        for name, model in models.items():
            if weights_hash(model) == about.weights:
                self._model, self.device = model, model.norm.weight.device
                return name
        way = f"name that one too, as --model {','.join((about.model, *models))}"
        raise SearchError(f"{self.folder} is of the model {about.model}, which is none of {', '.join(models)}; {way}")

    def query(
        self,
        image: Source,
        top: int = 20,
        *,
        box: PixelBox | None = None,
        cores: int | None = None,
        width: MlpWidth | None = None,
    ) -> list[Match]:
        """The `top` images that are most like `image`, or like the region `box` of it, the best first.

        An image is compared by its global feature. A region is compared with the cells of images, by the mean of its
        patches, or if the index was made without regions by its global feature with whole images. `cores` and `width`
        are the budget of the query (None: that of the index): features of one model at two budgets can be compared.
        """
        if top < 1:
            raise SearchError(f"top={top}: must be at least 1")
        return self.rank(self.embed_query(image, box, cores, width), top, by_region=box is not None)

    def embed_query(
        self, image: Source, box: PixelBox | None = None, cores: int | None = None, width: MlpWidth | None = None
    ) -> Tensor:
        """The feature (D) by which `query` looks for an image or a region."""
        settings, dense = self.description.settings, box is not None and self.has_regions
        pixels = self.load_query(image, box)[None].to(self.device)
        model = self.model
        with torch.inference_mode(), self._packed:
            out = model(
                normalize(pixels), cls_only=not dense,
                cores=settings.cores if cores is None else cores, width=settings.width if width is None else width,
            )  # fmt: skip
        return out.patches[0].mean(dim=0) if dense else out.cls[0]

    def load_query(self, image: Source, box: PixelBox | None = None, max_fitted: int | None = None) -> Tensor:
        """The pixels (3, H, W), uint8, of which the model makes the feature of an image, fitted as the index's are.

        Of a region the model is shown that alone, on as many pixels as a whole image: what is around it would take
        part. `max_fitted` is the largest H × W that is allowed.
        """
        s = self.description.settings
        fitting: dict[str, Any] = {"size": s.size, "fit": s.fit, "max_patches": s.max_patches}
        if box is not None:
            image = self._cut_out(image, box)
            scale = s.size / math.sqrt(image.width * image.height)
            fitting = {"size": nearest_sizes(image.height * scale, image.width * scale), "fit": "stretch"}
        opened, crop, _ = open_for_fit(image, **fitting, max_pixels=s.max_pixels, decoder=self._decoder)
        if max_fitted is not None and crop.width * crop.height > max_fitted:
            made = f"the model would see {crop.width}×{crop.height} pixels of it"
            raise ImageTooLargeError(f"{made}; at most {max_fitted:,} are allowed. Send one that is not so long")
        return crop_pixels(crop, opened, self._decoder)

    def rank(self, feature: Tensor, top: int, *, by_region: bool = False) -> list[Match]:
        """The `top` images that are most like a feature (D) of `embed_query`; `by_region`: like one of a region."""
        regions = self._tables.regions if by_region else None
        return self._rank(self._tables.vectors if regions is None else regions, feature, top)

    def duplicates(self, threshold: float = 0.95) -> Iterator[DuplicateGroup]:
        """Groups of images whose cosine with the first of the group is at least `threshold`, in the index's order.

        All pairs are compared, a block at a time: the time grows with the square of the number of images.
        """
        if not -1 <= threshold <= 1:
            raise SearchError(f"threshold={threshold}: must be from -1 to 1, as cosines are")
        return self._find_groups(threshold)

    def _find_groups(self, threshold: float) -> Iterator[DuplicateGroup]:
        vectors, free = self._tables.vectors, np.ones(len(self), bool)
        step = max(1, _BLOCK_SCORES // max(1, len(self)))
        for start in range(0, len(self), step):
            scores = _multiply(vectors[start : start + step], vectors[start:], self.device)
            for row in np.flatnonzero((scores >= threshold).sum(axis=1) > 1):
                if free[start + row]:
                    alike = row + np.flatnonzero((scores[row, row:] >= threshold) & free[start + row :])
                    if len(others := alike[alike != row]):
                        free[start + others] = False
                        of_group = [(start + row, 1.0), *((start + i, float(scores[row, i])) for i in others)]
                        yield DuplicateGroup(tuple(self._match(int(i), score) for i, score in of_group))

    def _rank(self, features: NDArray[np.float16], query: Tensor, top: int) -> list[Match]:
        """The images with the rows of `features`, (N, D) or (N, cells, D), that are most like the query (D)."""
        with needs_extra("a search needs", "search"):
            from usearch.compiled import MetricKind
            from usearch.index import search
        rows = features.reshape(-1, features.shape[-1])
        cells = len(rows) // max(1, len(self))
        best: dict[int, Match] = {}
        if len(rows):
            # With all cells of as many images there are as many images for certain.
            count = min(len(rows), top * cells)
            asked = to_unit_length(query.float(), dim=0).cpu().numpy().astype(np.float16)
            found = search(rows, asked, count, MetricKind.IP, exact=True)
            for key, distance in zip(found.keys.tolist(), found.distances.tolist(), strict=True):
                image, cell = divmod(key, cells)
                if image not in best and len(best) < top:
                    best[image] = self._match(image, 1 - distance, cell if features.ndim == 3 else None)
        return list(best.values())

    def _match(self, row: int, score: float, cell: int | None = None) -> Match:
        path, width, height = (self._tables.images[name][row].as_py() for name in ("path", "width", "height"))
        box = None if cell is None else self._box_of(width, height, cell)
        return Match(path, min(1.0, score), width, height, box, _is_missing(path))

    def _box_of(self, width: int, height: int, cell: int) -> PixelBox:
        """Where a cell is in an image of width × height: what the model was shown of it is divided evenly."""
        s = self.description.settings
        assert s.cells is not None
        crop = plan_fit(width, height, s.size, s.fit, s.max_pixels, s.max_patches)
        left, top, right, bottom = crop.box
        row, column = divmod(cell, s.cells)
        # A cell in pixels of the image; with padding the last ones end beyond its edge.
        across = (right - left) * crop.width / crop.columns / s.cells
        down = (bottom - top) * crop.height / crop.rows / s.cells
        x, y = round(left + column * across), round(top + row * down)
        end_x, end_y = round(left + (column + 1) * across), round(top + (row + 1) * down)
        return x, y, min(width, end_x) - x, min(height, end_y) - y

    @property
    def _decoder(self) -> Decoder:
        return "pillow" if self.description.settings.decode == "pillow" else "cpu"

    def _cut_out(self, image: Source, box: PixelBox) -> Image.Image:
        opened = open_image(image, max_pixels=self.description.settings.max_pixels)
        x, y, width, height = box
        if min(width, height) < 1 or min(x, y) < 0 or x + width > opened.width or y + height > opened.height:
            rule = f"must be X,Y,WIDTH,HEIGHT within the image, which has {opened.width}×{opened.height} pixels"
            raise SearchError(f"box={','.join(map(str, box))}: {rule}")
        return opened.crop((x, y, x + width, y + height))


def _multiply(some: NDArray[np.float16], others: NDArray[np.float16], device: torch.device) -> NDArray[np.float32]:
    """Cosines of vectors of length 1: (B, D) and (N, D) to (B, N)."""
    rows, scores = _as_float(some, device), np.empty((len(some), len(others)), np.float32)
    for start in range(0, len(others), _PART_ROWS):
        part = _as_float(others[start : start + _PART_ROWS], device)
        scores[:, start : start + len(part)] = (rows @ part.mT).cpu().numpy()
    return scores


def _as_float(vectors: NDArray[np.float16], device: torch.device) -> Tensor:
    return torch.from_numpy(vectors.astype(np.float32)).to(device)


def _is_missing(path: str) -> bool:
    """Whether neither the file nor the archive that it is in exists; addresses are not looked up."""
    if is_remote(path):
        return False
    path = file_of_frame(path)
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return not path or os.path.isdir(path)
