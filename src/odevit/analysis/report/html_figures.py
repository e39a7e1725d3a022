"""Figures as self-contained HTML: matplotlib to themed SVG, paths in 3-D to a canvas, frames to a GIF."""

import base64
import io
import json
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from odevit.analysis import HtmlFigure
from odevit.analysis.report.style import CSS_VARIABLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

MANY_POINTS = 1500  # an artist with more is drawn as pixels: as SVG it would take about 100 bytes a point
LARGE_PIXELS = 40_000  # base64 characters from which an embedded picture is worth packing as WebP
SCREEN_PIXELS_PER_POINT = 1.6  # 9 pt text becomes 14.4 px in a wide window
LEAST_PIXELS_PER_POINT = 0.8  # below this the text could not be read: the figure scrolls instead


def svg(figure: "Figure", label: str, prefix: str) -> str:
    """A matplotlib figure as inline SVG: transparent, real text, style.py's colours as CSS variables.

    `label` is read out by screen readers; `prefix` makes the ids unique in the page.
    """
    import matplotlib as mpl

    _rasterize_many_points(figure)
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=180, metadata=metadata)
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r"((?:fill|stroke): ?)(#[0-9a-f]{6})", _themed, body)
    body = re.sub(r"'DejaVu Sans'[^;\"]*|(?<=px )sans-serif", "var(--sans)", body)
    body = re.sub(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", _packed, body)
    width = figure.get_size_inches()[0] * 72
    size = f"max-width:{width * SCREEN_PIXELS_PER_POINT:.0f}px;min-width:{width * LEAST_PIXELS_PER_POINT:.0f}px"
    body = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", body, count=1)
    body = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", body, count=1)
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(label)}" style="{size}"', 1)


def _rasterize_many_points(figure: "Figure") -> None:
    from matplotlib.collections import Collection, QuadMesh
    from matplotlib.lines import Line2D

    for artist in figure.findobj():
        if isinstance(artist, QuadMesh):
            artist.set_rasterized(True)
        elif isinstance(artist, Line2D):
            artist.set_rasterized(np.size(artist.get_xdata()) > MANY_POINTS)
        elif isinstance(artist, Collection):
            vertices = [len(np.asarray(path.vertices)) for path in artist.get_paths()]
            artist.set_rasterized(max(sum(vertices), len(np.asarray(artist.get_offsets()))) > MANY_POINTS)


def _themed(match: re.Match[str]) -> str:
    variable = CSS_VARIABLES.get(match[2])
    return match[0] if variable is None else f"{match[1]}var({variable})"


def _packed(match: re.Match[str]) -> str:
    if len(match[1]) < LARGE_PIXELS:
        return match[0]
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(match[1]))).save(buffer, "WEBP", quality=88)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/webp;base64,{data}" if len(data) < len(match[1]) else match[0]


def paths3d(
    paths: Sequence[dict[str, Any]], height: int = 420, *, axes: Sequence[str] = ("PC 1", "PC 2", "PC 3")
) -> HtmlFigure:
    """Paths in three dimensions that the reader can turn. The viewer is templates/paths3d.js.

    Each path: points (m, 3), label, and optionally color_index (into the palette) and dashed. Paths with the same label
    share one entry of the legend. A ring marks the start, a dot the end; a path of one point is a dot.
    """
    data = []
    for path in paths:
        points = np.asarray(path["points"], dtype=float)
        if points.ndim != 2 or points.shape[1] != 3 or not len(points):
            raise ValueError(f"points of a path must have shape (m, 3) with m ≥ 1, got {points.shape}")
        if not np.isfinite(points).all():
            raise ValueError(f"the points of path {path['label']!r} are not all finite: leave that path out")
        rounded = [[float(f"{value:.4g}") for value in point] for point in points.tolist()]
        color, dashed = int(path.get("color_index", 0)) % 10, bool(path.get("dashed", False))
        data.append({"points": rounded, "label": str(path["label"]), "color": color, "dashed": dashed})
    if not data:
        raise ValueError("paths3d needs at least one path, got none")
    content = json.dumps({"paths": data, "axes": list(axes)}, separators=(",", ":")).replace("<", "\\u003c")
    return HtmlFigure(
        f'<div class="paths3d"><canvas style="height:min({height}px,90vw)" tabindex="0" role="img" '
        'aria-label="Paths in three dimensions; turn with the arrow keys"></canvas>'
        '<div class="legend"></div><p class="hint">Drag to turn. Press a name to hide or show it. '
        "A ring marks the start of a path, a dot its end.</p>"
        f'<script type="application/json">{content}</script></div>'
    )


def animation(frames: Sequence[Any], fps: float = 6, *, label: str = "Animation") -> HtmlFigure:
    """Frames as an inline GIF that repeats, resting on the last frame; readers who ask for less motion see that one.

    A frame is a PIL image or an array, (H, W) or (H, W, 3), uint8 or float in 0…1.
    """
    if not len(frames):
        raise ValueError("an animation needs at least one frame, got none")
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    pictures = [_picture(frame) for frame in frames]
    if len({picture.size for picture in pictures}) > 1:
        raise ValueError(f"all frames must have one size, got {sorted({picture.size for picture in pictures})}")
    moving, still = io.BytesIO(), io.BytesIO()
    durations = [round(1000 / fps)] * (len(pictures) - 1) + [1200]
    first, *rest = _one_palette(pictures)
    first.save(moving, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)
    pictures[-1].save(still, "WEBP", quality=88)
    width, height = pictures[0].size
    return HtmlFigure(
        f'<picture class="animation"><source media="(prefers-reduced-motion: reduce)" srcset="{_uri(still, "webp")}">'
        f'<img src="{_uri(moving, "gif")}" alt="{escape(label)}" width="{width}" height="{height}"></picture>'
    )


def _picture(frame: Any) -> "Image":
    from PIL import Image

    if isinstance(frame, Image.Image):
        return frame.convert("RGB")
    array = np.asarray(frame)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ValueError(f"a frame must have shape (H, W) or (H, W, 3), got {array.shape}")
    if array.dtype != np.uint8:
        array = (np.clip(array, 0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(array).convert("RGB")


def _one_palette(pictures: Sequence["Image"]) -> list["Image"]:
    """The pictures in 256 colours chosen for all together, so that nothing flickers from frame to frame."""
    from PIL import Image

    width, height = pictures[0].size
    column = Image.new("RGB", (width, height * len(pictures)))
    for index, picture in enumerate(pictures):
        column.paste(picture, (0, index * height))
    palette = column.quantize(256, Image.Quantize.FASTOCTREE)  # 20 times faster than the default, and nearer
    return [picture.quantize(palette=palette) for picture in pictures]


def _uri(buffer: io.BytesIO, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
