"""The operator `veca::packed_attention`: on a CPU through Triton's interpreter in float32, on a GPU as it is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from torch import Tensor

import veca
from veca.attention import core_attention, use_kernel
from veca.kernels import ops
from veca.rope import make_rotary, patch_coordinates

Pack = Sequence[tuple[int, tuple[int, int]]]
"""Budget and grid of each image."""

PACKS: list[Pack] = [
    [(8, (4, 5))],
    [(8, (1, 1)), (64, (9, 8)), (1, (1, 64)), (13, (3, 7))],
    [(64, (12, 11)), (64, (2, 2)), (40, (12, 11))],
]


def inputs(pack: Pack, width: int, heads: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Queries, keys and values, coordinates of cores and patches, frequencies, and a gradient of the output."""
    torch.manual_seed(0)
    cores, patches = sum(budget for budget, _ in pack), sum(rows * columns for _, (rows, columns) in pack)
    qkv, d_out = torch.randn(cores + patches, 3, heads, width), torch.randn(cores + patches, heads * width)
    points = torch.rand(cores, 2) * 2 - 1
    grids = torch.cat([patch_coordinates(*grid, torch.device("cpu"), torch.float32) for _, grid in pack])
    frequencies = make_rotary(points, width, 0.25).frequencies
    tensors = [qkv.to(dtype), points, grids, frequencies, d_out.to(dtype)]
    return [tensor.to(device) for tensor in tensors]


