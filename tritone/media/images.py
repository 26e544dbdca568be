"""A request's images: PNG, JPEG or WebP bytes, checked by their header before a pixel is decoded, as upright RGB."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from tritone.errors import bad

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 50_000_000
MAX_RATIO = 200
"""Longer side over shorter; the image processors of the Qwen models refuse more."""
MAX_SCANS = 64
"""Of a progressive JPEG, each of which passes over the whole picture: a small file could hold thousands. Usual are 10."""
Image.MAX_IMAGE_PIXELS = None
"""Pillow's own limits are higher, and the lower one of them only warns."""
ALLOWED = "the bytes of a PNG, JPEG or WebP image"


@dataclass(frozen=True)
class Picture:
    """One image, ready for the image processor. ``pixels`` uint8 [height, width, 3], RGB."""

    pixels: npt.NDArray[np.uint8]


def decode_picture(field: str, data: bytes) -> Picture:
    """The picture of a file's bytes, turned as its EXIF orientation says; transparency over white; of several frames the first.

    Raises ``InvalidArgument`` naming ``field``; an image that is too large is refused from its header.
    """
    if not data:
        raise bad(field, "0 bytes", ALLOWED)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise bad(field, data[:12], ALLOWED) from None
    except Exception as error:  # a damaged header; the decoders raise what they like
        raise bad(field, f"{type(error).__name__}: {error}", ALLOWED) from None
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise bad(field, f"{width} x {height} pixels", f"at most {MAX_PIXELS} pixels")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise bad(field, f"{width} x {height} pixels", f"a longer side of at most {MAX_RATIO} times the shorter")
        scans = data.count(b"\xff\xda") if image.format == "JPEG" else 0
        if scans > MAX_SCANS:
            raise bad(field, f"a JPEG of {scans} scans", f"at most {MAX_SCANS} scans")
        try:
            image.load()
            return Picture(np.asarray(_rgb(ImageOps.exif_transpose(image))))
        except Exception as error:  # damaged or cut
            raise bad(field, f"{type(error).__name__}: {error}", ALLOWED + " that is whole") from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey, which Pillow would clip at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
