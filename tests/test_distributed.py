"""Two gloo processes under torchrun against one: same losses, one checkpoint, and resuming at the other world size."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_recipe

from odevit.recipe import Recipe
from odevit.runlog import read_metrics
from odevit.train import fit


def distributed_recipe(folder: Path) -> Recipe:
    return tiny_recipe(
        folder, optim={"steps": 20, "accumulate": 2, "ema": 0.9}, augment={"mixup": 0.2}, loop={"log_every": 1}
    )


def start_torchrun(*arguments: str) -> subprocess.Popen:
    """`torchrun --standalone --nproc_per_node 2 -m odevit train …`"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "odevit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "train", *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-3000:]


def copy_as_of_step_15(run: Path, folder: Path) -> None:
    """A run folder as a kill after the checkpoint of step 15 leaves it."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000020")
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    recipe = folder / "recipe.yaml"
    recipe.write_text(distributed_recipe(folder / "two").to_yaml())
    two = start_torchrun(str(recipe))
    fit(distributed_recipe(folder / "one"), progress_bar=False)
    copy_as_of_step_15(folder / "one", folder / "one-then-two")
    one_then_two = start_torchrun(str(recipe), "--set", f"output={folder / 'one-then-two'}", "--resume")
    wait_for(two)
    copy_as_of_step_15(folder / "two", folder / "two-then-one")
    fit(distributed_recipe(folder / "two-then-one"), resume=True, progress_bar=False)
    wait_for(one_then_two)
    return folder


@pytest.mark.parametrize("name", ["two", "one-then-two", "two-then-one"])
def test_same_losses_as_one_process(name, runs):
    ours, theirs = read_metrics(runs / name), read_metrics(runs / "one")
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    assert len([r for r in ours if r["kind"] == "train"]) == 20
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["top1"] == pytest.approx(other["top1"], abs=1e-6)
        assert mine.get("count") == other.get("count")


@pytest.mark.parametrize("name", ["two", "one-then-two", "two-then-one"])
def test_same_weights_and_result(name, runs):
    ours, theirs = (load_file(runs / n / "model" / "model.safetensors") for n in (name, "one"))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
    result, expected = (json.loads((runs / n / "result.json").read_text()) for n in (name, "one"))
    assert result["count"] == expected["count"]
    assert result["top1"] == expected["top1"]


def test_one_set_of_checkpoints(runs):
    for name, processes in (("one", 1), ("two", 2), ("one-then-two", 2), ("two-then-one", 1)):
        checkpoints = runs / name / "checkpoints"
        assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000015", "step-00000020"]
        state = torch.load(checkpoints / "step-00000020" / "state.pt", weights_only=True)
        assert len(state["random"]) == processes  # one set of generators per process
