"""The flow as a backbone: feature maps at chosen times, and a segmentation read off them by a linear probe."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from problems import perturbed_model, tiny_images, tiny_model
from torch import nn
from transformers import AutoBackbone, AutoConfig
from transformers.models.auto import auto_factory

from odevit import OdeViTBackbone, OdeViTConfig
from odevit.model.layers import MIXINGS, TOKENIZERS
from odevit.model.pools import POOLS


@pytest.fixture
def saved(tmp_path):
    model = perturbed_model(num_fields=2)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_maps_are_the_patches_of_the_states_at_those_times(saved):
    model, folder = saved
    times = [0.3, 0.5, 1.0]
    backbone = OdeViTBackbone.from_pretrained(folder, feature_times=times, out_features=["stem", "t=0.3", "t=1"])
    images = tiny_images(2)
    with torch.no_grad():
        maps = backbone(images).feature_maps
        flow = model.odevit
        states = flow.evolve(flow.embed(images), save_at=[0.0, 0.3, 1.0]).xs
    assert backbone.channels == [32, 32, 32]
    assert backbone.stage_names == ["stem", "t=0.3", "t=0.5", "t=1"]
    for found, state in zip(maps, states, strict=True):
        assert found.shape == (2, 32, 4, 4)
        for row, column in ((0, 0), (1, 3), (3, 2)):
            assert torch.equal(found[:, :, row, column], state[:, 1 + 4 * row + column])


def test_every_step_is_a_stage_and_the_last_is_the_default(saved):
    model, folder = saved
    backbone = OdeViTBackbone.from_pretrained(folder)
    assert backbone.stage_names == ["stem", "t=0.25", "t=0.5", "t=0.75", "t=1"]
    assert backbone.out_features == ["t=1"]
    more = OdeViTBackbone.from_pretrained(folder, out_indices=[1, -1])
    assert more.out_features == ["t=0.25", "t=1"]
    output = more(tiny_images(1), output_hidden_states=True)
    assert len(output.hidden_states) == 5
    assert len(output.feature_maps) == 2
    with torch.no_grad():
        assert torch.allclose(output.hidden_states[-1], model.odevit(tiny_images(1)).last_hidden_state, atol=1e-6)


def test_auto_backbone_knows_it(saved):
    config = AutoConfig.from_pretrained(saved[1], out_features=["t=0.5"])
    backbone = AutoBackbone.from_config(config)
    assert type(backbone) is OdeViTBackbone
    assert backbone.out_features == ["t=0.5"]
    assert config.out_features == ["t=0.5"]


def test_auto_backbone_loads_a_model_of_the_hub(saved, monkeypatch):
    """transformers asks the hub whether the name exists before anything else, so that it refuses every local folder,
    whatever is in it. With the hub's yes the rest is as for any backbone: our class, with the weights."""
    monkeypatch.setattr(auto_factory, "hf_api", lambda: SimpleNamespace(repo_exists=lambda name: True))
    backbone = AutoBackbone.from_pretrained(saved[1], out_features=["t=0.5", "t=1"])
    assert type(backbone) is OdeViTBackbone
    assert torch.equal(backbone.odevit.positions, saved[0].odevit.positions)
    assert backbone.out_features == ["t=0.5", "t=1"]


def test_a_saved_backbone_keeps_its_times_and_takes_another_number_of_steps(saved, tmp_path):
    backbone = OdeViTBackbone.from_pretrained(saved[1], feature_times=[0.5, 1.0], out_features=["t=0.5", "t=1"])
    backbone.save_pretrained(tmp_path / "backbone")
    again = OdeViTBackbone.from_pretrained(tmp_path / "backbone", num_steps=8)
    assert again.out_features == ["t=0.5", "t=1"]
    expected = backbone(tiny_images(1), num_steps=8).feature_maps
    for ours, theirs in zip(expected, again(tiny_images(1)).feature_maps, strict=True):
        assert torch.equal(ours, theirs)


KINDS = [dict(zip(("tokenizer", "pool", "mixing"), row, strict=True)) for row in zip(
    cycle(TOKENIZERS), POOLS, cycle(MIXINGS), strict=False)]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_kind_of_model_is_a_backbone(options):
    backbone = OdeViTBackbone(tiny_model(**options).config)
    maps = backbone(tiny_images(2)).feature_maps
    maps[0].square().mean().backward()
    assert maps[0].shape == (2, 32, 4, 4)
    assert backbone.odevit.positions.grad.abs().sum() > 0
    if options["mixing"] == "none":
        assert backbone(tiny_images(1, size=24), interpolate_pos_encoding=True).feature_maps[0].shape == (1, 32, 6, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_times": [0.5, 0.2]}, r"feature_times must increase within \(0, 1\]"),
        ({"feature_times": [1.5]}, "feature_times must increase"),
        ({"out_features": ["t=0.3"]}, "subset of stage_names"),
    ],
)
def test_impossible_times_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OdeViTConfig(**options)


def scenes(count, seed):
    """Noise with one bright square on it; the label of a patch says whether the square covers it. (b, 16, 16)."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = 0.3 * torch.randn(count, 3, 16, 16, generator=generator), torch.zeros(count, 4, 4).long()
    for i in range(count):
        row, column = torch.randint(0, 3, (2,), generator=generator).tolist()
        images[i, :, 4 * row : 4 * row + 8, 4 * column : 4 * column + 8] += 1
        labels[i, row : row + 2, column : column + 2] = 1
    return images, labels


def test_a_linear_probe_on_the_maps_segments_scenes():
    """The example of docs: a frozen backbone, a 1×1 convolution on its maps at three times, 60 steps."""
    backbone = OdeViTBackbone(
        OdeViTConfig(**{**tiny_model().config.to_dict(), "out_features": ["stem", "t=0.5", "t=1"]})
    )
    backbone.eval().requires_grad_(False)
    (train, train_labels), (test, test_labels) = scenes(64, 0), scenes(64, 1)
    probe = nn.Conv2d(sum(backbone.channels), 2, kernel_size=1)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=0.05)
    features, unseen = (torch.cat(backbone(images).feature_maps, dim=1) for images in (train, test))
    for _ in range(60):
        loss = nn.functional.cross_entropy(probe(features), train_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (probe(unseen).argmax(1) == test_labels).float().mean()
    assert accuracy > 0.95  # always "background" has 0.75
