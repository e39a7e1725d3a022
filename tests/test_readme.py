"""Every command and snippet of the README is executed, in order, in a folder like a fresh clone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browsers import opened
from typer.testing import CliRunner

import odevit_cli

pytestmark = pytest.mark.timeout(1800)  # a busy machine is slow, not wrong

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
# words that make a long command short: the quickstart has just done the same work in full
SHORTER = {
    "train": "--set optim.epochs=1",
    "distill": "--set optim.epochs=1 --no-report",
    "analyze": "--only comparison,trajectory",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the repository's files; `odevit` and python are those of this environment."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("results"))
    return folder


def run(command: list[str], home: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=home, capture_output=True, text=True, timeout=1700, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def quickstart(home):
    """What `odevit quickstart` printed; its files are in `home`."""
    return run(["odevit", "quickstart"], home)


def test_there_is_something_to_test():
    assert len(SNIPPETS) == 2
    assert COMMANDS[:2] == ["make quickstart", "make test"]
    verbs = {command.split()[1] for command in COMMANDS[2:]}
    assert verbs == {"info", "train", "eval", "distill", "analyze", "audit", "page", "predict", "export"}


def test_the_first_screen_has_the_picture_the_two_commands_and_the_zoo():
    first = README.split("\n## ")[0]
    assert [line.split("#")[0].strip() for line in first.split("```")[1].splitlines()[1:]] == COMMANDS[:2]
    picture = re.search(r"!\[.+\]\((.+)\)", first).group(1)
    assert (ROOT / picture).is_file()
    assert "<!-- zoo -->" in first  # tests/test_docs.py compares it with the cards


def test_the_file_tree_is_the_house():
    """It names every room and every module outside a room, and nothing that is not there."""
    tree = README.split("## The house")[1].split("```")[1]
    parts = [path for path in (ROOT / "src/odevit").iterdir() if not path.name.startswith("_")]
    names = {path.name + "/" * path.is_dir() for path in parts if path.is_dir() or path.suffix == ".py"}
    assert {name for name in names if not re.search(rf"(^|\s){re.escape(name)}", tree)} == set()
    named = set(re.findall(r"(?:^|\s)([\w/]+?(?:\.py|\.md|/))(?=[\s,]|$)", tree)) - {"tests/ROOM/test_MODULE.py"}
    folders = ROOT, ROOT / "src/odevit", ROOT / "src/odevit/analysis", ROOT / "tests"
    assert {name for name in named if not any((folder / name).exists() for folder in folders)} == set()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["model", "student"])
def test_snippets_run(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_make_targets_exist(target, home):
    """`make -n` resolves every dependency; what they run is executed below and by this test run itself."""
    assert {"quickstart": "odevit quickstart", "test": "pytest"}[target] in run(["make", "-n", target], home)


def test_quickstart_keeps_its_promises(quickstart, home):
    folder = home / "runs/quickstart"
    assert f"Report: {folder.relative_to(home)}/report.html" in quickstart
    report = json.loads((folder / "report.json").read_text())
    values = report["values"]
    rows = values["comparison/side_by_side"]
    accuracy = {who: float(row["accuracy"].rstrip("%")) for who, row in rows.items()}
    parameters = {who: int(row["parameters"].replace(",", "")) for who, row in rows.items()}
    assert accuracy["student"] >= 96
    assert accuracy["teacher"] >= 96
    assert values["contraction/agreement"]["observed"] >= 0.97
    assert 4 * parameters["student"] <= parameters["teacher"]
    macs = {who: float(row["multiply-accumulates"].split()[0]) for who, row in rows.items()}
    assert macs["student"] <= 0.75 * macs["teacher"]
    gap = values["flow/gap"]  # seen: 0.3 points, and 0.3 between 4 and 12 steps; one image is 0.28
    assert abs(gap["gap"]) <= 0.0115
    assert abs(gap["accuracy_by_steps"]["4"] - gap["accuracy_by_steps"]["12"]) <= 0.0115
    assert (folder / "student/model/model.safetensors").exists()
    assert (folder / "quickstart.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", [(1200, 800), (375, 812)], ids=["desktop", "phone"])
def test_the_quickstarts_report_in_a_real_browser(quickstart, home, browser, size):
    with opened(browser, (home / "runs/quickstart/report.html").as_uri(), size) as page:
        page.locator(".live .status", has_text="Answer: ").wait_for()  # the model runs in the report
        assert page.locator(".live .picture").bounding_box()["y"] < size[1] / 3  # a picture on the first screen
        figures = page.locator(".frame > svg, .frame img, .frame canvas").all()
        boxes = [(figure.scroll_into_view_if_needed(), figure.bounding_box())[1] for figure in figures]
        width = page.evaluate("document.documentElement.scrollWidth")
    assert len(boxes) >= 12
    assert all(box is not None and box["width"] > 40 and box["height"] > 40 for box in boxes)
    assert width == size[0]


@pytest.mark.parametrize("command", COMMANDS[2:], ids=lambda command: command.split()[1])
def test_commands_run(command, quickstart, home, monkeypatch):
    monkeypatch.chdir(home)
    program, verb, *words = command.split()
    assert program == "odevit"
    words += SHORTER.get(verb, "").split()
    done = CliRunner().invoke(odevit_cli.app, [verb, *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert (done.stdout + done.stderr).strip()