def by_image(pack: Pack, qkv: Tensor, points: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output, and gradients of qkv and of the cores' coordinates, one image after the other, by the reference."""
    qkv, points = (x.detach().double().requires_grad_() for x in (qkv, points))
    core, patch = 0, len(points)
    cores, patches = [], []
    for budget, grid in pack:
        count = grid[0] * grid[1]
        own = torch.cat([qkv[core : core + budget], qkv[patch : patch + count]])[None]
        tables = points[None, None, core : core + budget], patch_coordinates(*grid, qkv.device, torch.float64)
        with use_kernel("reference"):
            out = core_attention(own, *(make_rotary(table, qkv.shape[-1], 0.25) for table in tables))[0]
        cores.append(out[:budget])
        patches.append(out[budget:])
        core, patch = core + budget, patch + count
    out = torch.cat(cores + patches)
    return [out.detach(), *torch.autograd.grad(out, [qkv, points], d_out.double())]


def together(pack: Pack, tensors: list[Tensor], programs: int) -> list[Tensor]:
    from veca.kernels.packed_attention import plan_spans

    qkv, points, grids, frequencies, d_out = tensors
    qkv, points = qkv.detach().requires_grad_(), points.detach().requires_grad_()
    patches = [rows * columns for _, (rows, columns) in pack]
    spans, images = (x.to(qkv.device) for x in plan_spans([budget for budget, _ in pack], patches, programs))
    out = ops.packed_attention_op(
        qkv, points, grids, frequencies, spans, images, max(budget for budget, _ in pack), ops.KERNELS
    )[0]
    return [out.detach(), *torch.autograd.grad(out, [qkv, points], d_out)]


def errors(pack: Pack, tensors: list[Tensor], programs: int) -> list[float]:
    qkv, points, _, _, d_out = tensors
    pairs = zip(together(pack, tensors, programs), by_image(pack, qkv, points, d_out), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@interpreted
@pytest.mark.parametrize("programs", [1, 100])
@pytest.mark.parametrize(("number", "width", "heads"), [(0, 128, 1), (1, 32, 2), (1, 64, 1), (2, 32, 1)])
def test_packed_attention_matches_the_reference(number: int, width: int, heads: int, programs: int) -> None:
    pack = PACKS[number]
    assert max(errors(pack, inputs(pack, width, heads), programs)) <= 1e-6


@interpreted
def test_packed_operators_keep_to_the_rules() -> None:
    from veca.kernels.packed_attention import plan_spans

    pack: Pack = [(8, (1, 3)), (8, (2, 2))]
    *tensors, d_out = inputs(pack, 32, 1)
    arguments = [*tensors, *plan_spans([8, 8], [3, 4], 1), 8, ops.KERNELS]
    out, lse = ops.packed_attention_op(*arguments)
    backward = [d_out, *arguments[:6], out, lse, 8, ops.KERNELS]
    torch.library.opcheck(torch.ops.veca.packed_attention_backward.default, backward)
    for tensor in arguments[:2]:
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.veca.packed_attention.default, arguments)


def test_spans_cover_every_patch_once() -> None:
    pytest.importorskip("triton")
    from veca.kernels.packed_attention import plan_spans

    budgets, patches = [8, 64, 1], [1, 1000, 130]
    for programs in (1, 3, 7, 1000):
        spans, images = plan_spans(budgets, patches, programs)
        assert [row[:2] for row in images.tolist()] == [[8, 64], [72, 1], [0, 8]]  # the largest first
        places = zip(images.tolist(), [1, 1001, 0], [1000, 130, 1], strict=True)
        for (core, budget, start, count), patch, number in places:
            own = spans[start : start + count].tolist()
            assert sum(span[4] for span in own) == number
            assert [span[3] for span in own] == [patch + sum(span[4] for span in own[:i]) for i in range(count)]
            assert all(span[:3] == [core, budget, 73 + span[3]] for span in own)
            assert [span[5] for span in own] == ([2] if count == 1 else [1, *[0] * (count - 1)])


def test_spans_of_a_huge_image_are_within_32_bits() -> None:
    pytest.importorskip("triton")
    from veca.kernels.packed_attention import plan_spans

    spans, images = plan_spans([64, 8], [10**6, 5], 4)  # a GPU of few programs, as for models of many heads
    assert images.tolist()[0] == [0, 64, 0, len(spans) - 1]
    counts = spans[:-1, 4]
    assert int(counts.sum()) == 10**6
    assert int(counts.max()) * 3 * 4096 < 2**31  # numbers of queries, keys and values of a model 4096 wide


def test_packs_are_padded_to_their_bucket() -> None:
    """A graph reads the tensors of the first pack of a bucket, into which all others of it are written."""
    pytest.importorskip("triton")
    from veca.fast_pack import PackInputs, PackTensors

    config, like = veca.create_model("veca_tiny", pretrained=False, depth=1).config, torch.zeros(1)
    found: dict[Any, PackTensors] = {}
    shared = 0
    for seed in range(40):
        draw = random.Random(seed)
        grids = tuple((draw.randint(1, 9), draw.randint(1, 9)) for _ in range(draw.randint(1, 8)))
        budgets = [draw.choice((8, 13, 64)) for _ in grids]
        patches, cores = sum(rows * columns for rows, columns in grids), sum(budgets)
        inputs = PackInputs(veca.PackedImages(torch.randn(patches, 24), grids), budgets, like, config)
        bucket = inputs.bucket
        shared += bucket in found
        out = found[bucket] = inputs.fill(found.get(bucket))
        assert torch.equal(out.pixels[bucket.cores :][:patches], inputs.batch.pixels)
        assert not out.pixels[: bucket.cores].any()
        assert out.bank_rows[:cores].tolist() == [row for budget in budgets for row in range(budget)]
        expected = [patch_coordinates(*grid, like.device, torch.float32) for grid in grids]
        torch.testing.assert_close(out.patch_points[:patches], torch.cat(expected))
        assert int(out.spans[:, 4].sum()) == patches
        assert len(out.spans) == bucket.spans
        assert (out.spans[out.spans[:, 4] == 0, 5] == 0).all()  # padding: nothing of it is stored
        assert int(out.images[:, 3].sum()) == len(inputs.spans)
        assert max(budgets) <= bucket.max_cores
    assert shared > 5
    wide = PackInputs(veca.PackedImages(torch.zeros(10**6, 1), ((1000, 1000),)), [64], like, config)
    assert len(wide.spans) <= wide.bucket.spans


def lower(kernel: Any, **constants: object) -> str:
    """A kernel for Hopper in Triton's first intermediate form: the interpreter does not check types."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    pointers = dict.fromkeys(("qkv", "out", "d_out", "d_qkv"), "*bf16") | dict.fromkeys(("spans", "images"), "*i32")
    names = "cores", "patches", "frequencies", "lse", "partials", "d_points"
    types = pointers | dict.fromkeys(names, "*fp32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    codegen = backend.get_codegen_implementation(options)
    return str(source.make_ir(target, options, codegen, backend.get_module_map(), context))


@pytest.mark.skipif(INTERPRETED, reason="kernels are not compiled in the interpreter")
@pytest.mark.parametrize("chunks", [1, 2])
def test_kernels_can_be_compiled_for_hopper(chunks: int) -> None:
    pytest.importorskip("triton")
    from veca.kernels import core_attention_backward, packed_attention

    sizes = {"H": 2, "D": 64, "CHUNK": 32, "CHUNKS": chunks}
    of_core = {"SCALE": 0.125, "EXACT": chunks > 1}
    both = sizes | of_core | {"TILE": 64, "PRECISION": "ieee", "STAGES": 2}
    kernels = [
        (packed_attention._packed_attention_kernel, both),
        (packed_attention._combine_packed_kernel, sizes | {"ROWS": 16}),
        (packed_attention._packed_attention_backward_kernel, both | {"PATCHES": chunks == 1, "CORES": True}),
        (packed_attention._combine_packed_backward_kernel, sizes | of_core),
        (core_attention_backward._combine_partials_backward_kernel, sizes | of_core),
    ]
    for kernel, constants in kernels:
        assert "tt.store" in lower(kernel, **constants)


class Stop(BaseException):
    pass


@pytest.mark.skipif(INTERPRETED, reason="operators are not traced in the interpreter")
@pytest.mark.parametrize("backward", [False, True])
def test_compiled_graphs_serve_every_mix(backward: bool) -> None:
    """Of what differs from pack to pack nothing is a constant of the graph, which would be compiled anew."""
    pytest.importorskip("triton")
    from torch._dynamo.backends.common import aot_autograd

    from veca.kernels.packed_attention import plan_spans

    sizes: list[Any] = []

    def stop(graph: Any, _: Any) -> None:
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes.extend(value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim > 1)
        raise Stop  # there is no GPU to run it

    qkv, points, grids, frequencies, d_out = inputs(PACKS[1], 32, 2)
    budgets, patches = [budget for budget, _ in PACKS[1]], [rows * columns for _, (rows, columns) in PACKS[1]]
    arguments = [qkv, points, grids, frequencies, *plan_spans(budgets, patches, 7)]
    if backward:
        arguments = [d_out, *arguments, torch.zeros_like(d_out), torch.zeros(len(d_out), 2).T]
    operator = ops.packed_attention_backward_op if backward else ops.packed_attention_op

    def run(max_cores: int, *tensors: Tensor) -> Tensor:
        return operator(*tensors, max_cores, ops.KERNELS)[0]

    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=stop), dynamic=True)
    with torch.no_grad(), pytest.raises(Stop):
        compiled(max(budgets), *arguments)
    torch.compiler.reset()
    changing = [size for size in sizes if size != 2]  # heads are always two
    assert len(changing) >= 5
    assert all(isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None for size in changing)


@interpreted
def test_a_model_runs_packs_by_the_kernel() -> None:
    model = veca.create_model("veca_tiny", pretrained=False, embed_dim=64, depth=2, num_heads=2).eval()
    batch = veca.pack([torch.randn(3, 32, 48), torch.randn(3, 80, 16), torch.randn(3, 32, 48)])
    with use_kernel("triton"):
        out = model(batch, cores=[8, 40, 8])
    with use_kernel("sdpa"):
        expected = model(batch, cores=[8, 40, 8])
    torch.testing.assert_close(out.patches, expected.patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.cores, expected.cores, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 50, 10_000])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)], ids=str)
def test_gpu_packed_attention(dtype: torch.dtype, limit: float, width: int, programs: int) -> None:
    pack: Pack = [(64, (19, 23)), (8, (1, 1)), (13, (40, 30)), (64, (2, 64))]
    assert max(errors(pack, inputs(pack, width, 2, dtype, "cuda"), programs)) <= limit


@pytest.mark.gpu
def test_gpu_packs_of_a_bucket_by_cuda_graphs() -> None:
    torch.manual_seed(0)
    model = veca.create_model("veca_small", pretrained=False, depth=3).cuda().eval()
    fast = veca.optimize(model)
    for seed in range(6):
        draw = random.Random(seed)
        grids = [(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(8)]
        budgets = [draw.choice((8, 32, 64)) for _ in grids]
        batch = veca.pack([torch.randn(3, 16 * rows, 16 * columns) for rows, columns in grids], device="cuda")
        with torch.inference_mode(), use_kernel("triton"):
            outputs = [fast(batch, budgets) for _ in range(3)]  # compiled, recorded, replayed
        with torch.inference_mode(), use_kernel("sdpa"):
            expected = model(batch, budgets)
        for out in outputs:
            for found, wanted in ((out.cores, expected.cores), (out.patches, expected.patches)):
                assert float((found.float() - wanted).norm() / wanted.norm()) <= 2e-2


@pytest.mark.gpu
def test_gpu_compiled_models_train_on_packs() -> None:
    torch.manual_seed(0)
    model = veca.create_model("veca_small", pretrained=False, depth=3).cuda()
    compiled, graphs = torch.compile(model, dynamic=True), []
    for seed in range(4):
        draw = random.Random(seed)
        grids = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(6 + seed)]
        budgets = [64, *(draw.choice((8, 32, 64)) for _ in grids[1:])]
        batch = veca.pack([torch.randn(3, 16 * rows, 16 * columns) for rows, columns in grids], device="cuda")
        found = []
        for kernel, run in (("triton", compiled), ("sdpa", model)):
            model.zero_grad()
            torch.manual_seed(seed)  # coordinates are augmented
            with use_kernel(kernel):
                out = run(batch, cores=budgets)
                (out.patches.square().mean() + out.cls.square().mean()).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        mine, theirs = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in found)
        assert float((mine - theirs).norm() / theirs.norm()) <= 1e-4
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs[1:])) == 1  # not one more, whatever the mix
