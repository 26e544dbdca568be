"""A request's images become upright RGB, or are refused by name, the large ones by their header alone."""

from __future__ import annotations

import struct
import time
import zlib

import numpy as np
import pytest
from media_files import image_file, pixels
from PIL import Image

from tritone.errors import InvalidArgument
from tritone.media.images import MAX_PIXELS, MAX_SCANS, decode_picture


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        decode_picture("here", data)
    return caught.value.message


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG file of that size, whose pixels are missing."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


PIXELS = struct.pack(">I", 1000) + b"IDAT"
"""The beginning of what follows the header."""


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (3, 2), (640, 480)])
def test_pixels_are_kept(size: tuple[int, int]) -> None:
    given = pixels(*size)
    for data in (image_file(given), image_file(given, "WEBP", lossless=True)):
        assert np.array_equal(decode_picture("here", data).pixels, given)


def test_jpeg_is_read() -> None:
    grey = np.full((40, 60, 3), 90, np.uint8)
    found = decode_picture("here", image_file(grey, "JPEG", quality=95)).pixels
    assert found.shape == (40, 60, 3) and np.abs(found.astype(int) - 90).max() <= 2


def test_a_camera_that_was_turned() -> None:
    image = Image.fromarray(pixels(4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned right by 90 degrees
    found = decode_picture("here", image_file(image, exif=exif)).pixels
    assert np.array_equal(found, np.rot90(pixels(4, 2), k=-1))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (2, 2), 70), (70, 70, 70)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 255)), (255, 0, 0)),
        (Image.new("LA", (2, 2), (0, 51)), (204, 204, 204)),
        (Image.new("RGB", (2, 2), (0, 0, 255)).quantize(2), (0, 0, 255)),
        (Image.fromarray(np.full((2, 2), 0x8000, np.uint16)), (128, 128, 128)),
    ],
    ids=["grey", "one bit", "transparent", "opaque", "grey with alpha", "palette", "16 bits"],
)
def test_other_kinds_of_pixels_become_rgb(image: Image.Image, expected: tuple[int, int, int]) -> None:
    assert decode_picture("here", image_file(image)).pixels[0, 0].tolist() == list(expected)


def test_of_an_animation_the_first_frame() -> None:
    first, second = Image.new("RGB", (3, 3), (9, 9, 9)), Image.new("RGB", (3, 3), (200, 0, 0))
    data = image_file(first, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert decode_picture("here", data).pixels[0, 0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("size", [(10_000, 10_000), (MAX_PIXELS + 1, 1), (2**31 - 1, 2**31 - 1), (60_000, 60_000)])
def test_images_that_are_too_large_are_refused_from_their_header(size: tuple[int, int]) -> None:
    begun = time.process_time()
    width, height = size
    expected = f"here: '{width} x {height} pixels' is not allowed; allowed: at most {MAX_PIXELS} pixels"
    assert refusal(png_header(width, height) + PIXELS) == expected
    assert time.process_time() - begun < 0.2


def test_a_bomb_that_packs_well_is_refused_before_it_is_unpacked() -> None:
    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + 3 * 10_000)) for _ in range(200)) + rows.flush()
    body = b"IDAT" + packed
    data = png_header(10_000, 10_000) + struct.pack(">I", len(packed)) + body + struct.pack(">I", zlib.crc32(body))
    assert refusal(data).startswith("here: '10000 x 10000 pixels' is not allowed")


def test_a_jpeg_of_endless_scans() -> None:
    data = image_file(pixels(16, 16), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scan, end = data[last:-2], data[-2:]
    assert decode_picture("here", data).pixels.shape == (16, 16, 3)
    assert refusal(data[:-2] + scan * MAX_SCANS + end).endswith(f"at most {MAX_SCANS} scans")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "here: '0 bytes' is not allowed; allowed: the bytes of a PNG, JPEG or WebP image"),
        (b"plain text", "here: b'plain text' is not allowed"),
        (image_file(pixels(4, 4), "GIF"), "here: b'GIF87a"),
        (image_file(pixels(4, 4), "BMP"), "here: b'BM"),
        (b"%PDF-1.4", "here: b'%PDF"),
        (b"\x89PNG\r\n\x1a\n", "here: "),
        (image_file(pixels(64, 64))[:-300], "here: 'OSError"),
        (image_file(pixels(64, 64), "JPEG")[:-300], "here: 'OSError"),
        (image_file(pixels(64, 64), "WEBP")[:-300], "here: "),
        (image_file(pixels(201, 1)), "here: '201 x 1 pixels' is not allowed; allowed: a longer side of at most 200 times"),
    ],
)
def test_wrong_files_are_named(data: bytes, reason: str) -> None:
    assert refusal(data).startswith(reason)


def test_damaged_files_are_refusals_never_crashes() -> None:
    chance = np.random.default_rng(5)
    files = [image_file(pixels(20, 10), kind) for kind in ("PNG", "JPEG", "WEBP")]
    for number in range(300):
        data = bytearray(files[number % 3])
        for place in chance.integers(0, min(len(data), 300), 4):
            data[place] = chance.integers(0, 256)
        try:
            found = decode_picture("here", bytes(data)).pixels
        except InvalidArgument as error:
            assert error.message.startswith("here")
        else:
            assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
