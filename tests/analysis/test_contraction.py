"""Contraction radius against brute force, and the soundness of certified agreement."""

import copy

import pytest
import torch

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.analysis import Study
from odevit.analysis.contraction import GROUPS, agreement, agreement_figure, run
from odevit.dynamics.arrival import contraction_radius
from odevit.teachers.teacher import Teacher, tiny_teacher


def random_head(generator: torch.Generator, classes: int = 7, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    draw = dict(generator=generator, dtype=torch.float64)
    return torch.randn(classes, width, **draw), torch.randn(classes, **draw)


def test_radius_is_exact() -> None:
    """No answer changes inside the ball; just outside, in the worst direction, it does."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = random_head(generator)
    states = 2 * torch.randn(300, 9, generator=generator, dtype=torch.float64)
    logits = states @ weight.T + bias
    answers, radii = logits.argmax(1), contraction_radius(logits, weight)
    assert (radii > 0).all()

    directions = torch.randn(300, 500, 9, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=-1, keepdim=True)
    inside = states[:, None] + 0.9999 * radii[:, None, None] * directions
    assert ((inside @ weight.T + bias).argmax(-1) == answers[:, None]).all()

    normals = weight[None] - weight[answers][:, None]  # (300, C, d): towards the plane between the answer and class j
    lengths = normals.norm(dim=-1, keepdim=True)
    towards = torch.where(lengths > 0, normals / lengths, torch.zeros(()))
    for factor, expected in ((0.999, 0), (1.001, 300)):
        moved = states[:, None] + factor * radii[:, None, None] * towards
        flipped = ((moved @ weight.T + bias).argmax(-1) != answers[:, None]).any(dim=1)
        assert flipped.sum() == expected


def test_radius_in_degenerate_cases() -> None:
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    parallel = contraction_radius(torch.tensor([[2.0, 1.0, -3.0]]), weight)  # class 1 differs by its bias only
    assert parallel.item() == pytest.approx(5 / 2**0.5)
    assert contraction_radius(torch.tensor([[2.0, 2.0, 0.0]]), weight).item() == 0  # a tie
    assert contraction_radius(torch.tensor([[0.3]]), torch.ones(1, 4)).item() == torch.inf
    with pytest.raises(ValueError, match=r"\(b, classes\)"):
        contraction_radius(torch.zeros(2, 3), torch.zeros(4, 5))


def student_of(teacher: Teacher, **changes: object) -> OdeViTForImageClassification:
    """A student with the teacher's read-out whose last CLS state is the teacher's embedding moved by a random flow."""
    settings = dict(
        image_size=teacher.image_size, patch_size=teacher.patch_size, num_channels=teacher.num_channels, depth=1,
        hidden_size=teacher.width, num_attention_heads=teacher.heads, mlp_ratio=2, num_steps=3, num_labels=10,
    )  # fmt: skip
    model = OdeViTForImageClassification(OdeViTConfig(**{**settings, **changes})).eval()
    parts = teacher.parts()
    with torch.no_grad():
        model.odevit.tokenizer.projection.weight.copy_(parts.patch_weight)
        model.odevit.tokenizer.projection.bias.copy_(parts.patch_bias)
        model.odevit.cls_token.copy_(parts.cls_token)
        model.odevit.positions.copy_(parts.positions)
        if parts.head_weight is not None and model.classifier.weight.shape == parts.head_weight.shape:
            model.norm.weight.copy_(parts.norm_weight)
            model.norm.bias.copy_(parts.norm_bias)
            model.norm.eps = parts.norm_eps
            model.classifier.weight.copy_(parts.head_weight)
            model.classifier.bias.copy_(parts.head_bias)
    return model


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    torch.manual_seed(1)
    return tiny_teacher("vit", num_labels=10)


@pytest.mark.slow
def test_certified_images_always_agree(teacher: Teacher) -> None:
    """60 teachers and students × 8 images, from near to far: certified implies observed."""
    teacher = copy.deepcopy(teacher)
    cases, certified, disagreeing = 0, 0, 0
    for seed in range(60):
        torch.manual_seed(seed)
        with torch.no_grad():  # a large CLS token makes the blocks matter less, so that student and teacher are near
            teacher.module.vit.embeddings.cls_token.normal_(std=10 ** (seed % 7 / 2 - 1))
            teacher.module.classifier.weight.normal_()
        student, images = student_of(teacher, depth=0.001 * 3 ** (seed % 8)), torch.randn(8, 3, 32, 32)
        result = agreement(student, teacher, images, batch_size=5)
        same = result["student_answers"] == result["teacher_answers"]
        assert torch.equal(result["teacher_answers"], teacher(images).argmax(1))
        assert torch.equal(result["student_answers"], student(images).logits.argmax(1))
        assert same[result["certified_images"]].all()
        assert result["certified"] <= result["observed"]
        cases, certified = cases + 8, certified + int(result["certified_images"].sum())
        disagreeing += int((~same).sum())
    assert cases >= 200
    assert certified >= 20, "the test is empty unless some agreement is certified"
    assert disagreeing >= 20, "the test is empty unless some images disagree"


def test_without_a_shared_reading_nothing_is_certified(teacher: Teacher) -> None:
    images = torch.randn(3, 3, 32, 32)
    other_head = student_of(teacher)
    with torch.no_grad():
        other_head.classifier.weight.mul_(1.5)
    cases = {
        "are not the teacher's": other_head,
        "10 classes and the student 4": student_of(teacher, num_labels=4),
        "wide": OdeViTForImageClassification(
            OdeViTConfig(image_size=32, patch_size=8, hidden_size=8, num_attention_heads=1, num_steps=2, num_labels=10)
        ).eval(),
    }
    for reason, student in cases.items():
        result = agreement(student, teacher, images)
        assert result["certified"] is None
        assert reason in result["note"]
        assert 0 <= result["observed"] <= 1
        assert "radii" not in result


def test_findings(teacher: Teacher) -> None:
    torch.manual_seed(0)
    student = student_of(teacher, depth=0.2)
    images, labels = torch.randn(20, 3, 32, 32), torch.arange(20) % 10
    labels[:5] = teacher(images).argmax(1)[:5]
    seen: list[tuple[int, int]] = []
    study = Study(student, images, labels, [str(i) for i in range(10)], teacher, batch_size=8)
    study.progress = lambda what, done, total: seen.append((done, total))
    (finding,) = run(study)
    assert finding.name == "contraction/agreement"
    assert sum(finding.value["groups"].values()) == 20
    right = {name: finding.value["groups"][name] for name in GROUPS}
    assert right["both right"] + right["teacher only"] == int((teacher(images).argmax(1) == labels).sum())
    assert finding.figure is not None
    assert seen[-1] == (20, 20)
    assert f"{finding.value['observed']:.1%}" in finding.text


@pytest.mark.slow
@pytest.mark.parametrize(("distance", "radius"), [(0.0, 2.0), (1.0, 0.0), (1.0, torch.inf)])
def test_figure_in_extreme_cases(distance: float, radius: float) -> None:
    """A perfect student, ties, and a single class can be drawn."""
    groups = torch.zeros(5, dtype=torch.long)
    figure = agreement_figure(torch.full((5,), distance), torch.full((5,), radius), groups)
    figure.draw_without_rendering()
    drawn = [points for points in figure.axes[1].collections if points.get_label() == GROUPS[0]]
    assert [len(points.get_offsets()) for points in drawn] == ([5] if radius == 2 else [])
