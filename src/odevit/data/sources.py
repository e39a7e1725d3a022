"""Where images come from: hub dataset, folder of images, parquet → one `Table` per split, nothing decoded yet."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odevit.data.decode import IMAGE_SUFFIXES, CorruptImageError, Frame, open_image, reason, to_pixels

# the words by which files, folders and hub datasets name their splits
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
LABEL_WORDS = ("label", "fine_label", "labels", "class", "target")  # preferred names of a label column, best first
GREY_MODES = {"1", "L", "I;16", "I;16B"}  # PIL modes that are kept as one channel


@dataclass
class Table:
    """Undecoded images and labels of one split. `rows` maps our row to the row of `dataset`."""

    dataset: Any  # datasets.Dataset whose image column yields {"bytes", "path"}
    image_column: str
    split: str
    labels: Tensor  # (n,) long
    rows: Tensor  # (n,) long

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Tensor) -> "Table":
        return Table(self.dataset, self.image_column, self.split, self.labels[indices], self.rows[indices])

    def describe(self, index: int, cell: dict[str, Any]) -> str:
        return str(cell.get("path") or f"row {int(self.rows[index])} of the {self.split} split")

    def open(self, index: int) -> Any:
        """The PIL image of one row, header read, pixels not."""
        return self._open_cell(index, self.dataset[int(self.rows[index])][self.image_column])

    def decode(self, index: int, channels: int, frame: Frame | None) -> np.ndarray:
        """uint8 (c, H, W) of one row; without a frame in its own size."""
        cell = self.dataset[int(self.rows[index])][self.image_column]
        return self.decode_cell(index, cell, channels, frame)

    def decode_cell(self, index: int, cell: dict[str, Any], channels: int, frame: Frame | None) -> np.ndarray:
        image = self._open_cell(index, cell)
        try:
            return to_pixels(image, channels, frame)
        except Exception as error:
            raise CorruptImageError(f"{self.describe(index, cell)} ({reason(error)})") from error

    def _open_cell(self, index: int, cell: dict[str, Any] | None) -> Any:
        if not cell or not (cell.get("bytes") or cell.get("path")):
            raise CorruptImageError(f"{self.describe(index, {})} (no image)")
        try:
            return open_image(cell.get("bytes") or cell["path"])
        except Exception as error:
            raise CorruptImageError(f"{self.describe(index, cell)} ({reason(error)})") from error


def open_tables(name: str, image_column: str | None, label_column: str | None) -> tuple[dict[str, Table], list[str]]:
    """The splits of a source ("train" is always there; "val" and "test" may be) and the class names."""
    path = Path(name).expanduser()
    splits = _open_path(path) if path.exists() or _looks_like_path(name) else _open_hub(name)
    if "train" not in splits:
        raise ValueError(
            f"{name} has no train split; it has {', '.join(splits)}. Name a folder, file or split 'train' "
            f"(known words: {', '.join(SPLIT_WORDS)})."
        )
    splits = {split: dataset for split, dataset in splits.items() if split in ("train", "val", "test")}
    train = splits["train"]
    image_column = _choose_image_column(train.features, image_column)
    label_column = _choose_label_column(train.features, label_column, image_column)
    class_names, numbers = _number_labels(splits, label_column)
    tables = {}
    for split, dataset in splits.items():
        labels = numbers[split]
        tables[split] = Table(_undecoded(dataset, image_column), image_column, split, labels, torch.arange(len(labels)))
    return tables, class_names


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".parquet") or name.count("/") > 1


def _open_hub(name: str) -> dict[str, Any]:
    """A dataset of the hub. What cannot be one is told at once, and the hub is asked once before it is asked for files:
    its library tries again for half a minute."""
    owner, _, rest = name.partition("/")
    if not rest or Path(owner).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"cannot load {name!r}: it is neither 'digits', nor a folder or file here, and a dataset on the hub is "
            "called OWNER/NAME"
        )
    import datasets

    try:
        _ask_hub(name)
        found = datasets.load_dataset(name)
    except Exception as error:  # the hub library raises many kinds, offline and online
        raise ValueError(
            f"cannot load {name!r}: it is neither 'digits', nor a folder or file here, and the hub says: {error}. "
            "Without a hub, give a local folder (class folders of images, with or without train/val/test) or parquet."
        ) from error
    return {SPLIT_WORDS.get(split.lower(), split): found[split] for split in found}


def _ask_hub(name: str) -> None:
    """One question, answered within seconds: raises what the hub says, or that there is none. A dataset that is in the
    local cache is not asked for."""
    import datasets
    from huggingface_hub import HfApi

    cached = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    if not cached.exists():
        HfApi().dataset_info(name, timeout=5)


def _open_path(path: Path) -> dict[str, Any]:
    if not path.exists():
        near = path.parent
        while not near.exists():
            near = near.parent
        inside = sorted(entry.name for entry in near.iterdir())[:10] if near.is_dir() else []
        raise ValueError(f"{path} does not exist. {near} does, and holds: {', '.join(inside) or 'nothing'}.")
    if path.is_file():
        if path.suffix != ".parquet":
            raise ValueError(f"a data file must be .parquet; got {path}. For images, give the folder.")
        return _load_parquet({"train": [str(path)]})
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder")
    files = sorted(file for file in path.rglob("*.parquet") if file.is_file())
    return _load_parquet(_group_by_split(files, path)) if files else _open_folder(path)


def _group_by_split(files: list[Path], root: Path) -> dict[str, list[str]]:
    """A file belongs to the split whose word stands in its name (train-00000-of-00001) or folder; else to train."""
    grouped: dict[str, list[str]] = {}
    for file in files:
        words = re.split(r"[-_./]", str(file.relative_to(root)).lower())
        split = next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "train")
        grouped.setdefault(split, []).append(str(file))
    return grouped


def _load_parquet(files: dict[str, list[str]]) -> dict[str, Any]:
    import datasets

    try:
        found = datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # pyarrow and datasets raise many kinds
        names = ", ".join(name for group in files.values() for name in group)
        raise ValueError(f"cannot read the parquet files {names}: {error.__cause__ or error}") from error
    return {split: found[split] for split in found}


def _open_folder(path: Path) -> dict[str, Any]:
    folders = _subfolders(path)
    # a class may be called "train" (CIFAR-100 has it): a split is a folder of folders
    splits = {folder: SPLIT_WORDS.get(folder.name.lower()) for folder in folders}
    if any(split and _subfolders(folder) for folder, split in splits.items()):
        labelled = {split: folder for folder, split in splits.items() if split and _subfolders(folder)}
        for folder in (folder for folder, split in splits.items() if split and not _subfolders(folder)):
            warnings.warn(f"{folder} has no class folders, so its images have no labels: left out", stacklevel=2)
        return _folder_datasets(labelled)
    if not folders:
        loose = sum(file.suffix.lower() in IMAGE_SUFFIXES for file in path.iterdir())
        held = f"{loose} images, but no class folders" if loose else "no images and no parquet files"
        raise ValueError(f"{path} holds {held}. Expected {path}/CLASS/IMAGE.png or {path}/train/CLASS/IMAGE.png.")
    return _folder_datasets({"train": path})


def _folder_datasets(folders: dict[str, Path]) -> dict[str, Any]:
    import datasets

    class_names = sorted({folder.name for root in folders.values() for folder in _subfolders(root)})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=class_names)})
    found = {}
    for split, root in folders.items():
        files = [
            (str(file), label)
            for label, name in enumerate(class_names)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
        ]
        if not files:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise ValueError(f"{root} has class folders but no image in them. Known kinds: {kinds}.")
        columns = {"image": [file for file, _ in files], "label": [label for _, label in files]}
        found[split] = datasets.Dataset.from_dict(columns, features=features)
    return found


def _subfolders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _choose_image_column(features: Any, wanted: str | None) -> str:
    import datasets

    if wanted is not None:
        return _known(features, wanted, "image_column")
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    # parquet written without the datasets library holds {"bytes", "path"} or plain bytes
    found += [name for name, feature in features.items() if isinstance(feature, dict) and "bytes" in feature]
    found += [name for name, feature in features.items() if getattr(feature, "dtype", "") == "binary"]
    if not found:
        raise ValueError(f"no column holds images; columns: {', '.join(features)}. Set image_column.")
    return found[0]


def _choose_label_column(features: Any, wanted: str | None, image_column: str) -> str:
    import datasets

    if wanted is not None:
        return _known(features, wanted, "label_column")
    classes = {name: f.num_classes for name, f in features.items() if isinstance(f, datasets.ClassLabel)}
    named = [name for name in LABEL_WORDS if name in features]
    for name in [*named, *sorted(classes, key=lambda name: -classes[name])]:
        if name in classes or not classes:
            return name
    others = ", ".join(name for name in features if name != image_column)
    raise ValueError(f"no column holds class labels; other columns: {others or 'none'}. Set label_column.")


def _known(features: Any, name: str, field: str) -> str:
    if name not in features:
        raise ValueError(f"{field} {name!r} is not a column; columns: {', '.join(features)}.")
    return name


def _number_labels(splits: dict[str, Any], column: str) -> tuple[list[str], dict[str, Tensor]]:
    """Class names, and the labels (n,) of every split with -1 for a missing one."""
    import datasets

    values = {}
    for split, dataset in splits.items():
        if column not in dataset.features:
            raise ValueError(f"the {split} split has no column {column!r}; it has {', '.join(dataset.features)}.")
        values[split] = dataset[column][:]  # at once: row by row takes 6 s for 60,000
    feature = splits["train"].features[column]
    present = [value for value in values["train"] if value is not None]
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
    elif present and isinstance(present[0], str):
        names = sorted(set(present))
    elif present and isinstance(present[0], int):
        names = [str(number) for number in range(max(present) + 1)]
    else:
        raise ValueError(f"labels must be class labels, whole numbers or words; column {column!r} holds {feature}.")
    return names, {split: _to_numbers(column_values, names) for split, column_values in values.items()}


def _to_numbers(values: Sequence[Any], names: list[str]) -> Tensor:
    number_of = {name: number for number, name in enumerate(names)}
    return torch.tensor(
        [-1 if v is None else number_of.get(v, len(names)) if isinstance(v, str) else int(v) for v in values],
        dtype=torch.long,
    )


def _undecoded(dataset: Any, column: str) -> Any:
    import datasets

    return dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
