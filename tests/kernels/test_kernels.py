"""The operator `veca::core_attention`: on a CPU through Triton's interpreter in float32, on a GPU as it is."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny, relative_error
from interpreter import interpreted
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import veca
from veca.attention import core_attention, use_kernel
from veca.config import SIZES
from veca.kernels import ops
from veca.model import Attention
from veca.rope import Rotary, make_rotary, patch_coordinates


class Case(NamedTuple):
    cores: int
    batch: int
    grid: tuple[int, int]
    head_dim: int
    heads: int = 2

    def __str__(self) -> str:
        rows, columns = self.grid
        return f"{self.cores}c-{self.batch}x{rows}x{columns}-{self.heads}x{self.head_dim}"


def inputs(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """A sequence qkv (B, S, 3, H, d), the cores' coordinates (B, 1, C, 2), and a gradient of the output (B, S, H·d)."""
    torch.manual_seed(case.cores)
    tokens = case.cores + case.grid[0] * case.grid[1]
    qkv = torch.randn(case.batch, tokens, 3, case.heads, case.head_dim)
    points = torch.rand(case.batch, 1, case.cores, 2) * 2 - 1
    d_out = torch.randn(case.batch, tokens, case.heads * case.head_dim)
    return qkv.to(device, dtype), points.to(device), d_out.to(device, dtype)


def tables(points: Tensor, grid: tuple[int, int], head_dim: int) -> tuple[Rotary, Rotary]:
    on_patches = patch_coordinates(*grid, points.device, points.dtype)
    return make_rotary(points, head_dim, 0.125), make_rotary(on_patches, head_dim, 0.125)


def operands(points: Tensor, grid: tuple[int, int], head_dim: int) -> tuple[Tensor, ...]:
    """What the operator takes after qkv."""
    core, patch = tables(points, grid, head_dim)
    return core.coordinates[:, 0].contiguous(), patch.coordinates, patch.frequencies


def run(kernel: str, qkv: Tensor, points: Tensor, d_out: Tensor, grid: tuple[int, int]) -> tuple[Tensor, ...]:
    """Output, and gradients of qkv and of the cores' coordinates."""
    qkv, points = qkv.detach().requires_grad_(), points.detach().requires_grad_()
    with use_kernel(kernel):  # type: ignore[arg-type]
        out = core_attention(qkv, *tables(points, grid, qkv.shape[-1]))
    return out.detach(), *torch.autograd.grad(out, [qkv, points], d_out)


def errors(kernel: str, qkv: Tensor, points: Tensor, d_out: Tensor, grid: tuple[int, int]) -> list[float]:
    """Of output and gradients, against the reference in float64."""
    exact = run("reference", qkv.double(), points.double(), d_out.double(), grid)
    found = run(kernel, qkv, points, d_out, grid)
    assert all(tensor.isfinite().all() for tensor in found)
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]


def uses_kernel(qkv: Tensor, cores: int) -> bool:
    """Whether "auto" takes the operator for such inputs."""
    points = torch.zeros(len(qkv), 1, cores, 2, device=qkv.device, dtype=torch.promote_types(qkv.dtype, torch.float32))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        core_attention(qkv, *tables(points, (1, qkv.shape[1] - cores), qkv.shape[-1]))
    return torch.ops.veca.core_attention in counter.flop_counts["Global"]


