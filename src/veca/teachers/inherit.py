"""Weights that a student takes over from its teacher.

Shapes: D width, M hidden channels of the student's MLP, K of the teacher's.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from veca.config import SIZES
from veca.images.resize import resize_matrix
from veca.model import Block, Veca
from veca.teachers.protocol import AnyTeacher, Standardized, Teacher, TeacherError, members

_BLOCK = re.compile(r"(?:^|\.)(?:layers?|blocks)\.(\d+)\.(.+)$")
_QUICK_GELU = 1.702
"""GELU(x) is about x · sigmoid(1.702 x), which SwiGLU can compute."""
# Names of the layers of a block, in timm and in versions of transformers
_QKV = (("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        ("attention.attention.query", "attention.attention.key", "attention.attention.value"))  # fmt: skip
_PROJ = ("attention.o_proj", "attention.output.dense", "attn.proj")
_SCALES = (("layer_scale1.lambda1", "ls1.gamma"), ("layer_scale2.lambda1", "ls2.gamma"))
_FC1, _GATE, _FC2 = ("mlp.up_proj", "mlp.fc1"), ("mlp.gate_proj",), ("mlp.down_proj", "mlp.fc2")

Layer = tuple[Tensor, Tensor]
"""Weight and bias."""


@torch.no_grad()
def inherit_weights(student: Veca, teacher: AnyTeacher) -> int:
    """Start a student from a teacher that is a ViT of its width and heads; returns how many blocks were inherited.

    Norms, attention and MLPs are taken over block by block, as far as both have blocks, and the patch embedding
    (`start_patch_embed`), the last norm, and the class token as the first core. LayerScale goes into the weights. An
    MLP with GELU becomes a SwiGLU that is close to it; of more channels than the student has, those with the largest
    norms are kept. Positions, other cores and the coordinate heads stay as they were.
    """
    own = _first(teacher)
    start_patch_embed(student, own, "model.start")
    tensors = {name: tensor.detach().float().cpu() for name, tensor in own.model.state_dict().items()}
    blocks: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := _BLOCK.search(name):
            blocks[int(found[1])][found[2]] = tensor
    heads, gated_by = _count_heads(own), getattr(getattr(own.model, "config", None), "hidden_act", "silu")
    if heads not in (None, student.config.num_heads):
        ours = f"the student {student.config.num_heads}"
        raise TeacherError(
            f"{own.name} has {heads} heads, {ours}: take a student with as many, or leave model.start out"
        )
    count = 0
    for block, (_, layers) in zip(student.blocks, sorted(blocks.items()), strict=False):
        assert isinstance(block, Block)
        _inherit_block(block, layers, own.name, gated_by)
        count += 1
    if not count:
        raise TeacherError(f"{own.name} has no blocks that a student could start from; leave model.start out")
    for name in ("layernorm", "norm"):
        if f"{name}.weight" in tensors:
            student.norm.weight.copy_(tensors[f"{name}.weight"])
            student.norm.bias.copy_(tensors[f"{name}.bias"])
    for name in ("embeddings.cls_token", "cls_token"):
        if name in tensors:
            student.cores[0][0] = tensors[name].flatten()
    return count


def _inherit_block(block: Block, layers: Mapping[str, Tensor], name: str, gated_by: str) -> None:
    """Copy a block of the teacher's, given its tensors by name; the gate of an MLP that has one is "silu" or "gelu"."""
    try:
        for norm in ("norm1", "norm2"):
            block.get_submodule(norm).load_state_dict({k: layers[f"{norm}.{k}"] for k in ("weight", "bias")})
        if "attn.qkv.weight" in layers:
            qkv = _layer(layers, ("attn.qkv",))
        else:
            names = next(names for names in _QKV if f"{names[0]}.weight" in layers)
            weights, biases = zip(*(_layer(layers, (each,)) for each in names), strict=True)
            qkv = torch.cat(weights), torch.cat(biases)
        _copy(block.attn.qkv, qkv)
        _copy(block.attn.proj, _scaled(_layer(layers, _PROJ), layers, _SCALES[0]))
        up, down = _layer(layers, _FC1), _scaled(_layer(layers, _FC2), layers, _SCALES[1])
        if f"{_GATE[0]}.weight" in layers:
            gate = _layer(layers, _GATE)
        else:  # silu(h) · 1, of a GELU
            gate, up, gated_by = up, (torch.zeros_like(up[0]), torch.ones_like(up[1])), "gelu"
        if gated_by.startswith("gelu"):  # as silu(1.702 h) / 1.702
            gate, up = (gate[0] * _QUICK_GELU, gate[1] * _QUICK_GELU), (up[0] / _QUICK_GELU, up[1] / _QUICK_GELU)
    except (KeyError, StopIteration) as error:
        raise TeacherError(f"{name}: its blocks are not a ViT's ({error}); leave model.start out") from error
    hidden = block.mlp.fc2.in_features
    size = gate[0].norm(dim=1) * down[0].norm(dim=0)
    kept = size.argsort(descending=True, stable=True)[:hidden].sort().values
    missing = hidden - len(kept)  # channels that the teacher has not add nothing at first
    fc1 = (torch.cat([_padded(part[kept], missing) for part in pair]) for pair in zip(gate, up, strict=True))
    _copy(block.mlp.fc1, tuple(fc1))
    _copy(block.mlp.fc2, (_padded(down[0].T[kept], missing).T, down[1]))


