"""Experiments: each committed script runs on a toy budget, and what it concludes follows from its numbers."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import contraction_hypothesis
import contraction_verdict
import flow as flow_script
import headlines
import pytest
import ship as ship_script
import small_teachers
import stability as stability_script
import torch
import which_vits
from problems import tiny_model
from studies import rank_interval

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.recipe import Recipe

SMALL = ["data.name=digits", "data.image_size=8", "model.image_size=8", "model.patch_size=2", "model.num_channels=1"]


def test_contraction_hypothesis_runs(tmp_path: Path, capsys: Any) -> None:
    report = contraction_hypothesis.main(["--quick", "--output", str(tmp_path)])
    assert report["verdict"] in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == report["rows"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    rows: dict[str, list] = {}
    for row in report["rows"]:
        rows.setdefault(row["family"], []).append(row)
        assert row["certified"] <= row["agreement"]  # a certificate is never wrong
    assert set(rows) == {"head scale", "small features", "quiet directions", "unused direction", "expansion", "budget"}
    assert report["certified_images_that_disagree"] == 0
    base = rows["head scale"][1]
    for scaled in rows["head scale"]:  # the radius is a length in state space
        assert scaled["radius"] == pytest.approx(base["radius"], rel=1e-4)
        assert scaled["agreement"] == base["agreement"]
    radii = [row["radius"] for row in rows["unused direction"]]
    assert radii[-1] < 0.05 * base["radius"]
    assert radii == sorted(radii, reverse=True)
    assert all(abs(row["agreement"] - base["agreement"]) < 0.01 for row in rows["unused direction"])
    for family in ("small features", "quiet directions"):  # one student: the head is all that differs
        assert all(row["distance"] == pytest.approx(base["distance"]) for row in rows[family])
    assert rows["budget"][-1]["agreement"] == base["agreement"]


def test_peers_have_the_published_shape_and_equal_parameters() -> None:
    ours = OdeViTForImageClassification(OdeViTConfig(**(flow_script.OURS | flow_script.WIDE), num_labels=10))
    cct, vit = flow_script.build_peer({"cct": 128}, 10), flow_script.build_peer({"vit": 80}, 10)
    assert cct.num_parameters() == 283_723  # as its authors count
    assert vit.num_parameters() == pytest.approx(ours.num_parameters(), rel=0.01)


def test_every_arm_that_is_screened_can_be_built_and_differs_from_the_others() -> None:
    fields, loop = flow_script.STUDIES["screen"]["as it is"]
    recipes = [
        flow_script.recipe_of(fields, loop, [*changes, "optim.minutes=1"]) for changes in flow_script.SCREENED.values()
    ]
    assert len({str(recipe.to_dict()) for recipe in recipes}) == len(recipes)
    several = [name for name, changes in flow_script.SCREENED.items() if len(changes) > 1]
    assert several == ["half the rates", "twice the rates"]
    for recipe in recipes:
        OdeViTConfig(**recipe.model)  # can be built


def test_every_arm_of_the_ablation_can_be_built_and_differs_from_the_others() -> None:
    arms = [arm for arm in flow_script.STUDIES["ablation"].values() if "cct" not in arm[0]]
    recipes = [flow_script.recipe_of(fields, loop, ["optim.minutes=1"]) for fields, loop in arms]
    assert len({str(recipe.to_dict()) for recipe in recipes}) == len(recipes) > 10
    for recipe in recipes:
        OdeViTConfig(**recipe.model)


def test_an_arm_is_trained_and_measured_once(tmp_path: Path, capsys: Any) -> None:
    budget = ["optim.minutes=null", "optim.steps=1", "optim.batch_size=16", "data.limit=60"]
    arguments = ["screen", "--only", "batch 64", "--output", str(tmp_path)]
    for assignment in (*SMALL, *budget):
        arguments += ["--set", assignment]
    rows = flow_script.main(arguments)
    assert set(flow_script.SETTINGS) < set(rows["batch 64 (seed 0)"])
    assert "| batch 64 (seed 0) |" in capsys.readouterr().out
    assert flow_script.main(arguments) == rows  # only read


def test_rank_correlation() -> None:
    x = torch.tensor([1.0, 2, 3, 4])
    assert contraction_verdict.rank_correlation(x, -x.exp()) == pytest.approx(-1)
    assert contraction_verdict.rank_correlation(x, torch.tensor([1.0, 1, 2, 2])) == pytest.approx(0.8944, abs=1e-4)
    assert contraction_verdict.rank_correlation(x, torch.ones(4)) is None


def test_the_refitted_head_leaves_out_the_first_directions() -> None:
    """Two classes told apart along the second largest direction: read from q = 0 and q = 1 on, not from q = 2 on."""
    torch.manual_seed(0)
    labels = torch.arange(400) % 2
    cls = torch.randn(400, 5) * torch.tensor([10.0, 0.1, 0.1, 0.1, 0.1])
    cls[:, 1] += labels
    for first, reads in ((0, True), (1, True), (2, False)):
        weight, bias = contraction_hypothesis.refitted_head(cls, labels, first)
        right = ((cls @ weight.T + bias).argmax(dim=1) == labels).double().mean()
        normal = torch.nn.functional.normalize(weight[1] - weight[0], dim=0)
        assert (right > 0.9, abs(normal[1]) > 0.9) == (reads, reads)
        assert abs(normal[0]) < 0.1


@pytest.mark.parametrize(
    ("ratio", "agreement", "words"), [(3.0, 0.95, "not as 'only if'"), (3.0, 0.5, "nothing here contradicts")]
)
def test_the_verdict_follows_the_numbers(ratio: float, agreement: float, words: str) -> None:
    same = torch.arange(100) < 100 * agreement
    row = contraction_verdict.Row("budget", "1 step", 0.9, 1.0, ratio, ratio, 0.0, agreement, 0.1)
    result = contraction_verdict.conclude([(row, {"ratio": torch.full((100,), ratio), "same": same})])
    assert words in result["verdict"]
    bins = result["agreement_by_ratio"]["budget"]
    assert [entry["images"] for entry in bins] == [0, 0, 0, 100, 0, 0, 0]
    assert bins[3]["agreement"] == pytest.approx(agreement)
    inside = torch.full((100,), 0.5)
    broken = contraction_verdict.conclude([(row, {"ratio": inside, "same": same})])
    assert broken["certified_images_that_disagree"] == 100 - int(same.sum())
    assert "BROKEN" in broken["verdict"]


def test_stability_arms_are_measured_once_and_resumed(tmp_path: Path, capsys: Any) -> None:
    words = [
        "contractive",
        "--only",
        "softmax",
        "contractive, certified",
        "--attacked",
        "12",
        "--output",
        str(tmp_path),
    ]
    for assignment in ("optim.steps=3", "optim.batch_size=16", "data.limit=80"):
        words += ["--set", assignment]
    rows = stability_script.main(words)
    softmax, certified = rows["softmax (seed 0)"], rows["contractive, certified (seed 0)"]
    assert softmax["certified 36/72/108"] == "–"
    assert certified["certified 36/72/108"].count("/") == 2
    assert float(certified["σ(Φ)"]) <= 1.0001
    assert float(certified["μ"]) <= 1e-4 < float(softmax["μ"])
    assert "beaten by the attack: 0 of 12 images" in capsys.readouterr().out
    assert stability_script.main(words) == rows


def test_shapes_of_certified_models_are_screened_on_held_out_images(tmp_path: Path, capsys: Any) -> None:
    words = ["screen", "--only", "as it is", "√n·mean", "--output", str(tmp_path)]
    for assignment in ("optim.steps=3", "optim.batch_size=16", "data.limit=80"):
        words += ["--set", assignment]
    every, mean = stability_script.main(words).values()
    weights = [int(row["parameters"].replace(",", "")) for row in (every, mean)]
    assert weights[0] - weights[1] == 4 * 64 * 10  # four more tokens of width 64 for each of ten classes
    assert "held-out images" in capsys.readouterr().out
    assert "attacked 36/72/108" not in every


@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_every_arm_of_the_stability_studies_is_a_valid_model(data: str) -> None:
    from odevit.model.config import OdeViTConfig

    for arms in stability_script.arms(data).values():
        recipes = [Recipe.load(arm.recipe, [*arm.overrides, "optim.minutes=1"]) for arm in arms.values()]
        assert len({str(recipe.to_dict()) for recipe in recipes}) == len(recipes)
        for recipe in recipes:
            OdeViTConfig(**{"image_size": 8, **recipe.model})


def test_which_vits_can_be_turned_is_measured_once_and_resumed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    words = ["--quick", "--only", "ViT, 3 blocks", "Swin, 2 + 4 blocks", "--output", str(tmp_path)]
    report = which_vits.main(words)
    vit, swin = report["rows"].values()
    assert vit["kept"] == pytest.approx(vit["student_accuracy"] / vit["teacher_accuracy"])
    assert 0 <= vit["certified"] <= vit["agreement"] <= 1
    assert vit["audit"]["layers"] == 3
    assert vit["audit"]["explained_by_one_field"] <= vit["audit"]["explained_by_one_field_per_layer"] + 0.05
    assert swin["certified"] is None
    assert [stage["layers"] for stage in swin["audit"]["stages"]] == [2, 4]
    assert swin["note"] == "this teacher only answers"
    assert report["correlations"][which_vits.SCORE]["kept"] == {"rank_correlation": None, "interval": None, "n": 1}
    output = capsys.readouterr().out
    assert "| ViT, 3 blocks | " in output
    assert report["verdicts"]["Swin"] in output
    assert (tmp_path / "which_vits.svg").stat().st_size > 1000
    monkeypatch.setattr(which_vits, "measure", lambda *_: pytest.fail("measured again"))
    assert which_vits.main(words)["rows"] == report["rows"]
    so_far = which_vits.main(["--quick", "--finished", "--output", str(tmp_path)])
    assert so_far["rows"] == report["rows"]
    assert len(so_far["left_out"]) == len(small_teachers.small_teachers()) - 2


def test_the_correlation_of_the_audit_with_what_came_of_it() -> None:
    """Ranks that agree but for one pair of neighbours, and a family without a certificate."""
    rows = []
    for i in range(10):
        audit = dict.fromkeys(which_vits.SCORES, i / 10)
        place = {3: 4, 4: 3}.get(i, i)
        rows.append({"family": "ViT", "audit": audit, "kept": 0.9 + place / 100, "agreement": place / 10})
        rows[-1] |= {"certified": i / 20 if i < 5 else None, "radius": 1.0, "distance_over_radius": -i}
    found = which_vits.correlations(rows)[which_vits.SCORE]
    assert found["kept"]["rank_correlation"] == pytest.approx(1 - 6 * 2 / 990)  # 1 - 6 Σd² / n(n² - 1)
    assert found["kept"]["interval"][0] < found["kept"]["rank_correlation"] < found["kept"]["interval"][1] < 1
    assert found["certified"] == {"rank_correlation": 1.0, "interval": None, "n": 5}
    assert found["radius"]["rank_correlation"] is None
    assert found["distance_over_radius"]["rank_correlation"] == pytest.approx(-1)
    assert which_vits.verdicts(rows)["ViT"].startswith("10 of 10 keep 90% of their accuracy (kept: 90.0 to 99.0 %)")


def test_the_interval_of_a_rank_correlation_covers_it() -> None:
    """Pairs of normals with a known Spearman's ρ = 6/π arcsin(r/2): 95 % of the intervals should hold it."""
    r, n, trials = 0.7, 20, 400
    truth = 6 / torch.pi * torch.tensor(r / 2).asin().item()
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, trials, n, generator=generator)
    y = r * x + (1 - r**2) ** 0.5 * noise
    held = 0
    for a, b in zip(x, y, strict=True):
        low, high = rank_interval(contraction_verdict.rank_correlation(a, b), n) or (1.0, -1.0)
        held += low < truth < high
    assert 0.92 <= held / trials <= 0.98
    assert rank_interval(0.5, 7) is None
    assert rank_interval(None, 50) is None


def test_every_small_teacher_but_swin_is_one_that_a_student_can_follow() -> None:
    from odevit.teachers.teacher import find_family

    teachers = small_teachers.small_teachers()
    assert len(teachers) >= 16
    assert {teacher.depth for teacher in teachers.values()} == {3, 6, 9, 12}
    assert {teacher.family for teacher in teachers.values()} == {"ViT", "DeiT", "DINO", "DINOv2", "timm", "Swin"}
    for teacher in teachers.values():
        if teacher.depth == 3 and teacher.family != "timm":
            module = teacher.build()
            assert find_family(module)
            assert len(small_teachers.answers(module, torch.zeros(2, 1, 8, 8))[0]) == 2


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
