"""VECA as timm models: `import veca.hub`, then `timm.create_model("veca_small_patch16")`.

Pretrained weights have their tag here too: `timm.create_model("veca_small_patch16.TAG", pretrained=True)`. With
`features_only=True`, `veca_small_patch16_pyramid` has maps at strides 4 to 32 as a convolutional network has.

A thin subclass of `Veca` with the interface of timm's models: a call returns logits (or the global feature), and the
attributes that timm's tools read are there. Tensors have the same names as in `Veca`, so checkpoints are the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm.models
import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from veca.checkpoint import CheckpointError, load
from veca.checkpoint.loading import find_pretrained, list_models
from veca.config import SIZES, VecaConfig
from veca.errors import ArgumentError
from veca.heads.pyramid import STRIDES, FeaturePyramid
from veca.images import MEAN, STD
from veca.images.resize import repeat_edges
from veca.inputs import resolve_block_indices, resolve_budget, resolve_width
from veca.model import Veca
from veca.packed import PackedImages
from veca.teachers.outputs import keep_output

SIZE = (512, 512)
"""Of the images in the paper's results."""


class TimmVeca(Veca):
    """A `Veca` with the interface of timm: `model(images, cores=C)` → logits, or features without a classifier.

    `cores` and `width` at creation are those of every call that names none; they can be changed later:
    `model.budget = 16`, `model.width = 0.5`. Cores beyond the `cores` of creation are frozen.
    Any field of `VecaConfig` can be given. Images may have any size in whole patches, whatever `img_size` is, and with
    `dynamic_img_pad` any size at all: the last row and column are repeated up to whole patches.
    """

    def __init__(
        self,
        cfg: VecaConfig,
        *,
        cores: int | None = None,
        width: float | None = None,
        img_size: int | tuple[int, int] | None = None,
        dynamic_img_size: bool = True,
        dynamic_img_pad: bool = False,
        global_pool: str = "token",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        with torch.device(device) if device is not None else nullcontext():
            super().__init__(VecaConfig.from_dict({**cfg.to_dict(), **fields}))
        if dtype is not None:
            self.to(dtype)
        config = self.config
        self.budget: int = resolve_budget(cores, config, self._warned)
        self.freeze_inactive_cores(self.budget)
        resolve_width(width, config, self._warned)
        self.width = width
        # Attributes that timm's training script, feature wrappers and benchmarks read.
        self.in_chans = config.in_chans
        self.head_hidden_size = self.num_features
        self.global_pool = _check_pool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.has_class_token = True
        self.dynamic_img_pad = dynamic_img_pad
        shape = {"num_chs": config.embed_dim, "reduction": config.patch_size}
        self.feature_info = [{"module": f"blocks.{i}", **shape} for i in range(config.depth)]
        blocks: Any = self.blocks if drop_path_rate else ()
        for i, block in enumerate(blocks):
            # A hook drops the residual branch of a sample; hooked layers take no fused path.
            for layer in (block.attn, block.mlp):
                layer.drop_path = DropPath(drop_path_rate * i / max(1, config.depth - 1))
                layer.register_forward_hook(_drop_path)
        self.set_input_size(img_size)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: the budget."""
        return self.budget

    def forward(  # type: ignore[override]  # as timm's do
        self, x: Tensor | PackedImages | Mapping[str, Tensor], cores: Any = None, width: Any = None
    ) -> Tensor:
        if isinstance(x, Mapping):
            x = PackedImages.from_padded(x, self.config.patch_size)
        if isinstance(x, PackedImages):
            return self._forward_pack(x, cores, width)
        if self.global_pool == "token":  # patches are not needed
            tokens = self.output_proj(self._run(x, cores, cls_only=True, width=width)[0])
        else:
            tokens = self.forward_features(x, cores, width)
        return self.forward_head(tokens, cores=cores)

    def _forward_pack(self, batch: PackedImages, cores: Any, width: Any) -> Tensor:
        """Logits, or features without a classifier, of images of any mix of sizes."""
        if not self.global_pool:
            raise ArgumentError("global_pool='': a pack has no batch of tokens; choose 'token' or 'avg'")
        out = self._forward_packed(batch, cores, self.global_pool == "token", width)
        if self.global_pool == "token":
            pooled = out.cls
        else:
            pooled = torch.stack([each.flatten(1).mean(1) for each in out.feature_maps])
        logits: Tensor = self.head(self.head_drop(pooled))
        return logits

    def _run(self, images: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        return super()._run(self._pad(images), *args, **kwargs)

    def forward_intermediates(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of `Veca`; padded images have maps of their padded size, as with timm's own models."""
        return super().forward_intermediates(self._pad(images), *args, **kwargs)

    def _pad(self, images: Tensor) -> Tensor:
        return repeat_edges(images, self.config.patch_size) if self.dynamic_img_pad else images

    def forward_head(self, x: Tensor, pre_logits: bool = False, cores: int | None = None) -> Tensor:
        """Pooling and classifier on tokens made with a budget of `cores`; `pre_logits` stops before the classifier."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            budget = resolve_budget(self.budget if cores is None else cores, self.config, self._warned)
            x = x[:, budget:].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one; 0 removes it. `global_pool`: "token", "avg" or "" for all tokens."""
        if global_pool is not None:
            self.global_pool = _check_pool(global_pool)
        super().reset_classifier(num_classes)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set the nominal image size. Nothing depends on it but the attributes of `patch_embed`."""
        patch = self.config.patch_size
        if patch_size not in (None, patch, (patch, patch)):
            raise ArgumentError(f"patch_size={patch_size}; the weights are for patches of {patch}: leave it out")
        if img_size is None:
            img_size = getattr(self.patch_embed, "img_size", None)
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size or SIZE
        if height % patch or width % patch or min(height, width) < patch:
            raise ArgumentError(f"img_size={img_size}; sides must be positive multiples of {patch}")
        grid = height // patch, width // patch
        nominal = {"img_size": (height, width), "patch_size": (patch, patch), "grid_size": grid}
        vars(self.patch_embed).update(nominal, num_patches=grid[0] * grid[1])

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the features of the blocks `indices` do not need; returns the numbers of these blocks."""
        take = resolve_block_indices(indices, len(self.blocks))
        depth = max(take) + 1
        self.blocks = self.blocks[:depth]
        self.coordinate_heads = self.coordinate_heads[: depth - 1]
        self.coordinate_alpha = nn.Parameter(self.coordinate_alpha.detach()[: depth - 1].clone())
        self.config = dataclasses.replace(self.config, depth=depth)
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]  # called the same way
        if prune_head:
            self.output_proj = nn.Identity()
            self.num_features = self.head_hidden_size = self.embed_dim
            self.config = dataclasses.replace(self.config, output_dim=None)
            self.reset_classifier(0, "")
        return take

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load weights from what `veca.load` takes; the classifier only if it has as many classes.

        Without an `output_dim` here, the output projection there is left out.
        """
        source = load(checkpoint_path)
        keeps_classifier = source.num_classes == self.num_classes > 0
        if self.config.output_dim is None and not keeps_classifier:
            source.reset_classifier(0)
            keep_output(source, "none")
        fields = ("embed_dim", "depth", "num_heads", "mlp_dim", "patch_size", "num_cores", "core_chunk", "output_dim")
        for field in (*fields, "rope_zero_fraction"):
            theirs, ours = getattr(source.config, field), getattr(self.config, field)
            if theirs != ours:
                raise CheckpointError(f"{checkpoint_path}: its {field} is {theirs}, the model's is {ours}")
        tensors = source.state_dict()
        first = "patch_embed.proj.weight"
        if source.config.in_chans != self.config.in_chans:
            tensors[first] = timm.models.adapt_input_conv(self.config.in_chans, tensors[first])
        if source.num_classes != self.num_classes:  # keep the new classifier
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
            tensors |= {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        self.load_state_dict(tensors)
        self.provenance = source.provenance
        self.config = dataclasses.replace(self.config, widths=source.config.widths)  # which channels are first matters

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are tokens and coordinates, not weights of layers."""
        kinds = ("cores.", "core_states.", "coordinate_alpha")
        return {name for name, _ in self.named_parameters() if name.startswith(kinds)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter names by layer, for layer-wise learning rates; a coordinate head belongs to the block before it."""
        return {
            "stem": r"^(?:cores|core_states|coordinate_alpha|patch_embed)",
            "blocks": [(r"^(?:blocks|coordinate_heads)\.(\d+)", None), (r"^(?:norm|output_proj)", (99999,))],
        }


def _check_pool(pool: str) -> str:
    if pool not in ("token", "avg", ""):
        raise ArgumentError(f"global_pool={pool!r}; choose 'token' (the first core), 'avg' (the patches) or '' (none)")
    return pool


def _drop_path(layer: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
    return layer.drop_path(out)


def _cfgs() -> dict[str, Any]:
    """Pretrained configs by name, with a tag where there are weights; the first tag is the default."""
    # `custom_load`: by `load_pretrained`, which reads released checkpoints too. `crop_pct`: as in veca.images.
    shared = {"custom_load": True, "input_size": (3, *SIZE), "crop_pct": 1 / 1.125, "mean": MEAN, "std": STD}
    shared |= {"first_conv": "patch_embed.proj", "classifier": "head", "license": "apache-2.0"}
    shared["paper_ids"] = "arXiv:2605.12491"
    shared["paper_name"] = "Elastic Attention Cores for Scalable Vision Transformers"
    cfgs = {}
    for size in SIZES:
        tagged = [name for name in list_models(pretrained=True) if name.partition(".")[0] == size]
        for name in tagged or [size]:
            folder = find_pretrained(name)
            file = str(folder / "model.safetensors") if folder else None
            weights = {"file": file, "num_classes": 0 if file else 1000}
            cfgs[name.replace(size, f"{size}_patch16", 1)] = {**shared, **weights}
    return cfgs


default_cfgs = timm.models.generate_default_cfgs(_cfgs())


class PyramidNet(nn.Module):
    """Maps at strides 4 to 32 of images, with the interface of timm's `features_only` models.

    The pyramid has random weights, which are to be trained. `out_indices` are numbers of its levels.
    """

    def __init__(self, backbone: Any, channels: int, out_indices: int | Sequence[int]) -> None:
        super().__init__()
        self.backbone = backbone
        self.out_indices = resolve_block_indices(out_indices, len(STRIDES))
        self.pyramid = FeaturePyramid(backbone.model.embed_dim, channels, [STRIDES[i] for i in self.out_indices])
        info = [{"module": f"pyramid.{i}", "num_chs": channels, "reduction": STRIDES[i]} for i in range(len(STRIDES))]
        self.feature_info = timm.models.FeatureInfo(info, tuple(self.out_indices))
        self.default_cfg = self.pretrained_cfg = backbone.pretrained_cfg

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = self.pyramid(self.backbone(x)[-1], (x.shape[-2], x.shape[-1]))
        return maps


def _register(size: str, pyramid: bool = False) -> None:
    name = f"{size}_patch16"

    def create(pretrained: bool = False, pyramid_channels: int = 256, **kwargs: Any) -> nn.Module:
        config = SIZES[size]
        overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
        file = Path(timm.models.resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), overlay).file or "")
        if file.parent == find_pretrained(file.parent.name):
            if pretrained:  # the same architecture as without, so that files of the one load into the other
                config = dataclasses.replace(load(file, device="meta").config, output_dim=None)
            kwargs.setdefault("num_classes", config.num_classes if pretrained else 1000)
        levels = pyramid and kwargs.get("features_only", False)
        out_indices = kwargs.pop("out_indices", len(STRIDES) if levels else 3)
        kwargs["feature_cfg"] = {"out_indices": 1 if levels else out_indices, "feature_cls": "getter"}
        model = timm.models.build_model_with_cfg(TimmVeca, name, pretrained, model_cfg=config, **kwargs)
        return PyramidNet(model, pyramid_channels, out_indices) if levels else model

    create.__name__ = create.__qualname__ = f"{name}_pyramid" if pyramid else name
    create.__doc__ = f"`{size}` of veca; `kwargs` are those of `TimmVeca`."
    timm.models.register_model(create)


for _size in SIZES:
    _register(_size)
    _register(_size, pyramid=True)
