"""Corruptions made on the spot."""

import pytest
import torch

from odevit.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_greater_strength_changes_more(name: str, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, channels, 8, 12), dtype=torch.uint8, generator=generator)
    before, changes = images.clone(), []
    for strength in STRENGTHS:
        result = corrupt(images, name, strength)
        assert result.shape == images.shape
        assert result.dtype == torch.uint8
        assert torch.equal(result, corrupt(images, name, strength)), "the same seed, the same images"
        changes.append(float((result.float() - images.float()).norm()))
    assert torch.equal(images, before)
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert changes[-1] > 1.1 * changes[0]


def test_levels_mean_what_they_say() -> None:
    grey = torch.full((8, 1, 32, 32), 128, dtype=torch.uint8)
    assert float(corrupt(grey, "noise", 5).float().std() / 255) == pytest.approx(0.10, abs=0.005)
    assert torch.equal(corrupt(grey, "blur", 5), grey)
    dot = torch.zeros(1, 1, 15, 15, dtype=torch.uint8)
    dot[0, 0, 7, 7] = 255
    blurred = corrupt(dot, "blur", 5)[0, 0]
    assert int(blurred[7, 7]) == pytest.approx(255 / (2 * torch.pi), abs=1)  # σ = 1: a Gaussian's peak
    assert torch.equal(blurred, blurred.T)
    steps = torch.tensor([0, 200], dtype=torch.uint8).repeat(32).view(1, 1, 8, 8)
    assert set(corrupt(steps, "contrast", 2).unique().tolist()) == {50, 150}


def test_bad_input() -> None:
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    for arguments, message in (
        ((images, "fog", 1), "choose one of noise, blur"),
        ((images, "noise", 6), "from 1 to 5, got 6"),
        ((images.float(), "noise", 1), "got float32"),
    ):
        with pytest.raises(ValueError, match=message):
            corrupt(*arguments)
