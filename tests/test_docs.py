"""Every snippet of the pages under docs/ is executed, in order, beside one tiny teacher and student."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import tiny_recipe
from typer.testing import CliRunner

import odevit_cli
from odevit.analysis.doctor import RULES
from odevit.commands.distill import distill_recipe
from odevit.distill.losses import LOSSES
from odevit.model.solvers import SOLVERS
from odevit.recipe import Recipe
from odevit.shipped import FOLDER, card, names
from odevit.teachers.teacher import tiny_teacher

ROOT = Path(__file__).parent.parent
PAGES = ("install", "distil", "report", "speed", "extend")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in which runs/quickstart has a teacher and a student; both as good as untrained."""
    folder = tmp_path_factory.mktemp("docs")
    torch.manual_seed(0)
    teacher = folder / "runs/quickstart/teacher/model"
    tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1).module.save_pretrained(teacher)
    student = folder / "runs/quickstart/student"
    values = tiny_recipe(student, data={"limit": 128}, optim={"steps": 2, "batch_size": 32}).to_dict()
    values |= {"task": "distill", "model": {"mlp_ratio": 1, "num_steps": 2}}
    values["distill"] = {"teacher": str(teacher), "losses": {"cls_path": 1.0, "kl": 1.0}, "sample": 32}
    distill_recipe(Recipe.from_dict(values), report=None, progress_bar=False)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("results"))
    return folder


def snippets(page: str) -> list[tuple[str, str]]:
    return re.findall(r"```(bash|python)\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs(page, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    known = [(registry, set(registry)) for registry in (SOLVERS, LOSSES, RULES)]
    assert snippets(page)
    try:
        for kind, text in snippets(page):
            if kind == "python":
                exec(compile(text, f"docs/{page}.md", "exec"), {})
                continue
            for line in text.splitlines():
                program, *words = shlex.split(line)
                if program == "make":  # tests/test_readme.py runs it
                    assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
                    continue
                assert program == "odevit"
                CliRunner().invoke(odevit_cli.app, words, catch_exceptions=False)
    finally:
        for registry, before in known:
            for name in set(registry) - before:
                del registry[name]
    capsys.readouterr()


def lines_for_your_own(page: str) -> list[str]:
    return re.findall(r"(?m)^ {4}(odevit .*(?:MY_VIT|runs/mine).*)$", (ROOT / page).read_text())


@pytest.mark.slow
def test_the_lines_for_your_vit_and_your_images_run(tmp_path, monkeypatch, capsys):
    """As they stand in docs/distil.md, with a tiny ViT, images of 16 pixels and one step; the README has the same."""
    assert len(lines_for_your_own("docs/distil.md")) == 4
    assert set(lines_for_your_own("README.md")) < set(lines_for_your_own("docs/distil.md"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny_teacher("vit", image_size=32, patch_size=8).module.save_pretrained("MY_VIT")
    noise = np.random.default_rng(0)
    for index in range(60):
        path = Path(f"MY_IMAGES/{index % 10}/{index}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (20, 18, 3), dtype=np.uint8)).save(path)
    Image.open("MY_IMAGES/3/3.png").save("PHOTO.png")
    planned = 0
    short = shlex.split("--set model.image_size=16 --set optim.steps=1 --set optim.batch_size=32")
    for line in lines_for_your_own("docs/distil.md"):
        words = shlex.split(line.replace("PHOTO", "PHOTO.png"))[1:]
        words += {"distill": [*short, "--no-report"], "plan": [*short, "--json"]}.get(words[0], [])
        said = CliRunner().invoke(odevit_cli.app, words, catch_exceptions=False)
        assert said.exit_code == 0
        planned = json.loads(said.stdout)["cache"] if words[0] == "plan" else planned
    assert planned == sum(np.load(path, mmap_mode="r").nbytes for path in Path().rglob("cache/*/*.npy"))
    assert Path("runs/mine/comparison.json").is_file()
    capsys.readouterr()


@pytest.mark.parametrize("name", names())
def test_every_card_says_how_to_load_its_model(name):
    """Stopping early only where a rule was calibrated; the snippet of the smallest runs."""
    text = (FOLDER / name / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert f'odevit.zoo("{name}")' in code
    assert f"| command | `{card(name)['command']}` |" in text
    assert ('halting="calibrated"' in code) == bool(card(name)["halting"])
    if name == "digits":
        exec(compile(code.replace("PHOTO", str(ROOT / "docs/digit.png")), name, "exec"), {})


def test_the_pages_are_short_and_the_readme_names_them():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        assert f"docs/{page}.md" in readme
        assert len((ROOT / f"docs/{page}.md").read_text().splitlines()) <= 60


def test_the_readmes_table_of_the_zoo_is_what_the_cards_say():
    """One row for each card, between the two marks; nothing stands there while the zoo is empty."""
    table = (ROOT / "README.md").read_text().split("<!-- zoo -->")[1].split("<!-- /zoo -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    expected = []
    for name in names():
        entry = card(name)
        expected.append(
            [f"`{name}`", entry["data"], f"{entry['accuracy']:.2%}", f"{entry['parameters']:,}",
             f"{entry['macs'] / 1e6:,.1f} M", f"{100 * entry['flow']['gap']:+.1f}"]
        )  # fmt: skip
    assert rows == expected
