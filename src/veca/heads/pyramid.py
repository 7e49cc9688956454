"""A feature pyramid on the last map of a backbone, for detectors and decoders that need maps at strides 4 to 32.

It is the simple feature pyramid of ViTDet (arXiv:2203.16527): no lateral connections, since all blocks have one stride.

Shapes: B images, D width of the backbone, K channels of the pyramid.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from veca.errors import ArgumentError

STRIDES = (4, 8, 16, 32)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps (B, K, rows, columns)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FeaturePyramid(nn.Module):
    """A map (B, D, rows, columns) at stride 16 → maps (B, K, …) at `strides`, of which there are layers for these only.

    >>> import torch
    >>> pyramid = FeaturePyramid(192, 64)
    >>> [tuple(each.shape) for each in pyramid(torch.zeros(1, 192, 4, 6))]
    [(1, 64, 16, 24), (1, 64, 8, 12), (1, 64, 4, 6), (1, 64, 2, 3)]
    """

    def __init__(self, in_channels: int, out_channels: int = 256, strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        if unknown := [stride for stride in strides if stride not in STRIDES]:
            raise ArgumentError(f"strides={unknown}; a pyramid has maps at strides {', '.join(map(str, STRIDES))}")
        self.strides = tuple(strides)
        self.levels = nn.ModuleList(_level(in_channels, out_channels, stride) for stride in self.strides)

    def forward(self, x: Tensor, size: tuple[int, int] | None = None) -> list[Tensor]:
        """Maps at `strides`; of images that were padded, cropped to what covers their `size` (height, width) before."""
        maps = [level(x) for level in self.levels]
        if size is not None:
            pairs = zip(maps, self.strides, strict=True)
            maps = [each[..., : -(-size[0] // stride), : -(-size[1] // stride)] for each, stride in pairs]
        return maps


def _level(width: int, channels: int, stride: int) -> nn.Sequential:
    half, quarter = width // 2, width // 4
    resize: list[nn.Module]
    if stride == 4:
        resize = [nn.ConvTranspose2d(width, half, 2, 2), ChannelNorm(half), nn.GELU()]
        resize.append(nn.ConvTranspose2d(half, quarter, 2, 2))
    elif stride == 8:
        resize = [nn.ConvTranspose2d(width, half, 2, 2)]
    else:  # an odd side gains one, as with strided convolutions
        resize = [] if stride == 16 else [nn.MaxPool2d(2, ceil_mode=True)]
    last = {4: quarter, 8: half}.get(stride, width)
    smooth = [nn.Conv2d(last, channels, 1), ChannelNorm(channels)]
    return nn.Sequential(*resize, *smooth, nn.Conv2d(channels, channels, 3, padding=1), ChannelNorm(channels))
