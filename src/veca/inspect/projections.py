"""Features as colours: principal components or UMAP, the colour maps of maps and of cores, and images of maps."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError

ProjectionMethod: TypeAlias = Literal["pca", "umap"]

_INFERNO = "000004 160b39 420a68 6a176e 932667 bc3754 dd513a f37819 fca50a f6d746 fcffa4"
# Viridis without its dark end, which is lost on a dark photo.
_CORES = "3b528b 31668e 2a788e 238a8d 1e9c89 28ae80 44bf70 6ccd5a 9bd93c cde11d fde725"


class PcaColours(NamedTuple):
    """Principal components of features (..., D), and the range in which each becomes a level from 0 to 1."""

    mean: Tensor
    directions: Tensor
    """(D, components); float64, as all here."""
    low: Tensor
    high: Tensor
    flat: Tensor
    """Components in which nothing varies beyond rounding: their level is 0.5."""

    @classmethod
    def fit(cls, features: Tensor, components: int = 3, clip: float = 0.01) -> Self:
        """The 1st and 99th percentile of a component become 0 and 1; `clip` is that share.

        The sign makes the largest loading positive.
        """
        _check_features(features)
        x = features.detach().to("cpu", torch.float64).flatten(0, -2)
        mean, mean_square = x.mean(0), x.square().mean(0)
        x = x - mean
        variances, directions = _leading_eigenvectors(x, components)
        # Eigenvectors have no sign of their own: fix it, so that colours are reproducible.
        directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
        # Variance that rounding alone puts along each direction: of the features' dtype, and of the decomposition.
        rounding = torch.finfo(features.dtype).eps ** 2 * (directions.square().mT @ mean_square)
        floor = rounding.clamp(min=x.shape[1] * torch.finfo(torch.float64).eps * float(variances[0]))
        fitted = (x @ directions).numpy()
        # Between the quantiles `clip` and 1 - `clip`, or between minimum and maximum where these two coincide.
        low, high = np.quantile(fitted, (clip, 1 - clip), axis=0)
        same = high <= low
        low, high = np.where(same, fitted.min(0), low), np.where(same, fitted.max(0), high)
        return cls(mean, directions, torch.from_numpy(low), torch.from_numpy(high), variances <= floor)

    def levels(self, features: Tensor) -> Tensor:
        """Features (..., D) as (..., components), float32: from 0 to 1 within the range, not clipped beyond it."""
        _check_features(features)
        projected = (features.detach().to("cpu", torch.float64) - self.mean) @ self.directions
        spread = torch.where(self.high > self.low, self.high - self.low, 1.0)
        return torch.where(self.flat, 0.5, (projected - self.low) / spread).float().to(features.device)


def pca(features: Tensor, components: int = 3, clip: float = 0.01, like: Tensor | None = None) -> Tensor:
    """The first principal components of `features` (..., D), each in [0, 1]: (..., components), float32.

    All leading dimensions are fitted together, so feature maps stacked into one tensor share their colours. The 1st
    and 99th percentile of a component become 0 and 1 and what lies beyond is clipped; `clip` is that share, and 0 clips
    nothing. The sign makes the largest loading positive. A component in which nothing varies beyond rounding is 0.5
    everywhere. With `like`, components and percentiles are those of these features (..., D), so that maps computed
    later can share the colours of one map.

    >>> pca(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), components=2).round(decimals=3)
    tensor([[0.0000, 0.5000],
            [0.5000, 0.5000],
            [1.0000, 0.5000]])
    """
    width = features.shape[-1] if features.ndim else 0
    if not 1 <= components <= width:
        raise ArgumentError(f"components={components}; features {tuple(features.shape)} have from 1 to {width}")
    _check_features(features)
    return PcaColours.fit(features if like is None else like, components, clip).levels(features).clamp(0, 1)


def otsu_threshold(values: Tensor) -> float:
    """Otsu's threshold: of all splits of the values into two groups, that with the least variance within both.

    >>> otsu_threshold(torch.tensor([0.0, 0.25, 0.25, 0.75, 1.0]))
    0.5
    """
    x = values.detach().flatten().double().sort().values
    below = torch.arange(1, len(x), dtype=x.dtype, device=x.device)
    sums = x.cumsum(0)
    distance = sums[:-1] / below - (sums[-1] - sums[:-1]) / (len(x) - below)  # of the means of both groups
    split = int((below * (len(x) - below) * distance.square()).argmax())
    return float((x[split] + x[split + 1]) / 2)


def split_foreground(levels: Tensor) -> tuple[float, float]:
    """Where levels (rows, columns) of the first principal component part foreground and background, by Otsu.

    The threshold, and the side of the foreground: 1 above it, -1 below. It is the one that has less of the border.
    """
    threshold = otsu_threshold(levels)
    above = levels > threshold
    border = torch.cat([above[0], above[-1], above[1:-1, 0], above[1:-1, -1]])
    return threshold, -1.0 if border.float().mean() > 0.5 else 1.0


def find_foreground(features: Tensor) -> Tensor:
    """A mask (rows, columns) of the patches of `features` (rows, columns, D) that are taken for the foreground.

    >>> features = torch.zeros(4, 4, 8)
    >>> features[1:3, 1:3] = 1.0
    >>> find_foreground(features).sum(), find_foreground(1 - features)[1, 1]
    (tensor(4), tensor(True))
    """
    levels = pca(features, components=1)[..., 0]
    threshold, side = split_foreground(levels)
    mask = side * (levels - threshold) > 0
    return mask if mask.any() else ~mask  # of features that are all equal, everything


def _check_features(features: Tensor) -> None:
    if not features.numel() or not features.is_floating_point() or not features.isfinite().all():
        given = f"features {tuple(features.shape)} of {features.dtype}"
        raise ArgumentError(f"{given} must be finite, floating point, not empty")


def _leading_eigenvectors(x: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of xᵀx / N and their vectors (D, components), x (N, D) in float64.

    By subspace iteration, which takes a tenth of the time of a full decomposition with 1280 channels; where it does not
    converge, because eigenvalues are too close, the full decomposition is used.
    """
    # Extra directions speed up convergence, which depends on the first eigenvalue beyond them.
    width, count = x.shape[1], components + 12
    if 2 * count < width:
        start = torch.randn(width, count, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(start).Q
        for _ in range(100):
            product = x.mT @ (x @ basis) / len(x)
            values, rotation = torch.linalg.eigh(basis.mT @ product)
            values, rotation = values.flip(0)[:components], rotation.flip(1)[:, :components]
            residual = (product @ rotation - basis @ rotation * values).norm(dim=0)
            if residual.max() <= 1e-10 * values[0]:
                return values, basis @ rotation
            basis = torch.linalg.qr(product).Q
    values, vectors = torch.linalg.eigh(x.mT @ x / len(x))
    return values.flip(0)[:components], vectors.flip(1)[:, :components]


def umap(features: Tensor, components: int = 3) -> Tensor:
    """UMAP of `features` (..., D) with cosine distance, each component in [0, 1]: (..., components), float32.

    All leading dimensions are embedded together. The seed is fixed: the same features give the same colours. The first
    call of a process compiles for a minute.
    """
    check_method("umap")
    _check_features(features)
    from umap import UMAP

    x = features.detach().float().cpu().flatten(0, -2).numpy()
    if len(x) < components + 3:
        raise ArgumentError(f"UMAP in {components}D takes {components + 3} points or more, not {len(x)}; choose pca")
    as_in_the_paper = {"metric": "cosine", "n_neighbors": min(15, len(x) - 1), "min_dist": 0.1}
    embedding = UMAP(n_components=components, random_state=0, n_jobs=1, **as_in_the_paper).fit_transform(x)
    low, high = embedding.min(0), embedding.max(0)
    scaled = (embedding - low) / np.where(high > low, high - low, 1.0)
    return torch.from_numpy(scaled).float().reshape(*features.shape[:-1], components)


def project(
    maps: Sequence[Tensor], components: int = 3, method: ProjectionMethod = "pca", clip: float = 0.01
) -> list[Tensor]:
    """Several maps (..., D), of any sizes, in one joint projection to [0, 1]: equal features get equal colours.

    Where D is less than `components`, the last of them are 0.5 everywhere, or UMAP's. `clip` is that of `pca`.

    >>> [colours.shape for colours in project([torch.rand(4, 4, 8), torch.rand(8, 8, 8)])]
    [torch.Size([4, 4, 3]), torch.Size([8, 8, 3])]
    """
    check_method(method)
    stacked = torch.cat([features.flatten(0, -2).float().cpu() for features in maps])
    # Zero channels add nothing; PCA needs at least as many channels as components.
    stacked = F.pad(stacked, (0, max(0, components - stacked.shape[1])))
    projected = pca(stacked, components, clip) if method == "pca" else umap(stacked, components)
    parts = projected.split([features.shape[:-1].numel() for features in maps])
    return [part.reshape(*features.shape[:-1], components) for part, features in zip(parts, maps, strict=True)]


def check_method(method: str) -> None:
    """Raise, before any work is done, if a method is unknown or not installed."""
    if method not in get_args(ProjectionMethod):
        raise ArgumentError(f"method={method!r}; choose one of {', '.join(get_args(ProjectionMethod))}")
    if method == "umap" and find_spec("umap") is None:
        raise ArgumentError("UMAP needs umap-learn, not installed: pip install 'veca[viz]', or choose pca")


def describe_axes(method: ProjectionMethod, count: int) -> str:
    """The axes of a projection in words.

    >>> describe_axes("pca", 3)
    'first three principal components'
    """
    number = {2: "two", 3: "three"}.get(count, str(count))
    return f"first {number} principal components" if method == "pca" else f"{number} dimensions of a UMAP"


def heat(values: Tensor) -> Tensor:
    """Inferno colours (..., 3) of values in [0, 1], from black over red to pale yellow.

    >>> heat(torch.tensor([0.0, 1.0]))
    tensor([[0.0000, 0.0000, 0.0157],
            [0.9882, 1.0000, 0.6431]])
    """
    return _interpolate(_INFERNO, values)


def core_colours(count: int) -> list[str]:
    """Colours of a bank of cores in their order, #rrggbb, from blue over green to yellow.

    >>> core_colours(3)
    ['#3b528b', '#28ae80', '#fde725']
    """
    return _hex(_interpolate(_CORES, torch.linspace(0, 1, count)))


def heat_hex(values: Tensor) -> list[str]:
    """The colours of `heat` of values (N) as #rrggbb."""
    return _hex(heat(values))


def _interpolate(ramp: str, values: Tensor) -> Tensor:
    anchors = np.array([list(bytes.fromhex(colour)) for colour in ramp.split()]) / 255
    positions = np.linspace(0, 1, len(anchors))
    levels = values.detach().float().cpu().numpy()
    colours = np.stack([np.interp(levels, positions, channel) for channel in anchors.T], axis=-1)
    return torch.from_numpy(colours).float().to(values.device)


def _hex(colours: Tensor) -> list[str]:
    return [f"#{bytes(colour).hex()}" for colour in (colours.double() * 255).round().int().tolist()]


def map_range(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The values of maps (..., rows, columns) that are drawn darkest and brightest.

    The top percent may saturate, otherwise a single bright patch would darken all others.
    """
    flat = maps.flatten(-2)
    return flat.amin(-1), torch.maximum(flat.quantile(0.99, dim=-1), flat.amax(-1) / 4)


def scale_maps(maps: Tensor) -> Tensor:
    """Maps (..., rows, columns) scaled to [0, 1] between their `map_range`."""
    low, high = (end[..., None, None] for end in map_range(maps))
    return ((maps - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


def to_rgb(values: Tensor, size: tuple[int, int] | None = None, smooth: bool = False) -> Image.Image:
    """An image of a map of values in [0, 1]: (rows, columns, 3) as colours, (rows, columns) through `heat`.

    `size` (width, height) scales it, one square per value, or smoothly.

    >>> to_rgb(torch.rand(4, 6, 3), size=(96, 64)).size
    (96, 64)
    """
    if values.ndim == 2:
        values = heat(values)
    if values.ndim != 3 or values.shape[-1] != 3:
        raise ArgumentError(f"a map is (rows, columns, 3) or (rows, columns), not {tuple(values.shape)}")
    levels = (values.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(levels.numpy())
    return image.resize(size, Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST) if size else image
