"""Two gloo processes under torchrun against one: same losses, one checkpoint, and resuming at the other world size."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from child_processes import start_pair, wait_for_child
from safetensors.torch import load_file
from tiny_runs import tiny_recipe

from odevit.commands.train import train_recipe
from odevit.data import load_data
from odevit.recipe import Recipe
from odevit.training.classifiers import load_classifier
from odevit.training.evaluation import evaluate
from odevit.training.runlog import read_metrics
from odevit.training.statefile import load_state


def distributed_recipe(folder: Path) -> Recipe:
    return tiny_recipe(
        folder, optim={"steps": 20, "accumulate": 2, "ema": 0.9}, augment={"mixup": 0.2}, loop={"log_every": 1}
    )


def start_torchrun(*arguments: str) -> subprocess.Popen:
    """`torchrun --standalone --nproc_per_node 2 -m odevit train …`"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "odevit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "train", *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def copy_as_of_step_15(run: Path, folder: Path) -> None:
    """A run folder as a kill after the checkpoint of step 15 leaves it."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000020")
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()


def teacher_recipe(folder: Path, *, fsdp: bool) -> Recipe:
    """A discrete ViT. The last of 48 batches of the validation split leaves one process without an image."""
    loop = {"log_every": 1, "eval_every": 20, "eval_batch_size": 6, "fsdp": fsdp}
    recipe = tiny_recipe(folder, optim={"steps": 20, "accumulate": 2}, loop=loop)
    recipe.model = {"type": "vit", "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2}
    recipe.model |= {"num_attention_heads": 2, "intermediate_size": 64}
    recipe.model["qkv_bias"] = False  # the gradient of a key's bias is zero: AdamW would make steps of rounding errors
    return recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    recipe, sharded = folder / "recipe.yaml", folder / "sharded.yaml"
    recipe.write_text(distributed_recipe(folder / "two").to_yaml())
    sharded.write_text(teacher_recipe(folder / "sharded", fsdp=True).to_yaml())
    two = start_torchrun(str(recipe))
    train_recipe(distributed_recipe(folder / "one"), progress_bar=False)
    train_recipe(teacher_recipe(folder / "whole", fsdp=False), progress_bar=False)
    copy_as_of_step_15(folder / "one", folder / "one-then-two")
    output = f"output={folder / 'one-then-two'}"
    for command in (["train", str(recipe), "--set", output, "--resume"], ["train", str(sharded)]):
        assert [wait_for_child(child) for child in start_pair(command)] == [0, 0]
    _, errors = two.communicate(timeout=400)
    assert two.returncode == 0, errors[-3000:]
    copy_as_of_step_15(folder / "two", folder / "two-then-one")
    train_recipe(distributed_recipe(folder / "two-then-one"), resume=True, progress_bar=False)
    copy_as_of_step_15(folder / "sharded", folder / "sharded-then-whole")
    train_recipe(teacher_recipe(folder / "sharded-then-whole", fsdp=False), resume=True, progress_bar=False)
    return folder


PAIRS = [("two", "one"), ("one-then-two", "one"), ("two-then-one", "one")]
PAIRS += [("sharded", "whole"), ("sharded-then-whole", "whole")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_same_losses_as_one_process(name, reference, runs):
    ours, theirs = read_metrics(runs / name), read_metrics(runs / reference)
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    assert len([r for r in ours if r["kind"] == "train"]) == 20
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["top1"] == pytest.approx(other["top1"], abs=1e-6)
        assert mine.get("count") == other.get("count")


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_same_weights_and_result(name, reference, runs):
    ours, theirs = (load_file(runs / n / "model" / "model.safetensors") for n in (name, reference))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
    result, expected = (json.loads((runs / n / "result.json").read_text()) for n in (name, reference))
    assert result["count"] == expected["count"]
    assert result["top1"] == expected["top1"]


@pytest.mark.slow
def test_two_processes_with_batch_norm_resume_as_if_nothing_had_happened(tmp_path):
    """Each sees other images; what is validated, in the same words before and after, is what the first one has. The
    checkpoint of step 15 lies within a line of metrics.jsonl."""
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 20, "ema": 0.9}, loop={"log_every": 4})
    recipe.model = {**recipe.model, "tokenizer": "conv"}
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = ["train", str(tmp_path / "recipe.yaml")]
    assert [wait_for_child(child) for child in start_pair(command)] == [0, 0]
    copy_as_of_step_15(tmp_path / "run", tmp_path / "resumed")
    resumed = ["--set", f"output={tmp_path / 'resumed'}", "--resume"]
    assert [wait_for_child(child) for child in start_pair([*command, *resumed])] == [0, 0]
    ours, theirs = read_metrics(tmp_path / "resumed"), read_metrics(tmp_path / "run")
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-12)
    model = load_classifier(str(tmp_path / "run" / "model"))
    split = load_data(recipe.data).val
    best = max((r for r in theirs if r["kind"] == "val"), key=lambda record: record["top1"])
    assert evaluate(model, split)["loss"] == pytest.approx(best["loss"], rel=1e-6)  # of the weights that are saved


def test_one_set_of_checkpoints(runs):
    for name, processes in (("one", 1), ("two", 2), ("one-then-two", 2), ("two-then-one", 1), ("sharded", 2)):
        checkpoints = runs / name / "checkpoints"
        assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000015", "step-00000020"]
        state = load_state(checkpoints / "step-00000020" / "state.safetensors")
        assert len(state["random"]) == processes  # one set of generators per process


def test_a_sharded_checkpoint_is_a_plain_one(runs):
    ours, theirs = (
        load_state(runs / name / "checkpoints" / "step-00000020" / "state.safetensors") for name in ("sharded", "whole")
    )
    assert {name: v.shape for name, v in ours["model"].items()} == {n: v.shape for n, v in theirs["model"].items()}
    (mine,), (other,) = ours["optimizers"], theirs["optimizers"]
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, moments in other["state"].items():
        for name, value in moments.items():
            assert type(mine["state"][index][name]) is torch.Tensor
            torch.testing.assert_close(mine["state"][index][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("optim", "message"), [({"ema": 0.9}, r"optim\.ema"), ({"name": "muon"}, "adamw"), ({}, "torchrun")]
)
def test_fsdp_says_what_it_works_with(optim, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_recipe(tiny_recipe(tmp_path / "run", optim=optim, loop={"fsdp": True}), progress_bar=False)
