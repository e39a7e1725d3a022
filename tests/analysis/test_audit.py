"""Audit: paths made by known fields, phases that a student has, and every teacher family."""

import json

import pytest
import torch
from torch import Tensor

from odevit.analysis.audit import audit, estimated_error, path_shape, suggested_steps
from odevit.analysis.tied_field import (
    Sample,
    constant_residual,
    fit_runs,
    phase_fits,
    phase_runs,
    ridge_regression,
    row_weights,
    sample_tokens,
    split_images,
    suggested_fields,
)
from odevit.model.config import OdeViTConfig
from odevit.model.model import OdeViTForImageClassification
from odevit.teachers.teacher import TEACHERS, Teacher, tiny_teacher

DEPTH, WIDTH = 6, 5


def linear_field(seed: int) -> tuple[Tensor, Tensor]:
    """How a token and the mean token move a token: rotations, so that states neither die nor explode."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return 0.3 * (matrix - matrix.T), 0.1 * torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def flow(fields: list[tuple[Tensor, Tensor]], images: int = 100, tokens: int = 6) -> Tensor:
    """(D+1, N, n, d): layer l adds x A_l + mean(x) C_l."""
    generator = torch.Generator().manual_seed(9)
    states = [torch.randn(images, tokens, WIDTH, generator=generator, dtype=torch.float64)]
    for of_token, of_mean in fields:
        x = states[-1]
        states.append(x + x @ of_token + x.mean(dim=1, keepdim=True) @ of_mean)
    return torch.stack(states)


def audited(states: Tensor) -> list:
    return phase_fits(fit_runs(sample_tokens(states)))


def test_one_autonomous_field_needs_one_field() -> None:
    fits = audited(flow([linear_field(0)] * DEPTH))
    assert fits[0].residual < 1e-6
    assert max(fits[0].per_layer) < 1e-6
    assert suggested_fields(fits, 0.1) == 1


@pytest.mark.parametrize(("depth", "switch"), [(6, 3), (5, 3), (2, 1)])
def test_two_fields_are_found(depth: int, switch: int) -> None:
    fits = audited(flow([linear_field(0)] * switch + [linear_field(1)] * (depth - switch)))
    assert fits[0].residual > 0.2
    assert fits[1].residual < 1e-6
    assert fits[1].starts == [1, switch + 1]  # layers count from 1
    assert suggested_fields(fits, 0.1) == 2


def test_a_border_that_no_student_has_is_not_credited() -> None:
    """The field changes after 1 of 6 layers: two equal phases of three layers cannot follow, six of one can."""
    fits = audited(flow([linear_field(0)] + [linear_field(1)] * 5))
    assert fits[1].starts == [1, 4]
    assert fits[1].residual > 0.05
    assert fits[5].residual < 1e-6


@pytest.mark.parametrize("depth", [1, 2, 5, 6, 12])
def test_phases_are_those_that_a_student_has(depth: int) -> None:
    """Which field makes which step of a model with a step per layer, seen by hooks."""
    seen: list[int] = []
    for fields in sorted({1, 2, 3, 5, depth} & set(range(1, depth + 1))):
        sizes = dict(image_size=4, patch_size=4, num_channels=1, hidden_size=4, num_attention_heads=1, mlp_ratio=1)
        model = OdeViTForImageClassification(OdeViTConfig(**sizes, num_steps=depth, num_fields=fields, num_labels=2))
        seen.clear()
        for index, field in enumerate(model.odevit.fields):
            field.register_forward_pre_hook(lambda field, args, index=index: seen.append(index))
        model(torch.zeros(1, 1, 4, 4))
        runs = phase_runs(depth, fields)
        assert [phase for phase, (first, last) in enumerate(runs) for _ in range(first, last + 1)] == seen
        assert [run[0] for run in runs] == [0, *(run[1] + 1 for run in runs[:-1])]


def test_images_sorted_by_class_are_explained_as_well_as_shuffled_ones() -> None:
    """Ten clusters, each with a velocity of its own: who fits the first six cannot judge the last two."""
    torch.manual_seed(0)
    classes = torch.arange(10).repeat_interleave(20)
    x = 3 * torch.nn.functional.one_hot(classes, 12).double()[:, None] + 0.1 * torch.randn(200, 4, 12)
    velocity = torch.randn(10, 1, 12, dtype=torch.float64)[classes]
    states = torch.stack([x + layer * velocity / 3 for layer in range(4)])
    by_class = audited(states)
    shuffled = audited(states[:, torch.randperm(200)])
    assert shuffled[0].residual < 0.05
    assert by_class[0].residual < 0.05


def test_a_field_per_layer_is_needed_when_all_differ() -> None:
    fits = audited(flow([linear_field(seed) for seed in range(DEPTH)]))
    residuals = [fit.residual for fit in fits]
    assert residuals[-1] < 1e-6
    assert residuals[-2] > 0.01
    assert residuals == sorted(residuals, reverse=True)
    assert suggested_fields(fits, 0.01) == DEPTH


def test_pure_noise_is_not_explained_on_held_out_images() -> None:
    """Fitted residuals would be small with as many features as rows; judged ones must not be."""
    torch.manual_seed(0)
    states = torch.randn(3, 40, 4, WIDTH, dtype=torch.float64)
    states[1:] = states[0] + torch.stack([torch.randn(40, 4, WIDTH), torch.randn(40, 4, WIDTH)]).cumsum(0)
    fits = audited(states)
    assert fits[-1].residual > 0.6


def test_parts_of_the_images_are_disjoint_complete_and_shuffled() -> None:
    for count in (5, 6, 11, 100):
        rows = [part.tolist() for part in split_images(count)]
        assert all(rows)
        assert sorted(row for part in rows for row in part) == list(range(count))
    assert all(min(part) < 30 and max(part) >= 70 for part in rows)
    assert [part.tolist() for part in split_images(100)] == rows
    assert [part.tolist() for part in split_images(100, seed=1)] != rows
    with pytest.raises(ValueError, match="at least 5 images"):
        split_images(4)


def test_judged_images_never_reach_the_fit() -> None:
    """Spoiling the judging images where the last layer ends leaves the fit, and so the other layers, as it was."""
    states = flow([linear_field(0)] * 2 + [linear_field(1)] * 2)
    sample = sample_tokens(states)
    spoilt = Sample(sample.tokens.clone(), sample.context)
    spoilt.tokens[-1, split_images(100)[2]] += 3  # the end of the last layer
    before, after = fit_runs(sample), fit_runs(spoilt)
    assert torch.equal(before[0, 3][:3], after[0, 3][:3])
    assert after[0, 3][3].min() > before[0, 3][3].max() + 0.05


def test_ridge_regression_solves_the_normal_equations() -> None:
    torch.manual_seed(0)
    features = torch.cat([torch.randn(50, 3, dtype=torch.float64), torch.ones(50, 1, dtype=torch.float64)], dim=1)
    targets = torch.randn(50, 2, dtype=torch.float64)
    exact = torch.linalg.lstsq(features, targets).solution
    torch.testing.assert_close(ridge_regression(features.T @ features, features.T @ targets, 1e-12), exact)
    heavy = ridge_regression(features.T @ features, features.T @ targets, 1e8)
    torch.testing.assert_close(heavy[-1], targets.mean(dim=0), atol=1e-6, rtol=0)  # only the free constant is left
    assert heavy[:-1].abs().max() < 1e-6


def test_weights_make_shares() -> None:
    torch.manual_seed(0)
    increments = torch.randn(4, 10, 3, 5, dtype=torch.float64) * torch.tensor([1, 1e-3, 100, 0]).view(4, 1, 1, 1)
    shares = (increments.square().sum(dim=(1, 3)) * row_weights(increments)).double()  # (layers, tokens)
    torch.testing.assert_close(shares[:3, 0], torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(shares[:3, 1:].sum(dim=1), torch.full((3,), 0.5, dtype=torch.float64))
    assert shares[3].sum() == 0


def test_what_a_constant_per_layer_explains() -> None:
    """Everything when all images move alike, nothing when increments have mean zero."""
    torch.manual_seed(0)
    alike = torch.randn(50, 4, 5, dtype=torch.float64) + torch.randn(6, 1, 1, 5, dtype=torch.float64)
    assert constant_residual(sample_tokens(alike)) < 1e-12
    assert constant_residual(sample_tokens(torch.randn(6, 400, 4, 5))) == pytest.approx(1, abs=0.05)


def test_sampled_tokens() -> None:
    states = torch.arange(2 * 3 * 5.0).view(2, 3, 5, 1)
    sample = sample_tokens(states, patches=2)
    assert sample.tokens.shape == (2, 3, 3, 1)
    assert torch.equal(sample.tokens[:, :, 0], states[:, :, 0])
    assert torch.equal(sample.tokens[1] - sample.tokens[0], torch.full((3, 3, 1), 15.0))  # same tokens in every layer
    assert (sample.tokens[0, :, 1:, 0] % 5 > 0).all()
    assert torch.equal(sample.context, states.mean(dim=2))
    assert sample_tokens(states, patches=99).tokens.shape == (2, 3, 5, 1)
    with pytest.raises(ValueError, match="states must have shape"):
        sample_tokens(states[0])


def test_a_straight_line_has_no_curvature() -> None:
    direction = torch.randn(4, 3, 5, dtype=torch.float64)
    states = 10 + torch.arange(9.0, dtype=torch.float64).view(9, 1, 1, 1) * direction
    shape = path_shape(states)
    torch.testing.assert_close(shape.turning, torch.ones(7, dtype=torch.float64))
    assert shape.curvature.max() < 1e-12
    assert suggested_steps(shape) == 1
    torch.testing.assert_close(shape.velocity, direction.norm(dim=-1).mean().expand(8))
    assert path_shape(torch.ones(4, 2, 3)).turning.tolist() == [1, 1]  # nothing moves
    assert suggested_steps(path_shape(torch.ones(4, 2, 3))) == 1


def test_estimated_error_of_a_circle() -> None:
    """On the unit circle over an arc a, Euler's K steps go along tangents of length a/K: the sum of the local errors is
    a²/2K, a share a/2K of the length; suggested K = a / (2 · tolerance)."""
    angle = torch.linspace(0, torch.pi / 2, 65, dtype=torch.float64)
    shape = path_shape(torch.stack([angle.cos(), angle.sin()], dim=1)[:, None])
    assert estimated_error(shape, 10) == pytest.approx(torch.pi / 2 / 20, rel=0.02)
    assert suggested_steps(shape, 0.1) == 8
    assert shape.turning.tolist() == pytest.approx([torch.cos(angle[1]).item()] * 63)


@pytest.mark.parametrize("family", sorted(TEACHERS))
def test_every_family_is_audited(family: str) -> None:
    if family in ("timm", "torchvision"):
        pytest.importorskip(family)
    torch.manual_seed(0)
    teacher = tiny_teacher(family, image_size=16, num_labels=3)
    before, told = teacher.checksum(), []
    findings = list(audit(teacher, torch.randn(12, 3, 16, 16), batch_size=5, progress=lambda *p: told.append(p)))
    assert teacher.checksum() == before
    assert {"teacher", "tied field"} == {what for what, _, _ in told}
    names = [finding.name for finding in findings]
    assert names == ["audit/verdict", "audit/tied_field", "audit/path", "audit/steps"]
    value = findings[0].value
    assert 1 <= value["suggested_fields"] <= teacher.depth
    assert value["phases_start_at_layers"][0] == 1
    assert value["suggested_steps"] >= 1
    assert len(findings[2].value["CLS"]["velocity"]) == teacher.depth
    assert len(findings[2].value["patches"]["turning"]) == teacher.depth - 1
    assert all(finding.figure is not None for finding in findings[1:3])
    assert "-" not in findings[0].text.split("movement")[0]  # worse than standing still is told as 0 %
    json.dumps([finding.value for finding in findings])


class Blocks(Teacher):
    """A teacher whose states are given: what the audit makes of them, from images to words."""

    def __init__(self, states: Tensor):
        torch.nn.Module.__init__(self)
        self.given, self.seen, self.num_patches = states, 0, states.shape[2] - 1

    def trace(self, images: Tensor, attention: bool = False):  # type: ignore[override]
        from odevit.teachers.teacher import TeacherTrace

        rows = slice(self.seen, self.seen + len(images))
        self.seen += len(images)
        return TeacherTrace(list(self.given[:, rows]), None, None)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_verdict_of_one_and_of_two_fields(depth: int) -> None:
    teacher = Blocks(flow([linear_field(0)] * depth))
    verdict = next(iter(audit(teacher, torch.zeros(100, 1))))
    assert verdict.value["suggested_fields"] == 1
    assert "num_fields = 1" in verdict.text
    if depth > 1:
        half = (depth + 1) // 2
        teacher = Blocks(flow([linear_field(0)] * half + [linear_field(1)] * (depth - half)))
        verdict = next(iter(audit(teacher, torch.zeros(100, 1))))
        assert verdict.value["suggested_fields"] == 2
        assert verdict.value["phases_start_at_layers"] == [1, half + 1]
        assert "num_fields = 2" in verdict.text
