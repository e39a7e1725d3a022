"""What a model takes, where the data leaves it open: the order of classes, grey as RGB, one size for all."""

import pytest
import torch
from PIL import Image

from odevit.data import DataConfig, Wanted, load_data

COLOURS = {"a cat": 40, "dog": 120, "zebra": 240}


def images(root, split="", grey=False, side=6, count=8):
    for name, level in COLOURS.items():
        folder = root / split / name
        folder.mkdir(parents=True)
        for index in range(count):
            picture = Image.new("L", (side, side), level + index)
            (picture if grey else picture.convert("RGB")).save(folder / f"{index}.png")
    return root


def load(root, wanted, **fields):
    return load_data(DataConfig(name=str(root), **fields), wanted=wanted)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_same_classes_stand_in_the_models_order(tmp_path, streamed):
    names, root = ["zebra", "a cat", "dog"], images(tmp_path / "images")
    fields = {"memory_limit_mb": 0} if streamed else {}
    data, usual = load(root, Wanted(class_names=names), **fields), load(root, None, **fields)
    assert (data.class_names, usual.class_names) == (names, sorted(names))
    for split in ("train", "val"):
        pictures, labels = getattr(data, split).fetch(torch.arange(len(getattr(data, split))))
        levels = [COLOURS[data.class_names[label]] for label in labels.tolist()]
        assert all(0 <= int(picture.max()) - level < 8 for picture, level in zip(pictures, levels, strict=True))
        held = getattr(usual, split).fetch(torch.arange(len(getattr(usual, split))))[0]
        assert torch.equal(pictures, held)  # the same images are held out
    for other in (["zebra", "cat", "dog"], ["zebra", "a cat"]):
        assert load(root, Wanted(class_names=other)).class_names == sorted(COLOURS)


def test_grey_images_become_rgb_where_the_model_wants_it_and_never_the_other_way(tmp_path):
    grey, rgb = images(tmp_path / "grey", grey=True), images(tmp_path / "rgb")
    assert [load(grey, Wanted(channels=channels)).channels for channels in (None, 1, 3)] == [1, 1, 3]
    assert load(rgb, Wanted(channels=1)).channels == 3
    pictures = load(grey, Wanted(channels=3)).train.fetch(torch.arange(3))[0]
    assert torch.equal(pictures[:, 0], pictures[:, 2])


def test_images_of_several_sizes_are_brought_to_the_models(tmp_path):
    root = images(tmp_path / "images")
    Image.new("RGB", (20, 10), (255, 0, 0)).save(root / "dog" / "0.png")
    assert load(root, Wanted(side=8)).train.images.shape[-2:] == (8, 8)
    assert load(root, Wanted(side=8), image_size=4).train.images.shape[-2:] == (4, 4)
    with pytest.raises(ValueError, match=r"--set data\.image_size=224"):
        load(root, None)


def test_a_test_folder_without_labels_is_left_out_with_a_word(tmp_path):
    root = images(tmp_path, "train")
    (tmp_path / "test").mkdir()
    Image.new("RGB", (6, 6)).save(tmp_path / "test" / "1.png")
    with pytest.warns(UserWarning, match="no class folders"):
        data = load(root, None)
    assert data.test is None
    assert data.class_names == sorted(COLOURS)
