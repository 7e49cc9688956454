"""Strict settings: frozen dataclasses built from plain data, with types and bounds checked.

A settings class derives from `Settings`. Types come from its annotations, bounds from `Annotated[int, Bounds(ge=1)]`:

    @dataclass(frozen=True, kw_only=True)
    class Training(Settings):
        batch: Annotated[int, Bounds(ge=1)] = 32
        ema: Annotated[float, Bounds(gt=0, lt=1)] | None = None

    Training.from_dict({"batch": 64}, changes=["ema=0.9"])

Bounds hold however an instance is made; types are checked by `from_dict`, which reads what users wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from veca.errors import ArgumentError, VecaError
from veca.utils.text import did_you_mean, quoted

_TYPE_NAMES = {int: "an integer", bool: "true or false", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Bounds:
    """Limits of a number: greater or equal, greater than, less or equal, less than. `unit` ends the message.

    >>> str(Bounds(ge=1, le=4)), str(Bounds(gt=0, le=1)), str(Bounds(ge=16, le=8192, unit="pixels"))
    ('from 1 to 4', 'above 0, at most 1', 'from 16 to 8,192 pixels')
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    unit: str = ""

    def allow(self, value: float) -> bool:
        limits = (self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt)
        return all(limit is None or holds(value, limit) for limit, holds in limits)

    def __str__(self) -> str:
        high = self.le if self.lt is None else self.lt
        texts = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        rule = ", ".join(f"{text} {bound:,}" for text, bound in texts.items() if bound is not None)
        if self.ge is not None and high is not None:
            rule = f"from {self.ge:,} to {'under ' if self.le is None else ''}{high:,}"
        elif self.gt is not None and self.lt is not None:
            rule = f"between {self.gt:,} and {self.lt:,}"
        return f"{rule} {self.unit}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings classes. `section` is the key that instances have in the settings above them, for messages."""

    section: ClassVar[str] = ""
    error: ClassVar[type[VecaError]] = ArgumentError
    retired: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, each with a sentence that says what to do instead; null, their default, is let pass."""

    def __post_init__(self) -> None:
        for name, (bounds, optional) in _field_bounds(cast(Any, type(self))).items():
            if (value := getattr(self, name)) is not None or not optional:
                self.require(name, bounds.allow(value), f"null, or {bounds}" if optional else str(bounds))

    def require(self, name: str, holds: bool, rule: str, value: object = ...) -> None:
        """Raise an error that names the field, its value and the rule, unless it holds."""
        shown = getattr(self, name) if value is ... else value
        _Builder(self.error).require(_join_key(self.section, name), shown, holds, rule)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], changes: Sequence[str] = ()) -> Self:
        """Build from plain data, as YAML or JSON give it. `changes` are `key=value` as in `--set schedule.peak=2e-4`.

        The value of a change is YAML; dots lead into sections.
        """
        values = dict(values)
        for change in changes:
            _apply_change(values, change, cls.error)
        return cast(Self, _Builder(cls.error).build(cls, values, ""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back, through YAML or JSON too."""
        return {key: to_plain(value) for key, value in dataclasses.asdict(self).items()}


def to_plain(value: Any) -> Any:
    """Nested data with lists in place of tuples, as YAML and JSON have it."""
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    return [to_plain(part) for part in value] if isinstance(value, list | tuple) else value


def parse_yaml(text: str) -> Any:
    """Plain data from YAML; ValueError, in one line, where it is none."""
    import yaml  # comes with the extra `train`, which the classes above do not need

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ValueError(" ".join(str(error).split())) from error


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _field_bounds(kind: Any) -> dict[str, tuple[Bounds, bool]]:
    """Bounds by field, and whether the field may be None instead."""
    found = {}
    for name, hint in _field_types(kind).items():
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        extras = [extra for choice in choices for extra in getattr(choice, "__metadata__", ())]
        if bounds := next((extra for extra in extras if isinstance(extra, Bounds)), None):
            found[name] = bounds, type(None) in choices
    return found


def _join_key(section: str, key: object) -> str:
    return f"{section}.{key}" if section else str(key)


def _apply_change(values: dict[str, Any], change: str, error: type[VecaError]) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise error(f"--set {change}: must be key=value, as schedule.peak=2e-4")
    *sections, last = key.split(".")
    for name in sections:
        # A copy of each section on the way: the caller's data stay as they are.
        part = values.get(name, {})
        if not isinstance(part, Mapping):
            raise error(f"--set {change}: {name} has no keys of its own")
        values[name] = values = dict(part)
    try:
        values[last] = parse_yaml(text)
    except ValueError as cause:
        raise error(f"--set {change}: the value is not YAML") from cause


@dataclass(frozen=True)
class _Builder:
    """Turns plain data into annotated types; raises `error`, with the key, where they do not fit."""

    error: type[VecaError]

    def require(self, key: str, value: object, holds: bool, rule: str) -> None:
        if not holds:
            raise self.error(f"{key}={quoted(value)}: must be {rule}")

    def build(self, kind: Any, value: Any, key: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.build(arguments[0], value, key)
        if dataclasses.is_dataclass(kind):
            return self._build_section(kind, value, key)
        if origin in (Union, types.UnionType):
            return self._build_union(arguments, value, key)
        if origin is Literal:
            self.require(key, value, value in arguments, " or ".join(map(repr, arguments)))
            return value
        if origin is tuple:
            items = [value] if isinstance(value, str) and arguments[0] is str else value
            self.require(key, value, isinstance(items, list | tuple), "a list")
            return tuple(self.build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(items))
        if origin is dict:
            self.require(key, value, isinstance(value, Mapping), "keys with values")
            # In `--set budgets.8=2`, and in JSON, keys that are numbers are text.
            numeric = arguments[0] is int
            items = ((int(k) if numeric and isinstance(k, str) and k.isdecimal() else k, v) for k, v in value.items())
            return {self.build(arguments[0], k, key): self.build(arguments[1], v, f"{key}.{k}") for k, v in items}
        if kind is float:
            if isinstance(value, str):  # YAML reads 4e-4 as text: it wants 4.0e-4
                with contextlib.suppress(ValueError):
                    value = float(value)
            finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
            self.require(key, value, finite, "a finite number")
        elif kind is not Any:
            self.require(key, value, type(value) is kind, _TYPE_NAMES[kind])
            if kind is int:
                self.require(key, value, -(2**63) <= value < 2**63, "an integer of 64 bits")
        return value

    def _build_section(self, kind: Any, value: Any, section: str) -> Any:
        self.require(section or "settings", value, isinstance(value, Mapping), "keys with values")
        known, retired = _field_types(kind), getattr(kind, "retired", {})
        value = {key: part for key, part in value.items() if not (key in retired and part is None)}
        if unknown := [key for key in value if key not in known]:
            key, name = unknown[0], _join_key(section, unknown[0])
            if key in retired:
                raise self.error(f"{name}: {retired[key]}")
            raise self.error(f"unknown key {name!r}{did_you_mean(key, known)}. Known: {', '.join(known)}")
        return kind(**{key: self.build(known[key], part, _join_key(section, key)) for key, part in value.items()})

    def _build_union(self, kinds: Sequence[Any], value: Any, key: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        errors = []
        for kind in kinds:
            try:
                return self.build(kind, value, key)
            except self.error as error:
                errors.append("null" if kind is type(None) else str(error))
        raise self.error("; or ".join(errors))
