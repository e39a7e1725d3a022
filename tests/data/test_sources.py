"""Sources: folders, parquet files and hub datasets give honest splits, and faults are found before the first step."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from test_data import load

from odevit.data import batches
from odevit.data.splits import MemorySplit, StreamedSplit

CLASSES = ("cat", "dog", "train")  # a class may be called like a split


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def pixels(number: int, side: int = 6, grey: bool = False) -> np.ndarray:
    shape = (side, side) if grey else (side, side, 3)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def write_folder(root, counts=(10, 10, 10), side=6, grey=False, first=0):
    """root/CLASS/NUMBER.png with counts[i] images of class i."""
    for label, (name, count) in enumerate(zip(CLASSES, counts, strict=True)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = pixels(first + 100 * label + number, side, grey)
            Image.fromarray(image).save(root / name / f"{number:03}.png")
    return root


def parquet(path, labels, feature=None, extra=None, side=6):
    """A parquet file of images made from their row number, labels as given."""
    columns = {"img": [Image.fromarray(pixels(row, side)) for row in range(len(labels))], "label": labels}
    features = {"img": datasets.Image(), "label": feature or datasets.ClassLabel(names=list(CLASSES))}
    for name, (values, kind) in (extra or {}).items():
        columns[name], features[name] = values, kind
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path)
    return path


def test_folder_without_splits(tmp_path):
    data = load(write_folder(tmp_path / "images"))
    assert data.class_names == list(CLASSES)
    assert (len(data.train), len(data.val), data.test) == (27, 3, None)
    assert data.val.labels.tolist() == [0, 1, 2]
    images, labels = data.train.fetch(torch.arange(27))
    originals = {pixels(100 * label + number).tobytes(): label for label in range(3) for number in range(10)}
    for image, label in zip(images, labels, strict=True):  # (c, H, W) back to (H, W, c)
        assert originals[image.permute(1, 2, 0).contiguous().numpy().tobytes()] == label


@pytest.mark.parametrize("val_name", ["val", "valid", "validation"])
def test_folder_with_splits_uses_them(tmp_path, val_name):
    write_folder(tmp_path / "train", (4, 5, 6))
    write_folder(tmp_path / val_name, (1, 2, 3), first=1000)
    write_folder(tmp_path / "test", (2, 2, 2), first=2000)
    data = load(tmp_path)
    assert data.train.labels.bincount().tolist() == [4, 5, 6]
    assert data.val.labels.bincount().tolist() == [1, 2, 3]
    assert data.test.labels.bincount().tolist() == [2, 2, 2]


def test_grey_images_stay_one_channel(tmp_path):
    data = load(write_folder(tmp_path / "images", grey=True))
    assert data.channels == 1
    assert data.train.images.shape == (27, 1, 6, 6)


def test_mixed_sizes_need_an_image_size(tmp_path):
    folder = write_folder(tmp_path / "images")
    Image.new("RGB", (20, 10), (255, 0, 0)).save(folder / "cat" / "000.png")
    with pytest.raises(ValueError, match=r"--set data\.image_size"):
        load(folder)
    data = load(folder, image_size=6, seed=1)
    assert data.train.images.shape == (27, 3, 6, 6)
    both = torch.cat([data.train.images, data.val.images])
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 6, 6)
    assert (both == red).flatten(1).all(1).sum() == 1


@pytest.mark.slow
def test_size_that_the_probe_missed_is_noticed(tmp_path):
    folder = write_folder(tmp_path / "images", (150, 10, 10))
    Image.fromarray(pixels(1, side=9)).save(folder / "cat" / "001.png")
    with pytest.raises(ValueError, match="different sizes"):
        load(folder)
    assert load(folder, image_size=6).train.images.shape[1:] == (3, 6, 6)


# parquet and columns


def test_parquet_round_trip_and_split_names(tmp_path):
    labels = [0, 1, 2] * 8
    parquet(tmp_path / "set" / "train-00000-of-00001.parquet", labels)
    parquet(tmp_path / "set" / "test-00000-of-00001.parquet", labels[:6])
    data = load(tmp_path / "set", val_fraction=0.25)
    assert (len(data.train), len(data.val), len(data.test)) == (18, 6, 6)
    assert data.class_names == list(CLASSES)
    images, found = data.test.fetch(torch.arange(6))
    assert found.tolist() == labels[:6]
    assert np.array_equal(images[4].permute(1, 2, 0).numpy(), pixels(4))
    alone = load(tmp_path / "set" / "test-00000-of-00001.parquet", val_fraction=0.5)
    assert (len(alone.train), alone.test) == (3, None)


def test_label_column_is_guessed_and_can_be_named(tmp_path):
    fine, coarse = datasets.ClassLabel(num_classes=4), datasets.ClassLabel(num_classes=2)
    extra = {"coarse_label": ([0, 1] * 8, coarse), "fine_label": ([0, 1, 2, 3] * 4, fine)}
    columns = {"img": [Image.fromarray(pixels(row)) for row in range(16)], **{n: v for n, (v, _) in extra.items()}}
    features = {"img": datasets.Image(), **{n: kind for n, (_, kind) in extra.items()}}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(tmp_path / "a.parquet")
    assert len(load(tmp_path / "a.parquet", val_fraction=0.3).class_names) == 4
    assert len(load(tmp_path / "a.parquet", val_fraction=0.3, label_column="coarse_label").class_names) == 2
    with pytest.raises(ValueError, match="'colour' is not a column; columns: img, coarse_label, fine_label"):
        load(tmp_path / "a.parquet", label_column="colour")
    with pytest.raises(ValueError, match="image_column 'picture' is not a column"):
        load(tmp_path / "a.parquet", image_column="picture")


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [([2, 0, 1] * 6, "int64", ["0", "1", "2"]), (["pear", "apple", "fig"] * 6, "string", ["apple", "fig", "pear"])],
)
def test_plain_numbers_and_words_serve_as_labels(tmp_path, labels, kind, names):
    data = load(parquet(tmp_path / "a.parquet", labels, feature=datasets.Value(kind)), val_fraction=0.2)
    assert data.class_names == names
    everything = torch.cat([data.train.images, data.val.images]).permute(0, 2, 3, 1).numpy()
    numbers = torch.cat([data.train.labels, data.val.labels]).tolist()
    expected = {pixels(row).tobytes(): names.index(str(label)) for row, label in enumerate(labels)}
    assert [expected[np.ascontiguousarray(image).tobytes()] for image in everything] == numbers


def test_parquet_without_datasets_metadata(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pq.read_table(parquet(tmp_path / "a.parquet", [0, 1, 2] * 4)).replace_schema_metadata(None)
    pq.write_table(pa.table(whole), tmp_path / "b.parquet")
    data = load(tmp_path / "b.parquet", val_fraction=0.3)
    assert data.class_names == ["0", "1", "2"]
    assert data.train.images.shape[1:] == (3, 6, 6)


# streaming


@pytest.mark.slow
def test_streamed_batches_equal_those_from_memory(tmp_path):
    folder = write_folder(tmp_path / "images")
    memory = load(folder)
    streamed = load(folder, memory_limit_mb=0, workers=2)
    assert isinstance(memory.train, MemorySplit)
    assert isinstance(streamed.train, StreamedSplit)
    assert streamed.mean == pytest.approx(memory.mean)
    before = torch.random.get_rng_state()
    pairs = zip(batches(memory.train, 8, seed=4), batches(streamed.train, 8, seed=4), strict=True)
    for expected, found in pairs:
        assert torch.equal(expected.images, found.images)
        assert torch.equal(expected.labels, found.labels)
        assert torch.equal(expected.indices, found.indices)
    assert torch.equal(before, torch.random.get_rng_state())


def test_streamed_corrupt_image_is_replaced_named_and_counted(tmp_path):
    folder = write_folder(tmp_path / "images")
    (folder / "dog" / "003.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match=r"dog/003\.png"):
        data = load(folder, memory_limit_mb=0, workers=0)
    found = list(batches(data.train, 27, shuffle=False))
    assert found[0].images.shape[0] == 27
    assert data.skipped == 1
    with pytest.raises(ValueError, match=r"dog/003\.png"):
        load(folder, memory_limit_mb=0, workers=0, strict=True)


# faults


def test_corrupt_images_are_named_and_skipped_or_refused(tmp_path):
    folder = write_folder(tmp_path / "images", (10, 10, 10))
    whole = (folder / "cat" / "004.png").read_bytes()
    (folder / "cat" / "004.png").write_bytes(whole[: len(whole) // 2])  # header readable, pixels cut off
    (folder / "dog" / "007.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="corrupt images") as caught:
        data = load(folder)
    text = " ".join(str(warning.message) for warning in caught)
    assert "cat/004.png" in text
    assert "dog/007.png" in text
    assert data.skipped == 2
    assert len(data.train) + len(data.val) == 28
    with pytest.raises(ValueError, match=r"corrupt images in the \w+ split: .*(cat/004|dog/007)\.png"):
        load(folder, strict=True)


def test_corrupt_row_of_parquet_is_named_by_its_number(tmp_path):
    cells = [{"bytes": (b"junk" if row == 5 else png(row)), "path": None} for row in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"image": cells, "label": [0, 1] * 6}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match="row 5 of the train split"):
        assert load(tmp_path / "a.parquet", val_fraction=0.2).skipped == 1


def png(number: int) -> bytes:
    import io

    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("labels", "feature", "words"),
    [
        ([0, 1, 2, -1] * 3, None, r"3 others, the first in row 3: missing \(-1\)"),
        ([0, 1, 2, None] * 3, None, r"3 others, the first in row 3: missing \(-1\)"),
        ([0, 1, -3, 2] * 3, "int64", "3 others, the first in row 2: -3"),
        ([0, 0, 2, 2] * 3, None, "1 of 3 classes empty: dog"),
        ([0, 5], "int64", "2 images leave 4 of 6 classes empty: 1, 2, 3, 4"),
        ([0, 1, 2], None, "too few to hold out"),
        ([0, 0, 0, 0], "int64", "at least two classes"),
        ([0.5, 1.5], "float32", "must be class labels, whole numbers or words"),
    ],
)
def test_label_faults(tmp_path, labels, feature, words):
    kind = datasets.Value(feature) if feature else None
    with pytest.raises(ValueError, match=words):
        load(parquet(tmp_path / "a.parquet", labels, feature=kind))


def test_a_label_that_train_does_not_have_is_refused_and_an_unlabelled_test_is_left_out(tmp_path):
    parquet(tmp_path / "train.parquet", [0, 1, 2] * 5, feature=datasets.Value("int64"))
    parquet(tmp_path / "test.parquet", [0, 7], feature=datasets.Value("int64"))
    with pytest.raises(ValueError, match="the test split has 1 others, the first in row 1: 7"):
        load(tmp_path)
    parquet(tmp_path / "test.parquet", [-1, -1], feature=datasets.Value("int64"))
    with pytest.warns(UserWarning, match="test split has no labels"):
        assert load(tmp_path).test is None


def test_source_faults(tmp_path):
    (tmp_path / "near").mkdir()
    with pytest.raises(ValueError, match=r"does not exist\. .* does, and holds: near"):
        load(tmp_path / "far" / "away")
    with pytest.raises(ValueError, match="no images and no parquet files"):
        load(tmp_path / "near")
    Image.fromarray(pixels(0)).save(tmp_path / "near" / "a.png")
    with pytest.raises(ValueError, match="1 images, but no class folders"):
        load(tmp_path / "near")
    with pytest.raises(ValueError, match=r"must be \.parquet"):
        load(tmp_path / "near" / "a.png")
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="no image in them"):
        load(tmp_path / "hollow")
    (tmp_path / "broken.parquet").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot read the parquet files"):
        load(tmp_path / "broken.parquet")


def test_no_train_split_and_an_empty_class_folder(tmp_path):
    write_folder(tmp_path / "a" / "test")
    with pytest.raises(ValueError, match="no train split; it has test"):
        load(tmp_path / "a")
    write_folder(tmp_path / "b", (5, 0, 5))
    with pytest.raises(ValueError, match="1 of 3 classes empty: dog"):
        load(tmp_path / "b")


def test_columns_without_images_are_refused(tmp_path):
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column holds images; columns: text, label"):
        load(tmp_path / "a.parquet")


def test_unreachable_hub_says_what_works_without_it(monkeypatch):
    def unreachable(name):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr("odevit.data.sources._ask_hub", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: pytest.fail("it tries again and again"))
    with pytest.raises(ValueError, match=r"Couldn't reach 'nobody/nothing'.*local folder .* or parquet"):
        load("nobody/nothing")


def test_hub_dataset_with_its_own_split_names(monkeypatch):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})

    def rows(count):
        cells = [{"bytes": png(row), "path": None} for row in range(count)]
        return datasets.Dataset.from_dict({"image": cells, "label": [0, 1] * (count // 2)}, features=features)

    hub = datasets.DatasetDict({"train": rows(8), "validation": rows(4), "unsupervised": rows(2)})
    monkeypatch.setattr("odevit.data.sources._ask_hub", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: hub)
    data = load("somebody/something")
    assert (len(data.train), len(data.val), data.test) == (8, 4, None)


@pytest.mark.parametrize("name", ["digit", "runs/typo", "a b/c"])
def test_what_cannot_be_on_the_hub_is_told_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("odevit.data.sources._ask_hub", lambda name: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="OWNER/NAME"):
        load(name)
