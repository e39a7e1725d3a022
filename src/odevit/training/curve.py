"""curve.png: how a run went, in one picture: loss, accuracy and, where monitors looked, what the flow did."""

import io
from pathlib import Path
from typing import Any

from odevit.atomic import write_file
from odevit.training.runlog import monitor_seconds, read_metrics

Record = dict[str, Any]

# of the monitors: title of a panel → {what is recorded: its label}; a panel without records is left out
PANELS = {
    "Attention maps": {"g1": "g₁", "map_norm": "‖P‖₂"},
    "Steepness": {"field_bound": "field, bound", "field_norm": "field, measured", "sigma_max": "σ_max of the flow"},
    "Distance to the teacher / radius": {"distance_over_radius": "certain to agree below 1"},
}
LOGARITHMIC = ("Steepness", "Distance to the teacher / radius")
COLORS = ("tab:blue", "tab:orange", "tab:green")


def draw_curve(folder: Path) -> Path:
    """Loss, accuracy and monitored quantities by step, from metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds: dict[str, list[Record]] = {"train": [], "val": [], "monitor": []}
    for record in read_metrics(folder):
        kinds[record["kind"]].append(record)
    looks = kinds["monitor"]
    panels = {title: [n for n in names if any(n in r for r in looks)] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    figure = Figure(figsize=(8, 7) if panels else (8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(1 + bool(panels), 1, squeeze=False)[:, 0]
    loss, accuracy = parts[0].subplots(1, 2)
    _loss(loss, kinds["train"], kinds["val"])
    _accuracy(accuracy, kinds["train"], kinds["val"])
    if panels:
        costs = monitor_seconds(folder)
        parts[1].suptitle(f"Of a few validation images: median and largest ({len(costs)} looks, {sum(costs):.1f} s)")
        for axes, (title, names) in zip(
            parts[1].subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            _monitored(axes, looks, {name: PANELS[title][name] for name in names})
            axes.set(xlabel="step", title=title, yscale="log" if title in LOGARITHMIC else "linear")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_file(folder / "curve.png", picture.getvalue())
    return folder / "curve.png"


def _loss(axes: Any, train: list[Record], val: list[Record]) -> None:
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], color="tab:blue", label="training")
    if not any("margin" in r.get("losses", {}) for r in train):  # of radii; validation has the cross-entropy of logits
        axes.plot([r["step"] for r in val], [r["loss"] for r in val], "o-", color="tab:orange", label="validation")
    axes.set(xlabel="step", ylabel="loss", title="Loss")


def _accuracy(axes: Any, train: list[Record], val: list[Record]) -> None:
    shown, scores = [r for r in train if r["top1"] is not None], [100 * r["top1"] for r in val]
    steps = [r["step"] for r in shown]
    axes.plot(steps, [100 * r["top1"] for r in shown], color="tab:blue", alpha=0.6, label="training")
    axes.plot([r["step"] for r in val], scores, "o-", color="tab:orange", label="validation")
    if scores:
        label = f"best {max(scores):.2f} %"
        axes.axhline(max(scores), color="tab:orange", linewidth=0.8, linestyle=":", label=label)
    axes.set(xlabel="step", ylabel="top-1 accuracy (%)", title="Accuracy")


def _monitored(axes: Any, looks: list[Record], labels: dict[str, str]) -> None:
    """Each quantity's median as a line, its largest as the upper edge of a band."""
    for color, (name, label) in zip(COLORS, labels.items(), strict=False):
        seen = [(r["step"], r[name]["median"], r[name]["largest"]) for r in looks if name in r]
        steps, medians, largest = zip(*seen, strict=True)
        axes.plot(steps, medians, ".-", color=color, label=label)
        axes.fill_between(steps, medians, largest, color=color, alpha=0.15, linewidth=0)
    if "distance_over_radius" in labels:
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
