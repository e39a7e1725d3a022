"""The first convolution of a pooling stem: whitens what the model is given, and stays as it is."""

import pytest
import torch
import torch.nn.functional as nnf
from safetensors.torch import load_file
from tiny_runs import tiny_recipe

from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.training.evaluation import model_input
from odevit.training.whitening import FLOOR, whitening_filters

STEM = "odevit.tokenizer.layers.0.weight"


def whitened_recipe(folder, **optim):
    model = {"tokenizer": "pooling", "hidden_size": 64, "patch_size": 4}
    return tiny_recipe(folder, model=model, optim={"steps": 4, "whiten": True, **optim})


@pytest.mark.parametrize("channels", [1, 3])
def test_what_comes_out_has_the_covariance_of_white_noise(channels):
    images = torch.randn(100, channels, 18, 18, dtype=torch.float64)
    for _ in range(4):
        images = nnf.avg_pool2d(images, 3, 1)  # neighbours alike
    images = images + images.mean(dim=1, keepdim=True)  # and channels
    count = 9 * channels
    filters = whitening_filters(images, 2 * count + 3)
    assert filters.shape == (2 * count, channels, 3, 3)
    answers = nnf.conv2d(images, filters[:count]).transpose(0, 1).flatten(1)
    variances = torch.linalg.eigvalsh(nnf.unfold(images, 3).transpose(0, 1).flatten(1).cov()).flip(0)
    expected = variances / variances.clamp(min=FLOOR * variances[0])  # one, unless there is next to nothing
    torch.testing.assert_close(answers.cov(), expected.diag(), atol=1e-8, rtol=0)
    assert (expected[: count // 2] == 1).all()
    assert expected[-1] < 0.5
    torch.testing.assert_close(filters[count:], -filters[:count])


def test_fewer_channels_get_the_leading_directions():
    images = nnf.avg_pool2d(torch.randn(50, 1, 14, 14), 3, 1)
    few, all_nine = whitening_filters(images, 8), whitening_filters(images, 18)
    torch.testing.assert_close(few[:4], all_nine[:4])


def test_training_and_resuming_leave_it_as_it_is(tmp_path):
    data = load_data(DataConfig(name="digits", limit=640))
    whole = train_recipe(whitened_recipe(tmp_path / "whole"), data=data, progress_bar=False)
    stem = whole.model.odevit.tokenizer.layers[0].weight
    chosen = torch.linspace(0, len(data.train) - 1, min(2000, len(data.train))).long()
    filters = whitening_filters(model_input(whole.model, data.train.fetch(chosen)[0]), 64)
    torch.testing.assert_close(stem[: len(filters)], filters)

    recipe = whitened_recipe(tmp_path / "resumed")
    recipe.loop.checkpoint_every = 2
    train_recipe(recipe, data=data, progress_bar=False)
    max((tmp_path / "resumed" / "checkpoints").glob("step*")).rename(tmp_path / "gone")
    (tmp_path / "resumed" / "result.json").unlink()
    train_recipe(recipe, data=data, resume=True, progress_bar=False)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "resumed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert torch.equal(weights[1][STEM], stem)


def test_another_stem_has_nothing_to_whiten(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", model={"tokenizer": "patch"}, optim={"steps": 2, "whiten": True})
    with pytest.raises(ValueError, match=r"add model\.tokenizer=pooling"):
        train_recipe(recipe, progress_bar=False)
