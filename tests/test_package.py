"""What the package says about itself, said in one place."""

import re
import tomllib
from pathlib import Path

import odevit

ROOT = Path(__file__).parent.parent


def test_the_version_has_one_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "odevit.__version__"}
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == odevit.__version__


def test_the_python_that_is_promised_is_the_one_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    promised = re.match(r">=(\d+\.\d+)", project["project"]["requires-python"])[1]
    assert f'python-version: "{promised}"' in (ROOT / ".github/workflows/ci.yml").read_text()
    assert f"Python {promised}" in (ROOT / "constraints.txt").read_text().splitlines()[0]
    assert project["tool"]["mypy"]["python_version"] == promised


def test_every_tool_of_the_developers_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["dev"], *extras["train"], *extras["tensorboard"], *extras["timm"]]:
        name = re.match(r"[\w-]+", line)[0].lower()
        assert name in pinned | {"odevit"}, f"{name} has no exact version in constraints.txt"


def test_the_examples_of_contributing_stand_in_the_code():
    """Line by line, up to where an example says `…`."""
    pattern = re.compile(r"^\*\*an? .*?`(src/.*?)`.*?```python\n(.*?)```", re.DOTALL | re.MULTILINE)
    examples = pattern.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert [place for place, _ in examples] == [
        "src/odevit/model/solvers.py", "src/odevit/distill/losses.py", "src/odevit/teachers/families.py",
        "src/odevit/analysis/",
    ]  # fmt: skip
    for place, code in examples:
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).glob("*.py"))
        source = "\n".join(file.read_text() for file in files)
        for line in code.splitlines():
            assert re.split(r"…|\.\.\.", line)[0].rstrip() in source, f"{place} has no line {line}"
