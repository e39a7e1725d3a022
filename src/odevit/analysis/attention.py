"""Attention: where does CLS look, and how does that change along the flow?

The map of step k is the CLS row of softmax(QKᵀ) at the state where the step starts. Only the columns of patches are
kept: CLS itself and the registers are left out, and the rest is divided by its sum, so that a map is a distribution
over the image. How much was left out is told as `on patches`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from odevit.analysis import Finding, HtmlFigure, Study, register_analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORMAP = "inferno"
FULL_SCALE = 0.995  # the quantile drawn in the brightest colour: one extreme patch does not darken all others
BRIGHTEST_AT_LEAST = 3  # times the uniform share 1/M: attention that is the same everywhere looks dark, not bright
TILE = 96  # pixels: small images are enlarged by a whole factor to at least this in the animation


class AttentionPath(NamedTuple):
    """CLS attention at the start of each of K steps."""

    times: list[float]  # K
    maps: Tensor  # (K, b, h, M), each a distribution over the patches
    on_patches: Tensor  # (K, b, h): the share of CLS' attention that the patches get


def cls_to_patches(attention: Tensor, num_patches: int) -> tuple[Tensor, Tensor]:
    """Attention (b, h, n, n) of [CLS | M patches | R registers] -> map (b, h, M), its sum before division (b, h).

    Row 0 is CLS as the query; columns 1 … M are the patches as keys. R = 0 is no special case.
    """
    row = attention[:, :, 0, 1 : 1 + num_patches]
    share = row.sum(dim=-1)
    return row / share[..., None].clamp_min(torch.finfo(row.dtype).tiny), share


@torch.no_grad()
def attention_over_time(
    model: Any, images: Tensor, num_steps: int | None = None, solver: str | None = None
) -> AttentionPath:
    """The CLS attention of images (b, c, H, W) at every step; one full map is held at a time."""
    config, base = model.config, model.odevit
    states = base.evolve(base.embed(images), num_steps, solver, save_at="steps").xs  # (K + 1, b, n, d)
    grid = config.time_grid(len(states) - 1)
    maps, shares = zip(
        *(
            cls_to_patches(base.fields[phase].attention_map(state), config.num_patches)
            for (phase, _), state in zip(grid.steps(), states[:-1], strict=True)
        ),
        strict=True,
    )
    return AttentionPath(grid.times()[:-1], torch.stack(maps), torch.stack(shares))


def effective_share(maps: Tensor) -> Tensor:
    """exp(entropy) / M of distributions (…, M): 1 when all patches get the same, 1/M when one gets everything."""
    return torch.special.entr(maps).sum(dim=-1).exp() / maps.shape[-1]


def to_pixels(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (…, M) of a square grid of patches -> (…, H, W), bilinear."""
    side = math.isqrt(maps.shape[-1])
    if side * side != maps.shape[-1]:
        raise ValueError(f"the patches must form a square grid, got {maps.shape[-1]} of them")
    flat = maps.reshape(-1, 1, side, side)
    return torch.nn.functional.interpolate(flat, size, mode="bilinear").reshape(*maps.shape[:-1], *size)


