"""The contract for timm's and torchvision's models, in a process of its own where these libraries can be imported."""

import pytest
import torch
from distill_contract import DistillContract
from teacher_contract import SIZES, TeacherContract, images, randomise, read_out
from torch import nn

from odevit.teachers.teacher import TEACHERS, load_teacher, resize_classifier, resize_patch_kernel

pytest.importorskip("timm.models", reason="timm is an optional extra")
pytest.importorskip("torchvision.models", reason="torchvision is needed by timm")

from timm.layers import resample_patch_embed
from timm.models import create_model, save_for_hf
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

TINY = {"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 2}
VARIANTS = {
    "registers and LayerScale": lambda: VisionTransformer(**TINY, reg_tokens=2, init_values=0.1),
    "positions for patches only": lambda: VisionTransformer(**TINY, reg_tokens=2, no_embed_class=True),
    "normed queries and keys": lambda: VisionTransformer(**TINY, qk_norm=True),
    "mean of patches": lambda: VisionTransformer(**TINY, global_pool="avg"),
    "norm behind the pooling": lambda: VisionTransformer(**TINY, fc_norm=True),
    "any image size": lambda: VisionTransformer(**TINY, dynamic_img_size=True),
    "no head": lambda: VisionTransformer(**{**TINY, "num_classes": 0}),
    "distilled": lambda: VisionTransformerDistilled(**TINY),
}


class TestEveryFamily(TeacherContract, DistillContract):
    @pytest.fixture(params=["timm", "torchvision"])
    def model(self, request: pytest.FixtureRequest) -> nn.Module:
        return randomise(TEACHERS[request.param].example(**SIZES))


class TestTimmVariants(TeacherContract):
    @pytest.fixture(params=VARIANTS)
    def model(self, request: pytest.FixtureRequest) -> nn.Module:
        return randomise(VARIANTS[request.param]())


class TestTimmWithoutHead(DistillContract):
    @pytest.fixture
    def model(self) -> nn.Module:
        return randomise(VARIANTS["no head"]())


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_and_attention_equal_timms_own(variant):
    model = randomise(VARIANTS[variant]()).eval()
    teacher = load_teacher(model)
    trace, extra = teacher.trace(images(), attention=True), teacher.extra_tokens
    with torch.no_grad():
        intermediates = model.forward_intermediates(
            images(), return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
    for state, (patches, prefix) in zip(trace.states[1:], intermediates, strict=True):
        own = torch.cat([prefix[:, :1], patches, prefix[:, 1:]], dim=1)
        torch.testing.assert_close(state, own, rtol=1e-4, atol=1e-4)
    rows = []
    attention = model.blocks[-1].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, args, output: rows.append(output[:, :, 0, 1 + extra :]))
    with torch.no_grad():
        model(images())
    torch.testing.assert_close(trace.attention, rows[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["registers and LayerScale", "positions for patches only", "distilled"])
@pytest.mark.parametrize("size", [{"image_size": 48}, {"image_size": 24}, {"image_size": 32, "patch_size": 4}])
def test_other_sizes_agree_with_timms_own(variant, size):
    model = randomise(VARIANTS[variant]()).eval()
    got = load_teacher(model, **size)(images(size=size["image_size"]))
    model.set_input_size(img_size=(size["image_size"],) * 2, patch_size=size.get("patch_size"))
    with torch.no_grad():
        torch.testing.assert_close(got, model(images(size=size["image_size"])), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("new_size", [4, 6, 16])
def test_patch_kernel_equals_timms(new_size):
    kernel = torch.randn(5, 3, 8, 8)
    expected = resample_patch_embed(kernel, [new_size, new_size])
    torch.testing.assert_close(resize_patch_kernel(kernel, new_size), expected, rtol=1e-4, atol=1e-4)


def test_distilled_gives_the_cls_head():
    model = randomise(VARIANTS["distilled"]()).eval()
    teacher = load_teacher(model)
    trace = teacher.trace(images())
    with torch.no_grad():
        distillation = model.head_dist(model.norm(trace.states[-1][:, -1]))
    cls_logits = read_out(teacher, trace.states[-1])
    torch.testing.assert_close((cls_logits + distillation) / 2, trace.logits, rtol=1e-4, atol=1e-5)
    assert "distillation head" in teacher.parts().head_note


def test_a_head_on_the_mean_patch_is_not_offered():
    teacher = load_teacher(randomise(VARIANTS["mean of patches"]()))
    assert teacher.num_labels == 5
    assert teacher.parts().head_weight is None
    assert "patch tokens" in teacher.parts().head_note


def test_torchvision_attention_equals_its_own():
    model = randomise(TEACHERS["torchvision"].example(**SIZES)).eval()
    trace = load_teacher(model).trace(images(), attention=True)
    block = model.encoder.layers[-1]
    with torch.no_grad():
        x = block.ln_1(trace.states[-2])
        _, maps = block.self_attention(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(trace.attention, maps[:, :, 0, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"class_token": False, "global_pool": "avg"}, "a CLS token"),
        ({"pos_embed": "none"}, "learned absolute positions"),
        ({"pre_norm": True}, "no norm before its first block"),
        ({"final_norm": False}, "a final LayerNorm"),
    ],
)
def test_what_a_student_could_not_copy_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        load_teacher(VisionTransformer(**{**TINY, **options}))


def test_a_timm_folder_brings_its_normalisation(tmp_path):
    model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=5)
    model_args = {"img_size": 32, "patch_size": 8, "depth": 1}
    save_for_hf(randomise(model), tmp_path, model_args=model_args, safe_serialization=True)
    teacher = load_teacher(tmp_path)
    assert teacher.family == "timm"
    assert teacher.checksum() == load_teacher(model).checksum()
    assert teacher.parts().mean == tuple(model.pretrained_cfg["mean"]) == load_teacher(model).parts().mean


def test_resize_classifier_is_for_hugging_face():
    with pytest.raises(ValueError, match="Hugging Face"):
        resize_classifier(VisionTransformer(**TINY), 48)
