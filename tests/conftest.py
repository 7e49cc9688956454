from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import veca
from veca import VecaConfig

torch.set_num_threads(1)  # the models here are small: threads would mostly wait for each other
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # the tests report to nobody

# Tests send SIGINT, to this process and to those it starts. A shell script starts what runs in its background
# (`make test &`) with SIGINT ignored, which every process started from there inherits; one that is handled is not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


LONGEST = (
    "optimize",
    "scale",
    "kernels",
    "images",
    "explore_browser",
    "notebooks",
    "newcomer",
    "web",
    "bench",
    "embed",
    "model",
    "data",
    "cli",
    "cache",
    "torch_file",
)
"""Files that take longest: they come first, so that no process is left with one of them when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Golden:
    """One of the two golden models: its weights file and the numbers the authors' implementation gave."""

    def __init__(self, weights: Path, numbers: Path) -> None:
        self.weights = weights
        self.numbers: dict[str, Tensor] = load_file(numbers)

    def model(self) -> veca.Veca:
        return veca.load(self.weights)


@pytest.fixture(scope="session", params=["micro", "d64"])
def golden(request: pytest.FixtureRequest) -> Golden:
    if request.param == "micro":
        return Golden(GOLDEN / "official_checkpoint.pt", GOLDEN / "forward.safetensors")
    return Golden(GOLDEN / "d64" / "weights.safetensors", GOLDEN / "d64" / "forward.safetensors")


@pytest.fixture
def tiny() -> veca.Veca:
    """A model small enough for any test, with coordinates that really move."""
    return make_tiny()


@pytest.fixture
def nothing_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every named size has random weights."""
    monkeypatch.setattr("veca.checkpoint.loading.WEIGHTS", tmp_path / "no weights")


def make_tiny(**overrides: object) -> veca.Veca:
    torch.manual_seed(0)
    model = veca.Veca(VecaConfig.from_dict({"embed_dim": 64, "depth": 3, "num_heads": 2, **overrides})).eval()
    with torch.no_grad():
        # New weights are so small that tokens hardly differ; these make every path matter.
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.startswith("core"):
                parameter.normal_(std=(0.3 if "coordinate" in name else 1.5) / parameter[0].numel() ** 0.5)
        model.coordinate_alpha.fill_(0.5)
    return model


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
