"""Open, check, resize and normalise images: the one place where image files become tensors.

    file, bytes, stream → open_image → upright RGB image → fit_image → sides multiples of 16
                        → to_tensor → uint8 (3, H, W) → normalize → float32, ready for the model

`load_image` does all of it. Every problem with an image raises `ImageError`, the one class to catch. Files are not
trusted: only a fixed list of formats is decoded, sizes are checked from the header before anything is decoded, and a
truncated file is refused instead of being filled up with grey.

Colour profiles (ICC) are ignored: the values in the file are taken to be sRGB.
"""

from veca.images.decode import MAX_PIXELS, ImageError, ImageTooLargeError, Source
from veca.images.formats import EXTENSIONS
from veca.images.load import MEAN, STD, Fit, fit_image, load_image, normalize, open_image, open_values, to_tensor
from veca.images.pack import pack
from veca.images.resize import PATCH, native_sizes, pad_to_multiple, resample, resize_to_multiple
from veca.inputs import nearest_sizes

__all__ = ["EXTENSIONS", "MAX_PIXELS", "MEAN", "PATCH", "STD", "Fit", "ImageError", "ImageTooLargeError", "Source"]
__all__ += [
    "fit_image",
    "load_image",
    "native_sizes",
    "nearest_sizes",
    "normalize",
    "open_image",
    "open_values",
    "pack",
]
__all__ += ["pack", "pad_to_multiple", "resample", "resize_to_multiple", "to_tensor"]
