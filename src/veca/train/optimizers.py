"""Optimizers: NorMuon with AdamW, layer-wise rates for fine-tuning, moving average of weights (EMA).

NorMuon orthogonalises the momentum of the blocks' matrices and normalises its rows. The orthogonal factor comes from
five steps of the Polar Express: matrix products only, batched over matrices of one shape. With several processes each
computes its share of the matrices and all exchange the results. Matrices sharded by rows (FSDP2) are gathered for it;
their optimizer state stays sharded.

Shapes: K matrices, R rows, C columns.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer, ParamsT

from veca.errors import ArgumentError
from veca.model import Veca
from veca.train.parallel import local_part, own_shard, shard_like, unshard

SAFETY = 1.01
"""Room for rounding: how far a singular value may exceed the interval a step was designed for."""
POLAR_EXPRESS = (
    (8.237312490495558, -23.157747414558195, 16.680568411445908),
    (4.082441999064834, -2.893047735332586, 0.5252849256975647),
    (3.9263479922546565, -2.8547468034765298, 0.5318022422894989),
    (3.2982187133085135, -2.424541981026706, 0.48632008358844087),
    (2.320007312889811, -1.6862169729967624, 0.4206802734023515),
)
"""(a, b, c) of the quintic a x + b x³ + c x⁵ of each step, for singular values that start in [0.001, 1]: the closest to
1 on the interval that the step before leaves, divided by SAFETY. The tests derive them."""
_NUMBERED_LAYER = re.compile(r"(?:blocks|coordinate_heads)\.(\d+)\.")
_STEM_PARAMETERS = ("patch_embed.", "cores.", "core_states.", "coordinate_alpha")
_NO_DECAY = ("cores.", "core_states.", "coordinate_alpha")


def polar(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An approximate orthogonal factor of each matrix (…, R, C), computed and returned in `dtype`.

    Singular values come within 0.14 of 1 if the smallest is at least a thousandth of the norm.

    >>> u = polar(torch.eye(4, 8), torch.float64)
    >>> bool(((torch.linalg.svdvals(u) - 1).abs() < 0.14).all())
    True
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(dtype)
    x = x.mT if tall else x
    x = x / (SAFETY * x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    # Each step maps every singular value by an odd quintic, without a decomposition: (a + b XXᵀ + c (XXᵀ)²) X.
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if tall else x


class NorMuon(Optimizer):
    """For matrices only. A group's `parts` is the number of blocks of rows of each of its matrices that are
    orthogonalised separately: 3 for a weight that holds those of q, k and v.

    `dtype` is that of the products; the state is float32. `found_inf`, a scalar on the device, is 1 in a step that must
    change nothing, as in torch's fused optimizers: the host need not wait to know.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, params: ParamsT, lr: float, weight_decay: float = 0.0, dtype: torch.dtype = torch.bfloat16, parts: int = 1
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95, "beta2": 0.95, "parts": parts}
        super().__init__(params, defaults)
        self.dtype = dtype
        if any(p.ndim != 2 or len(p) % group["parts"] for group in self.param_groups for p in group["params"]):
            raise ArgumentError("NorMuon takes matrices with a multiple of `parts` rows. Give the others to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step for matrices of one shape, batched."""
        lr, momentum, beta2, parts = (group[key] for key in ("lr", "momentum", "beta2", "parts"))
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["row_square"] = torch.zeros(len(p), 1, dtype=torch.float32, device=p.device)
        active = torch.zeros((), device=params[0].device) == 0 if self.found_inf is None else self.found_inf == 0
        gradients = [torch.where(active, local_part(p.grad).float(), 0.0) for p in params if p.grad is not None]
        moments = [local_part(state["momentum"]) for state in states]
        torch._foreach_mul_(moments, torch.where(active, momentum, 1.0))
        torch._foreach_add_(moments, gradients)
        nesterov = torch._foreach_add(gradients, moments, alpha=momentum)
        whole = torch.stack([unshard(shard_like(part, p)) for part, p in zip(nesterov, params, strict=True)])

        def blocks(stacked: Tensor) -> Tensor:  # (K, R, C) → (K · parts, R / parts, C)
            return stacked.unflatten(1, (parts, -1)).flatten(0, 1)

        def unstack(stacked: Tensor) -> list[Tensor]:
            return list(stacked.unflatten(0, (-1, parts)).flatten(1, 2).unbind())

        u = _shared_polar(blocks(whole), self.dtype).float()
        before = blocks(torch.stack([state["row_square"] for state in states]))
        squares = beta2 * before + (1 - beta2) * u.square().mean(dim=-1, keepdim=True)
        # Rows are divided by their running RMS, then the matrix gets back the norm it had.
        size = u.norm(dim=(-2, -1), keepdim=True)
        u = u / (squares.sqrt() + 1e-8)
        u *= size / u.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)  # all-zero gradients have no direction
        # Scaled so that the RMS of an update matches AdamW's, and both optimizers share one learning rate.
        scale = 0.2 * math.sqrt(max(u.shape[-2:]))
        updates = torch.stack([own_shard(part, p) for part, p in zip(unstack(u), params, strict=True)])
        weights = torch.stack([local_part(p).float() for p in params])
        # Cautious weight decay: only where it does not oppose the update.
        decay = lr * group["weight_decay"] * weights * (weights * updates >= 0)
        after = torch.where(active, weights - decay - lr * scale * updates, weights)
        torch._foreach_copy_([local_part(p) for p in params], list(after.unbind()))
        squares = torch.where(active, squares, before)
        torch._foreach_copy_([state["row_square"] for state in states], unstack(squares))


