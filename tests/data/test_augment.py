"""Augmentation: exact pixels, exact targets, and independence of the number of processes."""

import pytest
import torch
from torch import Tensor

from odevit.data.augment import MIXES, OPERATIONS, Augment, AugmentConfig

pytest.importorskip("kornia")

CLASSES = 10
STRENGTH = {"crop": 2, "flip": True, "geometry": 0.5, "color": 0.5, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
EVERYTHING = AugmentConfig(**STRENGTH)


def one(name: str, **others: object) -> AugmentConfig:
    return AugmentConfig(**{name: STRENGTH[name]}, **others)


def batch(count: int = 16, channels: int = 3, side: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, channels, side, side), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, CLASSES, (count,), generator=generator)


def test_every_registered_name_is_a_config_field_and_is_tested():
    assert set(OPERATIONS) | set(MIXES) == set(STRENGTH)
    assert all(hasattr(AugmentConfig(), name) for name in STRENGTH)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*OPERATIONS, *MIXES])
def test_shape_type_range_and_effect(name, channels):
    images, labels = batch(channels=channels)
    out, targets = Augment(one(name), CLASSES)(images, labels, seed=3)
    assert out.shape == images.shape
    assert out.dtype == torch.float32
    assert out.min() >= 0
    assert out.max() <= 1
    assert not torch.equal(out, images.float() / 255)
    assert torch.allclose(targets.sum(1), torch.ones(len(labels)))
    from_float, _ = Augment(one(name), CLASSES)(images.float() / 255, labels, seed=3)
    assert torch.equal(out, from_float)


@pytest.mark.parametrize("name", [*OPERATIONS, *MIXES])
def test_same_seed_same_result_other_seed_other_result_and_global_generator_untouched(name):
    images, labels = batch()
    augment = Augment(one(name), CLASSES)
    before = torch.random.get_rng_state()
    first, _ = augment(images, labels, seed=5)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(99)
    again, _ = augment(images, labels, seed=5)
    other, _ = augment(images, labels, seed=6)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("total", [4, 16])  # 4 is also the length of kornia's whole-batch parameters
@pytest.mark.parametrize("config", [*map(one, STRENGTH), EVERYTHING], ids=[*STRENGTH, "everything"])
def test_slices_of_two_processes_make_the_batch_of_one(config, total):
    images, labels = batch(total)
    augment = Augment(config, CLASSES)
    whole, targets = augment(images, labels, seed=7, start=0, total=total)
    half = total // 2
    parts = [
        augment(images[rows], labels[rows], seed=7, start=rows.start, total=total)
        for rows in (slice(0, half), slice(half, total))
    ]
    assert torch.equal(whole, torch.cat([part[0] for part in parts]))
    assert torch.equal(targets, torch.cat([part[1] for part in parts]))


def test_everything_off_is_the_identity():
    images, labels = batch()
    out, targets = Augment(AugmentConfig(), CLASSES)(images, labels, seed=0)
    assert out is images
    assert torch.equal(targets.argmax(1), labels)
    assert torch.equal(targets.sum(1), torch.ones(len(labels)))


def test_an_empty_slice_passes():
    images, labels = batch(0)
    out, targets = Augment(EVERYTHING, CLASSES)(images, labels, seed=0, start=2, total=2)
    assert out.shape[0] == 0
    assert targets.shape == (0, CLASSES)


def test_flip_mirrors_about_half_of_the_images_exactly():
    images, labels = batch(64)
    out, _ = Augment(one("flip"), CLASSES)(images, labels, seed=0)
    straight = images.float() / 255
    kept = (out == straight).flatten(1).all(1)
    mirrored = (out == straight.flip(-1)).flatten(1).all(1)
    assert torch.all(kept ^ mirrored)
    assert 16 < mirrored.sum() < 48


@pytest.mark.parametrize("fill", ["reflect", "zero"])
def test_crop_is_a_window_of_the_padded_image(fill):
    images, labels = batch(32)
    out, _ = Augment(one("crop", crop_fill=fill), CLASSES)(images, labels, seed=0)
    mode = {"reflect": "reflect", "zero": "constant"}[fill]
    padded = torch.nn.functional.pad(images.float() / 255, (2, 2, 2, 2), mode=mode)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # (b, c, 5, 5, 8, 8)
    same = (windows == out[:, :, None, None]).all(-1).all(-1).all(1)  # (b, 5, 5)
    assert torch.all(same.sum((1, 2)) >= 1)
    assert len(same.flatten(1).float().argmax(1).unique()) > 5  # many different shifts


