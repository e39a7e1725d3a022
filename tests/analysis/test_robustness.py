"""Step sweeps: costs, agreement, observed order, and a verdict that follows from the numbers."""

import math

import pytest
import torch
from problems import contractive_model, tiny_model

from odevit import SOLVERS, OdeViTForImageClassification
from odevit.analysis import Study
from odevit.analysis.robustness import compare, run, steps_within, verdict
from odevit.analysis.step_sweep import (
    REFERENCE,
    Point,
    evaluations,
    fit_order,
    observed_orders,
    settings_within,
    sweep,
)


def tiny(**changes: object) -> OdeViTForImageClassification:
    small = {"patch_size": 8, "num_channels": 1, "hidden_size": 12, "depth": 2, "num_registers": 0, "num_labels": 3}
    return tiny_model(**{**small, **changes})


IMAGES = torch.randn(7, 1, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(7) % 3


@pytest.mark.parametrize("num_fields", [1, 2])
def test_every_solver_shows_its_order_on_the_network(num_fields: int) -> None:
    model = tiny(num_fields=num_fields)
    orders = observed_orders(model, IMAGES[:2], step_counts=(8, 16, 32))
    assert set(orders) == set(SOLVERS)
    for solver, found in orders.items():
        assert found["order"] == pytest.approx(SOLVERS[solver].order, abs=0.3), solver
        assert all(count % num_fields == 0 for count in found["step_counts"])
    assert next(model.parameters()).dtype == torch.float32  # the model itself stays as it is


def test_fit_order() -> None:
    counts = [4, 8, 16, 32]
    assert fit_order(counts, [k**-2.0 for k in counts]) == pytest.approx(2)
    assert fit_order(counts, [math.inf, 3.0, 16**-3.0, 32**-3.0]) == pytest.approx(3)  # only the fine steps are used
    assert fit_order(counts, [1e-14, 1e-15, 1e-15, 0.0]) is None  # rounding only


def test_sweep_costs_agreement_and_error() -> None:
    model = tiny(depth=8)
    settings = settings_within(1, (1, 4, 16), None, 16)
    points = sweep(model, IMAGES, LABELS, settings, batch_size=3)
    assert set(points) == {*settings, REFERENCE, ("euler", 4)}
    for (solver, count), point in points.items():
        assert point.evaluations == sum(SOLVERS[solver].evaluations) / 2 * count == evaluations(solver, count)
        direct = model(IMAGES, num_steps=count, solver=solver)
        assert point.accuracy == pytest.approx((direct.logits.argmax(1) == LABELS).double().mean().item())
        same = direct.logits.argmax(1) == model(IMAGES).logits.argmax(1)
        assert point.agreement == pytest.approx(same.double().mean().item())
    assert points["euler", 4].agreement == 1.0
    assert points[REFERENCE].error == 0
    assert points["euler", 16].error < points["euler", 4].error < points["euler", 1].error
    exact = model.odevit.evolve(model.odevit.embed(IMAGES), *REFERENCE[::-1]).xs[-1].flatten(1)
    euler = model.odevit.evolve(model.odevit.embed(IMAGES), 4, "euler").xs[-1].flatten(1)
    error = ((euler - exact).norm(dim=1) / exact.norm(dim=1)).mean().item()
    assert points["euler", 4].error == pytest.approx(error, rel=1e-4)


def test_each_setting_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny(), []
    evolve = model.odevit.evolve
    monkeypatch.setattr(model.odevit, "evolve", lambda *args: calls.append(args[1:]) or evolve(*args))
    sweep(model, IMAGES, LABELS, [("euler", 4), REFERENCE, ("heun", 2)], batch_size=16)
    assert sorted(calls) == sorted([(4, "euler"), (64, "rk4"), (2, "heun")])


def test_settings_give_each_field_a_step() -> None:
    assert settings_within(3, (1, 2, 3, 6), ["euler", "rk4"], 12) == [("euler", 3), ("euler", 6), ("rk4", 3)]
    with pytest.raises(ValueError, match="at least 5"):
        settings_within(5, (1, 2), None, 100)
    with pytest.raises(ValueError, match="choose from euler"):
        settings_within(1, (1,), ["eulr"], 100)


def test_a_diverging_setting_is_told_and_the_rest_goes_on() -> None:
    model = tiny()
    with torch.no_grad():
        for parameter in model.odevit.fields[0].mlp.parameters():
            parameter.mul_(1e7)
    points = sweep(model, IMAGES, LABELS, [("euler", 2), ("euler", 8)], batch_size=4)
    assert points["euler", 8].diverged
    assert not points["euler", 2].diverged
    assert "accuracy" not in points["euler", 8].values()


def made_up(accuracies: dict[tuple[str, int], float], images: int = 1000) -> dict[tuple[str, int], Point]:
    """Points with the given accuracies; wrong images are the last ones, so differences are as paired as can be."""
    right = {key: torch.arange(images) < round(images * share) for key, share in accuracies.items()}
    return {
        key: Point(*key, evaluations(*key), accuracy=share, agreement=1.0, error=0.1, right=right[key])
        for key, share in accuracies.items()
    }


def test_the_verdict_follows_the_numbers() -> None:
    worse = made_up({("euler", 6): 0.60, ("euler", 8): 0.595, ("euler", 12): 0.58, ("rk4", 1): 0.4, REFERENCE: 0.59})
    values, text = verdict(worse, ("euler", 6))
    assert not values["closes_gap"]
    assert "No:" in text
    assert "-1.0 ± 0.3 points" in text  # the exact flow
    assert values["steps_within_one_point"] == (6, 8)

    better = made_up({("euler", 6): 0.60, ("strang", 2): 0.65, ("strang", 9): 0.9, REFERENCE: 0.61})
    values, text = verdict(better, ("euler", 6), teacher_accuracy=0.70)
    assert values["closes_gap"]
    assert "gap of 10.0 points" in text
    assert "Yes: strang with 2 steps gains +5.0" in text  # 9 steps cost more than training did
    assert "50% of the gap" in text

    noise = made_up({("euler", 6): 0.60, ("heun", 3): 0.602, REFERENCE: 0.6})
    values, text = verdict(noise, ("euler", 6))  # two images of a thousand are no evidence
    assert not values["closes_gap"]
    assert "Undecided" in text


def test_steps_within_stops_at_the_first_gap() -> None:
    points = made_up({("euler", k): a for k, a in ((1, 0.5), (2, 0.3), (3, 0.495), (4, 0.5), (8, 0.505), (9, 0.6))})
    assert steps_within(points, ("euler", 4)) == (3, 8)


def test_findings_and_options() -> None:
    options = {
        "robustness": {"max_images": 5, "order_images": 1, "step_counts": (1, 2, 4), "solvers": ["euler", "rk4"]}
    }
    study = Study(tiny(num_fields=2), IMAGES, LABELS, ["a", "b", "c"], batch_size=4, options=options)
    findings = {finding.name: finding for finding in run(study)}
    assert list(findings) == ["robustness/verdict", "robustness/settings", "robustness/order"]
    assert findings["robustness/verdict"].value["images"] == 5
    assert {(row["solver"], row["num_steps"]) for row in findings["robustness/settings"].value} == {
        ("euler", 2), ("euler", 4), ("rk4", 2), ("rk4", 4), REFERENCE,
    }  # fmt: skip
    assert findings["robustness/order"].value["rk4"]["order"] == pytest.approx(4, abs=0.3)
    assert findings["robustness/verdict"].figure is not None
    with pytest.raises(ValueError, match="valid names: max_images"):
        list(run(Study(tiny(), IMAGES, LABELS, [], options={"robustness": {"images": 3}})))


def test_one_image_is_never_significant() -> None:
    points = [
        Point("euler", 4, 4, accuracy=right, agreement=1.0, error=0.1, right=torch.tensor([bool(right)]))
        for right in (1.0, 0.0)
    ]
    assert compare(*points)["gain"] == 1
    assert not compare(*points)["significant"]


def test_a_contractive_model_is_swept_where_it_never_expands():
    """Of fewer steps nothing is proven, so they are refused: the analysis leaves them out instead of failing."""
    model = contractive_model(num_fields=2, depth=8, num_steps=8)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    study = Study(
        model, images, torch.arange(6), list("0123456789"), options={"robustness": {"step_counts": (1, 2, 4, 8, 16)}}
    )
    findings = {finding.name: finding.value for finding in run(study)}
    assert {row["num_steps"] for row in findings["robustness/settings"] if row["solver"] == "euler"} == {8, 16}
    assert all(min(found["step_counts"]) >= 4 for found in findings["robustness/order"].values())
