from __future__ import annotations

import pytest
import torch
from conftest import make_tiny, relative_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from veca.attention import (
    core_attention,
    core_probabilities,
    few_cores_attention,
    first_core_attention,
    masked_attention,
    use_kernel,
)
from veca.rope import grid_rotary, make_rotary, patch_coordinates

CASES = [(1, 1, (2, 3)), (8, 2, (4, 6)), (13, 1, (1, 1)), (24, 3, (7, 3)), (64, 2, (5, 8))]


def inputs(
    cores: int, batch: int, grid: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(cores)
    qkv = torch.randn(batch, cores + grid[0] * grid[1], 3, 2, 32, dtype=torch.float64).to(device, dtype)
    points = (torch.rand(batch, 1, cores, 2, dtype=torch.float64) * 2 - 1).to(device)
    table_dtype = torch.promote_types(dtype, torch.float32)
    return qkv.requires_grad_(), points.to(table_dtype).requires_grad_()


def run(
    qkv: torch.Tensor, points: torch.Tensor, grid: tuple[int, int], kernel: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    on_patches = grid_rotary(*grid, 32, 0.125, qkv.device, points.dtype)
    with use_kernel(kernel):  # type: ignore[arg-type]
        out = core_attention(qkv, make_rotary(points, 32, 0.125), on_patches)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), [qkv, points])
    return out.detach(), *grads


@pytest.mark.parametrize(("cores", "batch", "grid"), CASES)
def test_fast_path_equals_the_reference_in_float64(cores: int, batch: int, grid: tuple[int, int]) -> None:
    qkv, points = inputs(cores, batch, grid, torch.float64)
    for found, expected in zip(run(qkv, points, grid, "auto"), run(qkv, points, grid, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cores", "batch", "grid"), CASES)
def test_attention_on_gpu_matches_float64(cores: int, batch: int, grid: tuple[int, int], dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    qkv, points = inputs(cores, batch, grid, dtype, "cuda")
    exact = run(qkv.detach().double().requires_grad_(), points.detach().double().requires_grad_(), grid, "reference")
    for found, expected in zip(run(qkv, points, grid, "auto"), exact, strict=True):
        assert relative_error(found, expected) <= tolerance


def test_reference_against_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    cores, tokens = 3, 8
    q, k, v = torch.randn(3, 1, 1, tokens, 4, dtype=torch.float64)
    out = masked_attention(q, k, v, cores)
    for i in range(tokens):
        seen = range(tokens) if i < cores else range(cores)
        logits = torch.stack([q[0, 0, i] @ k[0, 0, j] / 2 for j in seen])
        expected = sum(p * v[0, 0, j] for p, j in zip(logits.softmax(0), seen, strict=True))
        torch.testing.assert_close(out[0, 0, i], expected)


def layers(dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear]:
    """Projections of the width `inputs` has, with biases that matter."""
    torch.manual_seed(0)
    qkv, proj = nn.Linear(64, 192).to(dtype), nn.Linear(64, 64).to(dtype)
    for layer in (qkv, proj):
        nn.init.normal_(layer.weight, std=0.2)
        nn.init.normal_(layer.bias)
    return qkv.requires_grad_(False), proj.requires_grad_(False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("cores", "batch", "grid"), CASES)
def test_shortcuts_equal_the_reference(
    cores: int, batch: int, grid: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    tokens, points = inputs(cores, batch, grid, dtype)
    x, (qkv, proj) = tokens.detach()[:, :, 0].flatten(2), layers(dtype)
    tables = make_rotary(points.detach(), 32, 0.125), grid_rotary(*grid, 32, 0.125, x.device, dtype)
    with use_kernel("reference"):
        expected = proj(core_attention(qkv(x).unflatten(-1, (3, 2, 32)), *tables))
    assert relative_error(few_cores_attention(x, qkv, proj, 2, *tables), expected) <= tolerance
    assert relative_error(first_core_attention(x, qkv, proj, 2, *tables), expected[:, :1]) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_core_probabilities_mix_values_as_attention_does(dtype: torch.dtype) -> None:
    cores, batch, grid = 13, 3, (4, 6)
    tensor, points = (made.detach() for made in inputs(cores, batch, grid, dtype))
    tables, exact = (
        (make_rotary(points.to(kind), 32, 0.125), grid_rotary(*grid, 32, 0.125, points.device, kind))
        for kind in (points.dtype, torch.float64)
    )
    patch_to_core, core_to_all = core_probabilities(tensor[:, :, :2], *tables)
    assert (patch_to_core.shape, core_to_all.shape) == ((batch, 24, 2 * cores), (batch, 2 * cores, cores + 24))
    assert patch_to_core.dtype == core_to_all.dtype == dtype
    rounding = 0.02 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(core_to_all.sum(-1), torch.ones_like(core_to_all[..., 0]), rtol=0, atol=rounding)
    with use_kernel("reference"):
        expected = core_attention(tensor.double(), *exact).unflatten(-1, (2, 32))
    v = tensor[:, :, 2].double()
    for head in range(2):
        mine = slice(head * cores, (head + 1) * cores)
        mixed = core_to_all[:, mine].double() @ v[:, :, head], patch_to_core[..., mine].double() @ v[:, :cores, head]
        assert relative_error(torch.cat(mixed, dim=1), expected[:, :, head]) <= rounding / 2


def test_probabilities_are_not_rounded_by_autocast() -> None:
    """Logits of 50 in bfloat16 would be off by an eighth: probabilities by as much."""
    tensor, points = (made.detach() for made in inputs(8, 1, (4, 4), torch.float32))
    tensor, tables = (
        4 * tensor,
        (make_rotary(points, 32, 0.125), grid_rotary(4, 4, 32, 0.125, points.device, points.dtype)),
    )
    expected = core_probabilities(tensor[:, :, :2], *tables)
    with torch.autocast("cpu", torch.bfloat16):
        found = core_probabilities(tensor[:, :, :2], *tables)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operator's result had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_nothing_of_size_n_by_n_is_made() -> None:
    model, cores = make_tiny(depth=2), 8
    patches = 48 * 48
    with LargestTensor() as seen:
        model(torch.zeros(1, 3, 16 * 48, 16 * 48), cores).patches.sum().backward()
    widest = 2 * model.config.mlp_dim
    assert seen.largest <= (cores + patches) * max(widest, 3 * 16 * 16)
    with LargestTensor() as seen, use_kernel("reference"), torch.no_grad():
        model(torch.zeros(1, 3, 16 * 48, 16 * 48), cores)
    assert seen.largest >= patches**2, "the meter must see the reference's square"


def test_unknown_kernel_is_named() -> None:
    with pytest.raises(ValueError, match="'flash' is unknown; choose one of auto"), use_kernel("flash"):  # type: ignore[arg-type]
        pass


def test_use_kernel_restores_after_an_error() -> None:
    from veca import attention

    with pytest.raises(RuntimeError), use_kernel("reference"):
        raise RuntimeError
    assert attention._kernel == "auto"


def test_coordinates_get_gradients_through_rope() -> None:
    qkv, points = inputs(6, 1, (3, 3), torch.float64)
    patches = make_rotary(patch_coordinates(3, 3, qkv.device, qkv.dtype), 32, 0.125)
    assert torch.autograd.gradcheck(
        lambda p: core_attention(qkv.detach(), make_rotary(p, 32, 0.125), patches).sum(dim=(0, 1)), points
    )
