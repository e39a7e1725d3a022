"""One file or byte string → pixels, the same way for training, evaluation and prediction.

The camera's rotation (EXIF) is applied, of an animation the first frame is taken, grey of 16 bits is brought to 8, and
CMYK, palettes and transparency become RGB or grey. What has no fixed range (32-bit grey) and what is larger than
`MAX_PIXELS` is refused.
"""

import io
import sys
from collections.abc import Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # PIL tries these only: twice as fast as all 40
MAX_PIXELS = 150_000_000  # half a gigabyte of RGB; larger ones are refused before a pixel is decoded
LONGEST = 4  # sides of a longer image are cut to this ratio before resizing: the square at its centre is what is kept
STANDARD_INPUT = "-"


class CorruptImageError(ValueError):
    """An image could not be decoded; the message names it."""


def open_image(file: str | Path | bytes) -> Any:
    """The PIL image, header read, pixels not."""
    from PIL import Image

    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=IMAGE_FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width}×{image.height} pixels are more than the {MAX_PIXELS // 10**6} million that are decoded; "
            "make the image smaller first"
        )
    return image


def to_pixels(image: Any, channels: int, size: int | None) -> np.ndarray:
    """uint8 (c, H, W) of a PIL image; `size`: shorter side resized to it, then the centre cut out."""
    from PIL import Image

    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise ValueError(f"images have 1 or 3 channels, the model takes {channels}")
    image = _upright(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image, dtype=np.uint32) / 257).round().astype(np.uint8))  # 65535 -> 255
    if image.mode in ("I", "F"):
        raise ValueError("grey of 32 bits has no fixed range; save it with 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # PIL's advice; the colour under the transparency stays
    image = image if image.mode == mode else image.convert(mode)
    if size is not None:
        image = _resize_and_cut(image, size)
    pixels = np.array(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_pixels(file: str | Path | bytes, channels: int, size: int | None, name: str | None = None) -> np.ndarray:
    """`to_pixels` of a file or of its bytes. Whatever fails is a CorruptImageError that names the file."""
    try:
        return to_pixels(open_image(file), channels, size)
    except Exception as error:  # PIL raises many kinds on damaged files
        named = name or (str(file) if not isinstance(file, bytes) else "the image")
        raise CorruptImageError(f"{named} ({reason(error)})") from error


def reason(error: Exception) -> str:
    """Why an image could not be read, in words."""
    if type(error).__name__ == "UnidentifiedImageError":
        return f"not an image of a known kind: {', '.join(IMAGE_FORMATS)}"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return str(error) or type(error).__name__


def find_images(names: Iterable[str]) -> Iterator[str]:
    """Files, folders (all images below, sorted), globs and `-` (standard input) → names of single images, lazily.

    A name that matches nothing is handed on as it is, so that reading it says what is wrong.
    """
    for name in names:
        path = Path(name).expanduser()
        if name == STANDARD_INPUT or path.is_file():
            yield name if name == STANDARD_INPUT else str(path)
        elif path.is_dir():
            found = [
                file
                for file in sorted(path.rglob("*"))
                if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
            ]
            if not found:
                raise ValueError(f"{path} holds no images (known kinds: {', '.join(sorted(IMAGE_SUFFIXES))})")
            yield from map(str, found)
        elif has_magic(name) and (matches := sorted(glob(str(path), recursive=True))):
            yield from (match for match in matches if Path(match).is_file())
        else:
            yield str(path)


def read_image(name: str, channels: int, size: int | None) -> np.ndarray:
    """uint8 (c, H, W) of a file, or of the bytes on standard input when the name is `-`."""
    if name == STANDARD_INPUT:
        return read_pixels(sys.stdin.buffer.read(), channels, size, "standard input")
    return read_pixels(name, channels, size)


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, KeyError, TypeError):  # damaged EXIF beside good pixels
        return image


def _resize_and_cut(image: Any, size: int) -> Any:
    from PIL import Image

    if image.size == (size, size):
        return image
    width, height = image.size
    if max(width, height) > LONGEST * min(width, height):
        wide, high = min(width, LONGEST * height), min(height, LONGEST * width)
        left, top = (width - wide) // 2, (height - high) // 2
        image = image.crop((left, top, left + wide, top + high))
        width, height = image.size
    scale = size / min(width, height)
    wide, high = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    return image.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
