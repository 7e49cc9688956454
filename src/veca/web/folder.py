"""Images of this machine that the explorer was started with: listed, embedded in the background, searched."""

import hashlib
from pathlib import PurePath

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.data.index import ImageIndex
from veca.errors import VecaError
from veca.images import fit_image, normalize, open_image, to_tensor
from veca.inspect.maps import inspecting
from veca.model import Veca
from veca.web.analysis import REFERENCE_SIZE
from veca.web.images import SHORT_SIDE, StoredImage, crop_image
from veca.web.jobs import JobSteps
from veca.web.schemas import Neighbour, SampleInfo

MAX_IMAGES = 1000
THUMBNAIL_SIDE = 256


class Folder:
    """The first `MAX_IMAGES` images of an index. Of their paths, only file names are told."""

    def __init__(self, index: ImageIndex) -> None:
        self._index = index
        self._numbers: dict[str, int] = {}  # of each id
        sizes = index.sizes()
        for number in range(min(len(index), MAX_IMAGES)):
            key = f"{index.relative_name(number)} {sizes[number]}"  # links outlive the server
            self._numbers.setdefault(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32], number)
        self.images = [
            SampleInfo(id=id, title=PurePath(index.relative_name(number)).name) for id, number in self._numbers.items()
        ]
        self._thumbnails: dict[str, bytes] = {}
        self._features: dict[str, dict[str, Tensor | None]] = {}
        """Unit global feature of each image by model and id; None: the image cannot be read."""

    def __len__(self) -> int:
        return len(self._numbers)

    def open(self, id: str) -> StoredImage | None:
        """The image, or None: it is not one of the folder, or cannot be read; the reason would tell its path."""
        try:
            return self._open(id, SHORT_SIDE) if id in self._numbers else None
        except (VecaError, OSError):
            return None

    def thumbnail(self, id: str) -> bytes | None:
        """A JPEG, once the image has been embedded."""
        return self._thumbnails.get(id)

    def _open(self, id: str, at_least: int) -> StoredImage:
        return crop_image(id, open_image(self._index.read(self._numbers[id]), at_least=at_least))

    def embed(self, name: str, model: Veca) -> JobSteps[None]:
        """Compute the global feature of every image, one at a step."""
        features = self._features.setdefault(name, {})
        for id in self._numbers:
            yield
            try:
                image = self._open(id, REFERENCE_SIZE)
            except (VecaError, OSError):
                features[id] = None
                continue
            if id not in self._thumbnails:
                self._thumbnails[id] = image.jpeg(THUMBNAIL_SIDE)
            yield
            with inspecting(model):
                fitted = normalize(to_tensor(fit_image(image.image, REFERENCE_SIZE, "keep")))[None]
                feature = model(fitted.to(model.norm.weight.device), cls_only=True).cls[0].float().cpu()
            features[id] = F.normalize(feature, dim=0) if feature.isfinite().all() else None

    def count_embedded(self, name: str) -> int:
        return len(self._features.get(name, ()))

    def nearest(self, name: str, id: str, feature: Tensor, count: int) -> list[Neighbour]:
        """The images whose features have the largest cosine with one, without the image `id` itself."""
        known = {other: each for other, each in list(self._features.get(name, {}).items()) if each is not None}
        known.pop(id, None)
        if not known:
            return []
        cosines = torch.stack(list(known.values())) @ F.normalize(feature, dim=0)
        best = cosines.topk(min(count, len(known)))
        ids, titles = list(known), {image.id: image.title for image in self.images}
        return [
            Neighbour(id=ids[i], title=titles[ids[i]], similarity=similarity)
            for similarity, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
