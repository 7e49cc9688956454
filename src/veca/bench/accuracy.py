"""How far from exact: what a contender gives against the plain model in float64 with the same float32 weights.

Of a model the features of the first image, of attention its output or the gradient of q, k and v for the first image:
images do not depend on each other. Of a training step the gradients of all weights, over the whole batch. The call that
was timed is the one that is checked, so nothing is compiled for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from veca.attention import core_attention, use_kernel
from veca.bench.contenders import Workload, loss
from veca.bench.machine import give_back
from veca.bench.report import Row
from veca.errors import ArgumentError
from veca.rope import make_rotary
from veca.utils.timing import Call, describe

Tensors: TypeAlias = Sequence[Tensor | None]
"""None stands for zeros, as autograd has it."""

VECA = ("veca", "two SDPA")
"""First words of the contenders that compute VECA."""
EAGER = ("veca eager", "two SDPA")
"""The plain ones."""
TOKENS_AT_ONCE = 4096
"""In float64 with all that a backward pass needs: 7 GiB in base."""


class Check(NamedTuple):
    exact: Callable[[Workload], Tensors]
    found: Callable[[Any], Tensors]
    """What of the result of a call is to be compared with it."""


def exact_features(workload: Workload) -> Tensors:
    model, image = workload.new_veca(torch.float64).eval(), workload.images[:1].double()
    with torch.no_grad(), use_kernel("sdpa"):
        out = model(image, workload.case.cores, cls_only=workload.setting.cls_only)
    return [out.cores[0], out.patches[0]]


def exact_gradients(workload: Workload) -> Tensors:
    """A few images at a time: the gradient of the batch is the mean of theirs."""
    model = workload.new_veca(torch.float64).train()
    for part in workload.images.split(max(1, TOKENS_AT_ONCE // workload.case.tokens)):
        with use_kernel("sdpa"):
            (loss(model(part.double(), workload.case.cores)) * len(part) / workload.case.batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def exact_attention(workload: Workload) -> Tensors:
    return [_attention(workload)[0].detach()[0]]


def exact_attention_gradient(workload: Workload) -> Tensors:
    out, qkv = _attention(workload)
    return [torch.autograd.grad(out, qkv, workload.gradient[:1].double())[0][0]]


def _attention(workload: Workload) -> tuple[Tensor, Tensor]:
    """Of the first image; the qkv it was made of."""
    config, (core, patch) = workload.case.config, workload.rotaries
    tables = (
        make_rotary(coordinates.double(), config.head_dim, config.rope_zero_fraction)
        for coordinates in (core.coordinates[:1], patch.coordinates)
    )
    qkv = workload.qkv[:1].double().requires_grad_()
    with use_kernel("sdpa"):
        return core_attention(qkv, *tables), qkv


CHECKS = {
    "model forward": Check(exact_features, lambda out: [out.cores[0], out.patches[0]]),
    "train step": Check(exact_gradients, lambda gradients: gradients),
    "attention forward": Check(exact_attention, lambda out: [out[0]]),
    "attention backward": Check(exact_attention_gradient, lambda gradients: [gradients[0][0]]),
}


def add_errors(rows: Sequence[Row], calls: Mapping[str, Call], workload: Workload) -> list[Row]:
    """The rows of one case with the errors of those that compute VECA. A time stands, whatever goes wrong here."""
    names = [row.contender for row in rows if row.ms is not None and row.contender.startswith(VECA)]
    found = errors({name: calls[name] for name in names}, CHECKS[rows[0].what], workload) if names else {}
    eager = next((error for name in EAGER if isinstance(error := found.get(name), float)), None)

    def with_error(row: Row) -> Row:
        error = found.get(row.contender)
        if isinstance(error, float):
            return dataclasses.replace(row, error=error, against_eager=error / eager if eager else None)
        return row if error is None else dataclasses.replace(row, failure=f"error not known: {error}")

    return [with_error(row) for row in rows]


def errors(calls: Mapping[str, Call], check: Check, workload: Workload) -> dict[str, float | str]:
    """The relative error of what each call gives, or why it cannot be had."""
    give_back(workload.setting.device)
    try:
        exact = check.exact(workload)
    except Exception as error:
        return dict.fromkeys(calls, f"float64: {describe(error)}")
    found: dict[str, float | str] = {}
    for name, call in calls.items():
        try:
            found[name] = relative_error(check.found(call()), exact)
        except Exception as error:
            found[name] = describe(error)
    return found


@torch.no_grad()
def relative_error(found: Tensors, exact: Tensors) -> float:
    """‖found − exact‖ / ‖exact‖ of all tensors together.

    >>> relative_error([torch.tensor([3.0, 3.0]), None], [torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
    1.0
    """
    off, scale = 0.0, 0.0
    for a, b in zip(found, exact, strict=True):
        off += _square(b if a is None else a if b is None else a.double() - b)
        scale += _square(b)
    error = math.sqrt(off / scale)
    if not math.isfinite(error):
        raise ArgumentError("the result has values that are not finite")
    return error


def _square(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().square().sum())
