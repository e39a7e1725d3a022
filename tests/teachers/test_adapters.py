"""A PEFT folder given as teacher."""

import json
import sys

import pytest
import torch

from odevit.teachers.teacher import load_teacher, tiny_teacher

peft = pytest.importorskip("peft")


@pytest.fixture
def adapter(tmp_path):
    torch.manual_seed(0)
    base = tiny_teacher("vit", image_size=16, patch_size=4).module.requires_grad_(True)
    base.save_pretrained(tmp_path / "base")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_normalize": True}
    (tmp_path / "base" / "preprocessor_config.json").write_text(json.dumps(processor))
    names = [name for name, layer in base.named_modules() if isinstance(layer, torch.nn.Linear) and "attention" in name]
    network = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    network.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    network.save_pretrained(tmp_path / "adapter")
    return network.eval(), tmp_path / "adapter"


def test_a_teacher_is_its_base_with_the_adapter_merged(adapter):
    network, folder = adapter
    teacher = load_teacher(folder)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = network(images).logits
        assert not torch.allclose(expected, load_teacher(folder.parent / "base")(images), atol=1e-3)
    assert torch.allclose(teacher(images), expected, atol=1e-5)
    assert teacher.family == "vit"
    assert (teacher.mean, teacher.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_without_peft_the_error_says_how_to_merge(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"is a PEFT adapter of .*base.*pip install peft.*merge_and_unload"):
        load_teacher(adapter[1])