CASES = [
    Case(1, 3, (2, 3), 32),  # fewer patches than a tile
    Case(1, 2, (6, 7), 64),
    Case(8, 3, (4, 9), 64, heads=1),  # one tile and a bit
    Case(8, 2, (3, 5), 32, heads=3),
    Case(13, 2, (1, 1), 128),
    Case(13, 1, (8, 4), 32),  # a full tile
    Case(24, 2, (7, 5), 32),
    Case(24, 1, (3, 11), 128, heads=1),
    Case(64, 1, (5, 8), 64),  # chunks of cores from here on
    Case(64, 1, (3, 7), 32),
    Case(64, 1, (2, 5), 128, heads=1),
    Case(70, 1, (9, 7), 64, heads=1),
    Case(40, 1, (5, 7), 128, heads=1),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_the_reference(case: Case) -> None:
    assert max(errors("triton", *inputs(case), case.grid)) <= 1e-6


@interpreted
@pytest.mark.parametrize(("programs", "splits"), [(2, 1), (4, 2), (6, 3), (1000, 5)])
def test_any_number_of_splits_gives_the_same(programs: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from veca.kernels import core_attention as kernels

    case = Case(40, 1, (5, 13), 32, heads=1)
    tiling = kernels.AttentionTiling(chunk=32, tile=16, warps=4, stages=1, programs=programs)
    qkv, points, d_out = inputs(case)
    monkeypatch.setattr(kernels, "choose_attention_tiling", lambda *_: tiling)
    assert kernels.launch_config(qkv, case.cores, False, tiling).splits == splits
    assert max(errors("triton", qkv, points, d_out, case.grid)) <= 1e-6


@interpreted
@pytest.mark.parametrize("layout", ["slice of a projection", "heads first", "q, k and v apart", "channels apart"])
def test_reads_qkv_where_it_lies(layout: str) -> None:
    case = Case(8, 2, (5, 7), 32)
    _, points, d_out = inputs(case)
    tokens = d_out.shape[1]
    if layout == "slice of a projection":
        qkv = F.linear(torch.randn(6, tokens + 5, 64), torch.randn(192, 64) / 8)[1::3, 2:-3].unflatten(-1, (3, 2, 32))
    elif layout == "heads first":
        qkv = torch.randn(2, 2, tokens, 3, 32).permute(0, 2, 3, 1, 4)
    elif layout == "channels apart":
        qkv = torch.randn(2, tokens, 3, 32, 2).transpose(-1, -2)
    else:
        qkv = torch.randn(3, 2, tokens, 2, 32).permute(1, 2, 0, 3, 4)
    assert not qkv.is_contiguous()
    assert max(errors("triton", qkv, points, d_out, case.grid)) <= 1e-6


@interpreted
def test_an_empty_batch_stays_empty() -> None:
    case = Case(8, 0, (5, 7), 32)
    out, d_qkv, d_points = run("triton", *inputs(case), case.grid)
    assert (out.shape, d_qkv.shape, d_points.shape) == ((0, 43, 64), (0, 43, 3, 2, 32), (0, 1, 8, 2))


@interpreted
@pytest.mark.parametrize(("shape", "width"), [((2, 37), 48), ((100,), 256), ((3, 5), 300), ((0, 4), 16)])
def test_swiglu_matches_float64(shape: tuple[int, ...], width: int) -> None:
    torch.manual_seed(0)
    h, bias, d_out = torch.randn(*shape, 2 * width), torch.randn(2 * width), torch.randn(*shape, width)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [h.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()]
        if dtype == torch.float32:
            out = ops.swiglu_op(*leaves)
        else:
            u, v = (leaves[0] + leaves[1]).chunk(2, dim=-1)
            out = F.silu(u) * v
        results.append([out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= 1e-6


@interpreted
@pytest.mark.parametrize(("shape", "width"), [((2, 37), 48), ((40,), 64), ((3, 5), 300), ((0, 4), 16)])
def test_narrow_linear_against_float64(shape: tuple[int, ...], width: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(*shape, width), torch.randn(2, width), torch.randn(2)
    d_out = torch.randn(*shape, 2)
    results = []
    for dtype, linear in ((torch.float32, ops.narrow_linear_op), (torch.float64, F.linear)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = linear(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= 1e-6


@interpreted
def test_narrow_linear_keeps_to_the_rules() -> None:
    x, weight, bias = torch.randn(2, 5, 40), torch.randn(2, 40), torch.randn(2)
    torch.library.opcheck(torch.ops.veca.narrow_linear_backward.default, [torch.randn(2, 5, 2), x, weight])
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    torch.library.opcheck(torch.ops.veca.narrow_linear.default, leaves)


@interpreted
def test_swiglu_keeps_to_the_rules() -> None:
    h, bias = torch.randn(2, 5, 40), torch.randn(40)
    torch.library.opcheck(torch.ops.veca.swiglu_backward.default, [torch.randn(2, 5, 20), h, bias])
    torch.library.opcheck(torch.ops.veca.swiglu.default, [h.requires_grad_(), bias.requires_grad_()])


@interpreted
@pytest.mark.parametrize(
    ("width", "added", "carried", "cores"),
    [
        (48, True, True, 5),
        (128, True, True, 5),
        (300, True, True, 5),
        (128, True, False, 0),
        (300, True, False, 9),
        (48, False, False, 0),
        (300, False, False, 0),
    ],
)
def test_add_norm_against_float64(width: int, added: bool, carried: bool, cores: int) -> None:
    torch.manual_seed(0)
    shape = (3, 9, width)  # more pairs of rows than programs, and an odd row
    x, update, d_total, d_normed, d_cores = torch.randn(5, *shape)
    gain, shift = torch.randn(2, width)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, gain, shift, *([update] if added else []))]
        if dtype == torch.float32:
            more = leaves[3] if added else None
            total, normed, first = ops.add_norm_op(leaves[0], more, leaves[1], leaves[2], 1e-5, dtype, cores)
            total = total if added else leaves[0]
        else:
            total = leaves[0] + leaves[3] if added else leaves[0]
            normed, first = F.layer_norm(total, (width,), leaves[1], leaves[2], 1e-5), total[:, :cores]
        loss = (normed * d_normed).sum() + carried * (total * d_total).sum()
        if cores:
            loss = loss + (first * d_cores[:, :cores]).sum()
        results.append([total.detach(), normed.detach(), first.detach(), *torch.autograd.grad(loss, leaves)])
    for found, expected in zip(*results, strict=True):
        assert found.numel() == expected.numel() or not added
        assert not found.numel() or relative_error(found, expected) <= 1e-6


@interpreted
@pytest.mark.parametrize("added", [True, False])
def test_add_norm_keeps_to_the_rules(added: bool) -> None:
    x, update = torch.randn(2, 1, 5, 16)
    gain, shift = torch.randn(2, 16)
    leaves = [t.clone().requires_grad_() for t in (x, update, gain, shift)]
    leaves[1] = leaves[1] if added else None  # type: ignore[call-overload]
    torch.library.opcheck(torch.ops.veca.add_norm.default, [*leaves, 1e-5, torch.float32, 3])
    back = [x, update, x[:, :3], x, gain, 1e-5, torch.float32] if added else [None, update, None, x, gain, 1e-5, None]
    torch.library.opcheck(torch.ops.veca.add_norm_backward.default, back)


@interpreted
@pytest.mark.parametrize("layout", ["channels first", "one for all", "slice"])
def test_takes_any_layout_of_the_gradient(layout: str) -> None:
    case = Case(8, 2, (5, 7), 32)
    qkv, points, d_out = inputs(case)
    if layout == "channels first":
        d_out = d_out.mT.contiguous().mT
    elif layout == "one for all":
        d_out = d_out[:1, :1].expand_as(d_out)
    else:
        d_out = torch.cat([d_out, d_out], dim=-1)[..., 32:-32]
    assert not d_out.is_contiguous()
    assert max(errors("triton", qkv, points, d_out, case.grid)) <= 1e-6


@interpreted
@pytest.mark.parametrize("logits", ["far apart", "all low", "all high"])
@pytest.mark.parametrize("cores", [24, 40])
def test_large_logits_do_not_overflow(cores: int, logits: str) -> None:
    """Hundreds, of which a plain exponential would overflow; far apart they also make rows nearly one-hot."""
    case = Case(cores, 1, (5, 7), 64, heads=1)
    qkv, points, d_out = inputs(case)
    if logits == "far apart":
        qkv[:, :, 0] *= 30
    else:
        qkv[:, :, 0, :, 31] = -60 if logits == "all low" else 60  # a channel that does not turn: 60² / √64
        qkv[:, :, 1, :, 31] = 60
    found, rounding = (errors(kernel, qkv, points, d_out, case.grid) for kernel in ("triton", "sdpa"))
    assert max(found) <= 1e-4
    assert max(found) <= 3 * max(rounding)


@interpreted
@pytest.mark.parametrize("cores", [13, 40])
def test_gradients_that_are_zero(cores: int) -> None:
    case = Case(cores, 1, (3, 5), 32, heads=1)
    qkv, points, d_out = inputs(case)
    for gradient in run("triton", qkv, points, torch.zeros_like(d_out), case.grid)[1:]:
        assert not gradient.any()
    # Of one patch: no other patch takes part, and no patch as a key or a value.
    only = d_out.clone()
    only[:, : cores + 3] = only[:, cores + 4 :] = 0
    d_qkv = run("triton", qkv, points, only, case.grid)[1]
    assert d_qkv[:, cores + 3, 0].all()
    assert d_qkv[:, :cores, 1:].all()
    assert not d_qkv[:, :cores, 0].any()
    assert not d_qkv[:, cores + 4 :].any()
    assert not d_qkv[:, cores:, 1:].any()
    # Of cores: no patch takes part as a query.
    only = d_out.clone()
    only[:, cores:] = 0
    d_qkv = run("triton", qkv, points, only, case.grid)[1]
    assert d_qkv[:, cores:, 1:].all()
    assert not d_qkv[:, cores:, 0].any()
    # With one value for all it does not matter who looks where.
    qkv[:, :, 2] = qkv[:, :1, 2].clone()
    out, d_qkv, d_points = run("triton", qkv, points, d_out, case.grid)
    torch.testing.assert_close(out, qkv[:, :, 2].flatten(2))
    assert d_qkv[:, :, :2].abs().max() < 1e-5 < d_qkv[:, :, 2].abs().max()
    assert d_points.abs().max() < 1e-4


def check_operator(device: str, dtype: torch.dtype, case: Case) -> None:
    qkv, points, d_out = inputs(case, dtype, device)
    qkv = torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]]  # strided
    arguments = [qkv, *operands(points, case.grid, case.head_dim)]
    out, lse = ops.core_attention_op(*arguments)
    torch.library.opcheck(torch.ops.veca.core_attention_backward.default, [d_out, *arguments, out, lse])
    for tensor in arguments[:2]:
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.veca.core_attention.default, arguments)


@interpreted
def test_operators_keep_to_the_rules() -> None:
    check_operator("cpu", torch.float32, Case(8, 2, (1, 3), 32, heads=1))


def test_graphs_compiled_with_other_kernels_are_not_found(tmp_path: Path) -> None:
    """Torch's cache on disk does not look into operators: what is in them must be in its key."""
    here = Path(ops.__file__).parent
    assert ops.source_digest(here) == ops.KERNELS
    shutil.copytree(here, tmp_path / "kernels")
    assert ops.source_digest(tmp_path / "kernels") == ops.source_digest(here)
    with open(tmp_path / "kernels" / "swiglu.py", "a") as file:
        file.write("# another\n")
    assert ops.source_digest(tmp_path / "kernels") != ops.source_digest(here)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "head_dim", "cores", "reason"),
    [
        (torch.float64, 32, 8, "the tensors are torch.float64, not bfloat16, float16 or float32"),
        (torch.float32, 48, 8, "heads are 48 wide, not 32, 64 or 128"),
        (torch.float32, 32, 300, "there are 300 cores, more than 256"),
    ],
    ids=["float64", "width", "cores"],
)
def test_what_does_not_fit_takes_sdpa_unless_asked_by_name(
    dtype: torch.dtype, head_dim: int, cores: int, reason: str
) -> None:
    case = Case(cores, 1, (2, 3), head_dim)
    qkv, points, d_out = inputs(case, dtype)
    points = points.to(dtype)
    assert not uses_kernel(qkv, cores)
    for a, b in zip(*(run(kernel, qkv, points, d_out, case.grid) for kernel in ("auto", "sdpa")), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(ValueError, match=f"kernel 'triton' cannot run: {reason}; choose 'auto'"):
        run("triton", qkv, points, d_out, case.grid)


@interpreted
def test_what_fits_takes_the_kernel() -> None:
    qkv, _, _ = inputs(Case(8, 1, (2, 3), 32))
    assert uses_kernel(qkv, 8)
    with use_kernel("sdpa"):
        assert not uses_kernel(qkv, 8)


def test_a_cpu_takes_sdpa_unless_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = Case(13, 2, (4, 5), 64)
    qkv, points, d_out = inputs(case)
    assert not uses_kernel(qkv, case.cores)
    for a, b in zip(*(run(kernel, qkv, points, d_out, case.grid) for kernel in ("auto", "sdpa")), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(ValueError, match="'triton' cannot run: .* on the CPU, where only .*; choose 'auto'"):
        run("triton", qkv, points, d_out, case.grid)


def test_fake_results_are_laid_out_like_real_ones() -> None:
    with FakeTensorMode():
        qkv = torch.empty(2, 40, 3, 4, 64, dtype=torch.bfloat16)[:, ::2].requires_grad_()
        points = torch.empty(2, 8, 2).requires_grad_()
        out, lse = ops.core_attention_op(qkv, points, torch.empty(12, 2), torch.empty(16))
        gradients = torch.autograd.grad(out, [qkv, points], torch.empty_like(out))
    assert [(*t.shape, t.dtype) for t in (out, lse)] == [(2, 20, 256, torch.bfloat16), (2, 4, 20, torch.float32)]
    assert [(t.shape, t.dtype) for t in gradients] == [(t.shape, t.dtype) for t in (qkv, points)]
    assert all(t.is_contiguous() for t in (out, lse, *gradients))
    assert not lse.requires_grad


def test_flops_are_those_of_the_paper() -> None:
    from test_flops import PAPER, RESOLUTIONS

    config, cores, found = SIZES["veca_base"], 64, []
    dim, heads, head_dim = config.embed_dim, config.num_heads, config.head_dim
    with torch.device("meta"):
        attention = Attention(config)
        for size in RESOLUTIONS:
            patches = (size // config.patch_size) ** 2
            more = operands(torch.empty(1, 1, cores, 2), (1, patches), head_dim)
            with FlopCounterMode(display=False) as counter:
                qkv = attention.qkv(torch.empty(1, cores + patches, dim)).unflatten(-1, (3, heads, head_dim))
                out = attention.proj(ops.core_attention_op(qkv, *more)[0])
            counts = counter.flop_counts["Global"]
            assert counts[torch.ops.veca.core_attention] == 8 * dim * cores * patches + 4 * dim * cores**2
            found.append(counter.get_total_flops())
            with FlopCounterMode(display=False) as counter:
                out.sum().backward()
            backward = counter.flop_counts["Global"][torch.ops.veca.core_attention_backward]
            assert backward == 20 * dim * cores * patches + 10 * dim * cores**2
    assert found == PAPER["veca_base"]


# From here on the GPU. A kernel takes seconds to compile, so the cases are few and share widths: two heads, and where
# nothing else matters 64 cores of width 32 in bfloat16.

SANE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-6}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        (torch.bfloat16, Case(64, 8, (19, 23), 64)),
        (torch.bfloat16, Case(13, 16, (19, 23), 32)),
        (torch.bfloat16, Case(200, 4, (19, 23), 128)),
        (torch.float16, Case(64, 8, (16, 16), 128)),
        (torch.float16, Case(13, 16, (19, 23), 64)),
        (torch.float16, Case(200, 4, (19, 23), 32)),
        (torch.float32, Case(8, 16, (19, 23), 32)),
        (torch.float32, Case(64, 8, (19, 23), 64)),
    ],
    ids=str,
)
def test_gpu_is_as_exact_as_sdpa(dtype: torch.dtype, case: Case) -> None:
    arguments = inputs(case, dtype, "cuda")
    assert uses_kernel(arguments[0], case.cores)
    found, plain = (errors(kernel, *arguments, case.grid) for kernel in ("triton", "sdpa"))
    assert max(found) <= SANE[dtype]
    for mine, theirs in zip(found, plain, strict=True):
        assert mine <= 1.2 * theirs + torch.finfo(torch.float32).eps


