"""VECA as transformers models: `import veca.hub` registers them with the Auto classes.

Every class holds a `Veca` as `veca` and has the interface of the DINOv3 classes. `from_pretrained` reads folders that
`veca.save` wrote, and `veca.load` reads those that `save_pretrained` wrote.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), D width, H heads,
L blocks.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    SemanticSegmenterOutput,
)
from transformers.utils.generic import can_return_tuple

from veca import config as plain
from veca.attention import core_probabilities
from veca.errors import ArgumentError
from veca.heads.pyramid import STRIDES, FeaturePyramid
from veca.hub.image_processing import VecaImageProcessor
from veca.hub.saved_code import SavedWithCode
from veca.images.resize import repeat_edges
from veca.model import Veca, init_layer
from veca.packed import PackedImages
from veca.teachers.outputs import keep_output

__all__ = [
    "VecaBackbone",
    "VecaConfig",
    "VecaForImageClassification",
    "VecaForSemanticSegmentation",
    "VecaImageProcessor",
    "VecaModel",
]

_DEFAULT = plain.VecaConfig()


class VecaConfig(SavedWithCode, BackboneConfigMixin, PreTrainedConfig):
    """The fields of `veca.VecaConfig` under their own names and those usual in transformers, and a default budget.

    >>> VecaConfig(hidden_size=384, num_attention_heads=6, cores=32).veca().embed_dim
    384
    """

    model_type = "veca"
    _auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "VecaConfig",
        "AutoModel": "VecaModel",
        "AutoModelForImageClassification": "VecaForImageClassification",
        "AutoModelForSemanticSegmentation": "VecaForSemanticSegmentation",
        "AutoBackbone": "VecaBackbone",
        "AutoImageProcessor": "VecaImageProcessor",
    }
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "num_channels": "in_chans",
    }

    embed_dim: int = _DEFAULT.embed_dim
    depth: int = _DEFAULT.depth
    num_heads: int = _DEFAULT.num_heads
    mlp_ratio: float = _DEFAULT.mlp_ratio
    patch_size: int = _DEFAULT.patch_size
    in_chans: int = _DEFAULT.in_chans
    num_cores: int = _DEFAULT.num_cores
    core_chunk: int = _DEFAULT.core_chunk
    budgets: list[int] | tuple[int, ...] = _DEFAULT.budgets
    widths: list[float] | tuple[float, ...] = _DEFAULT.widths
    output_dim: int | None = _DEFAULT.output_dim
    rope_zero_fraction: float = _DEFAULT.rope_zero_fraction
    coordinate_shift: float = _DEFAULT.coordinate_shift
    coordinate_rescale: float = _DEFAULT.coordinate_rescale
    cores: int | None = None
    """The budget of a call that names none; None: all cores."""
    width: float | None = None
    """The width of a call that names none; None: the whole MLP."""
    image_size: int = 512
    """Nominal; any other size works too."""
    pad_images: bool = True
    """Whether images may have sides that are no multiples of the patch size; maps then have the shapes of DINO's."""
    return_cores: bool = True
    """Whether tokens are all cores and the patches, or else the first core and the patches, as of a ViT."""
    provenance: dict[str, Any] | None = None
    """As `Veca.provenance`: where the weights come from."""
    apply_layernorm: bool = True
    """Backbone only: whether feature maps before the last are normalised too."""
    reshape_hidden_states: bool = True
    """Backbone only: whether feature maps are (B, D, rows, columns), or else (B, 1 + N, D), the first core first."""
    semantic_loss_ignore_index: int = 255
    """Semantic segmentation only: the label of pixels that do not count."""
    pyramid: int | None = None
    """Backbone only: channels of the feature maps at "stride4" to "stride32", its stages then; None: no such maps."""
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        outputs = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if (classes := kwargs.pop("num_classes", 0)) and self.id2label is None:  # as `veca.save` writes it
            kwargs.setdefault("num_labels", classes)
        super().__post_init__(**kwargs)
        self.veca()  # validates the fields
        self.stage_names = ["stem", *(f"stage{i}" for i in range(1, self.depth + 1))]
        if self.pyramid is not None:
            self.stage_names = [f"stride{stride}" for stride in STRIDES]
        self.set_output_features_output_indices(**outputs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of any configuration; what the stages are and which of them come out is told together."""
        told = {name: kwargs.pop(name) for name in ("pyramid", "out_features", "out_indices") if name in kwargs}
        saved = {name: value for name, value in config_dict.items() if not (told and name.startswith("out_"))}
        return super().from_dict(saved | told, **kwargs)

    def veca(self, classifier: bool = False) -> plain.VecaConfig:
        """Our configuration of the same architecture, with a class for each label if there is a classifier."""
        num_classes = self.num_labels or 0 if classifier else 0
        names = (field.name for field in dataclasses.fields(plain.VecaConfig) if field.name != "num_classes")
        return plain.VecaConfig.from_dict({name: getattr(self, name) for name in names} | {"num_classes": num_classes})

    @property
    def hidden_size(self) -> int:
        """Width of `last_hidden_state`: of the output projection if there is one. Setting it sets `embed_dim`."""
        return self.output_dim or self.embed_dim

    @hidden_size.setter
    def hidden_size(self, value: int) -> None:
        self.embed_dim = value

    @property
    def num_register_tokens(self) -> int:
        """Number of tokens between the first and the patches, under its DINOv3 name."""
        return (self.cores or self.num_cores) - 1 if self.return_cores else 0

    def set_output_features_output_indices(self, out_features: Any, out_indices: Any) -> None:
        """Choose the feature maps of a backbone. They are taken before the output projection: there is none then."""
        if out_features is not None or out_indices is not None:
            self.output_dim = None
        super().set_output_features_output_indices(out_features, out_indices)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if values["out_features"] == self.stage_names[-1:]:  # the default, which is not meant for a backbone only
            del values["out_features"], values["out_indices"]
        return values


class VecaPreTrainedModel(PreTrainedModel):
    """Base of the three models: the `Veca`, its weights, and the forward pass."""

    config_class = VecaConfig
    base_model_prefix = "veca"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class has it)
    _supports_sdpa = True
    _classifies = False
    accepts_loss_kwargs = False  # else Trainer passes arguments of its own to `forward`

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """As of the configuration, which is saved with the model."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.veca = Veca(config.veca(self._classifies))
        self.veca.provenance = dict(config.provenance or {})
        self._freeze_unused()
        self.post_init()

    @classmethod
    def from_veca(cls, model: Veca, **kwargs: Any) -> Any:
        """A copy of a plain model, in eval mode; `kwargs` are further fields of the configuration.

        With `output_dim=None` the copy has no output projection, and its tokens are `config.embed_dim` wide.
        """
        config = VecaConfig(**{**model.config.to_dict(), "provenance": model.provenance, **kwargs})
        with torch.device("meta"):  # its own weights are replaced
            wrapped = cls(config)
        wrapped.veca, expected = copy.deepcopy(model), wrapped.veca.config
        if expected.output_dim is None is not model.config.output_dim:
            wrapped.veca.reset_classifier(0)
            keep_output(wrapped.veca, "none")
        if wrapped.veca.num_classes != expected.num_classes:
            wrapped.veca.reset_classifier(expected.num_classes)
        like = next(wrapped.veca.parameters())
        for name, head in wrapped.named_children():
            if name != "veca":  # it is new
                head.to(like.dtype).to_empty(device=like.device).apply(wrapped._init_weights)
        return wrapped.eval()

    def train(self, mode: bool = True) -> Any:
        """As of any module. Parameters without a gradient are frozen here, as `from_pretrained` makes new ones."""
        self._freeze_unused()
        return super().train(mode)

    def _freeze_unused(self) -> None:
        """Freeze parameters that cannot get a gradient, so that `DistributedDataParallel` does not wait for them."""
        self.veca.freeze_inactive_cores(self.config.cores or self.config.num_cores)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a checkpoint lacks; called for each module with missing parameters."""
        if not isinstance(module, Veca | nn.ParameterList):
            init_layer(module)
            if isinstance(module, nn.ConvTranspose2d):  # of a pyramid
                module.reset_parameters()
            return
        # transformers patches `nn.init` to skip loaded parameters, but `init_cores` copies the states.
        states = self.veca.core_states
        loaded = [(chunk, chunk.clone()) for chunk in states if getattr(chunk, "_is_hf_initialized", False)]
        self.veca.init_cores()
        for chunk, state in loaded:
            chunk.copy_(state)

    def get_input_embeddings(self) -> nn.Module:
        return self.veca.patch_embed

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        self.veca.set_grad_checkpointing(enable)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.veca.grad_checkpointing

    def _pass(
        self,
        images: Tensor,
        cores: int | None,
        width: float | None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cls_only: bool = False,
        take: Sequence[int] = (),
        stop: int | None = None,
    ) -> tuple[Any, dict[str, Any], list[Tensor]]:
        """Final tokens (B, S, D), `hidden_states` and `attentions`, each None unless requested, and the tokens `take`n.

        Of images that are not whole patches, the last row and column are repeated; their tokens are those of DINO,
        which does without what is left of a patch.
        """
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        cores = self.config.cores if cores is None else cores
        width = self.config.width if width is None else width
        take, stop = (range(-1, len(self.veca.blocks)), None) if hidden else (take, stop)
        pads = self.config.pad_images and isinstance(images, Tensor)  # else `_run` says what is wrong
        padded = repeat_edges(images, self.config.patch_size) if pads else images
        with recorded_attention(self.veca, bool(attentions)) as maps, loaded_weights(self.veca):
            x, coordinates, taken = self.veca._run(padded, cores, take, stop, cls_only and not hidden, width)
        if not cls_only or hidden:
            grids = [tuple(side // self.config.patch_size for side in each.shape[-2:]) for each in (padded, images)]
            x, *taken = (self._select(tokens, coordinates.shape[2], *grids) for tokens in (x, *taken))
        more = {"hidden_states": tuple(taken) if hidden else None, "attentions": tuple(maps) if attentions else None}
        return self.veca.output_proj(x), more, taken

    def _select(self, tokens: Tensor, budget: int, padded: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
        """Tokens (B, S, D) without those that padding added, and without cores that are not asked for."""
        cores, patches = tokens[:, :budget], tokens[:, budget:]
        if padded == grid and self.config.return_cores:
            return tokens
        if padded != grid:
            patches = patches.unflatten(1, padded)[:, : grid[0], : grid[1]].flatten(1, 2)
        return torch.cat([cores if self.config.return_cores else cores[:, :1], patches], dim=1)

    def _pass_packed(
        self,
        images: dict[str, Tensor],
        cores: int | None,
        width: float | None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cls_only: bool = False,
    ) -> Tensor:
        """Final tokens (B, C + N, D) of images of any sizes, padded with zeros; the first alone if `cls_only`."""
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if hidden or attentions:
            raise ArgumentError(
                "hidden states and attentions are not returned for images of several sizes: ask for none"
            )
        batch = PackedImages.from_padded(images, self.config.patch_size)
        cores = self.config.cores if cores is None else cores
        out: Any = self.veca(batch, cores, cls_only, self.config.width if width is None else width)
        tokens: Tensor = out.cores.unflatten(0, (len(batch), -1))
        tokens = tokens if self.config.return_cores else tokens[:, :1]
        if cls_only:
            return tokens
        valid = images["pixel_attention_mask"].bool()
        patches = tokens.new_zeros(*valid.shape, tokens.shape[-1]).masked_scatter(valid[..., None], out.patches)
        return torch.cat([tokens, patches], dim=1)

    def _tokens(
        self, pixel_values: Tensor, mask: Tensor | None, shapes: Tensor | None, *settings: Any, **outputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """`_pass` of a batch of one size, or `_pass_packed` if there are a mask and shapes."""
        if mask is None and shapes is None:
            return self._pass(pixel_values, *settings, **outputs)[:2]
        if mask is None or shapes is None:
            raise ArgumentError("pixel_attention_mask and spatial_shapes belong together: pass both, or neither")
        images = {"pixel_values": pixel_values, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        return self._pass_packed(images, *settings, **outputs), {}


@contextmanager
def recorded_attention(model: Veca, enabled: bool = True) -> Iterator[list[Tensor]]:
    """Context manager: records the attention of the cores over all tokens, (B, H, C, S) per layer. No gradient."""
    maps: list[Tensor] = []

    @torch.no_grad()
    def keep(attn: Any, args: tuple[Any, ...]) -> None:
        x, core_rotary, patch_rotary = args
        qk = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1))[:, :, :2]
        maps.append(core_probabilities(qk, core_rotary, patch_rotary)[1].unflatten(1, (attn.num_heads, -1)))

    blocks: Any = model.blocks
    with ExitStack() as hooks:
        for block in blocks if enabled else ():
            hooks.enter_context(block.attn.register_forward_pre_hook(keep))
        yield maps


@contextmanager
def loaded_weights(model: Veca) -> Iterator[None]:
    """Context manager: parameters of no layer are there, which accelerate loads in calls of `model` if offloaded."""
    hook: Any = getattr(model, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(model)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(model, None)


class VecaModel(VecaPreTrainedModel):
    """The backbone: tokens, cores first, and the first core as `pooler_output`.

    `hidden_states`: the tokens before the first block and after each, L + 1 of (B, S, D). `attentions`: those of the
    cores over all tokens, L of (B, H, C, S), without gradient; patches attend to cores only.

    With `pixel_attention_mask` and `spatial_shapes`, as the image processor makes them with `fit="native"`, images have
    any mix of sizes; after the cores, tokens of an image are its patches, padded with zeros.
    """

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        cores: int | None = None,
        width: float | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        **outputs: Any,
    ) -> BaseModelOutputWithPooling:
        tokens, more = self._tokens(pixel_values, pixel_attention_mask, spatial_shapes, cores, width, **outputs)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=tokens[:, 0], **more)


class VecaForImageClassification(VecaPreTrainedModel):
    """A linear classifier on the first core."""

    _classifies = True

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        cores: int | None = None,
        width: float | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        **outputs: Any,
    ) -> ImageClassifierOutput:
        padded = pixel_attention_mask, spatial_shapes
        tokens, more = self._tokens(pixel_values, *padded, cores, width, **outputs, cls_only=True)
        logits: Any = self.veca.forward_head(tokens)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits, **more)


class VecaForSemanticSegmentation(VecaPreTrainedModel):
    """A linear classifier on each patch; the loss is taken at the size of the labels."""

    def __init__(self, config: VecaConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        cores: int | None = None,
        width: float | None = None,
        **outputs: Any,
    ) -> SemanticSegmenterOutput:
        """Logits (B, num_labels, rows, columns); `labels` (B, height, width), 255 where there is none."""
        tokens, more, _ = self._pass(pixel_values, cores, width, **outputs)
        rows, columns = (side // self.config.patch_size for side in pixel_values.shape[-2:])
        logits: Any = self.classifier(tokens[:, tokens.shape[1] - rows * columns :]).mT.unflatten(-1, (rows, columns))
        loss: Any = None
        if labels is not None:
            resized = F.interpolate(logits.float(), labels.shape[-2:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(resized, labels.long(), ignore_index=self.config.semantic_loss_ignore_index)
        return SemanticSegmenterOutput(loss=loss, logits=logits, **more)


class VecaBackbone(BackboneMixin, VecaPreTrainedModel):
    """Feature maps (B, D, rows, columns) of `out_features`: "stem", "stage1" … one for each block.

    It has no output projection and runs no block after the last of these stages. With `config.pyramid` the stages are
    "stride4" to "stride32": maps with that many channels, of the last block.
    """

    _keys_to_ignore_on_load_unexpected = [r"output_proj\."]  # noqa: RUF012 (as the base class has it)

    def __init__(self, config: VecaConfig) -> None:
        if config.output_dim is not None:
            config = copy.deepcopy(config)
            config.output_dim = None
        super().__init__(config)
        self.num_features = [config.pyramid or config.embed_dim] * len(config.stage_names)
        if config.pyramid:
            strides = [STRIDES[config.stage_names.index(stage)] for stage in self.out_features]
            self.pyramid = FeaturePyramid(config.embed_dim, config.pyramid, strides)
            self.post_init()

    @property
    def _stages(self) -> list[int]:
        """Numbers of the blocks whose tokens are needed, from 1; 0 is before the first."""
        if self.config.pyramid:
            return [self.config.depth]
        return [self.config.stage_names.index(stage) for stage in self.config.out_features]

    def _is_normalised(self, stage: int) -> bool:
        return self.config.apply_layernorm or stage == self.config.depth

    def _freeze_unused(self) -> None:
        super()._freeze_unused()
        run = max(1, *self._stages)
        unused = [*self.veca.blocks[run:], *self.veca.coordinate_heads[run - 1 :]]
        unused += [] if any(map(self._is_normalised, self._stages)) else [self.veca.norm]
        for module in unused:
            module.requires_grad_(False)
        self.veca.coordinate_alpha.requires_grad_(self.veca.coordinate_alpha.requires_grad and run > 1)

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, cores: int | None = None, width: float | None = None, **outputs: Any
    ) -> BackboneOutput:
        stages, patch, size = self._stages, self.config.patch_size, pixel_values.shape[-2:]
        if self.config.pyramid and self.config.pad_images:  # its maps are cropped at their own strides
            pixel_values = repeat_edges(pixel_values, patch)
        take = [stage - 1 for stage in stages]
        _, more, taken = self._pass(pixel_values, cores, width, **outputs, take=take, stop=max(1, *stages))
        if more["hidden_states"] is not None:
            taken = [taken[stage] for stage in stages]
        rows, columns = (side // patch for side in pixel_values.shape[-2:])
        maps: Any = []
        for stage, x in zip(stages, taken, strict=True):
            x = self.veca.norm(x) if self._is_normalised(stage) else x
            patches = x[:, x.shape[1] - rows * columns :]
            if self.config.reshape_hidden_states or self.config.pyramid:
                maps.append(patches.mT.unflatten(-1, (rows, columns)).contiguous())
            else:
                maps.append(torch.cat([x[:, :1], patches], dim=1))
        if self.config.pyramid:
            maps = self.pyramid(maps[0], tuple(size))
        return BackboneOutput(feature_maps=tuple(maps), **more)


transformers.AutoConfig.register("veca", VecaConfig, exist_ok=True)
transformers.AutoModel.register(VecaConfig, VecaModel, exist_ok=True)
transformers.AutoModelForImageClassification.register(VecaConfig, VecaForImageClassification, exist_ok=True)
transformers.AutoModelForSemanticSegmentation.register(VecaConfig, VecaForSemanticSegmentation, exist_ok=True)
transformers.AutoBackbone.register(VecaConfig, VecaBackbone, exist_ok=True)
_PROCESSORS: dict[str, type] = dict.fromkeys(("torchvision", "pil"), VecaImageProcessor)
transformers.AutoImageProcessor.register(VecaConfig, image_processor_classes=_PROCESSORS, exist_ok=True)
