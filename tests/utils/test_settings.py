from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest

from veca.errors import ArgumentError
from veca.utils.settings import Bounds, Settings, parse_yaml


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    section: ClassVar[str] = "inner"
    retired: ClassVar[Mapping[str, str]] = {"old": "it is gone. Remove the key"}

    rate: Annotated[float, Bounds(gt=0, le=1)] = 0.5
    mode: Literal["fast", "exact"] = "fast"


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    inner: Inner = field(default_factory=Inner)
    count: Annotated[int, Bounds(ge=1)] = 2
    share: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    odds: dict[int, float] = field(default_factory=lambda: {8: 1.0})
    names: tuple[str, ...] = ()


def test_plain_data_goes_in_and_comes_out_again() -> None:
    values = {"inner": {"rate": 0.25}, "odds": {"8": 2, 16: 1}, "names": "one", "share": None}
    settings = Outer.from_dict(values)
    assert settings == Outer(inner=Inner(rate=0.25), odds={8: 2, 16: 1}, names=("one",))
    assert Outer.from_dict(settings.to_dict()) == settings
    assert settings.to_dict()["names"] == ["one"]


def test_changes_reach_into_sections_and_leave_the_callers_data_alone() -> None:
    values = {"inner": {"rate": 0.25}}
    settings = Outer.from_dict(values, ["inner.rate=1e-1", "odds.16=3", "share=0.5", "names=[a, b]"])
    assert (settings.inner.rate, settings.odds, settings.share) == (0.1, {16: 3}, 0.5)
    assert settings.names == ("a", "b")
    assert values == {"inner": {"rate": 0.25}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"rat": 1}}, "unknown key 'inner.rat' .did you mean 'rate'.*Known: rate, mode"),
        ({"inner": {"rate": 0}}, "inner.rate=0: must be above 0, at most 1"),
        ({"inner": {"mode": "slow"}}, "inner.mode='slow': must be 'fast' or 'exact'"),
        ({"inner": {"old": 3}}, "inner.old: it is gone. Remove the key"),
        ({"inner": 3}, "inner=3: must be keys with values"),
        ({"count": 0}, "count=0: must be at least 1"),
        ({"count": 2**70}, "must be an integer of 64 bits"),
        ({"count": True}, "count=True: must be an integer"),
        ({"share": 1}, "share=1: must be null, or between 0 and 1"),
        ({"share": "half"}, "share='half': must be null, or a finite number"),
        ({"names": ["a", 1]}, r"names\[1\]=1: must be text"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Outer.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"count": 0}, "count=0: must be at least 1"), ({"count": "2"}, "count='2': must be an integer")],
)
def test_types_and_bounds_hold_for_instances_made_in_python_too(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Outer(**values)


def test_a_missing_key_without_a_default_is_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needy(Settings):
        section: ClassVar[str] = "needy"
        count: int

    with pytest.raises(ArgumentError, match=r"needy\.count: missing, and there is no default"):
        Needy.from_dict({})


def test_a_retired_key_with_its_default_is_let_pass() -> None:
    assert Outer.from_dict({"inner": {"old": None}}) == Outer()


@pytest.mark.parametrize("text", ["[1", "2024-02-31", "a: b: c", "[" * 10_000])
def test_text_that_is_no_yaml_is_one_error_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        parse_yaml(text)
