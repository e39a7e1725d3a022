"""docs/reliability.json as tables between the marks of docs/RELIABILITY.md: run this file after `make torture`."""

import json
import re
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
    return said + "\n".join(lines)


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
