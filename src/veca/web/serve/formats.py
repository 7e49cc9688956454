"""Bodies of requests taken apart, and features written as JSON, safetensors or npy."""

import io
import json
from collections.abc import Sequence
from email.message import Message
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca.web.analysis import pack_tensors
from veca.web.jobs import RequestError
from veca.web.serve.schemas import MAX_REQUEST_IMAGES, MEDIA_FORMATS, FeatureFormat

MAX_BOUNDARY = 70
"""Characters, by RFC 2046."""


class ServedFeatures(NamedTuple):
    """Of one image, float32."""

    grid: tuple[int, int]
    cls: NDArray[np.float32]
    """(D)"""
    cores: NDArray[np.float32]
    """(C, D)"""
    patches: NDArray[np.float32]
    """(N, D); empty where only the global feature was asked for."""
    logits: NDArray[np.float32] | None
    """(K), where the model has classes."""


def split_body(body: bytes, content_type: str) -> list[bytes]:
    """The images of a request: the body itself, or the parts of a multipart form, whatever their names.

    >>> split_body(b"--x\\r\\n\\r\\none\\r\\n--x\\r\\n\\r\\ntwo\\r\\n--x--", "multipart/form-data; boundary=x")
    [b'one', b'two']
    """
    header = Message()
    header["content-type"] = content_type
    if header.get_content_maintype() != "multipart":
        if not body:
            raise RequestError(400, "The body is empty; send an image as the body, or several as a form.")
        return [body]
    boundary = (header.get_boundary() or "").encode("latin-1", "replace")
    # Of the parts, the first is what stands before the form, the last what stands behind it.
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_REQUEST_IMAGES + 2)
    if not 0 < len(boundary) <= MAX_BOUNDARY or len(parts) < 2:
        raise RequestError(400, "The form has no boundary between its parts; let the HTTP client write the form.")
    if len(parts) > MAX_REQUEST_IMAGES + 2:
        raise RequestError(413, f"The form has more than {MAX_REQUEST_IMAGES} images; send fewer at a time.")
    if not parts[-1].startswith(b"--"):
        raise RequestError(400, "The form does not end with its boundary; a part of it is missing.")
    images = []
    for number, part in enumerate(parts[1:-1], start=1):
        # The empty line ends the headers of a part, of which there may be none.
        _, end, content = part.partition(b"\r\n\r\n")
        if not end:
            raise RequestError(400, f"Part {number} of the form has no empty line between its headers and its content.")
        images.append(content)
    if not images:
        raise RequestError(400, "The form has no parts; send each image as a file of the form.")
    return images


def choose_format(named: FeatureFormat | None, accept: str) -> FeatureFormat:
    """The format that a query names, or else the Accept header.

    >>> choose_format(None, "*/*"), choose_format(None, "text/html;q=0.9, application/vnd.safetensors")
    ('json', 'safetensors')
    """
    if named is not None:
        return named
    ranges = []
    for each in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in each.split(";"))
        weights = [parameter.removeprefix("q=") for parameter in parameters if parameter.startswith("q=")]
        ranges.append((media_type, weights[0] if weights else "1"))
    # Weights are compared as text: 0.8 < 0.9 < 1.
    for media_type, weight in sorted(ranges, key=lambda pair: pair[1], reverse=True):
        if media_type in ("", "*/*", "application/*"):
            return "json"
        if media_type in MEDIA_FORMATS and weight.strip("0."):
            return MEDIA_FORMATS[media_type]
    raise RequestError(406, f"Features are sent as one of {', '.join(MEDIA_FORMATS)}; name one of them in Accept.")


def write_features(
    kinds: Sequence[str], found: Sequence[ServedFeatures], form: FeatureFormat, about: dict[str, Any]
) -> bytes:
    """Features of the images of a request, as the content of its response."""
    if form == "json":
        images = [
            {"grid": each.grid, **{kind: getattr(each, kind).tolist() for kind in kinds}} for each in found
        ]  # exact: every float32 is a float64, and Python writes all digits that tell it from its neighbours
        return json.dumps({**about, "images": images}, allow_nan=False).encode()
    arrays = {kind: _stack(kind, found) for kind in kinds}
    if form == "safetensors":
        return pack_tensors(arrays, about)
    file = io.BytesIO()
    np.save(file, next(iter(arrays.values())), allow_pickle=False)
    return file.getvalue()


def _stack(kind: str, found: Sequence[ServedFeatures]) -> NDArray[np.float32]:
    """Features of all images: cls (B, D), cores (B, C, D), patches (B, rows, columns, D)."""
    if kind != "patches":
        return np.stack([getattr(each, kind) for each in found])
    grids = sorted({each.grid for each in found})
    if len(grids) > 1:
        shown = ", ".join(f"{rows}×{columns}" for rows, columns in grids[:4])
        raise RequestError(
            422, f"The images have grids of {shown} patches, which make no array: ask for JSON, or for one at a time."
        )
    return np.stack([each.patches.reshape(*each.grid, -1) for each in found])
