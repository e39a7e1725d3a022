"""What a person sees of a run: progress bar or plain lines, metrics.jsonl, TensorBoard, README.txt."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from odevit.atomic import write_file
from odevit.parse import reading

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"

README = """\
recipe.yaml     everything that defines this run; here, `odevit train recipe.yaml --output . --resume` continues it
metrics.jsonl   losses and accuracies by step, one JSON object a line; curve.png shows them; timing.jsonl: speed
checkpoints/    complete states to resume from; the newest ones only
best/           the weights that were best on the validation split so far
model/          the result, for AutoModelForImageClassification.from_pretrained; result.json: its accuracy
report.html     of a student: beside its teacher (comparison.json), and what its flow does (report.json)
"""


class RunLog:
    """Writes on the main process only; every method is safe to call on all of them."""

    def __init__(self, folder: Path, *, main: bool, bar: bool, tensorboard: bool = False):
        self.folder, self.main = folder, main
        self.bar: Any = None
        self.board: Any = None
        self._plain_every = 0.0
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "README.txt", README)
        if tensorboard:
            self.board = _open_tensorboard(folder / "tensorboard")
        if bar and sys.stderr.isatty():
            self.bar = _open_bar()

    def truncate(self, length: int) -> None:
        """Cut metrics.jsonl to what it was at the checkpoint that is resumed."""
        path = self.folder / METRICS
        if self.main and path.exists():
            os.truncate(path, length)

    def length(self) -> int:
        """Bytes of metrics.jsonl, forced to disk."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        with path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def metrics(self, record: dict[str, Any]) -> None:
        self._append(METRICS, record)
        if self.board is not None:
            for name, value in _numbers(record):
                self.board.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def timing(self, record: dict[str, Any]) -> None:
        self._append(TIMING, record)

    def say(self, text: str) -> None:
        if self.main:
            (self.bar.console.print if self.bar else lambda t: print(t, file=sys.stderr, flush=True))(text)

    def show(self, progress: float, stage: str, values: dict[str, str]) -> None:
        """Move the bar; without a terminal, one line each 5 % of the run."""
        text = "  ".join(f"{name} {value}" for name, value in values.items())
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=progress, description=stage, text=text)
        elif progress >= self._plain_every:
            self.say(f"{progress:6.1%}  {stage}  {text}")
            self._plain_every = progress + 0.05

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if self.main:
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(record) + "\n")


def _open_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.percentage:3.0f}%")
    times = TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[text]}")
    bar = Progress(*columns, *times, console=Console(stderr=True))
    bar.add_task("start", total=1.0, text="")
    bar.start()
    return bar


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("loop.tensorboard needs tensorboard: pip install 'odevit[tensorboard]'") from error
    return SummaryWriter(str(folder))


def _numbers(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((prefix + name, float(value)))
    return found


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl."""
    path = folder / METRICS
    with reading(path):
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def monitor_seconds(folder: Path) -> list[float]:
    """What each look of the monitors cost, over all sittings. A crash of the machine may have left half a line."""
    found, path = [], folder / TIMING
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            found.append(float(json.loads(line)["monitor_seconds"]))
    return found


class Window:
    """Sums since the last line of metrics.jsonl. Pieces and processes add up to means over the global batch."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}  # of each value, and under "steps/…" of the steps that had it

    def add(self, terms: Any, targets: Any, share: float) -> None:
        """terms of a piece that is `share` of the global batch; targets (b, classes)."""
        losses = {name: float(value.detach()) for name, value in terms.losses.items()}
        values = {"loss": sum(losses.values())} | {f"loss/{name}": value for name, value in losses.items()}
        if terms.logits is not None:
            values["top1"] = float((terms.logits.detach().argmax(1) == targets.argmax(1)).float().mean())
        for name, value in (values | {f"steps/{name}": 1.0 for name in values}).items():
            self.sums[name] = self.sums.get(name, 0.0) + share * value

    def shared(self, accelerator: Any) -> dict[str, float]:
        """The sums over all processes."""
        if accelerator.num_processes == 1 or not self.sums:
            return dict(self.sums)
        import torch

        names = sorted(self.sums)
        sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64, device=accelerator.device)
        return dict(zip(names, accelerator.reduce(sums).tolist(), strict=True))

    def take(self, accelerator: Any) -> dict[str, Any]:
        """{"loss", "losses", "top1"}: means over those steps of the window that had them; starts the next window."""
        sums = self.shared(accelerator)
        self.sums = {}
        means = {name: value / sums[f"steps/{name}"] for name, value in sums.items() if f"steps/{name}" in sums}
        losses = {name.removeprefix("loss/"): value for name, value in means.items() if name.startswith("loss/")}
        return {"loss": means["loss"], "losses": losses, "top1": means.get("top1")}
