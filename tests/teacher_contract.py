"""What every teacher must do, whatever its family: inherit from `TeacherContract` and give it a fixture `model`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odevit.teachers.teacher import TEACHERS, Teacher, load_teacher

SIZES = {"image_size": 32, "patch_size": 8, "num_labels": 5, "num_channels": 3}


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random values everywhere, also where libraries start with zeros or ones (norms, LayerScale, CLS, heads)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return module


def images(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def rebuild_tokens(teacher: Teacher, x: Tensor) -> Tensor:
    """What a student with E registers makes of the copied parts: [CLS | patches | extras]."""
    parts = teacher.parts()
    patches = F.conv2d(x, parts.patch_weight, parts.patch_bias, stride=teacher.patch_size).flatten(2).mT
    tokens = torch.cat([parts.cls_token.expand(len(x), -1, -1), patches], dim=1) + parts.positions
    if parts.embedding_norm_weight is not None:
        norm = parts.embedding_norm_weight, parts.embedding_norm_bias
        tokens = F.layer_norm(tokens, (teacher.width,), *norm, parts.norm_eps)
    return tokens if parts.registers is None else torch.cat([tokens, parts.registers.expand(len(x), -1, -1)], dim=1)


def read_out(teacher: Teacher, state: Tensor, token: int = 0) -> Tensor:
    parts = teacher.parts()
    features = parts.norm(state[:, token])
    if parts.projection_weight is not None:
        features = F.linear(features, parts.projection_weight)
    if parts.unit_features:
        features = features / features.norm(dim=-1, keepdim=True)
    return F.linear(features, parts.head_weight, parts.head_bias)


class TeacherContract:
    def test_family_and_sizes(self, model):
        teacher = load_teacher(model)
        assert TEACHERS[teacher.family].recognises(model)
        assert sum(family.recognises(model) for family in TEACHERS.values()) == 1
        assert (teacher.width, teacher.heads, teacher.depth) == (32, 2, 3)
        assert (teacher.image_size, teacher.patch_size, teacher.num_patches, teacher.num_channels) == (32, 8, 16, 3)

    def test_trace_is_the_forward_block_by_block(self, model):
        teacher = load_teacher(model)
        trace = teacher.trace(images())
        assert len(trace.states) == teacher.depth + 1
        assert torch.equal(trace.states[0], rebuild_tokens(teacher, images()))  # bit for bit
        for index in range(teacher.depth):
            assert trace.states[index + 1].shape == (2, 17 + teacher.extra_tokens, 32)
            assert not torch.allclose(trace.states[index + 1], trace.states[index], atol=0.1)
            torch.testing.assert_close(
                teacher.block(index, trace.states[index]), trace.states[index + 1], rtol=1e-4, atol=1e-4
            )

    def test_logits_are_the_models_own_and_the_head_reads_cls(self, model):
        teacher = load_teacher(model)
        trace, parts = teacher.trace(images()), teacher.parts()
        if teacher.num_labels == 0:
            assert trace.logits is None
            assert parts.head_weight is None
            assert parts.head_note
            with pytest.raises(ValueError, match="no classification head"):
                teacher(images())
            return
        with torch.no_grad():
            output = model.eval()(images())
        own = output if isinstance(output, Tensor) else output.logits
        # the attention that pools a tower without CLS rounds differently in a copy's memory: 1e-7 was seen
        rounding = {"rtol": 0, "atol": 0} if teacher.adapter.looks_at_cls else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(trace.logits, own, **rounding)
        assert torch.equal(teacher(images()), trace.logits)
        assert own.shape == (2, 5)
        if parts.head_note == "":
            torch.testing.assert_close(read_out(teacher, trace.states[-1]), own, rtol=1e-4, atol=1e-5)
        elif parts.head_weight is not None:
            assert not torch.allclose(read_out(teacher, trace.states[-1]), own, atol=1e-2)

    def test_the_copied_norm_is_the_teachers_down_to_its_eps(self, model):
        teacher = load_teacher(model)
        parts = teacher.parts()
        if teacher.anatomy.norm is None:
            assert parts.norm_weight is parts.norm_bias is None
            return
        small = 1e-3 * torch.randn(4, 32)  # where the variance is as small as eps
        assert torch.equal(parts.norm(small), teacher.anatomy.norm(small))

    def test_attention_is_a_part_of_a_softmax_row(self, model):
        teacher = load_teacher(model)
        attention = teacher.trace(images(), attention=True).attention
        assert attention.shape == (2, 2, 16)
        assert (attention > 0).all()
        if teacher.adapter.looks_at_cls:
            assert (attention.sum(-1) < 1).all()  # the rest goes to CLS and the extra tokens
        else:
            torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2))
        assert teacher.trace(images()).attention is None

    def test_the_given_model_and_the_teacher_never_change(self, model):
        before = copy.deepcopy(model.state_dict())
        model.train()
        teacher = load_teacher(model, image_size=48)
        checksum = teacher.checksum()
        teacher.train()
        nn.ModuleList([teacher]).train()
        assert not any(module.training for module in teacher.modules())
        first, second = teacher.trace(images(size=48), attention=True), teacher.trace(images(size=48))
        assert torch.equal(first.states[-1], second.states[-1])  # the examples have dropout in their configs
        assert not any(parameter.requires_grad for parameter in teacher.parameters())
        parts = teacher.parts()
        for name, part in vars(parts).items():
            if isinstance(part, Tensor):
                assert not part.requires_grad, name
                part.add_(1)
        assert teacher.checksum() == checksum
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())

    def test_hooks_are_removed_when_the_forward_fails(self, model):
        teacher = load_teacher(model)
        broken = teacher.anatomy.blocks[1].register_forward_pre_hook(lambda block, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            teacher.trace(images())
        broken.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())

    def test_checksum_sees_one_weight(self, model):
        teacher, again = load_teacher(model), load_teacher(model)
        assert teacher.checksum() == again.checksum()
        with torch.no_grad():
            next(again.module.parameters()).view(-1)[0] += 1e-6 + 1e-3
        assert teacher.checksum() != again.checksum()

    def test_gradients_pass_a_block_to_its_tokens_only(self, model):
        teacher = load_teacher(model)
        x = teacher.trace(images()).states[1].requires_grad_()
        teacher.block(1, x).square().sum().backward()
        assert x.grad is not None
        assert (x.grad if teacher.adapter.looks_at_cls else x.grad[:, 1:]).abs().min() > 0
        assert all(parameter.grad is None for parameter in teacher.parameters())

    @pytest.mark.parametrize(("image_size", "patch_size"), [(48, None), (24, None), (16, 4), (64, 16), (32, 4)])
    def test_other_sizes_keep_the_contract(self, model, image_size, patch_size):
        teacher = load_teacher(model, image_size=image_size, patch_size=patch_size)
        assert (teacher.image_size, teacher.patch_size) == (image_size, patch_size or 8)
        x = images(size=image_size)
        trace = teacher.trace(x, attention=True)
        assert torch.equal(trace.states[0], rebuild_tokens(teacher, x))
        assert trace.attention.shape[-1] == teacher.num_patches == (image_size // teacher.patch_size) ** 2
        assert torch.isfinite(trace.states[-1]).all()

    def test_a_patch_size_with_the_same_grid_keeps_positions_and_answers(self, model):
        """Images twice as large with patches twice as large: smooth images give nearly the same first tokens."""
        small, large = load_teacher(model), load_teacher(model, image_size=64, patch_size=16)
        assert torch.equal(small.parts().positions, large.parts().positions)
        smooth = F.interpolate(torch.randn(2, 3, 3, 3), size=32, mode="bicubic")
        enlarged = F.interpolate(smooth, size=64, mode="bicubic", antialias=True)
        tokens, near = small.trace(smooth).states[0], large.trace(enlarged).states[0]
        patches = slice(1, 17)
        error = (tokens - near)[:, patches].norm() / (tokens - small.parts().positions.mean())[:, patches].norm()
        assert error < 0.05

    def test_wrong_images_and_sizes_are_told(self, model):
        teacher = load_teacher(model)
        with pytest.raises(ValueError, match=r"3, 32, 32.*got \(2, 3, 48, 48\)"):
            teacher.trace(images(size=48))
        with pytest.raises(ValueError, match="multiple of the patch size 8, got 30; use 32"):
            load_teacher(model, image_size=30)
