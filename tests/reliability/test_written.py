"""What is written: with the modes that the umask says, inside the output folder, and through no link."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from child_processes import start_child, wait_for_child
from tiny_runs import tiny_recipe

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.commands.train import train_recipe
from odevit.training.classifiers import save_classifier


def tiny_model():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "num_attention_heads": 2}
    return OdeViTForImageClassification(OdeViTConfig(**sizes, mlp_ratio=1, depth=1, num_steps=2, num_labels=3))


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): stat.S_IMODE(f.stat().st_mode) for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_model_folder_follows_the_umask(mask, mode, umask, tmp_path):
    umask(mask)
    tiny_model().save_pretrained(tmp_path / "a")
    save_classifier(tiny_model(), tmp_path / "b")
    assert len(modes(tmp_path)) == 6
    assert set(modes(tmp_path).values()) == {mode}


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_a_run_follows_the_umask(mask, mode, umask, tmp_path):
    umask(mask)
    train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 2}), progress_bar=False)
    assert {name: found for name, found in modes(tmp_path / "run").items() if found != mode} == {}


def _watched_run(folder: Path, report: Path) -> None:
    written: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and (arguments[2] or 0) & writing:
            written.append(os.path.abspath(os.fspath(arguments[0])))
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
            written.extend(os.path.abspath(a) for a in arguments if isinstance(a, str))

    sys.addaudithook(hook)
    train_recipe(tiny_recipe(folder, optim={"steps": 2}), progress_bar=False)
    report.write_text(json.dumps(sorted(set(written))))


@pytest.mark.slow
def test_a_run_writes_into_its_folder_only(tmp_path):
    assert wait_for_child(start_child(_watched_run, tmp_path / "run", tmp_path / "report.json")) == 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert len(written) > 10
    allowed = (str(tmp_path / "run"), str(tmp_path / "report.json"), "/dev/", str(Path.home() / ".cache"))
    caches = ("matplotlib", "__pycache__", "torchinductor")  # of libraries, where they say
    assert [name for name in written if not name.startswith(allowed) and not any(c in name for c in caches)] == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "README.txt", "curve.png", "recipe.yaml", "checkpoints", "best"])
def test_a_link_in_a_run_folder_is_not_followed(name, tmp_path):
    outside, folder = tmp_path / "precious", tmp_path / "run"
    if "." in name:
        outside.write_text("precious")
    else:
        outside.mkdir()
    folder.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=f"{name} is a link"):
        train_recipe(tiny_recipe(folder, optim={"steps": 2}), resume=True, progress_bar=False)
    assert outside.is_dir() or outside.read_text() == "precious"
