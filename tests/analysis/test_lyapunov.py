"""What the Lyapunov analysis tells: the exponents of every image, with honest signs and intervals."""

import json

import pytest
import torch
from problems import tiny_images, tiny_model

from odevit.analysis import Finding, Study, run_analyses
from odevit.analysis.lyapunov import run
from odevit.dynamics.exponents import model_exponents
from odevit.model.errors import NonFiniteStateError


def study(count: int = 24, teacher=None, **overrides) -> Study:
    model = tiny_model(num_labels=3, **overrides)
    return Study(model, tiny_images(count), torch.arange(count) % 3, ["a", "b", "c"], teacher=teacher, batch_size=10)


@pytest.mark.slow
def test_analysis_tells_what_it_measured():
    looked_at = study(patch_size=8)
    top, classes = run(looked_at)
    exponents = model_exponents(looked_at.model, looked_at.images).value[:, 0]
    assert top.value["per_image"] == pytest.approx(exponents.tolist(), abs=1e-4)
    assert top.value["mean"] == pytest.approx(exponents.mean().item(), abs=1e-4)
    depth = looked_at.model.config.depth
    assert top.value["median_amplification"] == pytest.approx((exponents * depth).exp().median().item(), rel=1e-2)
    for index, row in enumerate(classes.value["classes"]):
        assert row["mean"] == pytest.approx(exponents[looked_at.labels == index].mean().item(), abs=1e-4)
        assert row["interval"][0] <= row["mean"] <= row["interval"][1]
    assert all(finding.figure is not None for finding in (top, classes))
    assert f"{top.value['mean']:.3f}" in top.headline
    json.dumps([top.value, classes.value], allow_nan=False)


@pytest.mark.slow
def test_classes_of_few_images_have_no_interval():
    _, classes = run(study(9))
    assert [row["interval"] for row in classes.value["classes"]] == [None] * 3
    assert classes.value["correlation_classes"]["interval"] is None


@pytest.mark.slow
def test_signs_are_those_of_the_quotient_where_constants_do_not_count():
    """Without any field the flow stands still: every exponent is 0, and 0 is neither positive nor negative."""
    looked_at = study(8)
    for parameter in looked_at.model.odevit.fields.parameters():
        parameter.data.zero_()
    top = next(run(looked_at))
    assert top.value["mean"] == pytest.approx(0, abs=1e-6)
    for summary in (top.value, top.value["quotient"]):
        assert summary["share_positive"] == summary["share_negative"] == 0
    assert "neither clearly" in top.headline
    assert next(run(study(8, norm="none"))).value["quotient"] is None


def test_contracting_flow_is_seen_to_contract(monkeypatch):
    """A field whose only part is x' = W₂ gelu(W₁ norm(x)) with W₂ = -c W₁ᵀ: contracting, except for constants."""
    looked_at = study(8, depth=1.0, num_steps=8, mlp_ratio=1)
    (field,) = looked_at.model.odevit.fields
    field.attention.out.weight.data.zero_()
    field.mlp.w1.weight.data = torch.eye(field.mlp.w1.in_features)
    field.mlp.w2.weight.data = -torch.eye(field.mlp.w1.in_features)
    field.norm_f.bias.data += 20.0  # where GELU is the identity
    top = next(run(looked_at))
    assert top.value["mean"] == pytest.approx(0, abs=1e-5)  # constants stay
    assert top.value["share_negative"] == 0
    assert top.value["quotient"]["share_negative"] == 1
    assert top.value["quotient"]["mean"] < -0.9
    assert "approach" in top.headline


@pytest.mark.slow
def test_teacher_is_measured_on_all_images():
    from odevit.teachers.teacher import tiny_teacher

    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=8)
    findings = list(run(study(22, teacher=teacher, hidden_size=8, patch_size=8, num_steps=1)))
    assert findings[2].name == "lyapunov/teacher"
    assert findings[2].value["images"] == 22  # three batches
    assert findings[2].value["quotient"]["mean"] <= findings[2].value["mean"] + 1e-4


def test_an_analysis_that_fails_is_told_and_the_others_go_on(monkeypatch):
    from odevit import analysis

    def broken(looked_at):
        yield Finding("broken/first", 1, "First", "Found before the state was lost.")
        raise NonFiniteStateError(3, 0.5)

    def fine(looked_at):
        yield Finding("fine/last", 2, "Last", "Found.")

    analyses = {name: analysis.Analysis(run, "", False) for name, run in (("broken", broken), ("fine", fine))}
    monkeypatch.setattr(analysis, "load_analyses", lambda: analyses)
    findings = run_analyses(None, study(2))
    assert [finding.name for finding in findings] == ["broken/first", "broken/not_computed", "fine/last"]
    assert findings[1].value is None
    assert "after step 3" in findings[1].text
