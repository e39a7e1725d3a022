"""The trajectory cache: what it gives back, when it is another one, and what a killed build leaves behind."""

import dataclasses
import errno
import json
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from odevit.data import DataConfig, derive_seed, load_data, prepare
from odevit.data.augment import Augment, AugmentConfig
from odevit.data.splits import MemorySplit
from odevit.distill import cache as caching
from odevit.distill.cache import Builder, as_bytes, open_cache
from odevit.distill.cache_key import Transform, describe, digest
from odevit.teachers.teacher import load_teacher, tiny_teacher

SMALL_CHUNK = 24  # so that a few images make several chunks
IMAGES = 60


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return tiny_teacher("deit", image_size=16, patch_size=8, num_channels=1)  # with a distillation token


@pytest.fixture(scope="module")
def train():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (IMAGES, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return MemorySplit(pixels, torch.arange(IMAGES) % 10, ["one.png"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(caching, "CHUNK", SMALL_CHUNK)
    monkeypatch.setattr(caching, "TEACHER_BATCH", 16)


def transform(**changes):
    values = {"image_size": 16, "mean": (0.4,), "std": (0.3,), "augment": AugmentConfig()}
    return Transform(**(values | changes))


AUGMENTED = transform(augment=AugmentConfig(crop=2, flip=True), views=2, seed=3)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.mark.parametrize(("tokens", "kept"), [("cls", 1), ("all", 6)])
def test_round_trip_to_half_precision(tokens, kept, teacher, train, tmp_path):
    cache = open_cache(tmp_path, teacher, train, transform(), tokens=tokens)
    assert torch.equal(cache.split.images, train.images)
    assert torch.equal(cache.split.labels, train.labels)
    assert cache.split.skipped == ["one.png"]
    rows = torch.tensor([59, 0, 23, 24, 24])
    truth = teacher.trace(prepare(train.images[rows], 16, (0.4,), (0.3,)))
    trace = cache.trace(rows)
    assert len(trace.states) == 4
    for state, expected in zip(trace.states, truth.states, strict=True):
        assert state.shape == (5, kept, 32)
        assert state.dtype == torch.float32
        torch.testing.assert_close(state, expected[:, :kept], rtol=2**-10, atol=1e-6)
    torch.testing.assert_close(trace.logits, truth.logits, rtol=1e-5, atol=1e-6)  # single precision
    assert trace.attention is None


def test_nothing_read_from_the_cache_can_change_its_files(teacher, train, tmp_path):
    cache = open_cache(tmp_path, teacher, train, AUGMENTED)
    before = files(cache.folder)
    cache.trace(torch.arange(5)).states[0].add_(1)
    cache.states.add_(1)
    cache.split.images.add_(1)
    assert files(cache.folder) == before


def test_views_are_augmented_images_and_their_own_traces(teacher, train, tmp_path):
    cache = open_cache(tmp_path, teacher, train, AUGMENTED, tokens="all")
    assert len(cache.split) == 2 * IMAGES
    assert torch.equal(cache.split.labels, train.labels.repeat(2))
    first, second = cache.split.images.split(IMAGES)
    assert not torch.equal(first, second)
    assert not torch.equal(first, train.images)
    augment = Augment(AUGMENTED.augment, 10)
    rows = slice(SMALL_CHUNK, 2 * SMALL_CHUNK)
    seed = derive_seed(3, "view", 1, SMALL_CHUNK)
    assert torch.equal(second[rows], as_bytes(augment(train.images[rows], train.labels[rows], seed=seed)[0]))
    truth = teacher.trace(prepare(cache.split.images[90:95], 16, (0.4,), (0.3,)))
    for state, expected in zip(cache.trace(torch.arange(90, 95)).states, truth.states, strict=True):
        torch.testing.assert_close(state, expected, rtol=2**-10, atol=1e-6)


def test_images_that_nothing_augments_are_not_stored_again(teacher, train, tmp_path):
    plain = open_cache(tmp_path, teacher, train, transform())
    assert plain.split is train
    assert {path.name for path in plain.folder.glob("*.npy")} == {"labels.npy", "states.npy", "logits.npy"}
    assert (open_cache(tmp_path, teacher, train, AUGMENTED).folder / "images.npy").exists()


@pytest.mark.slow
def test_the_largest_logits_are_kept_with_the_sum_of_the_others(teacher, train, tmp_path):
    whole = open_cache(tmp_path, teacher, train, transform())
    top = open_cache(tmp_path, teacher, train, transform(), top=3, temperature=2.0)
    rows = torch.tensor([59, 0, 23, 24])
    logits, kept = whole.trace(rows).logits, top.trace(rows).logits
    assert torch.equal(kept.values, logits.sort(dim=1, descending=True).values[:, :3])
    assert torch.equal(logits.gather(1, kept.classes), kept.values)
    everything = torch.cat([kept.values / 2, kept.rest[:, None]], dim=1).logsumexp(dim=1)
    torch.testing.assert_close(everything, (logits / 2).logsumexp(dim=1))
    assert np.load(top.folder / "classes.npy").dtype == np.int16
    others = [open_cache(tmp_path, teacher, train, transform(), top=k, temperature=t) for k, t in ((3, 1.0), (4, 2.0))]
    assert len({cache.folder for cache in (whole, top, *others)}) == 4
    assert open_cache(tmp_path, teacher, train, transform(), top=10).folder == whole.folder  # as many as there are


def test_bytes_survive_the_way_to_float_and_back():
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(as_bytes(pixels.float() / 255), pixels)
    assert torch.equal(as_bytes(pixels), pixels)


def test_a_complete_cache_is_not_built_again(teacher, train, tmp_path, monkeypatch):
    said = []
    first = open_cache(tmp_path, teacher, train, transform(), say=said.append)
    assert len(said) == 1
    assert "60 images, 1 token a state: 18.6 kB" in said[0]
    assert str(first.folder) in said[0]
    monkeypatch.setattr(Builder, "build", lambda *_: pytest.fail("built again"))
    again = open_cache(tmp_path, load_teacher(teacher.module), train, transform(), say=said.append)
    assert again.folder == first.folder
    assert len(said) == 1


def test_size_told_is_the_size_written(teacher, train, tmp_path):
    said = []
    pixels = torch.zeros(IMAGES, 1, 64, 64, dtype=torch.uint8)
    cache = open_cache(tmp_path, teacher, MemorySplit(pixels, train.labels), AUGMENTED, tokens="all", say=said.append)
    size = sum(path.stat().st_size for path in cache.folder.glob("*.npy")) / 1e3
    assert f"60 images x 2 views, 6 tokens a state: {size:.1f} kB" in said[0]
    assert size > 500


def test_a_teacher_may_run_in_bfloat16(teacher, train, tmp_path):
    rows = torch.arange(IMAGES)
    exact, rounded = (
        open_cache(tmp_path, teacher, train, transform(precision=kind), say=lambda text: None).trace(rows)
        for kind in ("no", "bf16")
    )
    for before, after in zip([*exact.states, exact.logits], [*rounded.states, rounded.logits], strict=True):
        assert after.dtype == torch.float32
        assert (after - before).norm() <= 0.03 * before.norm()
    assert not torch.equal(exact.logits, rounded.logits)


def test_the_key_of_float32_is_that_of_caches_before_there_was_another(teacher, train):
    assert "precision" not in describe(teacher, train, transform(), "cls")["transform"]
    assert describe(teacher, train, transform(precision="bf16"), "cls")["transform"]["precision"] == "bf16"


@pytest.mark.slow
def test_every_ingredient_changes_the_key(teacher, train, tmp_path):
    def folder(teacher=teacher, train=train, transform=AUGMENTED, tokens="cls"):
        return open_cache(tmp_path, teacher, train, transform, tokens=tokens, say=lambda text: None).folder

    other_teacher = load_teacher(teacher.module)
    with torch.no_grad():
        next(other_teacher.parameters()).view(-1)[0] += 1e-3
    other_pixel, other_label = train.images.clone(), train.labels.clone()
    other_pixel[7, 0, 0, 0] ^= 1
    other_label[7] = 3
    changed = [
        folder(),
        folder(teacher=other_teacher),
        folder(train=MemorySplit(other_pixel, train.labels)),
        folder(train=MemorySplit(train.images, other_label)),
        folder(train=MemorySplit(train.images[:-1], train.labels[:-1])),
        folder(tokens="all"),
    ]
    for changes in (
        {"mean": (0.5,)},
        {"std": (0.5,)},
        {"views": 3},
        {"seed": 4},
        {"augment": AugmentConfig(crop=1, flip=True)},
        {"precision": "bf16"},
    ):
        changed.append(folder(transform=dataclasses.replace(AUGMENTED, **changes)))
    assert len(set(changed)) == len(changed)
    assert folder(train=MemorySplit(train.images.clone(), train.labels.clone())) == changed[0]


def test_a_folder_of_another_key_is_overwritten_not_used(teacher, train, tmp_path):
    cache = open_cache(tmp_path, teacher, train, transform())
    good, meta = files(cache.folder), json.loads((cache.folder / "meta.json").read_text())
    (cache.folder / "meta.json").write_text(json.dumps({**meta, "key": "another"}))
    states = np.load(cache.folder / "states.npy")
    np.save(cache.folder / "states.npy", np.zeros_like(states))
    assert files(open_cache(tmp_path, teacher, train, transform()).folder) == good


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["before a column", "before meta", "inside a row", "no meta"])
@pytest.mark.parametrize("chunk", [0, 1, 4])
def test_an_interrupted_build_resumes_byte_for_byte(stop, chunk, teacher, train, tmp_path, monkeypatch):
    reference = open_cache(tmp_path / "reference", teacher, train, AUGMENTED, tokens="all")
    calls = []

    def interrupt(original, every):
        def call(self, *args):
            calls.append(1)
            if len(calls) > chunk * every + (every > 1) * 2:
                raise KeyboardInterrupt
            return original(self, *args)

        return call

    with monkeypatch.context() as patch:
        if stop == "before a column":
            patch.setattr(caching.Column, "append", interrupt(caching.Column.append, every=4))
        else:
            patch.setattr(Builder, "write_meta", interrupt(Builder.write_meta, every=1))
        with pytest.raises(KeyboardInterrupt):
            open_cache(tmp_path / "other", teacher, train, AUGMENTED, tokens="all")
    folder = tmp_path / "other" / reference.folder.name
    assert files(folder) != files(reference.folder)
    if stop == "inside a row":
        with (folder / "states.npy").open("r+b") as file:
            file.truncate((folder / "states.npy").stat().st_size - 1000)
    if stop == "no meta":
        (folder / "meta.json").unlink(missing_ok=True)
    runs, said = [], []
    observe = Builder.observe
    monkeypatch.setattr(Builder, "observe", lambda self, pixels: runs.append(len(pixels)) or observe(self, pixels))
    again = open_cache(tmp_path / "other", teacher, train, AUGMENTED, tokens="all", say=said.append)
    assert files(again.folder) == files(reference.folder)
    assert json.loads((folder / "meta.json").read_text()) == json.loads((reference.folder / "meta.json").read_text())
    done = [24, 24, 12, 24, 24, 12][: chunk if stop != "no meta" else 0]
    assert sum(runs) == 2 * IMAGES - sum(done)  # what was there is not computed again
    if done:
        assert f"{sum(done) / 120:.0%} of it there already" in said[0]


def test_one_builds_while_the_other_waits(teacher, train, tmp_path, monkeypatch):
    runs, observe = [], Builder.observe
    monkeypatch.setattr(Builder, "observe", lambda self, pixels: runs.append(len(pixels)) or observe(self, pixels))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(open_cache, tmp_path, teacher, train, transform()) for _ in range(2)]
    assert sum(runs) == IMAGES
    assert len({job.result().folder for job in both}) == 1


def test_a_full_disk_is_told_before_anything_is_written(teacher, train, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5000))
    with pytest.raises(ValueError, match=r"needs \d+\.\d kB in .*, and 5\.0 kB are free.*distill.cache=cls.*none"):
        open_cache(tmp_path, teacher, train, transform())
    assert not list(tmp_path.rglob("*.npy"))