def displayed(image: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> np.ndarray:
    """A normalised image (c, H, W) as colours (H, W, 3) in 0…1; without a mean and std, 0.5 each. Gray becomes RGB."""
    neutral = [0.5] * image.shape[0]
    scale, shift = (torch.tensor(list(x or neutral)).view(-1, 1, 1) for x in (std, mean))
    colors = (image.cpu().float() * scale + shift).clamp(0, 1)
    colors = colors.expand(3, -1, -1) if colors.shape[0] == 1 else colors[:3]
    return colors.permute(1, 2, 0).numpy()


def overlay(colors: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Heat (H, W) in 0…1 over an image (H, W, 3) in 0…1, at the image's own size; stronger heat covers more."""
    from matplotlib import colormaps

    cover = (0.35 + 0.45 * heat)[..., None]
    return (1 - cover) * colors + cover * colormaps[COLORMAP](heat)[..., :3]


def heats(maps: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Maps (m, M) -> (m, H, W) in 0…1, all on one scale so that they can be compared with each other."""
    pixels = to_pixels(maps.float().cpu(), size)
    top = torch.quantile(pixels.flatten(), FULL_SCALE).clamp_min(BRIGHTEST_AT_LEAST / maps.shape[-1])
    return (pixels / top).clamp(0, 1).numpy()


@register_analysis("attention", summary="Where does the network look, and when?")
def run(study: Study) -> Iterator[Finding]:
    """Options: images (rows), columns (times shown), heads (most heads shown)."""
    options = study.settings("attention", images=4, columns=6, heads=6)
    chosen = study.spread(options["images"])
    images, config = study.images[chosen], study.model.config
    path = attention_over_time(study.model, images)
    study.progress("attention", 1, 2)
    teacher = _teacher_maps(study, images)
    colors = [displayed(image, config.image_mean, config.image_std) for image in images]
    names = [study.class_names[int(label)] for label in study.labels[chosen]]
    steps = torch.linspace(0, len(path.times) - 1, min(options["columns"], len(path.times))).round().long().tolist()
    rule = "Bright patches get more of CLS' attention; CLS itself and registers are left out."

    mean = path.maps.mean(dim=2)  # (K, b, M)
    rows = [mean[:, i] for i in range(len(images))]
    last = None if teacher is None else teacher.mean(dim=1)
    figure = grid_figure(rows, colors, names, path.times, steps, last)
    beside = ", the teacher's last block beside it" if teacher is not None else ""
    text = f"The mean over heads, from the first step to the last{beside}; one scale of colours per row. {rule}"
    values = {"times": path.times, "steps_shown": steps, **_numbers(path, teacher)}
    yield Finding("attention/over_time", values, "What CLS looks at", text, figure)

    count = min(options["heads"], path.maps.shape[2])
    heads = [path.maps[:, 0, head] for head in range(count)]
    last = None if teacher is None or teacher.shape[1] != path.maps.shape[2] else teacher[0, :count]
    figure = grid_figure(heads, colors[:1] * count, [f"head {h + 1}" for h in range(count)], path.times, steps, last)
    text = f"Every row is one head on the first image; rows that differ show that heads share the work. {rule}"
    yield Finding("attention/heads", {"heads_shown": count}, "Head by head", text, figure)

    moving = animate(rows, colors, path.times, float(config.horizon))
    text = f"The same maps step by step; the bar below is the time along the flow. {rule}"
    yield Finding("attention/animation", {"frames": len(path.times)}, "Attention in motion", text, moving)
    text = (
        "The share of patches that CLS really uses, exp(entropy) / number of patches: it falls when attention "
        "gathers on few patches. Thin lines are heads, the thick one is their mean."
    )
    focus = effective_share(path.maps).mean(dim=1)  # (K, h)
    value = {"mean": focus.mean(dim=1).tolist(), "heads": focus.T.tolist()}
    yield Finding("attention/focus", value, "How wide it looks", text, focus_figure(path.times, focus, teacher))
    study.progress("attention", 2, 2)


def _teacher_maps(study: Study, images: Tensor) -> Tensor | None:
    """CLS row of the teacher's last block as distributions (b, h, M), or None."""
    if study.teacher is None:
        return None
    row = study.teacher.trace(study.for_teacher(images), attention=True).attention
    return None if row is None else row / row.sum(dim=-1, keepdim=True)


def _numbers(path: AttentionPath, teacher: Tensor | None) -> dict[str, Any]:
    values: dict[str, Any] = {"on_patches": path.on_patches.mean(dim=(1, 2)).tolist()}
    if teacher is not None and teacher.shape[-1] == path.maps.shape[-1]:
        mine, theirs = path.maps[-1].mean(dim=1), teacher.mean(dim=1)  # (b, M)
        mine, theirs = (x - x.mean(dim=1, keepdim=True) for x in (mine, theirs))
        values["correlation_with_teacher"] = torch.cosine_similarity(mine, theirs, dim=1).mean().item()
    return values


def grid_figure(
    rows: Sequence[Tensor],
    colors: Sequence[np.ndarray],
    names: Sequence[str],
    times: Sequence[float],
    steps: Sequence[int],
    teacher: Tensor | None = None,
) -> "Figure":
    """One row per image: the image, its maps (K, M) at `steps`, and the teacher's map (rows, M)."""
    from odevit.analysis.report.style import MUTED, figure_style, image_axes, subplots

    columns = 1 + len(steps) + (teacher is not None)
    with figure_style():
        height = (7.4 / columns) * len(rows) + 0.35
        figure, panels = subplots(len(rows), columns, width=7.4, height=height, squeeze=False)
        figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02)
        for index, (maps, image) in enumerate(zip(rows, colors, strict=True)):
            shown = [image, *(overlay(image, heat) for heat in heats(maps, image.shape[:2])[list(steps)])]
            if teacher is not None:
                shown.append(overlay(image, heats(teacher[index : index + 1], image.shape[:2])[0]))
            for axes, picture in zip(panels[index], shown, strict=True):
                image_axes(axes)
                axes.imshow(picture, interpolation="nearest")
            panels[index][0].set_ylabel(names[index], fontsize=8)
        titles = ["image", *(f"t = {times[step]:.2g}" for step in steps), *(["teacher"] if teacher is not None else [])]
        for axes, title in zip(panels[0], titles, strict=True):
            axes.set_title(title, fontsize=8, loc="center", color=MUTED, pad=3)
    return figure


def animate(rows: Sequence[Tensor], colors: Sequence[np.ndarray], times: Sequence[float], horizon: float) -> HtmlFigure:
    """The images side by side, one frame per step, over a bar that shows the time. rows: maps (K, M) per image."""
    from odevit.analysis.report.html_figures import animation

    heat = [heats(maps, image.shape[:2]) for maps, image in zip(rows, colors, strict=True)]  # each (K, H, W)
    factor = max(1, math.ceil(TILE / colors[0].shape[0]))
    frames = []
    for step, time in enumerate(times):
        tiles = [overlay(image, maps[step]) for image, maps in zip(colors, heat, strict=True)]
        picture = np.concatenate([tile.repeat(factor, axis=0).repeat(factor, axis=1) for tile in tiles], axis=1)
        bar = np.full((6, picture.shape[1], 3), 0.85)
        bar[:, : max(1, round(picture.shape[1] * time / horizon))] = (0.25, 0.56, 0.85)
        frames.append(np.concatenate([picture, bar], axis=0))
    return animation(frames, label="Attention of CLS along the flow")


def focus_figure(times: Sequence[float], focus: Tensor, teacher: Tensor | None) -> "Figure":
    """Effective share of patches over time: heads (K, h), their mean, the teacher's last block (b, h, M)."""
    from odevit.analysis.report.style import MUTED, color, figure_style, subplots

    with figure_style():
        figure, axes = subplots(width=5.6, height=2.8)
        axes.plot(times, 100 * focus.cpu(), color=color(0), linewidth=0.8, alpha=0.5)
        axes.plot(times, 100 * focus.mean(dim=1).cpu(), "o-", color=color(0), linewidth=2.2, label="mean of heads")
        if teacher is not None:
            share = 100 * effective_share(teacher).mean().item()
            axes.axhline(share, color=MUTED, linestyle="--", linewidth=1, label="teacher, last block")
        axes.set(xlabel="time", ylabel="patches in use (%)", ylim=(0, 102))
        axes.legend(loc="best")
    return figure
