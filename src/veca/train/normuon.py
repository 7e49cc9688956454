"""NorMuon optimizer: orthogonalised momentum with normalised rows, for the blocks' matrices.

The orthogonal factor comes from five steps of the Polar Express: matrix products only, batched over matrices of one
shape. With several processes each computes its share of the matrices and all exchange the results. Matrices sharded by
rows (FSDP2) are gathered for it; their optimizer state stays sharded.

Shapes: K matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from veca.errors import ArgumentError
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
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2 or len(p) % group["parts"]:
                    rule = "it takes matrices whose rows fall into equal parts. Give the others to AdamW"
                    raise ArgumentError(f"NorMuon: shape {tuple(p.shape)} with parts={group['parts']}; {rule}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._update(params, **{k: v for k, v in group.items() if k != "params"})
        return loss

    def _update(
        self, params: list[Tensor], lr: float, weight_decay: float, momentum: float, beta2: float, parts: int, **_: Any
    ) -> None:
        """One step for matrices of one shape, batched."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["row_square"] = torch.zeros(len(p), 1, dtype=torch.float32, device=p.device)
        active = None if self.found_inf is None else self.found_inf == 0
        gradients = [local_part(p.grad).float() for p in params if p.grad is not None]
        if active is not None:
            gradients = [torch.where(active, gradient, 0.0) for gradient in gradients]
        moments = [local_part(state["momentum"]) for state in states]
        torch._foreach_mul_(moments, momentum if active is None else torch.where(active, momentum, 1.0))
        torch._foreach_add_(moments, gradients)
        nesterov = torch._foreach_add(gradients, moments, alpha=momentum)
        whole = torch.stack([unshard(shard_like(part, p)) for part, p in zip(nesterov, params, strict=True)])

        def blocks(stacked: Tensor) -> Tensor:  # (K, R, C) → (K · parts, R / parts, C)
            return stacked.unflatten(1, (parts, -1)).flatten(0, 1)

        def unstack(stacked: Tensor) -> list[Tensor]:
            return list(stacked.unflatten(0, (-1, parts)).flatten(1, 2).unbind())

        u = self._shared_polar(blocks(whole)).float()
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
        after = weights - lr * weight_decay * weights * (weights * updates >= 0) - lr * scale * updates
        if active is not None:
            after, squares = torch.where(active, after, weights), torch.where(active, squares, before)
        torch._foreach_copy_([local_part(p) for p in params], list(after.unbind()))
        torch._foreach_copy_([state["row_square"] for state in states], unstack(squares))

    def _shared_polar(self, x: Tensor) -> Tensor:
        """`polar` of matrices (K, R, C), each computed by one process and gathered by all."""
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if count == 1:
            return polar(x, self.dtype)
        each = -(-len(x) // count)  # rounded up: the last process may have fewer, or none
        mine = x[each * dist.get_rank() :][:each]
        own = x.new_zeros(each, *x.shape[1:], dtype=self.dtype)
        own[: len(mine)] = polar(mine, self.dtype)
        gathered = own.new_empty(count * each, *x.shape[1:])
        dist.all_gather_into_tensor(gathered, own)
        return gathered[: len(x)]
