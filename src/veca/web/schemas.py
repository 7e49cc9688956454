"""Types of the HTTP API: query parameters, JSON responses and errors, as /openapi.json describes them."""

# Annotations are evaluated, not strings: FastAPI reads those of the dependency `ViewSetting` from its signature.

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Path, Query
from pydantic import BaseModel, Field

SAFETENSORS = "application/vnd.safetensors"
OCTET_STREAM = "application/octet-stream"
SHORT_SIDES = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Resolutions on offer: short sides in pixels."""
_ID = "^([a-z]{1,32}|[0-9a-f]{32})$"


ModelName = Annotated[str, Query(max_length=256, description="One of those in /api/about.")]
ShortSide = Annotated[int, Query(ge=16, le=SHORT_SIDES[-1], description="Short side in pixels, as in /api/about.")]


class ErrorResponse(BaseModel):
    problem: str = Field(description="What is wrong and what to do about it, for people.")


class ModelInfo(BaseModel):
    name: str
    random: bool = Field(description="Whether its weights are random, because there are no pretrained ones.")
    origin: str = Field(description="Where its weights come from, in a phrase; empty where that is not known.")
    layers: int
    width: int
    classes: int = Field(description="Of its classifier; 0: it has none.")
    budgets: list[int]
    widths: list[float] = Field(description="Shares of the MLP's channels that patches can use.")
    parameters: int


class SampleInfo(BaseModel):
    id: str
    title: str


class IndexInfo(BaseModel):
    model: str = Field(description="The one that its features are of.")
    images: int
    regions: bool = Field(description="Whether a box is compared with parts of images, or with whole ones.")


class About(BaseModel):
    version: str
    device: str
    models: list[ModelInfo]
    sizes: list[int] = Field(description="Short sides in pixels.")
    samples: list[SampleInfo]
    folder: list[SampleInfo] = Field(description="Images that the explorer was started with.")
    index: IndexInfo | None = Field(description="What /api/search searches; null: nothing.")
    default_size: int = Field(description="The one at which the page opens.")
    core_colours: list[str] = Field(description="The colour map of the cores, evenly spaced, from first to last.")
    heat: list[str] = Field(description="The colour map of the maps, evenly spaced, from least to most.")
    most_bytes: int = Field(description="Of an upload.")
    most_pixels: int


class ImageInfo(BaseModel):
    id: str
    width: int
    height: int
    cut: bool = Field(description="Whether its ends were cut off, because its long side was over twice its short side.")


class CountedCost(BaseModel):
    tokens: int
    gflops: float


class CountedCosts(BaseModel):
    veca: CountedCost
    dense: CountedCost = Field(description="The DINOv3-shaped dense ViT of the same size.")
    quality: float | None = Field(
        description="Of the full setting's, in the quality-cost table of the weights; null: it has no such row."
    )


class MeasuredCost(BaseModel):
    seconds: float
    mebibytes: float = Field(description="Peak memory of tensors, without the weights.")


class MeasuredCosts(BaseModel):
    veca: MeasuredCost
    dense: MeasuredCost | None = Field(description="The dense ViT of timm; null where timm is not installed.")


class ClassProbability(BaseModel):
    name: str
    probability: float


class Classes(BaseModel):
    classes: list[ClassProbability] = Field(description="The most probable first.")


class Neighbour(BaseModel):
    id: str
    title: str
    similarity: float = Field(description="Cosine of the global features.")


class Neighbours(BaseModel):
    neighbours: list[Neighbour] = Field(description="The nearest first, of the images embedded so far.")
    embedded: int
    total: int


class IndexMatch(BaseModel):
    id: str
    title: str
    similarity: float = Field(description="Cosine of the features.")
    box: tuple[float, float, float, float] | None = Field(
        description="Of a search with a box: the part that is most like it, x, y, width and height from 0 to 1."
    )
    readable: bool = Field(description="Whether the image is there and can be opened.")


class IndexMatches(BaseModel):
    matches: list[IndexMatch] = Field(description="The most similar first.")


class ScalingLine(BaseModel):
    cores: int | None = Field(description="The budget; null: the dense ViT of the same size.")
    width: float | None
    gflops: list[float] = Field(description="Of a square image of each size.")


class Scaling(BaseModel):
    sizes: list[int] = Field(description="Sides in pixels.")
    lines: list[ScalingLine]
    timed_sizes: list[int] = Field(description="Those that the page times.")
    max_seconds: float = Field(description="The page times no size that is expected to take longer.")


class ScalingTimes(BaseModel):
    seconds: list[float | None] = Field(description="Of each line; null: the dense ViT where timm is not installed.")


@dataclass(frozen=True)
class ViewSetting:
    """What to look at: an image, a model, a budget, a resolution and a width."""

    picture: Annotated[str, Query(pattern=_ID, description="The id of an image.")]
    model: ModelName
    cores: Annotated[int, Query(ge=1, le=256, description="The budget: one the model was trained at.")]
    size: ShortSide
    width: Annotated[float, Query(gt=0, le=1, description="The width: one the model was trained at.")] = 1.0


SettingQuery = Annotated[ViewSetting, Depends()]
PictureQuery = Annotated[str, Query(alias="picture", pattern=_ID, description="The id of an image.")]
ImageId = Annotated[str, Path(pattern=_ID, description="A sample's name, or the id an upload returned.")]
MaxSide = Annotated[int, Query(ge=16, le=1024, description="Maximum of the long side in pixels.")]
LayerNumber = Annotated[int, Query(ge=1, le=1024, description="Counted from 1.")]
NeighbourCount = Annotated[int, Query(ge=1, le=48, description="Maximum number of neighbours.")]
MatchCount = Annotated[int, Query(ge=1, le=100, description="Maximum number of images.")]
BoxQuery = Annotated[
    str | None,
    Query(
        pattern=r"^\d{1,5}(,\d{1,5}){3}$", description="Search by a region: X,Y,WIDTH,HEIGHT in pixels of the image."
    ),
]
QueryCores = Annotated[int, Query(alias="cores", ge=1, le=256, description="The budget: one the model was trained at.")]
QueryWidth = Annotated[float, Query(alias="width", gt=0, le=1, description="The width: one the model was trained at.")]
FileFormat = Annotated[Literal["npz", "safetensors"], Query(alias="format")]
_PANE = "Identifies a pane: its newest request cancels its earlier ones."
PaneId = Annotated[str | None, Header(alias="X-Veca-Pane", pattern="^[0-9A-Za-z-]{1,64}$", description=_PANE)]


def parse_box(text: str | None) -> tuple[int, int, int, int] | None:
    """The region of a query; None: there is none.

    >>> parse_box("40,60,200,120")
    (40, 60, 200, 120)
    """
    if text is None:
        return None
    x, y, width, height = map(int, text.split(","))
    return x, y, width, height


_ERRORS = {
    400: "The body is empty, or no form.",
    401: "The token is missing or wrong.",
    403: "The request comes from another site.",
    404: "There is no such image, or it was evicted.",
    406: "There is no such format of features.",
    408: "The image did not arrive in time.",
    409: "The same pane asked for something else meanwhile.",
    413: "The image has too many bytes or pixels.",
    415: "The image cannot be read.",
    421: "The server does not answer under this host name.",
    422: "A parameter is invalid, or the model's features are not finite.",
    503: "Too many requests; try again after the seconds in Retry-After.",
}


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of the errors `codes` and of those every operation has."""
    return {code: {"model": ErrorResponse, "description": _ERRORS[code]} for code in (401, 403, 421, *codes, 503)}


def binary_responses(media_type: str, description: str, *codes: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of an operation that returns bytes."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"content": content, "description": description}, **error_responses(*codes)}
