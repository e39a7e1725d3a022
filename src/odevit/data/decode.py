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
from typing import Any, NamedTuple

import numpy as np

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # PIL tries these only: twice as fast as all 40
MAX_PIXELS = 150_000_000  # half a gigabyte of RGB; larger ones are refused before a pixel is decoded
LONGEST = 4  # sides of a longer image are cut to this ratio before resizing: the square at its centre is what is kept
BICUBIC = 3  # PIL's number of the filter
STANDARD_INPUT = "-"


class CorruptImageError(ValueError):
    """An image could not be decoded; the message names it."""


class Frame(NamedTuple):
    """How a picture of any shape becomes a square; the image processor of a saved model says the same to transformers.

    The shorter side (squash: each side) is resized to `resize`, then the centre of side `cut` is cut out.
    """

    resize: int
    cut: int
    squash: bool = False
    resample: int = BICUBIC

    @classmethod
    def middle(cls, size: int) -> "Frame":
        """Ours: the largest square in the middle, resized to `size`."""
        return cls(size, size)

    @property
    def plain(self) -> bool:
        """Square images are only resized, with our own filter: `prepare` can do that later, from the native size."""
        return self.resize == self.cut and self.resample == BICUBIC

    def scaled(self, cut: int) -> "Frame":
        """The same for a model that now takes images of side `cut`."""
        return self._replace(resize=round(self.resize * cut / self.cut), cut=cut)

    def apply(self, image: Any) -> Any:
        """A PIL image → the square."""
        size = (self.resize, self.resize)
        if not self.squash:
            image = _shortened(image)
            short = min(image.size)
            size = (self.resize * image.width // short, self.resize * image.height // short)  # as transformers rounds
        if image.size != size:
            image = image.resize(size, self.resample)
        if size == (self.cut, self.cut):
            return image
        left, top = (size[0] - self.cut) // 2, (size[1] - self.cut) // 2
        return image.crop((left, top, left + self.cut, top + self.cut))


def _shortened(image: Any) -> Any:
    """Without the ends of a very long image, which would be large after resizing and then be cut off."""
    wide, high = min(image.width, LONGEST * image.height), min(image.height, LONGEST * image.width)
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    return image if image.size == (wide, high) else image.crop((left, top, left + wide, top + high))


def open_image(file: str | Path | bytes) -> Any:
    """The PIL image, header read, pixels not."""
    from PIL import Image

    if not isinstance(file, bytes) and Path(file).exists() and not Path(file).is_file():
        raise ValueError("it is not a file")  # a pipe would be waited for
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=IMAGE_FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width}×{image.height} pixels are more than the {MAX_PIXELS // 10**6} million that are decoded; "
            "make the image smaller first"
        )
    return image


def to_pixels(image: Any, channels: int, frame: Frame | None) -> np.ndarray:
    """uint8 (c, H, W) of a PIL image; without a frame in its own size."""
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
    if frame is not None:
        image = frame.apply(image)
    pixels = np.array(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_pixels(file: str | Path | bytes, channels: int, frame: Frame | None, name: str | None = None) -> np.ndarray:
    """`to_pixels` of a file or of its bytes. Whatever fails is a CorruptImageError that names the file."""
    try:
        return to_pixels(open_image(file), channels, frame)
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


def read_image(name: str, channels: int, frame: Frame | None) -> np.ndarray:
    """uint8 (c, H, W) of a file, or of the bytes on standard input when the name is `-`."""
    if name == STANDARD_INPUT:
        return read_pixels(sys.stdin.buffer.read(), channels, frame, "standard input")
    return read_pixels(name, channels, frame)


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, KeyError, TypeError):  # damaged EXIF beside good pixels
        return image
