"""How figures look: one palette and one matplotlib style, shared by every analysis and by the report.

    from odevit.analysis.report.style import figure_style, subplots
    with figure_style():                      # keep it open while drawing: colours and fonts are read then
        figure, axes = subplots(1, 2, width=7, height=3)

`html_figures.py` writes figures as SVG and turns every colour named here into a CSS variable, so that they follow the
reader's light or dark theme. Use these names (or the default cycle) instead of other colours where you can.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ten colours told apart with the common colour-vision deficiencies: Petroff, "Accessible Color Sequences for Data
# Visualization" (arXiv 2107.02270), in the order given there.
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
INK = "#1d1f23"  # text and marks that must stand out
MUTED = "#62676e"  # axes, ticks, reference lines
RULE = "#dcd9d2"  # grid lines
PAPER = "#fdfcfa"  # the page: for edges around markers

# colour -> CSS variable in the report
CSS_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper", "#000000": "--ink"} | {
    color: f"--c{index}" for index, color in enumerate(PALETTE)
}


def color(index: int) -> str:
    """The palette's colour for series or class `index`; starts again after ten."""
    return PALETTE[index % len(PALETTE)]


def _settings() -> Any:
    from cycler import cycler

    return {
        "font.size": 9,
        "text.color": INK,
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.7,
        "axes.labelcolor": INK,
        "axes.labelsize": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.titlepad": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": RULE,
        "grid.linewidth": 0.7,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "xtick.minor.width": 0.5,
        "ytick.minor.width": 0.5,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.5,
        "lines.markersize": 4.5,
        "image.cmap": "viridis",
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw inside this context, so that every figure of the report looks alike."""
    import matplotlib as mpl

    with mpl.rc_context(_settings()):
        yield


def subplots(
    rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 3.1, **kwargs: Any
) -> tuple["Figure", Any]:
    """A figure of `width` × `height` inches and its axes, as `plt.subplots` but without pyplot's global state.

    Up to 6 inches fit a phone; wider figures scroll sideways inside their frame there, so put the message on the left.
    Prefer "λ₁" to "$\\lambda_1$": text is set in the reader's own font, which fits mathtext's spacing less well.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **kwargs)


def image_axes(axes: Any) -> None:
    """Strip ticks, spines and grid from axes that show a picture."""
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
