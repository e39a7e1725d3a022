"""What a person sees: tables, bars, and JSON for programs."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from odevit.atomic import TEMPORARY
from odevit.words import readable


def check_output(file: Path) -> Path:
    """The same path, its folder made; a file that cannot be written is an error now, before any work."""
    if file.is_dir():
        raise ValueError(f"cannot write {file}: it is a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        trial = file.with_name(f"{TEMPORARY}{file.name}")  # never taken for the file itself, should we be killed here
        trial.unlink(missing_ok=True)
        trial.open("xb").close()
        trial.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}; choose another place") from error
    return file


def print_table(title: str, rows: Mapping[str, Any], headers: tuple[str, ...] = ()) -> None:
    """One row per entry; a value that is a mapping has one column per header."""
    table = Table(show_header=bool(headers))
    table.add_column("", no_wrap=True)  # a name that is cut or folded cannot be copied
    for header in headers or ("",):
        table.add_column(header, justify="right")
    for name, value in rows.items():
        cells = [value.get(header, "") for header in headers] if headers else [value]
        table.add_row(name, *(cell if isinstance(cell, str) else readable(cell) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a log has no margin, and a number that is cut says nothing
    console.print(Text(title, style="bold"), soft_wrap=True)  # a title of the table itself is folded to its width
    console.print(table)


def print_numbers(title: str, numbers: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(numbers)))
        return
    shown = {k: f"{v:.2%}" if k.startswith(("top", "certified")) else v for k, v in numbers.items()}
    print_table(title, shown)


def print_info(name: str, numbers: Mapping[str, Any], as_json: bool) -> None:
    """What `cost.describe` found."""
    if as_json:
        print(json.dumps({"model": name, **numbers}))
        return
    parameters, macs = numbers["parameters"], numbers["macs"]
    bound = numbers["lipschitz_bound"]
    print_table(
        f"{name} at K = {numbers['num_steps']} ({numbers['solver']})",
        {
            "parameters, total": f"{parameters['total']:,} ({parameters['total'] / 1e6:.3f} M)",
            "parameters, trainable": f"{parameters['trainable']:,}",
            "parameters, field(s)": f"{parameters['blocks']:,}",
            "multiply-accumulates, total": f"{macs['total'] / 1e9:.3f} G",
            "multiply-accumulates, flow": f"{macs['flow'] / 1e9:.3f} G",
            "bytes": f"{numbers['bytes']:,}",
            "Lipschitz bound of the field": "none known for this attention" if bound is None else f"{bound:.1f}",
        },
    )
    if bound is not None:
        Console().print("[dim]The bound is local: at the tokens of one random image, per unit of time.[/]")


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """What `analysis.comparison.compare` found."""
    student, teacher = comparison["student"], comparison["teacher"]

    def row(show: Callable[[Any], str], key: str) -> dict[str, str]:
        return {"student": show(student[key]), "teacher": "–" if teacher[key] is None else show(teacher[key])}

    print_table(
        f"Side by side on {comparison['images']:,} images",
        {
            "accuracy": row(lambda v: f"{v:.2%}", "accuracy"),
            "parameters": row(lambda v: f"{v:,}", "parameters"),
            "of these trained here": row(lambda v: f"{v:,}", "trainable"),
            "multiply-accumulates": row(lambda v: f"{v / 1e6:,.1f} M", "macs"),
            "milliseconds an image": row(lambda v: f"{v:.2f}", "milliseconds"),
        },
        headers=("student", "teacher"),
    )
    certified = comparison["certified_agreement"]
    certain = "." if certified is None else f"; on {certified:.2%} that is certain (contraction region)."
    print(
        f"The student has 1/{comparison['parameter_ratio']:.1f} of the parameters and agrees with its teacher on "
        f"{comparison['agreement']:.2%} of the images{certain}"
    )
    if comparison["note"]:
        print(f"Note: {comparison['note']}.")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (what, done, total) that draws one bar per analysis."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress
