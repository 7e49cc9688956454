"""What the API takes and gives, as its description tells it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Path, Query
from pydantic import BaseModel, Field

from veca.web.explorer import SIZES, Setting

SAFETENSORS = "application/vnd.safetensors"
ANY = "application/octet-stream"
_ID = "^([a-z]{1,32}|[0-9a-f]{32})$"


class Problem(BaseModel):
    problem: str = Field(description="What is wrong, and what to do about it, for people.")


class ModelAbout(BaseModel):
    name: str
    random: bool = Field(description="Whether its weights are random, because none ship for it.")
    origin: str = Field(description="Where its weights come from, in a phrase; empty where that is not known.")
    layers: int
    width: int
    budgets: list[int]
    parameters: int


class Sample(BaseModel):
    id: str
    title: str


class About(BaseModel):
    version: str
    device: str
    models: list[ModelAbout]
    sizes: list[int] = Field(description="Short sides in pixels.")
    samples: list[Sample]
    heat: list[str] = Field(description="The colour map of the maps, evenly spaced, from least to most.")
    most_bytes: int = Field(description="Of an upload.")
    most_pixels: int


class PictureAbout(BaseModel):
    id: str
    width: int
    height: int
    cut: bool = Field(description="Whether its ends were cut off, because it was longer than twice its width.")


class Counted(BaseModel):
    tokens: int
    gflops: float


class Counts(BaseModel):
    veca: Counted
    dense: Counted = Field(description="The DINOv3-shaped dense ViT of the same size.")


class Measured(BaseModel):
    seconds: float
    mebibytes: float = Field(description="The most that is held at once, above the weights.")


class Measures(BaseModel):
    veca: Measured
    dense: Measured


def _setting(
    picture: Annotated[str, Query(pattern=_ID, description="Its id.")],
    model: Annotated[str, Query(max_length=256, description="One of those in /api/about.")],
    cores: Annotated[int, Query(ge=1, le=256, description="The budget: one the model was trained at.")],
    size: Annotated[int, Query(ge=16, le=SIZES[-1], description="The short side in pixels, as in /api/about.")],
) -> Setting:
    return Setting(picture, model, cores, size)


Asked = Annotated[Setting, Depends(_setting)]
Id = Annotated[str, Path(pattern=_ID, description="A sample's name, or what an upload gave.")]
Side = Annotated[int, Query(ge=16, le=1024, description="Of the long side, at most.")]
Layer = Annotated[int, Query(ge=1, le=1024, description="Counted from 1.")]
Form = Annotated[Literal["npz", "safetensors"], Query(alias="format")]
Pane = Annotated[
    str | None,
    Header(
        alias="X-Veca-Pane",
        pattern="^[0-9A-Za-z-]{1,64}$",
        description="Whoever asks: a new question of the same pane withdraws its last one.",
    ),
]

_PROBLEMS = {
    401: "The token is missing or wrong.",
    403: "The request comes from another site.",
    404: "There is no such picture, any more or ever.",
    408: "The picture did not arrive in time.",
    409: "The same pane asked for something else meanwhile.",
    413: "The picture has too many bytes or pixels.",
    415: "The picture cannot be read.",
    421: "The server does not answer under this name.",
    422: "A parameter is not what it must be, or the model gives nothing that can be shown.",
    503: "Too much is asked at once; try again after the seconds in Retry-After.",
}


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The answers to what goes wrong: `codes`, and those that every operation has."""
    return {code: {"model": Problem, "description": _PROBLEMS[code]} for code in (401, 403, 421, *codes, 503)}


def binary(kind: str, description: str, *codes: int) -> dict[int | str, dict[str, Any]]:
    """The same for an operation that answers with bytes."""
    content = {kind: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"content": content, "description": description}, **problems(*codes)}
