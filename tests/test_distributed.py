"""Two gloo processes against one: same losses, one checkpoint, and resuming at the other world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_script import Stop, distributed_recipe, stop_after
from safetensors.torch import load_file

from odevit import train
from odevit.runlog import read_metrics
from odevit.train import fit


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    fit(distributed_recipe(folder / "one"), progress_bar=False)
    original = train.Run.train_step
    stop_after(7)
    with pytest.raises(Stop):
        fit(distributed_recipe(folder / "one-then-two"), progress_bar=False)
    train.Run.train_step = original
    script = Path(__file__).with_name("distributed_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(folder)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("stopped") == 2
    fit(distributed_recipe(folder / "two-then-one"), resume=True, progress_bar=False)
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
    for name in ("one", "two"):
        assert [p.name for p in sorted((runs / name / "checkpoints").iterdir())] == ["step-00000015", "step-00000020"]
    state = torch.load(runs / "two" / "checkpoints" / "step-00000020" / "state.pt", weights_only=True)
    assert len(state["random"]) == 2  # one set of generators per process
