"""The trajectory cache: a teacher runs once per image and view, and its states are read back from disk from then on.

A cache is a folder `CACHE_FOLDER/KEY` of plain .npy files, one row per view of an image: `images` (uint8, augmented),
`labels`, `states` (float16), `logits` (float32, when the teacher has some), and `meta.json`. KEY is the sha256 of all
that the rows depend on: teacher, data, transform, tokens. Another teacher or transform is another folder, so that a
stale cache is never read. Rows are appended chunk by chunk; a killed build goes on behind the last whole chunk.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odevit.atomic import write_file
from odevit.data import derive_seed, prepare
from odevit.data.augment import Augment
from odevit.data.splits import MemorySplit, Split
from odevit.distill.cache_key import Transform, describe
from odevit.parse import UnreadableError, read_json
from odevit.teachers.teacher import TeacherTrace

TOKENS = ("cls", "all", "logits")  # of a state: CLS, all of them, or no states at all
META = "meta.json"
CHUNK = 256  # images augmented and written at once; a killed build loses at most these
TEACHER_BATCH = 64
LARGEST_HALF = float(torch.finfo(torch.float16).max)  # 65504


class TrajectoryCache:
    """A finished cache. `split`: the views as images to train on; `trace`: what the teacher made of them."""

    def __init__(self, folder: Path, skipped: list[str] | None = None):
        def rows(name: str) -> Tensor:
            # copy-on-write: torch wants memory it may write to, the file stays as it is
            return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

        self.folder = folder
        self.states = rows("states") if (folder / "states.npy").exists() else None  # (N·V, D + 1, n, d)
        self.logits = rows("logits") if (folder / "logits.npy").exists() else None
        self.split = MemorySplit(rows("images"), rows("labels").clone(), skipped or [])

    def trace(self, indices: Tensor) -> TeacherTrace:
        """The teacher's float32 trace of rows (b,) of `split`, on the device of `indices`. It has no attention."""
        logits = None if self.logits is None else self.logits[indices.cpu()].to(indices.device)
        if self.states is None:
            return TeacherTrace([], None, logits)
        states = self.states[indices.cpu()].to(indices.device).float()
        return TeacherTrace(list(states.unbind(1)), None, logits)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def open_cache(
    parent: str | Path,
    teacher: Any,
    train: Split,
    transform: Transform,
    *,
    tokens: str = "cls",
    say: Callable[[str], None] = tell,
) -> TrajectoryCache:
    """The cache of this teacher on this split, built (or its building continued) when it is not complete.

    Several processes may ask at once: one builds, the others wait for it.
    """
    from filelock import FileLock

    if tokens not in TOKENS:
        raise ValueError(f"tokens to cache must be one of {', '.join(TOKENS)}, got {tokens!r}")
    content = describe(teacher, train, transform, tokens)
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    folder = Path(parent) / key[:20]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        builder = Builder(folder, key, content, teacher, train, transform, tokens)
        if builder.rows_done < builder.rows:
            builder.check_space(say)
            builder.build()
    cache = TrajectoryCache(folder, train.skipped)
    if not torch.equal(cache.split.labels, train.labels.repeat(transform.views)):
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
        tokens: str,
    ):
        self.folder, self.key, self.content = folder, key, content
        self.teacher, self.train, self.transform = teacher, train, transform
        count, views = len(train), transform.views
        self.rows = count * views
        self.kept = {"cls": 1, "logits": 0}.get(tokens, -1)
        if tokens == "all":
            self.kept = 1 + teacher.num_patches + teacher.extra_tokens
        first = train.fetch(torch.tensor([0]))[0]
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "images": (tuple(first.shape[1:]), "u1"),
            "labels": ((), "<i8"),
        }
        if self.kept:
            shapes["states"] = ((teacher.depth + 1, self.kept, teacher.width), "<f2")
        if teacher.num_labels:
            shapes["logits"] = ((teacher.num_labels,), "<f4")
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
                f"the cache of {what} needs {_in_words(left)} in {self.folder}, and {_in_words(free)} are free. Free "
                "some space, or choose distill.cache=cls, fewer distill.cache_views, another distill.cache_folder, "
                "or distill.cache=none"
            )
        say(f"caching {what}: {_in_words(total)} in {self.folder}{done}; {_in_words(free)} are free")

    def build(self) -> None:
        """Append the chunks that are missing. After each, meta.json says how many rows are safe."""
        todo = [chunk for chunk in self.chunks if chunk[0] * len(self.train) + chunk[1] >= self.rows_done]
        for column in self.columns.values():
            column.cut(self.rows_done)
        augment = Augment(self.transform.augment, num_classes=int(self.train.labels.max()) + 1)
        fetched = self.train.stream([torch.arange(start, end) for _, start, end in todo])
        for (view, start, end), (images, labels) in _shown(zip(todo, fetched, strict=True), len(todo)):
            seed = derive_seed(self.transform.seed, "view", view, start)
            pixels = as_bytes(augment(images, labels, seed=seed)[0])
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
            return {"logits": torch.cat(logits)}
        for batch in pixels.split(TEACHER_BATCH):
            trace = self.teacher.trace(prepare(batch.to(device), transform.image_size, transform.mean, transform.std))
            states.append(torch.stack([state[:, : self.kept] for state in trace.states], dim=1).cpu())
            if trace.logits is not None:
                logits.append(trace.logits.float().cpu())
        largest = max(float(part.abs().max()) for part in states)
        if not largest <= LARGEST_HALF:  # also NaN
            raise ValueError(
                f"the teacher's states reach {largest:g}, half precision only {LARGEST_HALF:g}: they cannot be cached. "
                "Set distill.cache=none"
            )
        return {"states": torch.cat(states).half()} | ({"logits": torch.cat(logits)} if logits else {})

    def write_meta(self, rows_done: int) -> None:
        record = {"key": self.key, "rows": self.rows, "rows_done": rows_done, "content": self.content}
        write_file(self.folder / META, json.dumps(record, indent=1))


def as_bytes(images: Tensor) -> Tensor:
    """Float 0..1, or uint8 as it is, → uint8."""
    return (images * 255).round().clamp(0, 255).byte() if images.is_floating_point() else images


def _in_words(size: int) -> str:
    power = 3 if size >= 1e9 else 2 if size >= 1e6 else 1
    return f"{size / 1000**power:.1f} {' kMG'[power]}B"


def _shown(steps: Any, total: int) -> Any:
    """The same steps, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, total=total, description="caching", console=Console(stderr=True))