def test_erase_blacks_out_one_rectangle_and_leaves_the_rest():
    images, labels = batch(64, side=16)
    images = images.clamp_min(1)
    out, _ = Augment(AugmentConfig(erase=0.5), CLASSES)(images, labels, seed=0)
    gone = (out == 0).all(1)  # (b, H, W)
    assert torch.equal(out * ~gone[:, None], images.float() / 255 * ~gone[:, None])
    touched = gone.flatten(1).any(1)
    assert 16 < touched.sum() < 48
    for mask in gone[touched]:
        assert mask.sum() == mask.any(0).sum() * mask.any(1).sum()


def test_colour_keeps_grey_images_grey_and_geometry_keeps_a_constant_middle():
    images = torch.full((8, 3, 16, 16), 100, dtype=torch.uint8)
    labels = torch.zeros(8, dtype=torch.long)
    colour, _ = Augment(AugmentConfig(color=0.5), CLASSES)(images, labels, seed=0)
    assert torch.allclose(colour, colour[:, :1].expand_as(colour), atol=1e-6)
    assert len(colour[:, 0, 0, 0].unique()) > 4
    moved, _ = Augment(AugmentConfig(geometry=0.2), CLASSES)(images, labels, seed=0)
    assert torch.allclose(moved[:, :, 7:9, 7:9], torch.tensor(100 / 255), atol=1e-5)


@pytest.mark.parametrize("name", [*MIXES])
def test_targets_are_exactly_the_shares_of_the_pixels(name):
    """Image i is constant i and has class i: the mean pixel must equal the target's mean class."""
    labels = torch.arange(8)
    images = (labels / 10.0).view(8, 1, 1, 1).expand(8, 3, 12, 12).clone()
    out, targets = Augment(one(name), CLASSES)(images, labels, seed=2)
    assert torch.allclose(out.mean((1, 2, 3)), targets @ torch.arange(CLASSES).float() / 10, atol=1e-6)
    assert torch.allclose(targets.sum(1), torch.ones(8))
    for row in range(8):
        assert set(targets[row].nonzero()[:, 0].tolist()) <= {row, row ^ 1}
    assert ((targets > 0).sum(1) == 2).any()
    if name == "cutmix":  # every pixel comes from one of the two images, and the foreign ones form a rectangle
        foreign = (out[:, 0] - images[:, 0]).abs() > 1e-6
        assert torch.all((out == images) | (out == images[torch.arange(8) ^ 1]))
        for mask in foreign:
            assert mask.sum() == mask.any(0).sum() * mask.any(1).sum()
    else:
        assert torch.all(out.flatten(1).std(1) < 1e-6)


def test_with_both_mixes_on_each_image_draws_one():
    labels = torch.arange(64) % CLASSES
    images = (torch.arange(64) / 64.0).view(64, 1, 1, 1).expand(64, 1, 16, 16).clone()
    out, _ = Augment(AugmentConfig(mixup=1.0, cutmix=1.0), CLASSES)(images, labels, seed=0)
    constant = out.flatten(1).std(1) < 1e-6
    assert 16 < constant.sum() < 56


def test_the_last_image_of_an_odd_batch_stays_itself():
    images, labels = batch(5)
    out, targets = Augment(one("mixup"), CLASSES)(images, labels, seed=0)
    assert torch.allclose(out[4], images[4].float() / 255)
    assert targets[4, labels[4]] == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"crop": -1}, "crop must be"),
        ({"crop_fill": "mirror"}, "reflect, zero"),
        ({"color": 2.0}, "color must be between 0"),
        ({"erase": -0.5}, "erase must be between 0"),
        ({"mixup": -1.0}, "mixup is the alpha"),
    ],
)
def test_wrong_settings_say_what_must_hold(wrong, words):
    with pytest.raises(ValueError, match=words):
        AugmentConfig(**wrong)


def test_wrong_rows_and_too_large_a_crop_are_refused():
    images, labels = batch(4)
    augment = Augment(one("mixup"), CLASSES)
    with pytest.raises(ValueError, match="whole pairs"):
        augment(images[:3], labels[:3], seed=0, start=0, total=8)
    with pytest.raises(ValueError, match="whole pairs"):
        augment(images, labels, seed=0, start=1, total=8)
    with pytest.raises(ValueError, match="do not lie in a global batch of 4"):
        augment(images, labels, seed=0, start=2, total=4)
    with pytest.raises(ValueError, match="crop_fill to 'zero'"):
        Augment(AugmentConfig(crop=8), CLASSES)(images, labels, seed=0)
