"""NorMuon: momentum, made orthogonal, with rows of even size. For the weight matrices of the blocks.

The orthogonal factor comes from five steps of the Polar Express, matrix products only, batched over matrices of one
shape. With several processes each takes its share of the matrices and all exchange the results. Matrices whose rows are
shared out over processes (FSDP2) are put together for it; what is kept of them stays shared out.

Shapes: K matrices, R rows, C columns.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from veca.errors import ArgumentError

STEPS = 5
SAFETY = 1.01
"""How far rounding may carry a singular value past where a step was made for."""
CUSHION = 0.02
"""Steps are not made for singular values below this share of the largest: they come up later, all others faster."""


def closest_to_one(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic a x + b x³ + c x⁵ whose largest distance from 1 on [low, high] is least (Remez's exchange)."""
    if low > (1 - 5e-6) * high:  # all in one point: the quintic that is flattest there
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    before, error = math.inf, 0.0
    while abs(error - before) > 1e-15:
        # The error is the same, with turns of sign, in the four points; then the inner ones move to its extrema.
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        a, b, c, new = solved.tolist()
        before, error = error, new
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return a, b, c


@functools.cache
def polar_express(steps: int = STEPS, low: float = 1e-3) -> list[tuple[float, float, float]]:
    """The quintic of each step, for singular values that start in [low, 1]."""
    high, found = 1.0, []
    for step in range(steps):
        a, b, c = closest_to_one(max(low, CUSHION * high), high)

        def quintic(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return a * x + b * x**3 + c * x**5

        centre = 2 / (quintic(low) + quintic(high))
        a, b, c = (centre * k for k in (a, b, c))
        if step < steps - 1:
            a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        found.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return found


def polar(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Nearly the orthogonal factor of each matrix (…, R, C), computed in `dtype` and returned in it.

    Singular values come within 0.14 of 1 if the least is a thousandth of the norm or more.

    >>> u = polar(torch.eye(4, 8), torch.float64)
    >>> bool(((torch.linalg.svdvals(u) - 1).abs() < 0.14).all())
    True
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(dtype)
    x = x.mT if tall else x
    x = x / (SAFETY * x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in polar_express():
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if tall else x


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor that may be shared out."""
    return x.to_local() if isinstance(x, DTensor) else x


def together(part: Tensor, like: Tensor) -> Tensor:
    """The whole of what every process holds a `part` of, shared out as `like` is."""
    if not isinstance(like, DTensor):
        return part
    shared = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return shared.full_tensor()


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """The part this process holds of a tensor that all have, shared out as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


class NorMuon(Optimizer):
    """For matrices only. A group's `parts` says into how many blocks of rows each of its matrices falls, that are
    orthogonalised on their own: 3 for a weight that holds those of q, k and v.

    `dtype` is that of the products; what is kept is float32. `found_inf`, a number on the device, is 1 in a step that
    is to change nothing; torch's fused optimizers have the same.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        beta2: float = 0.95,
        parts: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "beta2": beta2, "parts": parts}
        )
        self.dtype = dtype
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2 or len(p) % group["parts"]:
                    raise ArgumentError(
                        f"NorMuon got a parameter of shape {tuple(p.shape)} with parts={group['parts']}; "
                        "it takes matrices whose rows fall into equal parts. Give the others to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for params in alike.values():
                self._update(params, **{k: v for k, v in group.items() if k != "params"})
        return loss

    def _update(
        self,
        params: list[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float,
        beta2: float,
        parts: int,
        **_: Any,
    ) -> None:
        """One step of matrices of one shape, all at once."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["row_square"] = torch.zeros(len(p), 1, dtype=torch.float32, device=p.device)
        go = None if self.found_inf is None else self.found_inf == 0
        gradients = [local(p.grad).float() for p in params if p.grad is not None]
        if go is not None:
            gradients = [torch.where(go, gradient, 0.0) for gradient in gradients]
        moments = [local(state["momentum"]) for state in states]
        torch._foreach_mul_(moments, momentum if go is None else torch.where(go, momentum, 1.0))
        torch._foreach_add_(moments, gradients)
        wanted = torch._foreach_add(gradients, moments, alpha=momentum)
        whole = torch.stack([together(part, p) for part, p in zip(wanted, params, strict=True)])

        def blocks(stacked: Tensor) -> Tensor:  # (K, R, C) → (K · parts, R / parts, C)
            return stacked.unflatten(1, (parts, -1)).flatten(0, 1)

        def apart(stacked: Tensor) -> list[Tensor]:
            return list(stacked.unflatten(0, (-1, parts)).flatten(1, 2).unbind())

        u = self._shared_polar(blocks(whole)).float()
        before = blocks(torch.stack([state["row_square"] for state in states]))
        squares = beta2 * before + (1 - beta2) * u.square().mean(dim=-1, keepdim=True)
        size = u.norm(dim=(-2, -1), keepdim=True)
        u = u / (squares.sqrt() + 1e-8)
        u *= size / u.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)  # a gradient may be all zeros
        reach = 0.2 * math.sqrt(max(u.shape[-2:]))
        moves = torch.stack([own_rows(part, p) for part, p in zip(apart(u), params, strict=True)])
        weights = torch.stack([local(p).float() for p in params])
        after = weights - lr * weight_decay * weights * (weights * moves >= 0) - lr * reach * moves
        if go is not None:
            after, squares = torch.where(go, after, weights), torch.where(go, squares, before)
        torch._foreach_copy_([local(p) for p in params], list(after.unbind()))
        torch._foreach_copy_([state["row_square"] for state in states], apart(squares))

    def _shared_polar(self, x: Tensor) -> Tensor:
        """`polar` of matrices (K, R, C), each made by one process."""
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if count == 1:
            return polar(x, self.dtype)
        each = -(-len(x) // count)
        mine = x[each * dist.get_rank() :][:each]
        own = x.new_zeros(each, *x.shape[1:], dtype=self.dtype)
        own[: len(mine)] = polar(mine, self.dtype)
        everyone = own.new_empty(count * each, *x.shape[1:])
        dist.all_gather_into_tensor(everyone, own)
        return everyone[: len(x)]
