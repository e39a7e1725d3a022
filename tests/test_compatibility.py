"""What odevit 0.1.0 saved before its modules moved into rooms still loads and resumes (tests/fixtures/*-format1)."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from odevit import OdeViTForImageClassification
from odevit.commands.train import train_recipe
from odevit.recipe import Recipe
from odevit.training.checkpoint import CheckpointStore, read_checkpoint
from odevit.training.resume import TENSORS, RunState
from odevit.training.runlog import read_metrics

FIXTURES = Path(__file__).parent / "fixtures"


def test_a_model_of_format_1_gives_the_logits_it_gave():
    model = OdeViTForImageClassification.from_pretrained(FIXTURES / "model-format1").eval()
    expected = json.loads((FIXTURES / "model-format1" / "expected.json").read_text())
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()
    assert model.config.meeting_times == [0.25, 1.0]
    with torch.no_grad():
        assert torch.allclose(model(images).logits, torch.tensor(expected["logits"]), atol=1e-6)
        rk4 = model(images, solver="rk4", num_steps=8).logits
    assert torch.allclose(rk4, torch.tensor(expected["rk4"]), atol=1e-6)


def test_a_run_of_format_1_resumes_to_what_it_would_have_become(tmp_path):
    shutil.copytree(FIXTURES / "run-format1", tmp_path / "run")
    recipe = Recipe.load(tmp_path / "run" / "recipe.yaml", [f"output={tmp_path / 'run'}"])
    result = train_recipe(recipe, resume=True, progress_bar=False)
    assert result.metrics["steps"] == 24
    before = [json.loads(line) for line in (FIXTURES / "run-format1" / "whole-metrics.jsonl").read_text().splitlines()]
    now = read_metrics(tmp_path / "run")
    assert [record["step"] for record in now] == [record["step"] for record in before]
    for old, new in zip(before, now, strict=True):  # not bit for bit: the fixture was made on another day's machine
        assert new["loss"] == pytest.approx(old["loss"], rel=1e-4)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert json.loads((newest / "meta.json").read_text())["grouping"] == 1  # it can be resumed again
    assert _sizes(tmp_path / "run") == _sizes(FIXTURES / "run-format1")


def _sizes(run: Path) -> list[int]:
    """How many parameters AdamW's groups hold in a run's newest checkpoint."""
    state, _ = read_checkpoint(max((run / "checkpoints").glob("step-*")))
    return [len(group["params"]) for group in state["optimizers"][1]["param_groups"]]


def test_the_state_of_a_run_survives_a_checkpoint(tmp_path):
    """Every field comes back as it was, those of a run of format 1 too, which does not say its grouping."""
    state = RunState.read(CheckpointStore(FIXTURES / "run-format1" / "checkpoints", keep=2))
    assert state is not None
    assert state.grouping == 1
    again = CheckpointStore(tmp_path, keep=2)
    state.write(again)
    back = RunState.read(again)
    for name in (field.name for field in dataclasses.fields(RunState)):
        before, after = getattr(state, name), getattr(back, name)
        if name in ("model", "average"):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
        elif name not in TENSORS:
            assert before == after, name
