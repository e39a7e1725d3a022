"""A student takes its teacher's tokens, norm and head over, as copies; the contract runs over every family."""

import pytest
import torch
from teacher_contract import images, randomise

from odevit import OdeViTForImageClassification
from odevit.distill.meeting import unroll
from odevit.distill.student import TEACHERS_OWN, copy_parts, parameter_report, student_of
from odevit.teachers.teacher import TEACHERS, load_teacher

FAMILIES = sorted(set(TEACHERS) - {"timm", "torchvision"})  # those two: tests/with_timm


def random_teacher(family="vit"):
    example = TEACHERS[family].example(image_size=32, patch_size=8, num_labels=5, num_channels=3)
    return load_teacher(randomise(example))


@pytest.fixture(scope="module", params=FAMILIES)
def teacher(request):
    return random_teacher(request.param)


@pytest.mark.parametrize("registers", [None, 0, 3])
def test_tokens_equal_the_teachers_bit_for_bit(teacher, registers):
    student = student_of(teacher, **({} if registers is None else {"num_registers": registers}))
    tokens, first = student.odevit.embed(images()), teacher.trace(images()).states[0]
    expected = teacher.extra_tokens if registers is None else registers
    assert tokens.shape == (2, 17 + expected, 32)
    assert torch.equal(tokens[:, :17], first[:, :17])
    if expected == teacher.extra_tokens:
        assert torch.equal(tokens, first)  # extra tokens became registers


def test_head_of_the_last_state_gives_the_teachers_logits(teacher):
    trace, student = teacher.trace(images()), student_of(teacher)
    logits = student.classify(trace.states[-1])
    note = teacher.parts().head_note
    if trace.logits is None:
        assert student.classifier.weight.requires_grad, note
    elif note == "":
        torch.testing.assert_close(logits, trace.logits, rtol=1e-4, atol=1e-5)
    else:
        assert not torch.allclose(logits, trace.logits, atol=1e-2), note


def test_every_part_is_copied_by_name_and_none_is_shared(teacher):
    student = student_of(teacher)
    names, parts = copy_parts(teacher, student), teacher.parts()
    expected = {
        "odevit.tokenizer.projection.weight": parts.patch_weight,
        "odevit.tokenizer.projection.bias": parts.patch_bias,
        "odevit.cls_token": parts.cls_token,
        "odevit.positions": parts.positions,
        "odevit.registers": parts.registers,
        "odevit.embedding_norm.weight": parts.embedding_norm_weight,
        "odevit.embedding_norm.bias": parts.embedding_norm_bias,
        "norm.weight": parts.norm_weight,
        "norm.bias": parts.norm_bias,
        "projection.weight": parts.projection_weight,
        "classifier.weight": parts.head_weight,
        "classifier.bias": parts.head_bias,
    }
    assert set(names) == {name for name, part in expected.items() if part is not None}
    values = student.state_dict()
    assert all(torch.equal(values[name], expected[name]) for name in names)
    theirs = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in student.parameters()}


@pytest.mark.slow
def test_training_a_student_leaves_the_teacher_as_it_is(teacher):
    before, student = teacher.checksum(), student_of(teacher, freeze_head=False).train()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student(images(), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1.0)
    assert not torch.equal(student.odevit.positions, teacher.parts().positions)
    assert teacher.checksum() == before


def test_head_is_frozen_unless_asked_or_fresh(teacher):
    def frozen(student):
        return {name for name, parameter in student.named_parameters() if not parameter.requires_grad}

    parts = teacher.parts()
    head = {"classifier.weight", "classifier.bias"}
    head |= set() if parts.norm_weight is None else {"norm.weight", "norm.bias"}
    head |= set() if parts.projection_weight is None else {"projection.weight"}
    copied = parts.head_weight is not None
    assert frozen(student_of(teacher)) == (head if copied else set())
    assert frozen(student_of(teacher, freeze_head=False)) == set()


def test_the_patch_bias_is_copied_too():
    """The published code left the patch bias out."""
    teacher = random_teacher()
    assert teacher.parts().patch_bias.abs().min() > 0
    student = student_of(teacher)
    assert torch.equal(student.odevit.tokenizer.projection.bias, teacher.parts().patch_bias)


