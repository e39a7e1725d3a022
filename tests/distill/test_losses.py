"""Every registered loss: its value in closed form, and where its gradient goes."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.distill.losses import LOSSES, Meeting, answer_divergence
from odevit.distill.meeting import unroll

PATCHES, REGISTERS, CLASSES, LAYERS = 4, 2, 5, 3
PATHS = {"cls_path": (0, 1), "patch_path": (1, 1 + PATCHES), "register_path": (1 + PATCHES, 1 + PATCHES + REGISTERS)}


def tiny_student(**fields):
    torch.manual_seed(0)
    values = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_attention_heads": 2}
    values |= {"mlp_ratio": 1, "num_registers": REGISTERS, "depth": LAYERS, "num_steps": LAYERS, "num_labels": CLASSES}
    return OdeViTForImageClassification(OdeViTConfig(**(values | fields)))


def meet(model, *, equal=False, **changes):
    """A meeting after a real forward; the teacher is random, or the student itself."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    path, _ = unroll(model, random(3, 1, 8, 8), [], LAYERS, [])
    student, logits = torch.stack(path[1:]), model.classify(path[-1])
    attention = model.odevit.fields[-1].attention_map(path[-2])[:, :, 0, 1 : 1 + PATCHES]
    values = {
        "model": model,
        "path": path,
        "student": student,
        "teacher": student.detach().clone() if equal else random(*student.shape),
        "weights": torch.ones(LAYERS, student.shape[2]),
        "logits": logits,
        "teacher_logits": logits.detach().clone() if equal else random(*logits.shape),
        "teacher_attention": attention.detach() if equal else random(*attention.shape).softmax(-1),
        "targets": one_hot(torch.tensor([0, 1, 4]), CLASSES).float(),
    }
    return Meeting(**(values | changes))


def value(name, meeting):
    return float(LOSSES[name](meeting).detach())


def reached(model, loss):
    loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_finite_and_reaches_what_it_should(name):
    model = tiny_student()
    with torch.no_grad():
        torch.nn.init.normal_(model.classifier.weight)
    meeting = meet(model)
    loss = LOSSES[name](meeting)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    names = reached(model, loss)
    everything = {n for n, _ in model.named_parameters()}
    head = {n for n in everything if n.startswith(("norm.", "classifier."))}
    assert names >= everything - head
    assert (names >= head) == (name in ("kl", "cross_entropy"))
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_jasmin_reaches_queries_and_keys_at_one_step():
    """The published code computed it on detached maps: no gradient at all."""
    model = tiny_student(num_steps=1)
    path, _ = unroll(model, torch.randn(2, 1, 8, 8), [], 1, [])
    names = reached(model, LOSSES["jasmin"](meet(model, path=path)))
    field = {name.removeprefix("odevit.fields.0.") for name in names if "fields" in name}
    assert {"attention.query.weight", "attention.key.weight"} <= field
    assert not any(name.startswith(("mlp", "attention.value")) for name in field)  # maps come before the first step


@pytest.mark.parametrize("name", [*PATHS, "attention", "kl"])
def test_zero_when_student_and_teacher_agree(name):
    meeting = meet(tiny_student(), equal=True)
    assert value(name, meeting) == pytest.approx(0, abs=1e-12)
    assert value(name, meet(tiny_student())) > 1e-3


@pytest.mark.parametrize("name", PATHS)
def test_path_losses_in_closed_form(name):
    """Σ_l w_l mean over batch and tokens of the squared distance, only of their own tokens."""
    first, last = PATHS[name]
    weights = torch.rand(LAYERS, 1 + PATCHES + REGISTERS)
    meeting = meet(tiny_student(), weights=weights)
    expected = 0.0
    for layer in range(LAYERS):
        for token in range(first, last):
            distance = (meeting.student[layer, :, token] - meeting.teacher[layer, :, token]).detach()
            expected += float(weights[layer, token] * distance.square().sum(-1).mean()) / (last - first)
    assert value(name, meeting) == pytest.approx(expected, rel=1e-5)
    shifted = meeting.teacher.clone()
    shifted[:, :, first:last] = meeting.student[:, :, first:last].detach() + 0.5  # 16 · 0.25 in each layer
    known = meet(meeting.model, teacher=shifted, weights=torch.tensor([[1.0], [10.0], [100.0]]).expand(3, 7))
    assert value(name, known) == pytest.approx(444.0, rel=1e-5)


def test_attention_and_answers_in_closed_form():
    model = tiny_student()
    meeting = meet(model, equal=True)
    off = meet(model, equal=True, teacher_attention=meeting.teacher_attention + 0.01)
    assert value("attention", off) == pytest.approx(0.01 * PATCHES, rel=1e-5)

    p, q, tau = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6]), 2.0
    rows = {"logits": (tau * q.log() + 5).expand(3, 2), "teacher_logits": (tau * p.log() - 1).expand(3, 2)}
    expected = tau**2 * (0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6))
    assert value("kl", meet(model, **rows, temperature=tau)) == pytest.approx(expected, rel=1e-5)

    targets = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]])
    expected = -(math.log(0.4) + math.log(0.6) + 0.5 * (math.log(0.4) + math.log(0.6))) / 3
    known = meet(model, logits=q.log().expand(3, 2), targets=targets)
    assert value("cross_entropy", known) == pytest.approx(expected, rel=1e-5)


def test_answers_are_compared_in_float32_under_autocast():
    student, teacher = torch.randn(64, 5), torch.randn(64, 5)
    exact = answer_divergence(student.bfloat16().float(), teacher, 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        seen = answer_divergence(student.bfloat16(), teacher, 2.0)
        online = answer_divergence(student.bfloat16(), student.bfloat16(), 4.0)  # a teacher that answers in 16 bits
    assert seen.dtype == torch.float32
    assert float(seen) == pytest.approx(float(exact), rel=1e-6)
    assert float(online) == pytest.approx(0, abs=1e-6)


def test_only_cross_entropy_reads_the_labels():
    model = tiny_student()
    with torch.no_grad():
        torch.nn.init.normal_(model.classifier.weight)
    other = one_hot(torch.tensor([3, 3, 3]), CLASSES).float()
    dependent = [name for name in LOSSES if value(name, meet(model)) != value(name, meet(model, targets=other))]
    assert dependent == ["cross_entropy"]


def test_losses_without_what_they_compare_are_told():
    model = tiny_student()
    meeting = meet(model)
    only_cls = meet(model, teacher=meeting.teacher[:, :, :1], weights=torch.ones(LAYERS, 1))
    assert torch.isfinite(LOSSES["cls_path"](only_cls))
    for name, (first, last) in list(PATHS.items())[1:]:
        with pytest.raises(ValueError, match=f"same tokens to compare, got {last - first} and 0"):
            LOSSES[name](only_cls)
    without = meet(tiny_student(num_registers=0))
    assert value("patch_path", without) > 0
    with pytest.raises(ValueError, match="got 0 and 0"):
        LOSSES["register_path"](without)
    with pytest.raises(ValueError, match="attention=True"):
        LOSSES["attention"](meet(model, teacher_attention=None))
    with pytest.raises(ValueError, match="classification head"):
        LOSSES["kl"](meet(model, teacher_logits=None))
