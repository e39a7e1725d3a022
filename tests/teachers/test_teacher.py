"""Teachers on tiny random models: the contract of every family, and what is particular to each.

The families of timm and torchvision are tested in tests/with_timm, which needs these libraries.
"""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from distill_contract import DistillContract
from teacher_contract import SIZES, TeacherContract, images, randomise, read_out, rebuild_tokens
from torch import nn

from odevit.teachers.families import HuggingFace
from odevit.teachers.teacher import (
    TEACHERS,
    find_family,
    load_teacher,
    resize_classifier,
    resize_patch_kernel,
    tiny_teacher,
)

HUGGING_FACE = [name for name, family in TEACHERS.items() if isinstance(family, HuggingFace)]


class TestEveryFamily(TeacherContract, DistillContract):
    @pytest.fixture(params=TEACHERS)
    def model(self, request: pytest.FixtureRequest) -> nn.Module:
        try:
            return randomise(TEACHERS[request.param].example(**SIZES))
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{request.param} cannot be imported here ({error}); tests/with_timm runs its contract")


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_face_states_and_attention_equal_its_own_outputs(family):
    model = randomise(TEACHERS[family].example(**SIZES)).eval()
    teacher = load_teacher(model)
    model.set_attn_implementation("eager")
    hidden, attentions = [], []
    blocks = TEACHERS[family].anatomy(model).blocks
    for block in blocks:
        block.attention.register_forward_hook(lambda module, args, output: attentions.append(output[1]))
    with torch.no_grad():
        hidden.append(model.base_model.embeddings(images()))
        for block in blocks:
            hidden.append(block(hidden[-1]))
    trace = teacher.trace(images(), attention=True)
    extra = teacher.extra_tokens
    order = [0, *range(1 + extra, 17 + extra), *range(1, 1 + extra)]
    for state, own in zip(trace.states, hidden, strict=True):
        torch.testing.assert_close(state, own[:, order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trace.attention, attentions[-1][:, :, 0, 1 + extra :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", HUGGING_FACE)
@pytest.mark.parametrize("image_size", [24, 48])
def test_hugging_face_own_interpolation_agrees(family, image_size):
    model = randomise(TEACHERS[family].example(**SIZES)).eval()
    own = {} if family.startswith("dinov2") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        expected = model.base_model(images(size=image_size), **own).last_hidden_state
        got = load_teacher(model, image_size=image_size).module.base_model(images(size=image_size)).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_distilled_teacher_averages_two_heads_and_gives_the_cls_head():
    model = randomise(TEACHERS["deit-distilled"].example(**SIZES)).eval()
    teacher = load_teacher(model)
    trace = teacher.trace(images())
    with torch.no_grad():
        output = model(images())
        distillation = model.distillation_classifier(model.base_model.layernorm(trace.states[-1][:, -1]))
    torch.testing.assert_close(read_out(teacher, trace.states[-1]), output.cls_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((output.cls_logits + distillation) / 2, trace.logits, rtol=1e-4, atol=1e-5)
    assert teacher.extra_tokens == 1
    assert "distillation head" in teacher.parts().head_note


@pytest.mark.parametrize("family", ["dinov2", "dinov2-registers"])
def test_dinov2_has_no_copyable_head_but_its_own_logits(family):
    model = randomise(TEACHERS[family].example(**SIZES)).eval()
    teacher = load_teacher(model)
    trace, parts = teacher.trace(images()), teacher.parts()
    assert parts.head_weight is None
    assert "patch tokens" in parts.head_note
    with torch.no_grad():
        normed = model.base_model.layernorm(trace.states[-1])
        own = model.classifier(torch.cat([normed[:, 0], normed[:, 1:17].mean(1)], dim=1))
    torch.testing.assert_close(trace.logits, own, rtol=1e-4, atol=1e-5)
    assert teacher.extra_tokens == (4 if family == "dinov2-registers" else 0)


@pytest.mark.parametrize("name", ["DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel"])
def test_models_without_a_head(name):
    import transformers

    kind = getattr(transformers, name)
    family = next(f for f in TEACHERS.values() if name in getattr(f, "classes", ()))
    teacher = load_teacher(randomise(kind(family.example(**SIZES).config)))
    assert teacher.num_labels == 0
    assert teacher.trace(images()).logits is None
    assert torch.equal(teacher.trace(images()).states[0], rebuild_tokens(teacher, images()))


def test_what_is_no_vision_transformer_is_refused_by_name():
    from transformers import ResNetConfig, ResNetForImageClassification

    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    for module in (resnet, nn.Linear(3, 3)):
        with pytest.raises(ValueError, match=type(module).__name__) as caught:
            load_teacher(module)
        assert all(family in str(caught.value) for family in TEACHERS)
    with pytest.raises(ValueError, match=r"unknown teacher family 'swin'.*vit"):
        tiny_teacher("swin")


def test_a_folder_gives_the_same_teacher_and_its_normalisation(tmp_path):
    model = randomise(TEACHERS["vit"].example(**SIZES))
    model.save_pretrained(tmp_path)
    assert load_teacher(str(tmp_path)).parts().mean is None
    settings = {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    teacher = load_teacher(tmp_path)
    assert teacher.checksum() == load_teacher(model).checksum()
    assert teacher.parts().mean == (0.1, 0.2, 0.3)
    assert teacher.parts().std == (0.4, 0.5, 0.6)


def test_a_dino_folder_loads_without_a_random_pooler(tmp_path):
    randomise(TEACHERS["dino"].example(**SIZES)).save_pretrained(tmp_path)
    first, second = load_teacher(tmp_path), load_teacher(tmp_path)
    assert first.family == "dino"
    assert first.checksum() == second.checksum()
    assert not any("pooler" in name for name, _ in first.named_parameters())


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    model = TEACHERS["dino"].example(**SIZES)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["ViTForImageClassification"]}))
    with pytest.raises(ValueError, match=r"lacks weights.*classifier\.weight"):
        load_teacher(tmp_path)


def test_a_folder_without_a_model_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_teacher(tmp_path)


@pytest.mark.parametrize(("old", "new"), [(4, 6), (8, 16), (8, 8)])
def test_resized_kernel_reads_enlarged_patches_exactly(old, new):
    kernel, patches = torch.randn(7, 3, old, old), torch.randn(11, 3, old, old)
    enlarged = F.interpolate(patches, size=(new, new), mode="bicubic", antialias=True)
    expected = F.conv2d(patches, kernel)
    torch.testing.assert_close(F.conv2d(enlarged, resize_patch_kernel(kernel, new)), expected, rtol=1e-4, atol=1e-4)


def test_resized_kernel_is_the_least_squares_solution_when_shrinking():
    kernel = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    resized = resize_patch_kernel(kernel, 4)
    basis = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    transpose = F.interpolate(basis, size=(4, 4), mode="bicubic", antialias=True).flatten(1)  # Bᵀ, (64, 16)
    residual = kernel.flatten(1) - resized.flatten(1) @ transpose.mT
    assert residual.norm() > 0.1
    torch.testing.assert_close(residual @ transpose, torch.zeros(2, 16, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", [name for name in HUGGING_FACE if name != "dino"])
def test_resize_classifier_round_trips_at_the_new_size(family, tmp_path):
    model = randomise(TEACHERS[family].example(**SIZES))
    teacher = load_teacher(model, image_size=48)
    assert resize_classifier(model, 48) is model
    assert torch.equal(load_teacher(model)(images(size=48)), teacher(images(size=48)))
    resize_classifier(model, 24, num_labels=7)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.eval()(images(size=24)).logits.square().mean().backward()
    anatomy = TEACHERS[family].anatomy(model)
    assert anatomy.positions.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert (again.config.image_size, again.config.num_labels, len(again.config.id2label)) == (24, 7, 7)
    with torch.no_grad():
        assert torch.equal(again(images(size=24)).logits, model(images(size=24)).logits)
    assert torch.equal(load_teacher(tmp_path)(images(size=24)), load_teacher(model)(images(size=24)))


def test_resize_classifier_needs_a_classifier():
    with pytest.raises(ValueError, match="AutoModelForImageClassification"):
        resize_classifier(TEACHERS["dino"].example(**SIZES), 48)


def test_tiny_teacher_and_deepcopy():
    teacher = tiny_teacher("vit", image_size=8, patch_size=2, num_labels=10, num_channels=1)
    clone = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    x = torch.randn(2, 1, 8, 8)
    assert find_family(teacher.module) == "vit"
    assert teacher.trace(x).states[-1].abs().sum() > 0
    assert clone.trace(x).states[-1].abs().sum() == 0
