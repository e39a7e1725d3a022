"""The trajectory cache: a teacher runs once per image and view, and its states are read back from disk from then on.

A cache is a folder `CACHE_FOLDER/KEY` of plain .npy files, one row per view of an image: `images` (uint8, augmented;
left out where nothing augments them: they are the data's own), `labels`, `states` (float16), `logits` (float32, when
the teacher has some; or the largest of them with their `classes` and the `rest`, see `top`), and `meta.json`. KEY is
the sha256 of all that the rows depend on: teacher, data, transform, tokens. Another teacher or transform is another
folder, so that a stale cache is never read. Rows are appended chunk by chunk; a killed build goes on behind the last
whole chunk.

Shapes: N images, V views, D teacher blocks, n tokens kept (1 for "cls", 1 + M + E for "all"), d width.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from odevit.atomic import write_file
from odevit.data import derive_seed, prepare
from odevit.data.augment import OPERATIONS, Augment
from odevit.data.splits import MemorySplit, Split
from odevit.distill.cache_key import Transform, describe
from odevit.distill.top import TopLogits, keep_top
from odevit.parse import UnreadableError, read_json
from odevit.training.precision import autocast
from odevit.words import si

TOKENS = ("cls", "all", "logits")  # of a state: CLS, all of them, or no states at all
META = "meta.json"
CHUNK = 256  # images augmented and written at once; a killed build loses at most these
TEACHER_BATCH = 64
LARGEST_HALF = float(torch.finfo(torch.float16).max)  # 65504


class CachedTrace(NamedTuple):
    """What is left of a teacher's trace. No attention."""

    states: list[Tensor]  # D + 1 of (b, n, d), none when only answers are cached
    logits: Tensor | TopLogits | None
    attention: None = None


class TrajectoryCache:
    """A finished cache. `split`: the views as images to train on; `trace`: what the teacher made of them.

    train: the split it was made from."""

    def __init__(self, folder: Path, train: Split):
        def rows(name: str) -> Tensor:
            # copy-on-write: torch wants memory it may write to, the file stays as it is
            return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

        self.folder = folder
        self.states = rows("states") if (folder / "states.npy").exists() else None  # (N·V, D + 1, n, d)
        self.logits = rows("logits") if (folder / "logits.npy").exists() else None
        self.top = (rows("classes"), rows("rest")) if (folder / "classes.npy").exists() else None
        self.labels, self.split = rows("labels").clone(), train
        if (folder / "images.npy").exists():
            self.split = MemorySplit(rows("images"), self.labels, train.skipped)

    def trace(self, indices: Tensor) -> CachedTrace:
        """The teacher's float32 trace of rows (b,) of `split`, on the device of `indices`."""
        here, device = indices.cpu(), indices.device
        logits: Any = None if self.logits is None else self.logits[here].to(device)
        if self.top is not None:
            classes, rest = (column[here].to(device) for column in self.top)
            logits = TopLogits(logits, classes.long(), rest)
        states = [] if self.states is None else list(self.states[here].to(device).float().unbind(1))
        return CachedTrace(states, logits)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_cache(
    parent: str | Path,
    teacher: Any,
    train: Split,
    transform: Transform,
    *,
    tokens: str = "cls",
    top: int = 0,
    temperature: float = 1.0,
    say: Callable[[str], None] = tell,
) -> TrajectoryCache:
    """The cache of this teacher on this split, built (or its building continued) when it is not complete.

    Several processes may ask at once: one builds, the others wait for it.
    top: keep so many of the largest logits, and of the others their sum at this temperature; 0: all of them.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens to cache must be one of {', '.join(TOKENS)}, got {tokens!r}")
    content = describe(teacher, train, transform, tokens, top, temperature)
    return open_part(parent, content, teacher, train, transform, say=say)


def open_part(
    parent: str | Path,
    content: dict[str, Any],
    teacher: Any,
    part: Split,
    transform: Transform,
    *,
    start: int = 0,
    say: Callable[[str], None] = tell,
) -> TrajectoryCache:
    """The cache of a part of the training images, from number `start` on, under the name that `content` gives it."""
    from filelock import FileLock

    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    folder = Path(parent) / key[:20]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        builder = Builder(folder, key, content, teacher, part, transform, start)
        if builder.rows_done < builder.rows:
            builder.check_space(say)
            builder.build()
    cache = TrajectoryCache(folder, part)
    if not torch.equal(cache.labels, part.labels.repeat(transform.views)):
        raise UnreadableError(f"{folder} is damaged: its labels are not those of the data. Remove the folder")
    return cache


# --- building ---------------------------------------------------------------------------------------------------------


class Column:
    """One .npy file that grows row by row under the header of its final shape."""

    def __init__(self, folder: Path, name: str, rows: int, shape: tuple[int, ...], dtype: str):
        self.path, self.dtype = folder / f"{name}.npy", np.dtype(dtype)
        header = io.BytesIO()
        spec = {"descr": self.dtype.str, "fortran_order": False, "shape": (rows, *shape)}
        np.lib.format.write_array_header_1_0(header, spec)
        self.header = header.getvalue()
        self.row_bytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.total_bytes = len(self.header) + rows * self.row_bytes

    def rows_on_disk(self) -> int:
        """Rows behind a good header."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise UnreadableError(f"{self.path} is not a file of ours: remove it, and it is written anew")
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            good = file.read(len(self.header)) == self.header
        return max(0, self.path.stat().st_size - len(self.header)) // self.row_bytes if good else 0

    def cut(self, rows: int) -> None:
        """Keep the first rows only."""
        with self.path.open("r+b" if rows else "wb") as file:
            file.write(self.header)
            file.truncate(len(self.header) + rows * self.row_bytes)

    def append(self, values: Tensor) -> None:
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(values.cpu().numpy(), dtype=self.dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())