def _padded(rows: Tensor, missing: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _layer(layers: Mapping[str, Tensor], names: tuple[str, ...]) -> Layer:
    """The first of the layers that is there; where it has no bias, with one of zeros."""
    found = next(name for name in names if f"{name}.weight" in layers)
    weight = layers[f"{found}.weight"]
    return weight, layers.get(f"{found}.bias", weight.new_zeros(len(weight)))


def _scaled(layer: Layer, layers: Mapping[str, Tensor], names: tuple[str, ...]) -> Layer:
    """A layer with the LayerScale after it in its weights."""
    scale = next((layers[name] for name in names if name in layers), torch.ones(len(layer[0])))
    return layer[0] * scale[:, None], layer[1] * scale


def _copy(layer: nn.Linear, values: tuple[Tensor, ...]) -> None:
    layer.load_state_dict(dict(zip(("weight", "bias"), values, strict=True)))


def _count_heads(teacher: Teacher) -> int | None:
    """Attention heads of a ViT of timm's or transformers'; None: it does not say."""
    config = getattr(teacher.model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    for module in teacher.model.modules() if heads is None else ():
        heads = getattr(module, "num_heads", None) if heads is None else heads
    return None if heads is None else int(heads)


def _first(teacher: AnyTeacher) -> Teacher:
    first = members(teacher)[0]
    return first.teacher if isinstance(first, Standardized) else first


@torch.no_grad()
def start_patch_embed(student: Veca, teacher: AnyTeacher, key: str = "model.patch_embed_from_teacher") -> None:
    """Initialise the student's patch embedding from the teacher's: both then compute the same from each patch.

    The difference in normalisation is folded into the weights, and so is the resizing of patches where the teacher's
    have another size. (Resizing a whole image also mixes neighbouring patches at their borders.) `key` is that of the
    recipe which asked for it, for messages.
    """
    teacher = _first(teacher)
    leave_out = f"leave {key} out"
    if (embedding := teacher.patch_embedding()) is None:
        raise TeacherError(f"{teacher.name} has no patch embedding to start from; {leave_out}")
    kernel, bias = (tensor.float().cpu() for tensor in embedding)
    if len(kernel) != student.config.embed_dim:
        as_wide = [name for name, size in SIZES.items() if size.embed_dim == len(kernel)]
        widths = f"{len(kernel)} wide, the student's {student.config.embed_dim}"
        way_out = f"take a student as wide ({', '.join(as_wide) or f'embed_dim={len(kernel)}'}), or {leave_out}"
        raise TeacherError(f"the patch embedding of {teacher.name} is {widths}: {way_out}")
    bias = bias + (kernel * teacher.shift.float().cpu()).sum((1, 2, 3))
    kernel = kernel * teacher.scale.float().cpu()
    if student.config.patch_size != teacher.stride:
        # Resizing is linear, so its matrix is folded into the kernel. No pseudo-inverse, as for a model that changes
        # its patch size: only the teacher's input would be resized, not the student's.
        sides = student.config.patch_size, teacher.stride
        resizing = resize_matrix(*sides, kernel.device, kernel.dtype, "bicubic", antialias=True)
        kernel = resizing.mT @ kernel @ resizing
    own = student.patch_embed.proj
    own.weight.copy_(kernel)
    own.bias.copy_(bias)  # type: ignore[union-attr]  # a patch embedding of ours always has one
