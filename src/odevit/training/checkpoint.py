"""Checkpoints that survive anything: written aside, forced to disk, renamed; verified on reading; bounded in number.

A checkpoint is a folder `checkpoints/step-00000100` with `state.safetensors` and `meta.json` (what a person may want to
read, and the hashes of both). A killed write leaves a `.tmp-…` folder, which is removed by the next run.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odevit.atomic import TEMPORARY, sync
from odevit.training.statefile import load_state, save_state

FORMAT = 2  # 1: state.pt, and a hash of it only
STATE, META = "state.safetensors", "meta.json"
PREVIOUS = ".previous-"

# A run may be resumed with other values of these: where it writes, how long it runs, how fast, in how much memory.
FREE_KEYS = {
    "output", "optim.epochs", "optim.steps", "optim.minutes", "optim.accumulate", "data.workers",
    "loop.checkpoint_every", "loop.checkpoint_minutes", "loop.keep", "loop.eval_batch_size",
    "loop.tensorboard", "loop.compile", "loop.recompute", "loop.fsdp", "distill.cache_folder",
}  # fmt: skip


class CheckpointError(OSError):
    """A checkpoint could not be written or read."""


def unwritable(folder: Path, error: OSError, newest: Path | None) -> CheckpointError:
    """What to say when a run can no longer write."""
    good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    return CheckpointError(
        f"cannot write in {folder}: {error}; {good}. Free some space there (or mend its rights), then resume "
        "with --resume"
    )


# --- atomic folders ---------------------------------------------------------------------------------------------------


def write_folder(target: Path, write: Callable[[Path], None], kept: str = "what was there before is intact") -> None:
    """`write(folder)` fills a temporary folder, which then takes the place of `target`: whole or not at all.

    Whatever goes wrong while writing (a full disk above all) is a CheckpointError, and what was there before stays.
    """
    temporary = target.with_name(TEMPORARY + target.name)
    previous = target.with_name(PREVIOUS + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in sorted(temporary.rglob("*"), reverse=True):
            sync(path)
        sync(temporary)
    except Exception as error:  # every library reports a full disk in its own way
        shutil.rmtree(temporary, ignore_errors=True)  # gives the space back
        raise CheckpointError(
            f"could not write {target}: {error}; {kept}. Free some space there (or mend its rights), then resume or "
            "start again"
        ) from error
    if target.exists():
        os.replace(target, previous)
    os.replace(temporary, target)
    sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def recover_folders(parent: Path) -> None:
    """Undo what a killed write left in `parent`: half-written things go, a moved-away folder comes back."""
    for path in parent.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    for path in parent.glob(f"{PREVIOUS}*"):
        target = path.with_name(path.name.removeprefix(PREVIOUS))
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, target)


def discard(folder: Path) -> None:
    """Remove a folder; killed on the way, what is left of it does not have its name."""
    temporary = folder.with_name(TEMPORARY + folder.name)
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):  # nothing depends on it: the next run tries again
        os.replace(folder, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


# --- the store --------------------------------------------------------------------------------------------------------


class CheckpointStore:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def newest(self) -> Path | None:
        return self.paths()[-1] if self.paths() else None

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write one checkpoint, then drop those beyond `keep`."""
        target = self.folder / f"step-{step:08d}"

        def write(folder: Path) -> None:
            save_state(state, folder / STATE)
            record = {"format": FORMAT, "step": step, **meta, "sha256": _sha256(folder / STATE)}
            record = json.loads(json.dumps(record))  # as it will be read
            (folder / META).write_text(json.dumps({**record, "meta_sha256": _sha256_of(record)}, indent=1))

        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.newest()
        write_folder(
            target, write, f"the last good checkpoint is {before}" if before else "there is no checkpoint before it"
        )
        self.drop_old()
        return target

    def drop_old(self) -> None:
        """Remove those beyond `keep`."""
        for path in self.paths()[: -self.keep]:
            discard(path)

    def load(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(state, meta) of the newest readable checkpoint; a damaged one is named and passed over. None without any."""
        found = self.paths()
        for path in reversed(found):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
        if found:
            raise CheckpointError(f"none of the {len(found)} checkpoints in {self.folder} can be read")
        return None

    def grouping(self, current: int) -> int:
        """How the run here groups its parameters (see `optim.GROUPING`); `current` when there is no checkpoint yet."""
        for path in reversed(self.paths()):
            try:
                return int(_read_meta(path).get("grouping", 1))
            except (OSError, ValueError, TypeError, AttributeError, RecursionError):
                continue  # damaged: the others are of the same run
        return current

    def drop_after(self, step: int) -> None:
        """Remove checkpoints of later steps: damaged ones, passed over by `load`."""
        for path in self.paths():
            if int(path.name.removeprefix("step-")) > step:
                discard(path)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, meta) of one checkpoint folder, verified."""
    try:
        meta = _read_meta(path)
        if isinstance(meta, dict) and isinstance(meta.get("format"), int) and meta["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer odevit, in format {meta['format']}")
        file = path / (STATE if meta["format"] > 1 else "state.pt")
        if meta["format"] > 1 and meta.pop("meta_sha256") != _sha256_of(meta):
            raise CheckpointError(f"{path} is damaged: {META} is not what was written")
        if not file.is_file() or _sha256(file) != meta["sha256"]:
            raise CheckpointError(f"{path} is damaged: {file.name} is not what was written")
        return load_state(file), meta
    except CheckpointError:
        raise
    except Exception as error:  # of the file system, JSON, safetensors or torch, or a value of the wrong type
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _read_meta(path: Path) -> dict[str, Any]:
    if not (path / META).is_file():  # reading a pipe would wait for ever
        raise FileNotFoundError(f"it has no file {META}")
    return json.loads((path / META).read_text())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


# --- what goes into one -----------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  (other libraries draw from it)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def library_versions() -> dict[str, str]:
    names = ("odevit", "torch", "transformers", "accelerate", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def check_same_recipe(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """A run may only be resumed with the recipe it was started with, up to `FREE_KEYS`."""
    before, now = _flatten(saved), _flatten(current)
    differing = [k for k in sorted(before.keys() | now.keys()) if k not in FREE_KEYS and before.get(k) != now.get(k)]
    if differing:
        lines = [f"  {key}: {before.get(key)!r} in the run, {now.get(key)!r} now" for key in differing]
        raise ValueError(
            "this run was started with another recipe:\n" + "\n".join(lines) + "\nResume with the old values, or start "
            "a new run in another folder. Only these may change: " + ", ".join(sorted(FREE_KEYS))
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
