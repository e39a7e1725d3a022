"""Every kind of image file gives the right pixels or a clear error."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from odevit.data import decode
from odevit.data.decode import CorruptImageError, Frame, find_images, read_image, read_pixels


def scene(width=6, height=4):
    """Left half red, right half blue: its orientation can be seen."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def spoilt(data):
    """Bytes in the middle turned round."""
    middle = len(data) // 2
    return data[:middle] + bytes(255 - value for value in data[middle : middle + 20]) + data[middle + 20 :]


def ramp16():
    return np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        (encoded(scene()), 0),
        (encoded(scene().convert("P", palette=Image.Palette.ADAPTIVE)), 0),
        (encoded(scene().convert("RGBA")), 0),
        (encoded(scene(), "BMP"), 0),
        (encoded(scene(), "WEBP", lossless=True), 0),
        (encoded(scene(), "JPEG", quality=100, subsampling=0), 8),
        (encoded(scene().convert("CMYK"), "JPEG", quality=100, subsampling=0), 8),
        (encoded(scene(), "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), "green")]), 0),
        (encoded(scene(), "TIFF", save_all=True, append_images=[Image.new("RGB", (6, 4), "green")]), 0),
    ],
    ids=["png", "palette", "alpha", "bmp", "webp", "jpeg", "cmyk", "animated", "pages"],
)
def test_colours_survive_every_kind_of_file(data, tolerance):
    expected = np.asarray(scene()).transpose(2, 0, 1).astype(int)
    assert np.abs(read_pixels(data, 3, None).astype(int) - expected).max() <= tolerance
    assert read_pixels(data, 1, Frame.middle(4)).shape == (1, 4, 4)


def test_palettes_with_transparency_keep_their_colours():
    image = scene().convert("P", palette=Image.Palette.ADAPTIVE)
    pixels = read_pixels(encoded(image, transparency=0), 3, None)
    assert np.array_equal(pixels, np.asarray(scene()).transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_are_scaled_not_cut_off(channels):
    pixels = read_pixels(encoded(Image.fromarray(ramp16())), channels, None)
    assert np.array_equal(pixels[0], np.round(ramp16() / 257).astype(np.uint8))
    tiff = read_pixels(encoded(Image.fromarray(ramp16()), "TIFF"), channels, None)
    assert np.array_equal(tiff, pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_rotation_is_applied(orientation):
    steps = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = scene().transpose(steps[orientation]) if orientation in steps else scene()
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, exif=exif)
    assert np.array_equal(read_pixels(data, 3, None), np.asarray(scene()).transpose(2, 0, 1))


def test_damaged_exif_beside_good_pixels_is_ignored():
    data = encoded(scene(), exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert read_pixels(data, 3, None).shape == (3, 4, 6)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 7)])
def test_every_shape_becomes_a_square(size):
    pixels = read_pixels(encoded(Image.new("RGB", size, (10, 200, 30))), 3, Frame.middle(32))
    assert pixels.shape == (3, 32, 32)
    assert (pixels == np.array([10, 200, 30], np.uint8)[:, None, None]).all()


def test_the_square_is_cut_from_the_centre():
    image = Image.new("L", (300, 4), 0)
    image.paste(255, (140, 0, 160, 4))
    assert (read_pixels(encoded(image), 1, Frame.middle(4)) == 255).all()


@pytest.mark.slow
def test_a_hundred_megapixels_are_read():
    data = encoded(Image.new("1", (10_000, 10_000), 1), "TIFF", compression="group4")
    with pytest.warns(Image.DecompressionBombWarning):
        assert (read_pixels(data, 1, Frame.middle(8)) == 255).all()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [13_000, 60_000])
def test_decompression_bombs_are_refused_from_their_header(side):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
    with pytest.raises(CorruptImageError, match=r"bomb\.png \(.*pixels"):
        read_pixels(bomb, 3, Frame.middle(8), "bomb.png")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(scene(100, 100))[:120], "truncated"),
        (spoilt(encoded(scene(100, 100), "GIF")), "data stream"),
        (b"", "not an image of a known kind"),
        (b"hello", "not an image of a known kind: PNG, JPEG"),
        (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "8 or 16 bits"),
        (encoded(Image.fromarray(np.zeros((4, 4), np.int32)), "TIFF"), "8 or 16 bits"),
    ],
    ids=["truncated", "corrupt", "empty", "text", "float", "32 bits"],
)
def test_what_cannot_be_read_is_named_with_its_reason(data, reason, tmp_path):
    file = tmp_path / "odd.png"
    file.write_bytes(data)
    with pytest.raises(CorruptImageError, match=rf"odd\.png \(.*{reason}"):
        read_image(str(file), 3, Frame.middle(8))


def test_a_model_of_five_channels_cannot_see_pictures():
    with pytest.raises(CorruptImageError, match="1 or 3 channels, the model takes 5"):
        read_pixels(encoded(scene()), 5, Frame.middle(8))


def test_files_folders_globs_and_standard_input_are_found(tmp_path, monkeypatch):
    for name in ("b.png", "sub/a.JPG", "sub/.hidden.png", "notes.txt", "odd[1].png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(scene()))

    def found(*names):
        return [str(name).replace(f"{tmp_path}/", "") for name in find_images(map(str, names))]

    assert found(tmp_path) == ["b.png", "odd[1].png", "sub/a.JPG"]
    assert found(tmp_path / "*.png", tmp_path / "odd[1].png", "-") == ["b.png", "odd[1].png", "odd[1].png", "-"]
    assert found(tmp_path / "**/*.JPG", tmp_path / "gone.png") == ["sub/a.JPG", "gone.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no images \(known kinds: .bmp"):
        found(tmp_path / "empty")
    with pytest.raises(CorruptImageError, match="no such file"):
        read_image(str(tmp_path / "gone.png"), 3, Frame.middle(8))
    monkeypatch.setattr(decode.sys, "stdin", type("Input", (), {"buffer": io.BytesIO(encoded(scene()))}))
    assert read_image("-", 3, Frame.middle(4)).shape == (3, 4, 4)
