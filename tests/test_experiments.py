"""Experiments: each committed script runs on a toy budget, and what it concludes follows from its numbers."""

import json
from pathlib import Path
from typing import Any

import any_classifier
import arrival
import contraction_hypothesis
import contraction_verdict
import flow as flow_script
import pytest
import small_teachers
import stability as stability_script
import torch
import which_vits
from studies import rank_interval

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.commands.train import train_recipe
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


def test_a_proof_stops_no_image_of_the_zoo_and_changes_no_answer(capsys: Any) -> None:
    rows = arrival.main(["digits", "--steps", "3"])
    assert rows == {"K = 3": {"images that stop early": "0.0%", "steps on average": "3.00", "answers that differ": "0"}}
    assert "359 test images" in capsys.readouterr().out


@pytest.mark.slow
def test_a_proof_stops_images_of_a_contractive_flow(tmp_path: Path) -> None:
    """After a few steps of training already, if there are enough of them in its flow."""
    overrides = ["model.solver=euler", "model.depth=4", "model.pool=sqrt_mean", f"output={tmp_path}"]
    recipe = Recipe.load("digits-certified", [*overrides, "optim.epochs=1", "data.limit=300"])
    train_recipe(recipe, progress_bar=False)
    found = arrival.main([str(tmp_path / "model"), "--steps", "64"])["K = 64"]
    assert float(found["images that stop early"].rstrip("%")) > 0
    assert float(found["steps on average"]) < 64
    assert found["answers that differ"] == "0"


@pytest.mark.slow
def test_any_classifier_is_turned_and_measured_once(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    words = ["--only", "ResNet", "--epochs", "0.1", "--output", str(tmp_path)]
    rows = any_classifier.main(words)
    assert rows["ResNet"]["its parameters "] == "58,203"
    assert 0 <= float(rows["ResNet"]["agreement"]) <= 100
    monkeypatch.setattr(any_classifier, "train_recipe", lambda *_, **__: pytest.fail("trained again"))
    assert any_classifier.main(words) == rows
    assert "| ResNet |" in capsys.readouterr().out
