from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from conftest import GOLDEN, relative_error
from safetensors.torch import load_file
from torch import Tensor, nn

from veca.train.optimizers import POLAR_EXPRESS, SAFETY, NorMuon, polar

NUMBERS = load_file(GOLDEN / "normuon.safetensors")


def run(starts: list[Tensor], gradients: list[list[Tensor]], **settings: object) -> list[Tensor]:
    weights = [nn.Parameter(start.clone()) for start in starts]
    optimizer = NorMuon(weights, lr=4e-4, weight_decay=0.015, **settings)  # type: ignore[arg-type]
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach() for weight in weights]


def golden_gradients(name: str) -> list[Tensor]:
    return [NUMBERS[f"{name}.g{step}"] for step in range(4)]


CUSHION = 0.02
"""Steps ignore singular values below this share of the largest: these converge later, all others faster."""


def closest_to_one(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic a x + b x³ + c x⁵ closest to 1 on [low, high] in the maximum norm (Remez exchange)."""
    if low > (1 - 5e-6) * high:  # the interval is a point: the quintic that is flattest there
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    before, error = math.inf, 0.0
    while abs(error - before) > 1e-15:
        # The error alternates in sign with equal size at the four points; the inner ones then move to its extrema.
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        a, b, c, new = solved.tolist()
        before, error = error, new
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return a, b, c


def polar_express(steps: int = 5, low: float = 1e-3) -> list[tuple[float, float, float]]:
    """The quintic of each step, for singular values that start in [low, 1]."""
    high, quintics = 1.0, []
    for step in range(steps):
        a, b, c = closest_to_one(max(low, CUSHION * high), high)

        def quintic(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return a * x + b * x**3 + c * x**5

        centre = 2 / (quintic(low) + quintic(high))
        a, b, c = (centre * k for k in (a, b, c))
        if step < steps - 1:
            a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        quintics.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return quintics


def test_coefficients_are_the_authors_and_follow_from_the_remez_exchange() -> None:
    coefficients = torch.tensor(POLAR_EXPRESS, dtype=torch.float64)
    assert torch.allclose(coefficients, NUMBERS["polar.coefficients"], 1e-12, 0)
    assert torch.allclose(coefficients, torch.tensor(polar_express(), dtype=torch.float64), 1e-12, 0)


@pytest.mark.parametrize("low", [1e-3, 0.02, 0.3, 0.9, 1.0])
def test_no_other_quintic_is_closer_to_one(low: float) -> None:
    """The error of the best is the same, with turns of sign, in four points: no other can be less in all of them."""
    a, b, c = closest_to_one(low, 1.0)
    x = torch.linspace(low, 1.0, 200_001, dtype=torch.float64)
    error = a * x + b * x**3 + c * x**5 - 1
    worst = float(error.abs().max())
    if low == 1.0:
        assert worst < 1e-12
        return
    signs = [bool(e > 0) for e in error if abs(float(e)) > worst * (1 - 1e-6)]
    turns = sum(a != b for a, b in itertools.pairwise(signs))
    assert turns == 3


def test_polar_is_the_authors_bit_for_bit() -> None:
    assert torch.equal(polar(NUMBERS["polar.in"]).float(), NUMBERS["polar.out"])


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32), (5, 24, 64)])
def test_polar_is_nearly_the_orthogonal_factor(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    found = polar(x, torch.float64)
    size = left.mT @ found @ right.mT  # diagonal, with singular values that all came near 1
    assert relative_error(size, torch.diag_embed(size.diagonal(dim1=-2, dim2=-1))) <= 1e-9
    assert float((torch.linalg.svdvals(found) - 1).abs().max()) <= 0.14
    assert relative_error(polar(x, torch.float32), polar(x, torch.float64)) <= 1e-4


@pytest.mark.parametrize("name", ["tall", "wide", "square"])
def test_four_steps_match_the_authors(name: str) -> None:
    for steps in range(1, 5):
        found = run([NUMBERS[f"{name}.p0"]], [[g] for g in golden_gradients(name)[:steps]])[0]
        expected = NUMBERS[f"{name}.p{steps}"]
        assert relative_error(found, expected) <= 2e-3
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-3


def reference(weight: Tensor, gradients: list[Tensor], lr: float = 4e-4, decay: float = 0.015) -> Tensor:
    """The step as the specification words it, in float64, one number after the other."""
    weight, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    v = torch.zeros(len(weight), dtype=torch.float64)
    for gradient in gradients:
        g = gradient.double()
        m = 0.95 * m + g
        u = polar(g + 0.95 * m, torch.float64)
        for row in range(len(u)):
            v[row] = 0.95 * v[row] + 0.05 * (u[row] ** 2).mean()
        size = (u**2).sum().sqrt()
        u = u / (v.sqrt() + 1e-8)[:, None]
        u = u * size / (u**2).sum().sqrt()
        weight = torch.where(weight * u >= 0, weight - lr * decay * weight, weight)
        weight = weight - lr * 0.2 * math.sqrt(max(u.shape)) * u
    return weight


@pytest.mark.parametrize("name", ["tall", "wide", "square"])
def test_in_float32_it_is_the_reference(name: str) -> None:
    expected = reference(NUMBERS[f"{name}.p0"], golden_gradients(name))
    found = run([NUMBERS[f"{name}.p0"]], [[g] for g in golden_gradients(name)], dtype=torch.float32)[0]
    assert relative_error(found - NUMBERS[f"{name}.p0"], expected - NUMBERS[f"{name}.p0"]) <= 1e-4
    assert relative_error(found, expected) <= 1e-6


def test_decay_spares_weights_that_the_step_pulls_down() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(8, 16), torch.randn(8, 16)
    plain, decayed = (
        run([start], [[gradient]], dtype=torch.float32)[0] if decay else _without_decay(start, gradient)
        for decay in (False, True)
    )
    shrunk = ~torch.isclose(plain, decayed, rtol=0, atol=1e-9)
    direction = start - plain
    assert torch.equal(shrunk, start * direction > 0)


def _without_decay(start: Tensor, gradient: Tensor) -> Tensor:
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    NorMuon([weight], lr=4e-4, weight_decay=0.0, dtype=torch.float32).step()
    return weight.detach()


def test_parts_are_matrices_of_their_own() -> None:
    """A fused weight of q, k and v moves as the three would, and other weights of the same shape do not disturb it."""
    torch.manual_seed(0)
    starts, gradients = torch.randn(2, 96, 32), torch.randn(4, 2, 96, 32)
    together = run(list(starts), [list(step) for step in gradients], parts=3, dtype=torch.float32)
    for weight, start, own in zip(together, starts, gradients.unbind(1), strict=True):
        apart = [run([s], [[g] for g in gs], dtype=torch.float32)[0] for s, gs in _thirds(start, own)]
        assert relative_error(weight, torch.cat(apart)) <= 1e-6
    assert relative_error(together[0], run([starts[0]], [[g[0]] for g in gradients], dtype=torch.float32)[0]) > 1e-5


def _thirds(start: Tensor, gradients: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
    return list(zip(start.chunk(3), zip(*(g.chunk(3) for g in gradients), strict=True), strict=True))  # type: ignore[arg-type]


def test_what_has_no_gradient_is_left_alone() -> None:
    still, moving = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = NorMuon([still, moving], lr=0.1, weight_decay=0.1)
    moving.grad = torch.randn(4, 4)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(4, 4))
    assert still not in optimizer.state
    assert not torch.equal(moving.detach(), torch.ones(4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_of_zeros_moves_nothing_but_the_decay(dtype: torch.dtype) -> None:
    start = torch.randn(6, 8)
    found = run([start], [[torch.zeros(6, 8)]], dtype=dtype)[0]
    assert relative_error(found, start * (1 - 4e-4 * 0.015)) <= 1e-6


def test_the_optimizer_continues_from_its_state() -> None:
    start, gradients = NUMBERS["wide.p0"], golden_gradients("wide")
    weight = nn.Parameter(start.clone())
    first = NorMuon([weight], lr=4e-4, weight_decay=0.015)
    for g in gradients[:2]:
        weight.grad = g.clone()
        first.step()
    second = NorMuon([weight], lr=1.0)
    second.load_state_dict(first.state_dict())
    for g in gradients[2:]:
        weight.grad = g.clone()
        second.step()
    assert torch.equal(weight.detach(), run([start], [[g] for g in gradients])[0])


@pytest.mark.parametrize(("shape", "parts"), [((8,), 1), ((2, 2, 2), 1), ((8, 4), 3)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...], parts: int) -> None:
    with pytest.raises(ValueError, match="takes matrices .*Give the others to AdamW"):
        NorMuon([nn.Parameter(torch.zeros(shape))], lr=0.1, parts=parts)


def _share(rank: int, count: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": out.read_text()}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count)
    torch.manual_seed(0)
    starts, gradients = torch.randn(5, 24, 16), torch.randn(2, 5, 24, 16)
    found = run(list(starts), [list(step) for step in gradients], dtype=torch.float32)
    torch.save(found, out.with_suffix(f".{rank}"))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_several_processes_share_the_work_and_agree(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (out := tmp_path / "weights").write_text(str(free.getsockname()[1]))
    mp.start_processes(_share, (3, out), nprocs=3, start_method="fork")
    torch.manual_seed(0)
    starts, gradients = torch.randn(5, 24, 16), torch.randn(2, 5, 24, 16)
    alone = run(list(starts), [list(step) for step in gradients], dtype=torch.float32)
    for rank in range(3):
        for found, expected in zip(torch.load(out.with_suffix(f".{rank}")), alone, strict=True):
            assert relative_error(found, expected) <= 1e-6


def _shard(rank: int, count: int, out: Path) -> None:
    """Two steps, a skipped one and another, of matrices shared out by FSDP2; rows of one do not fall evenly."""
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": out.read_text()}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count)
    model = _matrices()
    fully_shard(model)
    found = _steps(model)
    torch.save(found, out.with_suffix(f".{rank}"))
    torch.distributed.destroy_process_group()


def _matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(*shape, bias=False) for shape in ((16, 24), (16, 24), (8, 3))])


def _steps(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor, distribute_tensor

    def whole(x: Tensor) -> Tensor:
        return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()

    weights = dict(model.named_parameters())
    groups = [
        {"params": [w for w in weights.values() if len(w) == 24], "parts": 3},
        {"params": [w for w in weights.values() if len(w) == 3]},
    ]
    optimizer = NorMuon(groups, lr=1e-2, weight_decay=0.1, dtype=torch.float32)
    torch.manual_seed(1)
    for skip in (0.0, 0.0, 1.0, 0.0):
        for weight in weights.values():
            gradient = torch.randn(weight.shape) / (1 - skip)
            if isinstance(weight, DTensor):
                gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            weight.grad = gradient
        optimizer.found_inf = torch.tensor(skip)
        optimizer.step()
    states = {f"{n}.{k}": whole(v) for n, w in weights.items() for k, v in optimizer.state[w].items()}
    return {name: whole(weight) for name, weight in weights.items()} | states


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_matrices_that_are_shared_out_move_alike(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (out := tmp_path / "weights").write_text(str(free.getsockname()[1]))
    mp.start_processes(_shard, (2, out), nprocs=2, start_method="fork")
    alone = _steps(_matrices())
    for rank in range(2):
        shared = torch.load(out.with_suffix(f".{rank}"))
        assert shared.keys() == alone.keys()
        for name in alone:
            assert relative_error(shared[name], alone[name]) <= 1e-6, name
