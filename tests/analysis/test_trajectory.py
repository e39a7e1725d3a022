"""Paths of CLS: principal axes, lengths and layer errors on data with a known answer."""

import pytest
import torch

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.analysis import HtmlFigure, Study
from odevit.analysis.trajectory import (
    cls_paths,
    drawn_images,
    layer_errors,
    path_lengths,
    principal_axes,
    run,
)
from odevit.teachers.teacher import Teacher, tiny_teacher


def test_principal_axes_of_a_known_cloud() -> None:
    """Variances 9, 4, 1 (and nothing else) along three orthonormal directions in 6 dimensions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=torch.float64)).Q.T
    scores = torch.linalg.qr(torch.randn(500, 4, generator=generator, dtype=torch.float64)).Q
    scores = scores - scores.mean(dim=0)
    scores = torch.linalg.qr(scores[:, :3]).Q * torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    offset = torch.arange(6.0, dtype=torch.float64)
    axes = principal_axes(scores @ directions + offset)
    torch.testing.assert_close(axes.explained, torch.tensor([9, 4, 1], dtype=torch.float64) / 14)
    torch.testing.assert_close(axes.mean, offset)
    torch.testing.assert_close(
        (axes.components @ directions.T).abs(), torch.eye(3, dtype=torch.float64), atol=1e-8, rtol=0
    )
    torch.testing.assert_close(axes.project(scores @ directions + offset).abs(), scores.abs(), atol=1e-8, rtol=0)
    with pytest.raises(ValueError, match="3 axes need"):
        principal_axes(torch.zeros(2, 6))


def test_lengths_of_a_line_and_a_half_circle() -> None:
    angles = torch.linspace(0, torch.pi, 1001, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    line = torch.stack([torch.linspace(0, 5, 1001, dtype=torch.float64), torch.zeros_like(angles)], dim=1)
    length, straightness = path_lengths(torch.stack([circle, line]))
    assert length.tolist() == pytest.approx([torch.pi, 5], rel=1e-5)
    assert straightness.tolist() == pytest.approx([2 / torch.pi, 1], rel=1e-5)


def test_layer_errors() -> None:
    """Zero on the teacher's own path, one relative to the spread when the student says the mean, by hand else."""
    torch.manual_seed(0)
    teacher = torch.randn(20, 4, 5, dtype=torch.float64) + 3
    student = torch.zeros(20, 7, 5, dtype=torch.float64)
    student[:, 2], student[:, 4], student[:, 6] = teacher[:, 1], teacher[:, 2].mean(dim=0), 1.5 * teacher[:, 3]
    first, second, third = layer_errors(student, teacher, [(1, 2), (2, 4), (3, 6)])
    assert (first["relative"], first["of_spread"]) == (0, 0)
    assert second["of_spread"] == pytest.approx(1)
    assert third["relative"] == pytest.approx(0.5)
    target = teacher[:, 3]
    spread = (target - target.mean(dim=0)).square().sum()
    assert third["of_spread"] == pytest.approx((0.25 * target.square().sum() / spread).sqrt().item())
    assert abs(third["of_spread"] - 1) > 0.1  # or a missing root would not be seen
    assert (third["layer"], third["step"]) == (3, 6)


def test_drawn_images_are_few_and_of_frequent_classes() -> None:
    labels = torch.tensor([0, 1, 1, 1, 2, 2, 3, 3, 3, 3])
    drawn = drawn_images(labels, classes=2, per_class=3)
    assert {label: chosen.tolist() for label, chosen in drawn.items()} == {1: [1, 2, 3], 3: [6, 7, 8]}


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    torch.manual_seed(0)
    return tiny_teacher("vit", image_size=16, num_labels=3)


def study_of(teacher: Teacher | None, **changes: object) -> Study:
    torch.manual_seed(0)
    settings = dict(
        image_size=16, patch_size=8, hidden_size=32, num_attention_heads=2, mlp_ratio=1, depth=2, num_steps=6,
        num_labels=3, num_registers=1,
    )  # fmt: skip
    model = OdeViTForImageClassification(OdeViTConfig(**{**settings, **changes})).eval()
    return Study(model, torch.randn(9, 3, 16, 16), torch.arange(9) % 3, ["a", "b", "c"], teacher, batch_size=4)


def test_paths_are_the_states_of_cls(teacher: Teacher) -> None:
    study = study_of(teacher)
    student, of_teacher = cls_paths(study, torch.arange(9))
    states = study.model(study.images, output_hidden_states=True).hidden_states
    expected = torch.stack([state[:, 0] for state in states], dim=1)
    torch.testing.assert_close(student, expected.detach().double(), atol=1e-5, rtol=1e-5)
    assert of_teacher is not None
    assert of_teacher.shape == (9, teacher.depth + 1, teacher.width)
    torch.testing.assert_close(of_teacher[:, -1], teacher.trace(study.images).states[-1][:, 0].double())


def test_findings_with_a_teacher(teacher: Teacher) -> None:
    times = [(layer + 1) / teacher.depth for layer in range(teacher.depth)]
    for meeting_times in (times, None):
        study = study_of(teacher, meeting_times=meeting_times)
        findings = {finding.name: finding for finding in run(study)}
        assert list(findings) == ["trajectory/plane", "trajectory/space", "trajectory/layers"]
        layers = findings["trajectory/layers"].value
        assert layers["meeting_times"] is (meeting_times is not None)
        assert [entry["layer"] for entry in layers["layers"]] == list(range(1, teacher.depth + 1))
        assert layers["layers"][-1]["step"] == 6
    assert isinstance(findings["trajectory/space"].figure, HtmlFigure)
    assert "a (teacher)" in findings["trajectory/space"].figure.html
    assert sum(findings["trajectory/plane"].value["explained_variance"]) <= 1 + 1e-9
    assert findings["trajectory/plane"].value["student"]["length"] > 0


def test_a_teacher_of_another_width_is_not_drawn(teacher: Teacher) -> None:
    findings = {finding.name: finding for finding in run(study_of(teacher, hidden_size=12))}
    assert list(findings) == ["trajectory/plane", "trajectory/space"]
    assert "(teacher)" not in findings["trajectory/space"].figure.html
    assert "teacher" in findings["trajectory/plane"].value  # its length needs no common space
    assert "teacher" not in {finding.name: finding for finding in run(study_of(None))}["trajectory/plane"].value
