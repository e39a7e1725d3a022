"""CLS attention: the right row, the right columns, with and without registers, gray and coloured images."""

import numpy as np
import pytest
import torch
from problems import tiny_model

from odevit import OdeViTForImageClassification
from odevit.analysis import HtmlFigure, Study
from odevit.analysis.attention import (
    attention_over_time,
    cls_to_patches,
    displayed,
    effective_share,
    heats,
    overlay,
    run,
    to_pixels,
)
from odevit.teachers.teacher import tiny_teacher


def tiny(**changes: object) -> OdeViTForImageClassification:
    small = {"hidden_size": 12, "num_attention_heads": 3, "depth": 2, "num_registers": 0, "num_labels": 3}
    return tiny_model(**{**small, **changes})


@pytest.mark.parametrize("registers", [0, 2])
def test_keys_are_sliced_not_heads_nor_queries(registers: int) -> None:
    """A hand-made map: 3 heads, 4 patches; head h sends CLS' attention to patch h, and wastes some elsewhere."""
    tokens = 1 + 4 + registers
    attention = torch.full((2, 3, tokens, tokens), 1 / tokens)
    attention[:, :, 0] = 0
    for head in range(3):
        attention[:, head, 0, 1 + head] = 0.5
        attention[:, head, 0, 4] += 0.25  # the last patch: a slice that ends too early loses it
        attention[:, head, 0, 0] = 0.25 if registers == 0 else 0.05  # CLS to itself
        attention[:, head, 0, 5:] = 0.1
    maps, on_patches = cls_to_patches(attention, 4)
    assert maps.shape == (2, 3, 4)
    torch.testing.assert_close(on_patches, torch.full((2, 3), 0.75))
    expected = torch.tensor([[2 / 3, 0, 0, 1 / 3], [0, 2 / 3, 0, 1 / 3], [0, 0, 2 / 3, 1 / 3]])
    torch.testing.assert_close(maps, expected.expand(2, 3, 4))


@pytest.mark.parametrize(("registers", "fields"), [(0, 1), (3, 1), (1, 2)])
def test_over_time_agrees_with_the_models_own_maps(registers: int, fields: int) -> None:
    model, images = tiny(num_registers=registers, num_fields=fields), torch.randn(2, 3, 16, 16)
    path = attention_over_time(model, images)
    full = model(images, output_attentions=True).attentions
    assert path.maps.shape == (4, 2, 3, 16)
    assert path.times == [0, 0.25, 0.5, 0.75]
    for step, attention in enumerate(full):
        row = attention[:, :, 0, 1:17]
        torch.testing.assert_close(path.maps[step] * path.on_patches[step][..., None], row)
    torch.testing.assert_close(path.maps.sum(-1), torch.ones(4, 2, 3))
    assert attention_over_time(model, images, num_steps=7, solver="heun").maps.shape[0] == 7


def test_effective_share() -> None:
    one = torch.zeros(8)
    one[3] = 1
    assert effective_share(torch.full((8,), 1 / 8)).item() == pytest.approx(1)
    assert effective_share(one).item() == pytest.approx(1 / 8)


def test_a_patch_lands_where_it_is_in_the_image() -> None:
    maps = torch.zeros(1, 16)
    maps[0, 4 * 1 + 2] = 1  # second row, third column
    pixels = to_pixels(maps, (16, 16))
    row, column = divmod(int(pixels[0].argmax()), 16)
    assert (row // 4, column // 4) == (1, 2)
    with pytest.raises(ValueError, match="square"):
        to_pixels(torch.zeros(1, 15), (16, 16))


def test_uniform_attention_is_dark_and_a_peak_is_bright() -> None:
    assert heats(torch.full((1, 16), 1 / 16), (16, 16)).max() == pytest.approx(1 / 3, abs=1e-5)
    assert heats(torch.eye(16)[:1], (16, 16)).max() == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_shown_as_they_were(channels: int) -> None:
    original = torch.rand(channels, 10, 12)
    mean, std = [0.3] * channels, [0.2] * channels
    shown = displayed((original - 0.3) / 0.2, mean, std)
    assert shown.shape == (10, 12, 3)
    np.testing.assert_allclose(shown, original.expand(3, -1, -1).permute(1, 2, 0).numpy(), atol=1e-6)
    neutral = displayed((original - 0.5) / 0.5, None, None)
    np.testing.assert_allclose(neutral, shown, atol=1e-6)
    covered = overlay(shown, np.linspace(0, 1, 120).reshape(10, 12))
    assert covered.shape == (10, 12, 3)
    assert 0 <= covered.min() <= covered.max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_findings(channels: int) -> None:
    """Beside a teacher with another number of patches; without one too."""
    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=16, patch_size=8, num_labels=3, num_channels=channels)
    model = tiny(num_channels=channels)
    study = Study(model, torch.randn(5, channels, 16, 16), torch.arange(5) % 3, ["a", "b", "c"], teacher)
    study.options = {"attention": {"images": 2, "columns": 3}}
    findings = {finding.name: finding for finding in run(study)}
    assert list(findings) == ["attention/over_time", "attention/heads", "attention/animation", "attention/focus"]
    panels = findings["attention/over_time"].figure.axes
    assert len(panels) == 2 * (1 + 3 + 1)  # image, three times, teacher
    assert panels[4].get_title() == "teacher"
    assert panels[0].images[0].get_array().shape == (16, 16, 3)  # at the image's own size
    assert findings["attention/over_time"].value["steps_shown"][-1] == 3
    assert isinstance(findings["attention/animation"].figure, HtmlFigure)
    assert "data:image/gif" in findings["attention/animation"].figure.html
    study.teacher = None
    alone = next(run(study))
    assert len(alone.figure.axes) == 2 * (1 + 3)
