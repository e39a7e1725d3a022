"""The tables and pictures of results: every number is a run's, and none covers another."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import headlines
import pytest
import ship as ship_script
from problems import tiny_model

from odevit.recipe import Recipe


def test_every_point_of_a_picture_has_its_number_beside_it_and_nothing_covers_another() -> None:
    points = {number: (50.0, 50.0 + number / 4) for number in range(1, 13)}  # twelve points nearly on each other
    points |= {13: (54.0, 50.0), 14: (200.0, 50.0)}
    offsets = headlines.places(points)
    assert list(offsets) == list(points)
    assert math.hypot(*offsets[14]) == pytest.approx(8)
    numbers = [(points[n][0] + dx, points[n][1] + dy, 4.6 * len(str(n)), 7.0) for n, (dx, dy) in offsets.items()]
    markers = [(x, y, 6.0, 6.0) for x, y in points.values()]
    for index, box in enumerate(numbers):
        for x, y, width, tall in [*numbers[:index], *markers]:
            assert abs(box[0] - x) >= (box[2] + width) / 2 - 1e-9 or abs(box[1] - y) >= (box[3] + tall) / 2 - 1e-9


def test_an_axis_has_ticks_wherever_its_points_lie() -> None:
    for low, high in ((0.66, 0.73), (0.52, 0.78), (0.60, 0.95)):
        bottom, top = headlines.height(low), headlines.height(high)
        ticks = headlines.ticks_between(bottom, top)
        places = [headlines.height(tick / 100) for tick in ticks]
        assert len(ticks) >= 4
        assert all(bottom < place < top for place in places)
        assert min(b - a for a, b in pairwise(places)) >= (top - bottom) / 14
    assert {70, 80, 90} <= set(headlines.ticks_between(headlines.height(0.6), headlines.height(0.95)))


def test_a_card_counts_passes_over_images_and_not_over_rows_of_a_cache() -> None:
    views, extra, none = (Recipe.load(f"cifar{name}") for name in ("100/frozen-head", "10/answers", "10/distill"))
    result = {"epochs": 9.01, "steps": 27_589}
    assert ship_script.passes_of(result, views) == "72 passes over the images (9.01 over a cache of 8 views)"
    result = {"epochs": 4.35, "steps": 18_347}
    assert ship_script.passes_of(result, extra) == "4.35 passes over 540,000 rows of answers"
    assert ship_script.passes_of(result, none) == "4.35 epochs"


def test_where_a_run_was_heading_is_read_from_its_metrics(tmp_path: Path, capsys: Any) -> None:
    lines = [{"kind": "val", "step": step, "top1": step / 1000} for step in range(50, 1001, 50)]
    lines += [{"kind": "train", "step": step, "top1": right} for step, right in ((900, 0.1), (960, 0.8), (1000, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert headlines.main(["--curve", str(tmp_path)]) == []
    assert capsys.readouterr().out == "| 1,000 | 25.0 | 50.0 | 75.0 | 100.0 | 85 |\n"


def test_seeds_of_one_row_stand_together_and_count_as_their_mean() -> None:
    rows = [
        headlines.Row("ours", "CIFAR-10", "scratch", 2e5, 6e7, 0.90, minutes=60, seed=1),
        headlines.Row("ours", "CIFAR-10", "scratch", 2e5, 6e7, 0.88, minutes=61, seed=0),
        headlines.Row("ours", "CIFAR-10", "distilled", 2e5, 6e7, 0.895, minutes=85, seed=0),
        headlines.Row("ours", "CIFAR-100", "distilled", 2e5, 6e7, 0.70, minutes=85, seed=0),
        headlines.Row("CCT", "CIFAR-10", "scratch", 3e5, 3e7, 0.8917, headlines.KINDS[1]),
    ]
    assert [(runs[0].data, runs[0].how) for runs in headlines.numbered(rows).values()] == [
        ("CIFAR-10", "distilled"), ("CIFAR-10", "scratch"), ("CIFAR-10", "scratch"), ("CIFAR-100", "distilled"),
    ]  # fmt: skip
    text = headlines.table(rows)
    assert "| 2 | CCT | scratch | 0.3 M | all | 30.0 | 89.17 |  |  | them |" in text
    assert "| 3 | ours | scratch | 200,000 | all | 60.0 | 88.00, 90.00 | 61, 60 | 0, 1 | us |" in text
    assert text.index("| CIFAR-10 |") < text.index("| 3 |") < text.index("| CIFAR-100 |") < text.index("| 4 |")


def test_a_run_of_the_peer_is_read_like_ours(tmp_path: Path) -> None:
    from cct import CctConfig, CctForImageClassification

    CctForImageClassification(CctConfig(num_labels=10)).save_pretrained(tmp_path / "model")
    (tmp_path / "result.json").write_text(json.dumps({"top1": 0.875, "seconds": 90}))
    (tmp_path / "recipe.yaml").write_text("data: {name: digits}\noptim: {epochs: 1}\nseed: 3\n")
    row = headlines.measured(tmp_path, "CCT-2/3x2", "CIFAR-10", "scratch", "")
    assert row.parameters == 283_723  # as its authors count
    assert row.macs is not None
    assert 30e6 < row.macs < 36e6  # they say 33 M


def test_headlines_read_a_run_and_keep_what_stands_beside_the_marks(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "run" / "result.json").write_text(json.dumps({"top1": 0.875, "seconds": 90}))
    (tmp_path / "run" / "recipe.yaml").write_text("data: {name: digits}\noptim: {epochs: 1}\nseed: 3\n")
    (tmp_path / "RESULTS.md").write_text("before\n<!-- headlines -->\nold\n<!-- end -->\nafter\n")
    options = ["--docs", str(tmp_path), "--add", str(tmp_path / "run"), "--name", "tiny", "--data", "CIFAR-10"]
    for _ in range(2):  # the same run again replaces its row
        rows = headlines.main(options)
    mine = [row for row in rows if row.kind == headlines.KINDS[0]]
    assert len(mine) == 1
    assert mine[0].parameters == sum(p.numel() for p in model.parameters())
    assert (mine[0].accuracy, mine[0].minutes, mine[0].seed) == (0.875, 1.5, 3)
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| 87.50 | 1.5 | 3 | us |" in text
    assert all((tmp_path / f"accuracy-{what}.svg").stat().st_size > 1000 for what in ("parameters", "macs"))
