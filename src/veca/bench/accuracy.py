"""Rounding errors of contenders: their results against the plain model in float64 with the same weights.

For a model the features of the first image are compared, for attention its output or the gradient of q, k and v for
the first image (images are independent), for a training step the gradients of all weights over the whole batch. The
call that was timed is the one that is checked, so nothing is compiled again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from veca.attention import core_attention, use_kernel
from veca.bench.contenders import Workload, batch_loss
from veca.bench.machine import empty_cache
from veca.bench.report import BenchRow
from veca.errors import ArgumentError
from veca.rope import make_rotary
from veca.utils.timing import Call, describe

Tensors: TypeAlias = Sequence[Tensor | None]
"""None stands for zeros, as in `torch.autograd.grad`."""

VECA = ("veca", "two SDPA")
"""Prefixes of the contenders that compute VECA."""
EAGER = ("veca eager", "two SDPA")
"""The plain implementations among them."""
TOKENS_AT_ONCE = 4096
"""Tokens per float64 backward pass: about 7 GiB for base."""


class ErrorCheck(NamedTuple):
    reference: Callable[[Workload], Tensors]
    """The float64 result."""
    outputs: Callable[[Any], Tensors]
    """The tensors to compare with it, from the result of a call."""


def exact_features(workload: Workload) -> Tensors:
    # The images were drawn in the contenders' dtype: float64 gets exactly the same numbers.
    model, image = workload.new_veca(torch.float64).eval(), workload.images[:1].double()
    with torch.no_grad(), use_kernel("sdpa"):
        out = model(image, workload.case.cores, cls_only=workload.setting.cls_only)
    return [out.cores[0], out.patches[0]]


def exact_gradients(workload: Workload) -> Tensors:
    """A few images at a time to save memory: the gradient of the batch is the mean of theirs."""
    model = workload.new_veca(torch.float64).train()
    for part in workload.images.split(max(1, TOKENS_AT_ONCE // workload.case.tokens)):
        with use_kernel("sdpa"):
            (batch_loss(model(part.double(), workload.case.cores)) * len(part) / workload.case.batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def exact_attention(workload: Workload, gradient: bool = False) -> Tensors:
    """Output of attention for the first image, or the gradient of the qkv it was computed from."""
    config, (core, patch) = workload.case.config, workload.rotaries
    coordinates = (core.coordinates[:1].double(), patch.coordinates.double())
    tables = (make_rotary(each, config.head_dim, config.rope_zero_fraction) for each in coordinates)
    qkv = workload.qkv[:1].double().requires_grad_()
    with use_kernel("sdpa"):
        out = core_attention(qkv, *tables)
    return [torch.autograd.grad(out, qkv, workload.gradient[:1].double())[0][0] if gradient else out.detach()[0]]


CHECKS = {
    "model forward": ErrorCheck(exact_features, lambda out: [out.cores[0], out.patches[0]]),
    "train step": ErrorCheck(exact_gradients, lambda gradients: gradients),
    "attention forward": ErrorCheck(exact_attention, lambda out: [out[0]]),
    "attention backward": ErrorCheck(partial(exact_attention, gradient=True), lambda gradients: [gradients[0][0]]),
}


def add_errors(rows: Sequence[BenchRow], calls: Mapping[str, Call], workload: Workload) -> list[BenchRow]:
    """The rows of one case with the errors of those that compute VECA; a failure here leaves their times alone."""
    # A contender that failed has no time, and the dense ones compute another function.
    names = [row.contender for row in rows if row.ms is not None and row.contender.startswith(VECA)]
    values = compute_errors({name: calls[name] for name in names}, CHECKS[rows[0].what], workload) if names else {}
    eager = next((values[name]["error"] for name in EAGER if "error" in values.get(name, {})), None)
    for fields in values.values():
        if eager and "error" in fields:
            fields["against_eager"] = fields["error"] / eager
    return [dataclasses.replace(row, **values.get(row.contender, {})) for row in rows]


def compute_errors(calls: Mapping[str, Call], check: ErrorCheck, workload: Workload) -> dict[str, dict[str, Any]]:
    """By call, `error`, the relative error of its result, or `failure`, why it could not be computed."""
    empty_cache(workload.setting.device)
    try:
        exact = check.reference(workload)
    except Exception as error:
        return {name: {"failure": f"error not known: float64: {describe(error)}"} for name in calls}
    values: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            values[name] = {"error": relative_error(check.outputs(call()), exact)}
        except Exception as error:
            values[name] = {"failure": f"error not known: {describe(error)}"}
    return values


@torch.no_grad()
def relative_error(result: Tensors, exact: Tensors) -> float:
    """‖result − exact‖ / ‖exact‖ over all tensors together.

    >>> relative_error([torch.tensor([3.0, 3.0]), None], [torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
    1.0
    """

    def square(x: Tensor | None) -> float:
        return 0.0 if x is None else float(x.double().square().sum())

    difference, norm = 0.0, 0.0
    for a, b in zip(result, exact, strict=True):
        difference += square(b if a is None else a if b is None else a.double() - b)  # None is zero
        norm += square(b)
    error = math.sqrt(difference / norm)
    if not math.isfinite(error):
        raise ArgumentError("the result has values that are not finite")
    return error
