from __future__ import annotations

import json
from collections import Counter

import pytest
from conftest import GOLDEN

from veca.train.engine import draw, learning_rate

BUDGETS = {8: 1, 16: 1, 24: 2, 32: 2, 40: 3, 48: 3, 56: 4, 64: 4}


def test_the_learning_rate_matches_the_authors() -> None:
    golden = json.loads((GOLDEN / "schedule.json").read_text())
    settings = golden["total"], golden["warmup"], golden["lr"], golden["lr_min"]
    found = [learning_rate(step, *settings) for step in range(len(golden["lr_at_step"]))]
    assert found == pytest.approx(golden["lr_at_step"], rel=1e-12)


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, total=10, warmup=0, peak=2.0, low=1.0) == 2.0


def test_draws_follow_the_odds() -> None:
    count = 20_000
    drawn = Counter(draw(BUDGETS, "budget", seed=3, step=step) for step in range(count))
    for budget, odd in BUDGETS.items():
        share = odd / sum(BUDGETS.values())
        assert drawn[budget] / count == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)


def test_drawn_alike_by_all_and_apart_by_stream_seed_and_step() -> None:
    def series(stream: str = "budget", seed: int = 0, first: int = 0) -> list[int]:
        return [draw(BUDGETS, stream, seed, step) for step in range(first, first + 50)]

    assert series() == series()
    assert series()[10:] == series(first=10)[:40]
    assert len({tuple(series()), tuple(series("resolution")), tuple(series(seed=1)), tuple(series(first=1))}) == 4


def test_what_has_no_odds_is_never_drawn() -> None:
    odds = {256: 0.35, 384: 0.35, 512: 0.30, 768: 0.0}
    assert {draw(odds, "resolution", 0, step) for step in range(500)} == {256, 384, 512}
