"""docs/reliability.json as tables between the marks of docs/RELIABILITY.md: run this file after `make torture`."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import dependencies

DOCS = Path(__file__).parent.parent.parent / "docs"


def table(part: str, figures: dict[str, Any]) -> str:
    """The counts of one part as a Markdown table, with a sentence above it."""
    if part == "long":
        return _long(figures)
    if part == "corruption":
        rows = {**figures["by_file"], "**all**": figures["outcomes"]}
        said = f"{figures['cases']:,} spoilt files, {figures['bad']} bad."
        said += " Unnoticed: another answer of a file that has a checksum."
        return f"{said}\n\n{_rows('file', rows)}"
    said = f"{figures['faults']:,} faults, {figures['survived']:,} survived."
    if part == "kill":
        kills = sum(row["kill"] + row["moment"] for row in figures["by_task"].values())
        said += f" {kills:,} by SIGKILL, the others by the limit in the middle of a file."
    return said + ("\n\n" + _rows("task", figures["by_task"]) if "by_task" in figures else "")


def _rows(what: str, rows: dict[str, dict[str, int]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [f"| {what} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return "\n".join(
        lines + [f"| {name} | {' | '.join(f'{row[column]:,}' for column in columns)} |" for name, row in rows.items()]
    )


def _long(figures: dict[str, Any]) -> str:
    what = f"`{figures['recipe']}`" if figures.get("recipe") else "training"
    said = f"{figures['minutes']:g} minutes of {what}: {figures['steps']:,} steps, {figures['val']:,} validations and "
    said += f"checkpoints, {figures['monitor']:,} looks of the monitors. From the first quarter's end to the end:\n\n"
    lines = ["| | then | at the end | largest | slope per hour |", "|---|---:|---:|---:|---:|"]
    for name, label in (("memory_mb", "memory, MB"), ("handles", "open files"), ("disk_mb", "disk, MB")):
        then, end, largest = figures[name]
        lines.append(f"| {label} | {then:.2f} | {end:.2f} | {largest:.2f} | {figures[f'{name}_per_hour']:+.3f} |")
    if "in_use_mb_per_hour" in figures:
        value, error = figures["in_use_mb_per_hour"]
        lines.append(f"| bytes in use, MB (mallinfo2, the least in 20 s) | | | | {value:+.2f} ± {error:.2f} |")
    return said + "\n".join(lines) + "".join(_memory_by_part(figures))


def _memory_by_part(figures: dict[str, Any]) -> list[str]:
    """Slopes of memory between the moments at which the recipe changes its steps, without 5 minutes of settling."""
    begins = [*figures.get("parts", []), math.inf]
    lines = []
    for begin, end in pairwise(begins):
        rows = [row for row in figures["samples"] if begin + 5 <= row[0] < end]
        value, error = slope([row[0] / 60 for row in rows], [row[1] for row in rows])
        lines.append(
            f"\n\nMemory from minute {rows[0][0]:.0f} to {rows[-1][0]:.0f}, within which the steps are drawn from one "
            f"set: {value:+.0f} ± {error:.0f} MB an hour (mean {sum(row[1] for row in rows) / len(rows):,.0f} MB)."
        )
    return lines


def slope(x: list[float], y: list[float]) -> tuple[float, float]:
    """Of the least-squares line, and its standard error."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    if not spread:
        return 0.0, math.inf
    value = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - value * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return value, math.sqrt(rest / max(1, len(x) - 2) / spread)


def page(text: str, figures: dict[str, Any]) -> str:
    """RELIABILITY.md with the newest figures between its marks."""
    for part, found in figures.items():
        text = _between(text, part, table(part, found))
    return text


def _between(text: str, mark: str, content: str) -> str:
    pattern = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def write_page() -> None:
    figures = json.loads((DOCS / "reliability.json").read_text())
    file = DOCS / "RELIABILITY.md"
    file.write_text(_between(page(file.read_text(), figures), "dependencies", dependencies.table()))


if __name__ == "__main__":
    write_page()
