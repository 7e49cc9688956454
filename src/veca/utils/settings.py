"""Strict settings: frozen dataclasses whose types and bounds are checked, from Python, YAML or JSON.

A settings class derives from `Settings`. Types come from its annotations, bounds from `Annotated[int, Bounds(ge=1)]`:

    @dataclass(frozen=True, kw_only=True)
    class Training(Settings):
        batch: Annotated[int, Bounds(ge=1)] = 32
        ema: Annotated[float, Bounds(gt=0, lt=1)] | None = None

    Training.from_dict({"batch": 64}, changes=["ema=0.9"])

Lists become tuples, keys that are numbers as text become numbers; everything else must have its type already.
"""

import contextlib
import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from veca.errors import ArgumentError, VecaError
from veca.utils.text import did_you_mean, quoted

_TYPE_NAMES = {int: "an integer", bool: "true or false", str: "text"}


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


Positive = Annotated[int, Bounds(ge=1)]
"""An integer from 1."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings classes. `section` is the key that instances have in the settings above them, for messages."""

    section: ClassVar[str] = ""
    error: ClassVar[type[VecaError]] = ArgumentError
    retired: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, each with a sentence that says what to do instead; null, their default, is let pass."""

    @classmethod
    @functools.cache
    def _field_types(cls) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}

    def __post_init__(self) -> None:
        for name, kind in self._field_types().items():
            try:
                value = _fit(kind, getattr(self, name), name)
            except _MisfitError as misfit:
                key, value, rule = misfit.args
                self.require(key, False, rule, value)
            object.__setattr__(self, name, value)  # as dataclasses do it: the class is frozen

    def require(self, name: str, holds: bool, rule: str, value: object = ...) -> None:
        """Raise an error that names the field, its value and the rule, unless it holds."""
        if not holds:
            shown = quoted(getattr(self, name) if value is ... else value)
            raise self.error(f"{_in_section(self, name)}={shown}: must be {rule}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], changes: Sequence[str] = ()) -> Self:
        """Build from plain data, as YAML or JSON give it. `changes` are `key=value` as in `--set schedule.peak=2e-4`.

        The value of a change is YAML; dots lead into sections.
        """
        if not isinstance(values, Mapping):
            raise cls.error(f"{cls.section or 'settings'}={quoted(values)}: must be keys with values")
        values = {key: value for key, value in values.items() if not (key in cls.retired and value is None)}
        for change in changes:
            _apply_change(values, change, cls.error)
        known = cls._field_types()
        for key in values:
            if key in cls.retired:
                raise cls.error(f"{_in_section(cls, key)}: {cls.retired[key]}")
            if key not in known:
                unknown = f"unknown key {quoted(_in_section(cls, key))}{did_you_mean(key, known)}"
                raise cls.error(f"{unknown}. Known: {', '.join(known)}")
        required = (f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING)
        if missing := [_in_section(cls, name) for name in required if name not in values]:
            raise cls.error(f"{', '.join(missing)}: missing, and there is no default. Set it")
        return cls(**values)

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


def _in_section(settings: Settings | type[Settings], key: object) -> str:
    return f"{settings.section}.{key}" if settings.section else str(key)


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


class _MisfitError(VecaError):
    """A value that does not fit its type: the key, the value and the rule."""


def _fit(kind: Any, value: Any, key: str) -> Any:
    """Return the value as the annotated type `kind` has it; raise _MisfitError where it is none."""

    def require(holds: bool, rule: str) -> None:
        if not holds:
            raise _MisfitError(key, value, rule)

    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _fit(arguments[0], value, key)
        require(arguments[1].allow(value), str(arguments[1]))
    elif origin in (Union, types.UnionType):
        rules = ["null"] * (type(None) in arguments)
        if value is None and rules:
            return None
        for choice in (choice for choice in arguments if choice is not type(None)):
            try:
                return _fit(choice, value, key)
            except _MisfitError as misfit:
                where, _, rule = misfit.args
                if where != key:  # within the value, which has this kind otherwise
                    raise
                rules.append(rule)
        require(False, ", or ".join(rules))
    elif origin is Literal:
        require(value in arguments, " or ".join(map(repr, arguments)))
    elif origin is tuple:
        items = [value] if isinstance(value, str) and arguments[0] is str else value
        require(isinstance(items, list | tuple), "a list")
        return tuple(_fit(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(items))
    elif origin is dict:
        require(isinstance(value, Mapping), "keys with values")
        # In `--set budgets.8=2`, and in JSON, keys that are numbers are text.
        numeric = arguments[0] is int
        pairs = [(int(k) if numeric and isinstance(k, str) and k.isdecimal() else k, v) for k, v in value.items()]
        return {_fit(arguments[0], k, f"{key}.{k}"): _fit(arguments[1], v, f"{key}.{k}") for k, v in pairs}
    elif kind is float:
        if isinstance(value, str):  # YAML reads 4e-4 as text: it wants 4.0e-4
            with contextlib.suppress(ValueError):
                value = float(value)
        require(type(value) in (int, float) and abs(value) <= sys.float_info.max, "a finite number")
    elif isinstance(kind, type) and issubclass(kind, Settings):
        return value if isinstance(value, kind) else kind.from_dict(value)
    elif kind is not Any:
        require(type(value) is kind, _TYPE_NAMES[kind])
        require(kind is not int or -(2**63) <= value < 2**63, "an integer of 64 bits")
    return value
