"""Findings → report.json and report.html, one file that opens from disk and asks nothing of the network."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch

from odevit.analysis import ANALYSES, Finding, HtmlFigure
from odevit.analysis.report.html_figures import svg
from odevit.analysis.report.self_contained import Opening, document
from odevit.atomic import write_file
from odevit.words import readable

TEMPLATES = Path(__file__).parent / "templates"
MOST_TABLE_ROWS = 40  # a longer table is read in report.json


def write_report(
    findings: Sequence[Finding],
    folder: str | Path,
    *,
    title: str,
    command: str,
    meta: Mapping[str, Any],
    opening: Opening | None = None,
) -> Path:
    """Write `folder`/report.html and report.json; returns the path of report.html.

    The headlines and key numbers of the findings stand on top, in the order of the findings; without any headline, the
    first finding's text. meta: what else a reader must know (sampling, model, data, …); versions and the date are
    added. NaN and infinities stand in the JSON as "NaN", "Infinity", "-Infinity". opening: a live part above them all.
    """
    names = [finding.name for finding in findings]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"every finding of a report needs its own name; these came twice: {', '.join(repeated)}")
    values = {finding.name: plain(finding.value) for finding in findings}
    headline = [finding.headline for finding in findings if finding.headline] or [f.text for f in findings[:1]]
    numbers = {label: plain(value) for finding in findings for label, value in finding.key_numbers.items()}
    meta = {**plain(meta), **_versions()}
    content = {"title": title, "headline": headline, "command": command, "meta": meta, "values": values}
    scripts = [_template("paths3d.js"), *([opening.script] if opening else [])]
    body = Template(_template("report.html")).substitute(
        title=escape(title),
        opening=opening.html if opening else "",
        headline=_headline(headline),
        key_numbers=_definitions(numbers, "numbers"),
        contents=_contents(findings),
        sections="\n".join(_sections(findings, values, command)),
        command=_code(command),
        meta=_definitions(meta, "meta"),
    )
    css = _template("report.css") + (opening.css if opening else "")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "report.json", json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_file(folder / "report.html", document("report", title=title, css=css, body=body, scripts=scripts))
    return folder / "report.html"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tensors and arrays as lists, numbers that are not finite as strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(f"a value in a report must be made of numbers, texts, lists and dicts, got {type(value).__name__}")


def _single(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)


def _by_analysis(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.name.partition("/")[0], []).append(finding)
    return groups


def _versions() -> dict[str, str]:
    versions = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    for package in ("odevit", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _headline(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    first, *rest = map(escape, sentences)
    others = "".join(f"<li>{sentence}</li>" for sentence in rest)
    return f'<p class="lede">{first}</p>' + (f'<ul class="found">{others}</ul>' if others else "")


def _definitions(items: Mapping[str, Any], kind: str) -> str:
    def row(key: str, value: Any) -> str:
        pair = f"<dt>{escape(str(key))}</dt><dd>{escape(readable(value))}</dd>"
        return f"<div>{pair}</div>" if kind == "numbers" else pair

    columns = next((columns for columns in (3, 4) if len(items) % columns == 0), 3)  # no row left with one number
    rows = "".join(row(*item) for item in items.items())
    return f'<dl class="{kind}" style="--columns:{columns}">{rows}</dl>' if items else ""


def _heading(name: str) -> str:
    return escape(name.replace("_", " ").capitalize())


def _contents(findings: Sequence[Finding]) -> str:
    names = list(_by_analysis(findings))
    links = " ".join(f'<a href="#{_anchor(name)}">{_heading(name)}</a>' for name in names)
    return f'<nav aria-label="Contents">{links}</nav>' if len(names) > 1 else ""


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", name)


def _sections(findings: Sequence[Finding], values: Mapping[str, Any], command: str) -> Iterable[str]:
    for name, group in _by_analysis(findings).items():
        summary = f'<p class="question">{escape(ANALYSES[name].summary)}</p>' if name in ANALYSES else ""
        parts = []
        for is_fact, members in groupby(group, lambda finding: finding.figure is None):
            rendered = [
                _fact(f, values[f.name]) if is_fact else _figure(f, values[f.name], _command_for(command, name))
                for f in members
            ]
            parts.append(f'<dl class="facts">{"".join(rendered)}</dl>' if is_fact else "".join(rendered))
        yield f'<section id="{_anchor(name)}"><h2>{_heading(name)}</h2>{summary}{"".join(parts)}</section>'


def _command_for(command: str, analysis: str) -> str:
    """The command that makes this section alone, where the command has such an option."""
    if " analyze " not in f"{command} ":
        return command
    return re.sub(r"\s+--only[= ]\S+", "", command) + f" --only {analysis}"


def _code(command: str) -> str:
    """A command whose options are not broken at their hyphens at the end of a line."""
    return re.sub(r"(?<!\S)(--?[\w-]+)", r"<span>\1</span>", escape(command))


def _fact(finding: Finding, value: Any) -> str:
    shown = f"<dd>{escape(readable(value))}</dd>" if _single(value) else ""
    table = "" if _single(value) or value is None else _table(value) or f"<p>{_elsewhere(finding)}</p>"
    reading = f'<dd class="reading">{escape(finding.text)}{table}</dd>'
    return f"<div><dt>{escape(finding.title)}</dt>{shown}{reading}</div>"


def _elsewhere(finding: Finding) -> str:
    return f"The numbers are in report.json under <code>{escape(finding.name)}</code>."


def _figure(finding: Finding, value: Any, command: str) -> str:
    figure, title = finding.figure, escape(finding.title)
    assert figure is not None
    body = figure.html if isinstance(figure, HtmlFigure) else svg(figure, finding.title, _anchor(finding.name))
    shown = f"<span>{escape(readable(value))}</span>" if _single(value) else ""
    table = "" if value is None or shown else _table(value)
    numbers = f"<details><summary>Numbers</summary>{table}</details>" if table else ""
    return (
        f'<h3>{title}{shown}</h3><figure><div class="frame">{body}</div><figcaption><p>{escape(finding.text)}</p>'
        f'<p class="made"><code>{_code(command)}</code></p></figcaption>{numbers}</figure>'
    )


def _table(value: Any) -> str:
    """A dict of single values, or several records with the same keys, as a table; empty for anything else."""
    rows = list(value.items()) if isinstance(value, dict) else [(str(i), item) for i, item in enumerate(value)]
    records = bool(rows) and all(isinstance(item, dict) for _, item in rows)
    columns = list(dict.fromkeys(key for _, item in rows for key in item)) if records else [""]
    cells = [[item.get(column) if records else item for column in columns] for _, item in rows]
    if not rows or len(rows) > MOST_TABLE_ROWS or any(isinstance(cell, list | dict) for row in cells for cell in row):
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in ["", *columns])
    body = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(readable(cell))}</td>' for cell in row)}</tr>"
        for (key, _), row in zip(rows, cells, strict=True)
    )
    head = f"<thead><tr>{head}</tr></thead>" if records else ""
    return f'<div class="table"><table>{head}<tbody>{body}</tbody></table></div>'
