"""What names a cache beside its tensors. That every ingredient changes the name: test_cache.py."""

import copy

import pytest
import torch

from odevit.distill.cache_key import settings
from odevit.teachers.teacher import TEACHERS, load_teacher, tiny_teacher


@pytest.mark.parametrize("family", sorted(TEACHERS))
def test_what_a_teacher_computes_is_part_of_the_key(family):
    """Heads, eps and activation leave no trace in the weights: the states differ, and so must the key."""
    if family in ("timm", "torchvision"):
        pytest.importorskip(family)
    torch.manual_seed(0)
    teacher = tiny_teacher(family, image_size=16)
    images = torch.randn(2, 3, 16, 16)

    def changed(**rules):
        other = load_teacher(teacher.module)
        for part in other.module.modules():
            for name, rule in rules.items():
                if isinstance(vars(part).get(name), int | float):
                    setattr(part, name, rule(getattr(part, name)))
        return other

    def twice(value):
        return 2 * value

    def half(value):
        return value // 2

    others = [
        changed(eps=lambda eps: 0.1),
        changed(num_heads=twice, num_attention_heads=twice, head_dim=half, attention_head_size=half),
    ]
    before = teacher.trace(images).states[-1]
    for other in others:
        assert not torch.allclose(other.trace(images).states[-1], before, atol=1e-5)
        assert other.checksum() == teacher.checksum()
        assert settings(other.module) != settings(teacher.module)
    assert settings(load_teacher(teacher.module).module) == settings(teacher.module)


@pytest.mark.slow
def test_activation_and_config_are_part_of_the_key_and_names_are_not(tmp_path):
    torch.manual_seed(0)
    teacher = tiny_teacher("deit", image_size=16, patch_size=8, num_channels=1)
    config = copy.deepcopy(teacher.module.config)
    config.hidden_act = "relu"
    other = type(teacher.module)(config)
    other.load_state_dict(teacher.module.state_dict())
    assert load_teacher(other).checksum() == teacher.checksum()
    assert settings(load_teacher(other).module) != settings(teacher.module)
    teacher.module.save_pretrained(tmp_path)
    assert settings(load_teacher(tmp_path).module) == settings(teacher.module)


def test_a_class_made_by_splitting_names_the_same_model():
    """What FSDP2 does to a module: its class becomes one of two parents, the first FSDP's own."""
    teacher = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)
    before = settings(teacher.module)
    parent = type("FSDPModule", (), {})
    for part in teacher.module.modules():
        part.__class__ = type(f"FSDP{type(part).__name__}", (parent, type(part)), {})
    assert settings(teacher.module) == before