def test_from_teacher_in_one_call_and_back_from_disk(tmp_path):
    model = randomise(TEACHERS["vit"].example(image_size=32, patch_size=8, num_labels=3, num_channels=3))
    model.config.id2label = {0: "cat", 1: "dog", 2: "emu"}
    student = OdeViTForImageClassification.from_teacher(model, num_fields=2, mlp_ratio=2, num_registers=1, num_steps=6)
    config = student.config
    assert (config.num_fields, config.mlp_ratio, config.num_registers, config.num_steps) == (2, 2, 1, 6)
    assert (config.hidden_size, config.num_attention_heads, config.depth, config.image_size) == (32, 2, 3, 32)
    assert config.id2label == {0: "cat", 1: "dog", 2: "emu"}
    config.id2label[0] = "changed"
    assert model.config.id2label[0] == "cat"
    student.save_pretrained(tmp_path)
    again = OdeViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(images()).logits, student.eval()(images()).logits)


def test_a_teacher_without_a_head_gives_a_fresh_one():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32)
    student = student_of(ViTModel(config, add_pooling_layer=False), num_labels=7)
    assert student.classifier.weight.shape == (7, 32)
    assert student.classifier.weight.requires_grad


def test_parameter_report_counts_everything():
    teacher = random_teacher()
    student = student_of(teacher, mlp_ratio=1)
    report = parameter_report(student, teacher)
    head = 2 * 32 + 32 * 5 + 5
    field = 2 * 2 * 32 + 4 * 32 * 32 + 2 * 32 * 32  # two norms; q, k, v, o; W1, W2; no biases
    tokens = 32 * 3 * 64 + 32 + 32 + 17 * 32  # patch kernel and bias, CLS, positions
    assert report.field == field
    assert report.total == head + field + tokens
    assert report.trainable == field + tokens
    assert report.teacher == sum(parameter.numel() for parameter in teacher.parameters())
    assert report.ratio == report.teacher / report.total


@pytest.mark.parametrize("own", [{"image_size": 16}, {"patch_size": 4}, {"tokenizer": "pooling"}])
def test_a_student_may_have_patches_of_its_own(own):
    teacher = random_teacher()
    student, parts = student_of(teacher, **own), teacher.parts()
    size = own.get("image_size", 32)
    state = student.odevit.evolve(student.odevit.embed(torch.randn(2, 3, size, size))).xs[-1]
    assert state.shape == (2, 1 + (size // own.get("patch_size", 8)) ** 2, 32)
    cls = state[:, 0]
    torch.testing.assert_close(
        student.classify(state), parts.norm(cls) @ parts.head_weight.T + parts.head_bias, rtol=1e-4, atol=1e-5
    )
    frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert frozen == {"norm.weight", "norm.bias", "classifier.weight", "classifier.bias"}
    assert torch.equal(student.odevit.cls_token, parts.cls_token)
    assert not any(
        "patches" in name or "tokenizer" in name or "positions" in name for name in copy_parts(teacher, student)
    )


@pytest.mark.parametrize("name", [*TEACHERS_OWN, "num_stepz"])
def test_what_cannot_be_chosen_is_told(name):
    with pytest.raises(ValueError, match=f"cannot set {name} on a student; fields to choose: .*num_steps"):
        student_of(random_teacher(), **{name: 1})


def test_other_classes_than_the_teachers_are_told():
    with pytest.raises(ValueError, match=r"classifier.weight must have one shape.*\(9, 32\).*\(5, 32\).*num_labels"):
        student_of(random_teacher(), num_labels=9)


def test_a_contractive_student_is_distilled_on_the_teachers_path():
    teacher = random_teacher()
    student = student_of(teacher, field="contractive")
    path, evaluations = unroll(student, images(), [], student.config.num_steps, [])
    loss = sum((x[:, 0] - h[:, 0]).square().mean() for x, h in zip(path, teacher.trace(images()).states, strict=True))
    loss.backward()
    assert evaluations == teacher.depth
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in student.odevit.fields.parameters())
    with pytest.raises(ValueError, match=f"at least {teacher.depth} steps"):
        unroll(student, images(), [], teacher.depth - 1, [])