def test_a_disk_that_fills_up_is_told_and_the_build_goes_on_later(teacher, train, tmp_path, monkeypatch):
    append, calls = caching.Column.append, []

    def full(column, values):
        calls.append(1)
        if len(calls) == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(column, values)

    with monkeypatch.context() as patch:
        patch.setattr(caching.Column, "append", full)
        with pytest.raises(ValueError, match=r"disk is full.*What is written stays good"):
            open_cache(tmp_path / "a", teacher, train, transform())
    resumed, whole = (open_cache(tmp_path / name, teacher, train, transform()) for name in "ab")
    assert files(resumed.folder) == files(whole.folder)


def test_states_beyond_half_precision_are_told(teacher, train, tmp_path):
    huge = load_teacher(teacher.module)
    with torch.no_grad():
        huge.anatomy.cls_token.fill_(1e5)
    with pytest.raises(ValueError, match=r"states reach .*65504.*distill.cache=none"):
        open_cache(tmp_path, huge, train, transform())


def test_what_cannot_be_cached_is_told(teacher, train, tmp_path):
    for name in ("mixup", "cutmix"):
        with pytest.raises(ValueError, match=f"{name} cannot be cached.*augment.{name}=0"):
            transform(augment=AugmentConfig(**{name: 0.5}))
    with pytest.raises(ValueError, match=r"differ only by augmentation.*augment\.flip"):
        transform(views=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        transform(views=0)
    with pytest.raises(ValueError, match="cls, all, logits, got 'patches'"):
        open_cache(tmp_path, teacher, train, transform(), tokens="patches")


def test_a_teacher_without_logits_has_none_in_the_cache(train, tmp_path):
    backbone = tiny_teacher("dino", image_size=16, patch_size=8, num_channels=1)
    cache = open_cache(tmp_path, backbone, train, transform())
    assert cache.trace(torch.tensor([1])).logits is None


@pytest.mark.slow
def test_a_streamed_split_is_cached_and_told_by_its_files(teacher, tmp_path):
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for index in range(10):
            pixels = np.full((8, 8), 20 * index + (label == "b"), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{index}.png")
    config = DataConfig(name=str(tmp_path / "data"), val_fraction=0.2, workers=0)
    streamed = load_data(dataclasses.replace(config, image_size=8, memory_limit_mb=0)).train
    memory = load_data(config).train
    again = load_data(dataclasses.replace(config, image_size=8, memory_limit_mb=0)).train
    before = digest(streamed)
    assert digest(again) == before
    assert open_cache(tmp_path, teacher, streamed, transform()).split is streamed  # unchanged images are not kept twice
    views = open_cache(tmp_path, teacher, streamed, transform(augment=AugmentConfig(flip=True))).split
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(views.images, memory.images, strict=True))
    for path in (tmp_path / "data").rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)) + np.uint8(1)).save(path)
    changed = load_data(dataclasses.replace(config, image_size=8, memory_limit_mb=0)).train
    assert digest(changed) != before
