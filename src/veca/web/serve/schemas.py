"""Types of the API of `veca serve`: query parameters, limits and JSON responses."""

# Annotations are evaluated, not strings: FastAPI reads those of the dependency `FeatureQuery` from its signature.

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from pydantic import BaseModel, Field

from veca.config import MlpWidth
from veca.images import PATCH, Fit
from veca.utils.settings import Bounds, Positive, Settings
from veca.web.schemas import OCTET_STREAM, SAFETENSORS

NPY = "application/x-npy"
JSON = "application/json"
MAX_REQUEST_IMAGES = 64
MAX_SIZE = 1024
MAX_CLASSES = 1000
MAX_SIMILAR = 100
FeatureFormat = Literal["json", "safetensors", "npy"]
MEDIA_FORMATS: dict[str, FeatureFormat] = {JSON: "json", SAFETENSORS: "safetensors", NPY: "npy"}
_KINDS = "cls|patches|cores"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """What a server computes unless a request asks for something else, and how many images it takes in."""

    # Of a fine-tuned classifier the defaults are the settings that it was validated with
    cores: Positive | Literal["auto"] | None = "auto"
    """Budget; None: all cores. By default 32, or all of a model that was not trained at it."""
    width: MlpWidth | None = None
    size: Annotated[int, Bounds(ge=PATCH, le=MAX_SIZE)] | None = None
    """By default 256."""
    fit: Fit | None = None
    """By default "crop"."""
    precision: Literal["float32", "bfloat16"] = "float32"
    max_batch: Positive = 16
    """Images per forward pass, of the first model's size; fewer of larger ones, with as many patches."""
    max_wait: Annotated[float, Bounds(ge=0, le=1000, unit="ms")] = 2.0
    """Milliseconds that an image waits for others before its batch begins."""
    queue: Annotated[int, Bounds(ge=4)] = 256
    """Images being worked on or waiting, of that size or smaller; larger ones take more places, by their pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("size", (self.size or 0) % PATCH == 0, f"a multiple of {PATCH}")

    @property
    def queue_per_client(self) -> int:
        """Places that one address may take."""
        return self.queue - self.queue // 4


class ServedModel(BaseModel):
    name: str
    origin: str = Field(description="Where its weights come from, in a phrase; empty where that is not known.")
    features: int = Field(description="Their width.")
    classes: int = Field(description="Of its classifier; 0: it has none.")
    budgets: list[int]
    widths: list[float] = Field(description="Shares of the MLP's channels that patches can use.")


class ServedIndex(BaseModel):
    model: str = Field(description="The one of those served that its features are of.")
    images: int
    regions: bool = Field(description="Whether it has features of regions: a box is compared with parts of images.")
    cores: int = Field(description="The budget of queries that name none; so is width.")
    width: float


class ServiceAbout(BaseModel):
    version: str
    device: str
    precision: str
    models: list[ServedModel] = Field(description="The first answers requests that name none.")
    index: ServedIndex | None = Field(description="What /similar searches; null: nothing.")
    cores: int = Field(description="The budget of requests that name none; so are width, size and fit.")
    width: float
    size: int
    fit: str
    max_size: int = Field(description=f"Of requests, in pixels; sizes are multiples of {PATCH}.")
    max_images: int = Field(description="Of a request.")
    max_bytes: int = Field(description="Of the body of a request.")
    max_pixels: int = Field(description="Of an image as it is sent.")
    max_batch: int = Field(description="Images of the default size per forward pass.")
    max_wait: float = Field(description="Milliseconds that an image waits for others.")
    queue: int = Field(description="Places for images of the default size.")


class ImageFeatures(BaseModel):
    grid: list[int] = Field(description="Rows and columns of the patches.")
    cls: list[float] | None = Field(None, description="The global feature.")
    cores: list[list[float]] | None = Field(None, description="Features of the active cores.")
    patches: list[list[float]] | None = Field(None, description="Features of the patches, row by row.")


class Embeddings(BaseModel):
    model: str
    cores: int
    width: float
    size: int
    fit: str
    images: list[ImageFeatures] = Field(description="In the order in which they were sent.")


class NamedProbability(BaseModel):
    name: str
    probability: float


class Predictions(BaseModel):
    model: str
    images: list[list[NamedProbability]] = Field(description="Classes of each image, the most probable first.")


class SimilarImage(BaseModel):
    path: str = Field(description="As the index has it.")
    score: float = Field(description="Cosine of the features: 1 is the same.")
    width: int
    height: int
    box: list[int] | None = Field(description="Of a query with a box: x, y, width and height of what is most like it.")
    missing: bool = Field(description="Whether the file is no longer where it was.")


class SimilarImages(BaseModel):
    model: str
    cores: int
    width: float
    images: list[list[SimilarImage]] = Field(description="For each image that was sent, the most similar first.")


class Health(BaseModel):
    ready: bool = Field(description="Whether it takes images. That it answers at all shows that it is live.")
    waiting: int = Field(description="Places taken in the queue.")


@dataclass(frozen=True)
class RequestedSetting:
    """How images are embedded; what is left out is as the server was started."""

    model: Annotated[str | None, Query(max_length=256, description="One of those in /about.")] = None
    cores: Annotated[int | None, Query(ge=1, le=256, description="The budget: one in /about.")] = None
    width: Annotated[float | None, Query(gt=0, le=1, description="The width: one in /about.")] = None
    size: Annotated[int | None, Query(ge=PATCH, le=MAX_SIZE, multiple_of=PATCH, description="Side in pixels.")] = None
    fit: Annotated[Fit | None, Query(description="How images are brought to this size.")] = None


ServeSettingQuery = Annotated[RequestedSetting, Depends()]
FeaturesQuery = Annotated[
    str,
    Query(
        pattern=f"^({_KINDS})(,({_KINDS})){{0,2}}$",
        description="Which features, separated by commas: cls, patches, cores.",
        examples=["cls", "cls,patches"],
    ),
]
FormatQuery = Annotated[FeatureFormat | None, Query(alias="format", description="In place of the Accept header.")]
TopQuery = Annotated[int, Query(ge=1, le=MAX_CLASSES, description="How many classes.", examples=[5])]


@dataclass(frozen=True)
class SimilarQuery:
    """What is asked of the index."""

    top: Annotated[int, Query(ge=1, le=MAX_SIMILAR, description="How many images to find.")] = 20
    box: Annotated[
        str | None,
        Query(
            pattern=r"^\d{1,9}(,\d{1,9}){3}$",
            description="Search by a region: X,Y,WIDTH,HEIGHT in pixels of the image, of which one is sent.",
            examples=["40,60,200,120"],
        ),
    ] = None
    cores: Annotated[int | None, Query(ge=1, le=256, description="The budget; left out: that of the index.")] = None
    width: Annotated[float | None, Query(gt=0, le=1, description="The width; left out: that of the index.")] = None


SimilarQueryDep = Annotated[SimilarQuery, Depends()]

_BINARY = {"type": "string", "format": "binary"}
_FILES = {
    "type": "object",
    "properties": {"images": {"type": "array", "items": _BINARY, "maxItems": MAX_REQUEST_IMAGES}},
}
IMAGES_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "One image as the body, or several as the files of a form, under any names.",
        "required": True,
        "content": {OCTET_STREAM: {"schema": _BINARY}, "multipart/form-data": {"schema": _FILES}},
    }
}
EMBED_CONTENT: dict[str, Any] = {
    JSON: {
        "example": {
            "model": "veca_tiny", "cores": 32, "width": 1, "size": 256, "fit": "crop",
            "images": [{"grid": [16, 16], "cls": [0.5, -1.25]}],
        }
    },
    SAFETENSORS: {"schema": _BINARY},
    NPY: {"schema": _BINARY},
}  # fmt: skip
