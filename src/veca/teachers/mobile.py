"""Teachers that are mobile networks of timm, on a GPU by the kernels of `veca.kernels.convolution`.

Such a network is bound by memory: its maps are widened six times between two convolutions. The kernels add bias,
activation and residual sum on the way, so that no map is read or written once more for them.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from veca.attention import use_triton
from veca.kernels import ops

_MAX_FUSED_INPUTS = 16
"""A map with so few channels is widened anew for every tap of the depthwise convolution, in one kernel with it."""


def fuse_mobile_network(model: Any) -> None:
    """Fold the norms of a timm EfficientNet into its convolutions, and run on GPUs by kernels what they compute.

    They compute convolutions with ReLU6, "same" padding and no attention over channels, as all of EfficientNet-Lite's
    are. The rest stays as it is.
    """
    for module in list(model.modules()):
        for (at, conv), (after, norm) in itertools.pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, at, fuse_conv_bn_eval(conv, norm))
                setattr(module, after, getattr(norm, "act", nn.Identity()))  # timm's norms include the activation
    if is_dense(model.conv_stem) and isinstance(model.bn1, nn.ReLU6):
        model.conv_stem, model.bn1 = FirstConvolution(model.conv_stem), nn.Identity()
    if _is_pointwise(model.conv_head) and isinstance(model.bn2, nn.ReLU6):
        model.conv_head, model.bn2 = Pointwise(model.conv_head), nn.Identity()
    for stage in model.blocks:
        for name, block in stage.named_children():
            if _is_mobile(block):
                setattr(stage, name, MobileBlock(block))
    if all(isinstance(block, MobileBlock) for stage in model.blocks for block in stage):
        model.forward_features = _ForwardFeatures(model, model.forward_features)


class _ForwardFeatures:
    """`forward_features` of a fused network; torch.compile leaves it alone where kernels run."""

    def __init__(self, model: Any, forward: Callable[[Tensor], Tensor]) -> None:
        self.model, self.forward, self.compiled = model, forward, set[torch.dtype]()
        self.by_kernels: Callable[[Tensor], Tensor] = self._run_kernels
        if torch.cuda.is_available() or ops.INTERPRETED:  # not elsewhere: it loads the compiler, which takes seconds
            self.by_kernels = torch.compiler.disable(self._run_kernels)

    def __call__(self, images: Tensor) -> Tensor:
        return self.by_kernels(images) if _by_kernels(images) else self.forward(images)

    def _run_kernels(self, images: Tensor) -> Tensor:
        if images.is_cuda and (dtype := _product_dtype(images)) not in self.compiled:
            self._compile_kernels(images, dtype)
            self.compiled.add(dtype)
        return self.forward(images)

    def _compile_kernels(self, images: Tensor, dtype: torch.dtype) -> None:
        """Compile the kernels of all blocks at once in threads; a pass does one by one."""

        @torch.no_grad()
        def run(block: MobileBlock) -> None:
            with torch.cuda.device_of(images):
                block(torch.zeros(1, 32, 32, block.inputs, device=images.device, dtype=dtype).permute(0, 3, 1, 2))

        blocks = [module for module in self.model.modules() if isinstance(module, MobileBlock)]
        different = {(block.inputs, block.taps.shape, block.stride, block.has_residual): block for block in blocks}
        with ThreadPoolExecutor(8, "compile") as threads:
            list(threads.map(run, different.values()))


class FirstConvolution(nn.Module):
    """A convolution with ReLU6 after it, of images (B, c, H, W)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv, self.side, self.stride = conv, conv.kernel_size[0], conv.stride[0]
        self.weight, self.bias = _buffer(conv.weight.flatten(1).T), _buffer(conv.bias)
        self.cast: Tensor = nn.Buffer(self.weight, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if not _by_kernels(images):
            return self.conv(images).clamp(0, 6)
        from veca.kernels.convolution import launch_first_convolution

        weight = _cast_weight(self, _product_dtype(images))
        return launch_first_convolution(images, weight, self.bias, self.side, self.stride).permute(0, 3, 1, 2)


class Pointwise(nn.Module):
    """A 1×1 convolution with ReLU6 after it, of maps (B, K, H, W)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv, self.layer = conv, PointwiseLayer(conv)

    def forward(self, x: Tensor) -> Tensor:
        if not _by_kernels(x):
            return self.conv(x).clamp(0, 6)
        return self.layer(_channels_last(x), relu6=True).permute(0, 3, 1, 2)


class PointwiseLayer(nn.Module):
    """A 1×1 convolution by the kernel: maps (B, H, W, K) → (B, H, W, N), then ReLU6 or plus a residual."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = _buffer(conv.weight.flatten(1).T), _buffer(conv.bias)
        self.cast: Tensor = nn.Buffer(self.weight, persistent=False)

    def forward(self, maps: Tensor, relu6: bool = False, residual: Tensor | None = None) -> Tensor:
        from veca.kernels.convolution import launch_pointwise

        rest = None if residual is None else residual.flatten(0, 2)
        rows = launch_pointwise(maps.flatten(0, 2), _cast_weight(self, maps.dtype), self.bias, relu6, rest)
        return rows.unflatten(0, maps.shape[:3])


class MobileBlock(nn.Module):
    """A block of timm's: an inverted residual, or one that does not widen the map."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.has_residual, depthwise = block, block.has_skip, block.conv_dw
        wider, narrower = (block.conv_pw, block.conv_pwl) if hasattr(block, "conv_pwl") else (None, block.conv_pw)
        self.wider = None if wider is None else PointwiseLayer(wider)
        self.narrower, self.stride = PointwiseLayer(narrower), depthwise.stride[0]
        self.inputs = (wider or depthwise).in_channels
        self.taps, self.taps_bias = _buffer(depthwise.weight[:, 0].permute(1, 2, 0)), _buffer(depthwise.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if not _by_kernels(x):
            out = self.block(x)
            return out
        from veca.kernels.convolution import launch_block, launch_depthwise

        maps = _channels_last(x)
        if self.wider is not None and self.inputs <= _MAX_FUSED_INPUTS and not self.has_residual:
            widening, narrowing = ((_cast_weight(each, maps.dtype), each.bias) for each in (self.wider, self.narrower))
            out = launch_block(maps, *widening, self.taps, self.taps_bias, *narrowing, self.stride)
            return out.permute(0, 3, 1, 2)
        wide = maps if self.wider is None else self.wider(maps, relu6=True)
        wide = launch_depthwise(wide, self.taps, self.taps_bias, self.stride)
        return self.narrower(wide, residual=maps if self.has_residual else None).permute(0, 3, 1, 2)


def _buffer(tensor: Tensor | None) -> Tensor:
    """A contiguous float32 copy that is not part of the state dict."""
    assert tensor is not None
    return nn.Buffer(tensor.detach().float().contiguous(), persistent=False)


def _cast_weight(layer: FirstConvolution | PointwiseLayer, dtype: torch.dtype) -> Tensor:
    """The weight of a layer in the dtype of products; cast once."""
    if layer.cast.dtype != dtype:
        layer.cast = layer.weight.to(dtype)
    return layer.cast


def _by_kernels(x: Tensor) -> bool:
    """Whether kernels run on `x`: they are made for half precision; elsewhere only Triton's interpreter needs them."""
    return use_triton(x) and (ops.INTERPRETED or _product_dtype(x) in (torch.bfloat16, torch.float16))


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _channels_last(x: Tensor) -> Tensor:
    """Maps (B, c, H, W) as (B, H, W, c) in the dtype of products; no copy of what comes from a kernel."""
    return x.permute(0, 2, 3, 1).to(_product_dtype(x)).contiguous()


def _has_same_padding(conv: nn.Conv2d) -> bool:
    """Whether a convolution is padded as TensorFlow's "same" at every size, and has nothing that kernels do not."""
    side, stride = conv.kernel_size[0], conv.stride[0]
    padded = type(conv).__name__ == "Conv2dSame" or (stride == 1 and conv.padding == (side // 2, side // 2))
    square = conv.kernel_size == (side, side) and conv.stride == (stride, stride) and side % 2 == 1
    return padded and square and conv.dilation == (1, 1) and conv.bias is not None


def is_dense(conv: nn.Module) -> bool:
    """Whether the kernels compute such a convolution of all channels."""
    return isinstance(conv, nn.Conv2d) and _has_same_padding(conv) and conv.groups == 1


def _is_pointwise(conv: nn.Module) -> bool:
    return is_dense(conv) and conv.kernel_size == conv.stride == (1, 1)


def _is_mobile(block: Any) -> bool:
    """Whether `MobileBlock` computes what a block of timm's does."""
    names: dict[str, tuple[str, ...]] = {
        "DepthwiseSeparableConv": ("conv_dw", "bn1", "aa", "se", "conv_pw", "bn2", "drop_path"),
        "InvertedResidual": ("conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl", "bn3", "drop_path"),
    }
    layers = dict(block.named_children())
    if tuple(layers) != names.get(type(block).__name__):
        return False
    wide = ("bn1", "bn2") if "conv_pwl" in layers else ("bn1",)
    kinds: dict[str, type[nn.Module]] = dict.fromkeys(wide, nn.ReLU6)
    depthwise = layers.pop("conv_dw")
    return (
        isinstance(depthwise, nn.Conv2d)
        and _has_same_padding(depthwise)
        and depthwise.groups == depthwise.in_channels == depthwise.out_channels
        and all(_is_pointwise(layers.pop(name)) for name in list(layers) if name.startswith("conv_"))
        and all(isinstance(layer, kinds.get(name, nn.Identity)) for name, layer in layers.items())
    )