class Builder:
    """Writes the rows of one cache, view after view, chunk after chunk."""

    def __init__(
        self,
        folder: Path,
        key: str,
        content: dict[str, Any],
        teacher: Any,
        train: Split,
        transform: Transform,
        start: int = 0,
    ):
        self.folder, self.key, self.content, self.start = folder, key, content, start
        self.teacher, self.train, self.transform = teacher, train, transform
        count, views, tokens = len(train), transform.views, content["tokens"]
        self.top, self.temperature = content.get("top", (0, 1.0))
        self.rows = count * views
        self.kept = {"cls": 1, "logits": 0}.get(tokens, -1)
        if tokens == "all":
            self.kept = 1 + teacher.num_patches + teacher.extra_tokens
        shapes: dict[str, tuple[tuple[int, ...], str]] = {"labels": ((), "<i8")}
        if any(getattr(transform.augment, name) for name in OPERATIONS):
            shapes["images"] = (tuple(train.fetch(torch.tensor([0]))[0].shape[1:]), "u1")
        if self.kept:
            shapes["states"] = ((teacher.depth + 1, self.kept, teacher.width), "<f2")
        if teacher.num_labels:
            shapes["logits"] = ((self.top or teacher.num_labels,), "<f4")
        if self.top:
            shapes |= {"classes": ((self.top,), "<i2" if teacher.num_labels <= 2**15 else "<i4"), "rest": ((), "<f4")}
        self.columns = {name: Column(folder, name, self.rows, *spec) for name, spec in shapes.items()}
        starts = [(view, start) for view in range(views) for start in range(0, count, CHUNK)]
        self.chunks = [(view, start, min(start + CHUNK, count)) for view, start in starts]
        self.rows_done = self._rows_done()

    def _rows_done(self) -> int:
        """Rows up to the last chunk that is whole in every file."""
        try:
            meta = read_json(self.folder / META)
        except UnreadableError:
            meta = {}
        done = meta.get("rows_done") if meta.get("key") == self.key else 0
        on_disk = [column.rows_on_disk() for column in self.columns.values()]
        whole = min(done, *on_disk) if type(done) is int else 0
        ends = [view * len(self.train) + end for view, _, end in self.chunks]
        return max((end for end in ends if end <= whole), default=0)

    def check_space(self, say: Callable[[str], None]) -> None:
        """Say how large it will be; a ValueError when the disk has not that much left."""
        total = sum(column.total_bytes for column in self.columns.values())
        left = sum((self.rows - self.rows_done) * column.row_bytes for column in self.columns.values())
        free = shutil.disk_usage(self.folder).free
        views = f" x {self.transform.views} views" if self.transform.views > 1 else ""
        path = f"path of {len(self.train)} images{views}, {self.kept} token{'s' * (self.kept > 1)} a state"
        what = f"the teacher's {path if self.kept else f'answers to {len(self.train)} images{views}'}"
        done = f", {self.rows_done / self.rows:.0%} of it there already" if self.rows_done else ""
        if left > free:
            raise ValueError(
                f"the cache of {what} needs {si(left)}B in {self.folder}, and {si(free)}B are free. Free "
                "some space, or choose distill.cache=cls, fewer distill.cache_views, another distill.cache_folder, "
                "or distill.cache=none"
            )
        say(f"caching {what}: {si(total)}B in {self.folder}{done}; {si(free)}B are free")

    def build(self) -> None:
        """Append the chunks that are missing. After each, meta.json says how many rows are safe."""
        todo = [chunk for chunk in self.chunks if chunk[0] * len(self.train) + chunk[1] >= self.rows_done]
        for column in self.columns.values():
            column.cut(self.rows_done)
        augment = Augment(self.transform.augment, num_classes=int(self.train.labels.max()) + 1)
        fetched = self.train.stream([torch.arange(start, end) for _, start, end in todo])
        for (view, start, end), (images, _) in _shown(zip(todo, fetched, strict=True), len(todo)):
            labels = self.train.labels[start:end]  # also where the next image stands in for one that cannot be read
            seed = derive_seed(self.transform.seed, "view", view, self.start + start)
            pixels = as_bytes(augment(images, labels, seed=seed)[0])
            with autocast(self.transform.precision, next(self.teacher.parameters()).device):
                rows = {"images": pixels, "labels": labels, **self.observe(pixels)}
            try:
                for name, column in self.columns.items():
                    column.append(rows[name])
                self.write_meta(view * len(self.train) + end)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise ValueError(
                    f"the disk is full, {self.folder} is unfinished. What is written stays good: free some space and "
                    "start again, or choose distill.cache=cls, fewer distill.cache_views or distill.cache=none"
                ) from error

    def observe(self, pixels: Tensor) -> dict[str, Tensor]:
        """Run the teacher on uint8 images (b, c, H, W): its states (b, D + 1, n, d) in half precision, its logits."""
        device, transform = next(self.teacher.parameters()).device, self.transform
        states, logits = [], []
        if not self.kept:
            for batch in pixels.split(TEACHER_BATCH):
                images = prepare(batch.to(device), transform.image_size, transform.mean, transform.std)
                logits.append(self.teacher.answer(images).float().cpu())
            return self.answers(logits)
        for batch in pixels.split(TEACHER_BATCH):
            trace = self.teacher.trace(prepare(batch.to(device), transform.image_size, transform.mean, transform.std))
            states.append(torch.stack([state[:, : self.kept].float() for state in trace.states], dim=1).cpu())
            if trace.logits is not None:
                logits.append(trace.logits.float().cpu())
        largest = max(float(part.abs().max()) for part in states)
        if not largest <= LARGEST_HALF:  # also NaN
            raise ValueError(
                f"the teacher's states reach {largest:g}, half precision only {LARGEST_HALF:g}: they cannot be cached. "
                "Set distill.cache=none"
            )
        return {"states": torch.cat(states).half(), **self.answers(logits)}

    def answers(self, logits: list[Tensor]) -> dict[str, Tensor]:
        """The columns of batches of logits (b, classes)."""
        if not logits or not self.top:
            return {"logits": torch.cat(logits)} if logits else {}
        values, classes, rest = keep_top(torch.cat(logits), self.top, self.temperature)
        return {"logits": values, "classes": classes, "rest": rest}

    def write_meta(self, rows_done: int) -> None:
        record = {"key": self.key, "rows": self.rows, "rows_done": rows_done, "content": self.content}
        write_file(self.folder / META, json.dumps(record, indent=1))


def as_bytes(images: Tensor) -> Tensor:
    """Float 0..1, or uint8 as it is, → uint8."""
    return (images * 255).round().clamp(0, 255).byte() if images.is_floating_point() else images


def _shown(steps: Any, total: int) -> Any:
    """The same steps, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, total=total, description="caching", console=Console(stderr=True))
