"""The k largest logits and one number for the rest: the divergence of such answers, against that of all logits."""

import pytest
import torch

from odevit.distill.losses import answer_divergence
from odevit.distill.top import TopLogits, bytes_of_top, keep_top


def answers(classes, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (spread * torch.randn(7, classes, generator=generator, dtype=torch.float64) for _ in range(2))
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_one_class_left_out_is_no_loss(temperature):
    """k = C - 1: the rest is one class, so that nothing is lumped. k = C is `teacher` itself."""
    student, teacher = answers(10)
    whole = answer_divergence(student, teacher, temperature)
    top = answer_divergence(student, keep_top(teacher, 9, temperature), temperature)
    assert top.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, student)[0] for loss in (top, whole)))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("count", [1, 4, 30])
def test_what_lumping_leaves_out_is_the_divergence_within_the_rest(count, temperature):
    """KL = KL over k + 1 classes + p(rest) KL(p | rest ‖ q | rest), times T², written out class by class."""
    student, teacher = answers(100)
    lumped = answer_divergence(student, keep_top(teacher, count, temperature), temperature)
    p, q = ((x / temperature).softmax(1).detach() for x in (teacher, student))
    missing = 0.0
    for image in range(len(p)):
        rest = [c for c in range(100) if c not in teacher[image].topk(count).indices.tolist()]
        inside, said = p[image, rest], q[image, rest]
        a, b = inside / inside.sum(), said / said.sum()
        missing += float(inside.sum() * (a * (a / b).log()).sum()) / len(p)
    whole = answer_divergence(student, teacher, temperature).item()
    assert lumped.item() == pytest.approx(whole - temperature**2 * missing, rel=1e-9)
    assert lumped.item() < whole


def test_32_of_1000_are_close_where_a_teacher_is_sure():
    """Logits as a trained classifier has them: one class far above the others, the student on its way there."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 1000, generator=generator)
    teacher[torch.arange(64), torch.randint(1000, (64,), generator=generator)] += 12
    student = teacher + torch.randn(64, 1000, generator=generator)
    student.requires_grad_()
    whole, top = answer_divergence(student, teacher, 1.0), answer_divergence(student, keep_top(teacher, 32, 1.0), 1.0)
    assert 0 <= whole.item() - top.item() < 0.01  # of 0.046 nats
    a, b = (torch.autograd.grad(loss, student)[0].flatten() for loss in (top, whole))
    assert torch.cosine_similarity(a, b, dim=0) > 0.99


def test_the_rest_of_the_student_is_moved_as_one():
    """No class outside the top is preferred: their gradients are proportional to the student's own probabilities."""
    student, teacher = answers(20)
    top = keep_top(teacher, 3, 1.0)
    gradient = torch.autograd.grad(answer_divergence(student, top, 1.0), student)[0]
    q = student.detach().softmax(1)
    ratio = (gradient / q).scatter(1, top.classes, torch.nan)
    for row in ratio:
        kept = row[~row.isnan()]
        torch.testing.assert_close(kept, kept[:1].expand_as(kept))


def test_a_rest_that_weighs_nothing_is_finite():
    teacher = torch.full((2, 50), -500.0)
    teacher[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    student = torch.zeros(2, 50, requires_grad=True)
    loss = answer_divergence(student, keep_top(teacher, 3, 1.0), 1.0)
    gradient = torch.autograd.grad(loss, student)[0]
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_bytes_are_those_of_the_columns():
    top = keep_top(torch.randn(5, 1000), 32, 1.0)
    assert isinstance(top, TopLogits)
    values, classes = top.values.float().numpy().nbytes, top.classes.to(torch.int16).numpy().nbytes
    assert bytes_of_top(32, 1000) * 5 == values + classes + top.rest.float().numpy().nbytes == 196 * 5
    assert bytes_of_top(32, 100_000) == 196 + 64
