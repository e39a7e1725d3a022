"""curve.png has a panel for all that was recorded, and none for what was not."""

import json

from matplotlib.figure import Figure

from odevit.training.curve import draw_curve


def curve_panels(folder, monkeypatch):
    """Title of each panel of curve.png and the names in its legend."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.extend(figure.axes))
    draw_curve(folder)
    return {axes.get_title(): [text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn}


def test_the_curve_shows_what_was_monitored(tmp_path, monkeypatch):
    lines = [
        {"kind": "train", "step": 1, "loss": 2.0, "top1": None},
        {"kind": "val", "step": 1, "loss": 2.0, "top1": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(curve_panels(tmp_path, monkeypatch)) == ["Loss", "Accuracy"]
    look = {name: {"median": 1.0, "largest": 2.0} for name in ("g1", "map_norm", "field_norm", "sigma_max")}
    lines.append({"kind": "monitor", "step": 1, **look})  # Sinkhorn attention: no bound; no teacher
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    panels = curve_panels(tmp_path, monkeypatch)
    assert list(panels) == ["Loss", "Accuracy", "Attention maps", "Steepness"]
    assert panels["Steepness"] == ["field, measured", "σ_max of the flow"]
    lines.append({"kind": "monitor", "step": 2, **look, "distance_over_radius": {"median": 0.5, "largest": 3.0}})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "Distance to the teacher / radius" in curve_panels(tmp_path, monkeypatch)


def test_losses_that_cannot_be_compared_are_not_drawn_together(tmp_path, monkeypatch):
    lines = [
        {"kind": "train", "step": 1, "loss": 2.0, "losses": {"margin": 2.0}, "top1": 0.4},
        {"kind": "val", "step": 1, "loss": 14.0, "top1": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    panels = curve_panels(tmp_path, monkeypatch)
    assert panels["Loss"] == ["training"]
    assert panels["Accuracy"][:2] == ["training", "validation"]