@pytest.mark.gpu
def test_gpu_takes_sdpa_for_what_does_not_fit() -> None:
    for dtype, head_dim, cores in ((torch.float64, 32, 8), (torch.float32, 48, 8), (torch.bfloat16, 32, 300)):
        assert not uses_kernel(torch.randn(1, cores + 6, 3, 2, head_dim, device="cuda", dtype=dtype), cores)


@pytest.mark.gpu
def test_gpu_reads_qkv_where_it_lies_and_takes_large_logits() -> None:
    case = Case(64, 2, (5, 9), 32)
    qkv, points, d_out = inputs(case, torch.bfloat16, "cuda")
    qkv[:, :, 0] *= 30
    strided = torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]]
    for a, b in zip(*(run("triton", x, points, d_out, case.grid) for x in (qkv, strided)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    found, plain = (errors(kernel, qkv, points, d_out, case.grid) for kernel in ("triton", "sdpa"))
    assert found[0] <= 1.2 * plain[0]


class Layer(torch.nn.Module):
    """Attention with the rotary tables made inside, as a model does: tokens (B, S, D), coordinates (B, 1, C, 2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(make_tiny().config)

    def forward(self, x: Tensor, points: Tensor, on_patches: Tensor) -> Tensor:
        return self.attention(x, make_rotary(points, 32, 0.125), make_rotary(on_patches, 32, 0.125))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_gpu_compiles_as_one_graph(dynamic: bool) -> None:
    torch.compiler.reset()
    layer = Layer().cuda().bfloat16()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for batch, grid in [(2, (5, 9)), (3, (7, 11))][: 1 + dynamic]:
        x = torch.randn(batch, 64 + grid[0] * grid[1], 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        points = (torch.rand(batch, 1, 64, 2, device="cuda") * 2 - 1).requires_grad_()
        on_patches = patch_coordinates(*grid, x.device, torch.float32)
        d_out = torch.randn_like(x)
        results = []
        for call in (compiled, layer):
            with use_kernel("triton"):
                out = call(x, points, on_patches)
            results.append([out, *torch.autograd.grad(out, [x, points, *layer.parameters()], d_out)])
        for a, b in zip(*results, strict=True):
            assert relative_error(a, b) <= 5e-3


@pytest.mark.gpu
def test_an_exported_program_on_gpu_holds_the_operator() -> None:
    model = make_tiny().cuda().bfloat16()
    images = torch.randn(2, 2, 3, 48, 80, device="cuda", dtype=torch.bfloat16)
    program = torch.export.export(model, (images[0],), {"cores": 64})
    used = [node for node in program.graph.nodes if node.target is torch.ops.veca.core_attention.default]
    assert len(used) == model.config.depth
    assert relative_error(program.module()(images[1], cores=64).patches, model(images[1], 64).patches) <= 5e-3


@pytest.mark.gpu
def test_gpu_graph_replays_with_new_inputs() -> None:
    case = Case(64, 2, (5, 9), 32)
    qkv, points, d_out = inputs(case, torch.bfloat16, "cuda")
    more = operands(points, case.grid, case.head_dim)

    def step() -> tuple[Tensor, ...]:
        out, lse = ops.core_attention_op(qkv, *more)
        return out, *ops.core_attention_backward_op(d_out, qkv, *more, out, lse)

    step()  # a kernel cannot be compiled while it is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    before = [tensor.clone() for tensor in step()]
    qkv.copy_(torch.randn_like(qkv))
    d_out.copy_(torch.randn_like(d_out))
    graph.replay()
    torch.cuda.synchronize()
    for found, expected, old in zip(recorded, step(), before, strict=True):
        assert torch.equal(found, expected)
        assert not torch.equal(found, old)


@pytest.mark.gpu
def test_gpu_operators_keep_to_the_rules() -> None:
    check_operator("cuda", torch.bfloat16, Case(64, 2, (5, 9), 32))


def learn(model: veca.Veca, images: Tensor, kernel: str, autocast: bool = False) -> dict[str, Tensor]:
    """A forward and backward pass: features, and the gradients of the parameters."""
    model.zero_grad()
    with use_kernel(kernel), torch.autocast("cuda", torch.bfloat16, enabled=autocast):  # type: ignore[arg-type]
        out = model(images, 64)
    weights = torch.linspace(-1, 1, out.patches.shape[-1], device=images.device, dtype=torch.float64)
    ((out.patches * weights).square().mean() + (out.cores * weights).square().mean()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"patches": out.patches.detach(), "cores": out.cores.detach(), **gradients}


def mean_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Of the features, and of the gradients: one parameter's has few numbers, so all count alike."""
    assert found.keys() == exact.keys()
    assert any(name.startswith("core_states") for name in found)
    each = {name: relative_error(found[name], exact[name]) for name in exact}
    features = [each.pop(name) for name in ("patches", "cores")]
    return sum(features) / 2, sum(each.values()) / len(each)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("width", [1, 0.25])
def test_gpu_model_is_as_exact_as_with_sdpa(autocast: bool, width: float) -> None:
    found, plain = torch.zeros(2), torch.zeros(2)
    for seed in range(8):
        model = make_tiny(mlp_ratio=4.0, widths=(0.25, 1)).cuda()
        model.width = width
        torch.manual_seed(seed)
        images = torch.randn(4, 3, 144, 176, device="cuda")
        if not autocast:
            model, images = model.bfloat16(), images.bfloat16()
        exact = learn(copy.deepcopy(model).double(), images.double(), "reference")
        found += torch.tensor(mean_errors(learn(model, images, "triton", autocast), exact))
        plain += torch.tensor(mean_errors(learn(model, images, "sdpa", autocast), exact))
    assert (found <= 1.2 * plain).all(), (found, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_gpu_checkpointing_gives_the_same_gradients(dtype: torch.dtype, limit: float) -> None:
    """Up to the order of sums: what all blocks share gets its gradients from them in another one."""
    torch.manual_seed(0)
    model, images = make_tiny().cuda().to(dtype), torch.randn(2, 3, 80, 144, device="cuda")
    plain = learn(model, images, "triton")
    model.set_grad_checkpointing()
    for name, found in learn(model, images, "triton").items():
        assert relative_error(found, plain[name]) < limit, name


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_checkpointing_halves_memory(compiled: bool) -> None:
    """Also where a compiler orders the work: it must not do all that is done twice at once."""
    peaks = []
    for checkpointed in (False, True):
        model = make_tiny(depth=8).cuda()
        model.set_grad_checkpointing(checkpointed)
        images = torch.randn(16, 3, 256, 256, device="cuda")

        def loss(model: veca.Veca = model, images: Tensor = images) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16), use_kernel("triton"):
                return model(images).patches.square().mean()

        step = torch.compile(loss) if compiled else loss
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(step(), list(model.parameters()), allow_unused=True)
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
        torch.compiler.reset()
    assert peaks[1] <= 0.5 * peaks[0], peaks