def _shared_polar(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`polar` of matrices (K, R, C), each computed by one process and gathered by all."""
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if count == 1:
        return polar(x, dtype)
    each = -(-len(x) // count)  # rounded up: the last process may have fewer, or none
    mine = x[each * dist.get_rank() :][:each]
    own = x.new_zeros(each, *x.shape[1:], dtype=dtype)
    own[: len(mine)] = polar(mine, dtype)
    gathered = own.new_empty(count * each, *x.shape[1:])
    dist.all_gather_into_tensor(gathered, own)
    return gathered[: len(x)]


def split_parameters(model: Veca) -> dict[str, list[str]]:
    """Names of the trainable parameters by optimizer: NorMuon updates the weight matrices of the blocks except the very
    last one, AdamW the rest. NorMuon orthogonalises the three matrices (q, k, v) of `normuon_qkv` separately.
    """
    split: dict[str, list[str]] = {"normuon_qkv": [], "normuon": [], "adamw": []}
    last = f"blocks.{len(model.blocks) - 1}.mlp.fc2.weight"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # As in Muon, embeddings, norms, biases and the output layer are left to AdamW.
            matrix = name.startswith("blocks.") and parameter.ndim == 2 and name != last
            qkv = "normuon_qkv" if name.endswith("attn.qkv.weight") else "normuon"
            split[qkv if matrix else "adamw"].append(name)
    return split


def make_optimizers(model: Veca, rate: float, weight_decay: float, dtype: torch.dtype) -> dict[str, Optimizer]:
    """The optimizers of the paper, with one rate and one decay for both. `dtype` is that of NorMuon's products.

    Parameters without a gradient in a step, as cores beyond its budget, are left alone: no decay, no momentum. The keys
    are prefixes of the states' names in checkpoints.
    """
    qkv, normuon, rest = ([model.get_parameter(name) for name in names] for names in split_parameters(model).values())
    groups = [{"params": qkv, "parts": 3}, {"params": normuon, "parts": 1}]
    return {
        "normuon/": NorMuon(groups, rate, weight_decay, dtype),
        "adamw/": AdamW(rest, rate, (0.9, 0.999), 1e-8, weight_decay, fused=True),
    }


def step_optimizers(optimizers: Mapping[str, Any], learning_rate: float, skip: Tensor | None = None) -> None:
    """Update all parameters, or none if `skip`, a scalar on the device, is 1, and clear the gradients."""
    for optimizer in optimizers.values():
        optimizer.found_inf = skip  # fused AdamW reads it too
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()


def layer_decay_groups(
    network: nn.Module, depth: int, layer_decay: float, decay: float, head: float = 1.0
) -> list[dict[str, Any]]:
    """Parameter groups with layer-wise rates: general layers, near the pixels, should change less.

    The `scale` of a group's rate is `layer_decay` for the last block, `layer_decay` times that of the layer above for
    the others, `head` for the head. As in timm, parameters between the blocks and the head go with the last block.
    Biases, norms, cores and coordinates have no weight decay.
    """
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for full_name, parameter in network.named_parameters():
        name = full_name.removeprefix("backbone.")
        weight_decay = 0.0 if parameter.ndim < 2 or name.startswith(_NO_DECAY) else decay
        # 0 before the blocks, i + 1 for block i, depth + 1 for the head.
        layer = 0 if name.startswith(_STEM_PARAMETERS) else depth + name.startswith("head.")
        if match := _NUMBERED_LAYER.match(name):
            layer = int(match[1]) + 1
        scale = head if layer > depth else layer_decay ** (depth + 1 - layer)
        empty = {"params": [], "names": [], "scale": scale, "weight_decay": weight_decay}
        group = groups.setdefault((layer, weight_decay), empty)
        group["params"].append(parameter)
        group["names"].append(full_name)
    return list(groups.values())


class Ema:
    """A moving average of a model's parameters; does nothing where `decay` is None."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        self.averages = [local_part(p).detach().clone() for p in model.parameters()] if decay else []

    def update(self, skip: Tensor) -> None:
        """Average in the current weights, unless `skip`, a scalar on the device, is 1."""
        if self.decay:
            # average += (1 - decay) · (weights - average); with skip = 1 nothing is added, without a host sync.
            change = torch._foreach_sub([local_part(p).detach() for p in self.model.parameters()], self.averages)
            torch._foreach_mul_(change, (1 - self.decay) * (1 - skip))
            torch._foreach_add_(self.averages, change)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the averages as its parameters while the block runs."""
        if not self.decay:
            yield
            return
        parameters = [local_part(p) for p in self.model.parameters()]
        trained = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.averages)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, trained)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Averages by parameter name, sharded as the parameters are."""
        for (name, parameter), average in zip(self.model.named_parameters(), self.averages, strict=bool(self.decay)):
            yield name, shard_like(average, parameter)
