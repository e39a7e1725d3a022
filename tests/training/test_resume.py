"""A run that was killed anywhere and resumed equals, bit for bit, the run that was not."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from child_processes import start_child, wait_for_child
from safetensors.torch import load_file
from tiny_runs import stateful_recipe, tiny_recipe

from odevit.commands.train import train_recipe
from odevit.recipe import Recipe
from odevit.training import checkpoint
from odevit.training import loop as train
from odevit.training.checkpoint import CheckpointStore


def run_child(folder: Path, sabotage: tuple = (), resume: bool = False) -> int:
    """Run the recipe in a process of its own; its exit code, negative for a signal."""
    return wait_for_child(start_child(_child, folder, sabotage, resume))


def _child(folder: Path, sabotage: tuple, resume: bool) -> None:
    if sabotage:
        SABOTAGES[sabotage[0]](*sabotage[1:])
    train.draw_curve = lambda folder: None  # a third of such a small run
    train_recipe(stateful_recipe(folder), resume=resume, progress_bar=False)


def _signal_at_step(step: int, number: int) -> None:
    original = train.Run.train_step

    def train_step(run, batch, progress):
        if run.step == step:
            os.kill(os.getpid(), number)
        return original(run, batch, progress)

    train.Run.train_step = train_step


def _kill_in_call(name: str, part_of_path: str, count: int) -> None:
    """SIGKILL in the count-th call of checkpoint.sync or os.replace whose first argument contains `part_of_path`."""
    owner = checkpoint if name == "sync" else os
    original, seen = getattr(owner, name), []

    def call(path, *args):
        if part_of_path in str(path):
            seen.append(path)
            if len(seen) == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *args)

    setattr(owner, name, call)


def _kill_in_save_state(count: int) -> None:
    """SIGKILL with half of the state written."""
    original, seen = checkpoint.save_state, []

    def save(state, path):
        original(state, path)
        seen.append(path)
        if len(seen) == count:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_state = save


SABOTAGES = {"signal": _signal_at_step, "call": _kill_in_call, "save_state": _kill_in_save_state}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert run_child(folder) == 0
    return folder


def assert_same_run(folder: Path, reference: Path) -> None:
    assert (folder / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    for name in ("model", "best"):
        ours, theirs = (load_file(f / name / "model.safetensors") for f in (folder, reference))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    (ours, _), (theirs, _) = (CheckpointStore(f / "checkpoints", 2).load() for f in (folder, reference))
    for key in ("model", "average"):
        assert all(torch.equal(ours[key][name], theirs[key][name]) for name in theirs[key])
    for mine, other in zip(ours["optimizers"], theirs["optimizers"], strict=True):
        for index, moments in other["state"].items():
            assert all(torch.equal(mine["state"][index][name], value) for name, value in moments.items())
    assert not list(folder.rglob(".tmp-*"))
    assert not list(folder.rglob(".previous-*"))


@pytest.mark.slow
def test_reference_learns_and_is_reproducible(reference, tmp_path):
    assert run_child(tmp_path / "run") == 0
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 13, 23])  # before the first checkpoint, between two, at the last step
def test_sigkill_at_a_step(step, reference, tmp_path):
    assert run_child(tmp_path / "run", ("signal", step, signal.SIGKILL)) == -signal.SIGKILL
    assert run_child(tmp_path / "run", resume=True) == 0
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotage",
    [
        ("save_state", 3),
        ("call", "sync", "state.safetensors", 2),
        ("call", "replace", ".tmp-step", 2),
        ("call", "replace", ".tmp-best", 2),  # the old best/ has been moved away, the new one is not there yet
    ],
)
def test_sigkill_during_a_write(sabotage, reference, tmp_path):
    folder = tmp_path / "run"
    assert run_child(folder, sabotage) == -signal.SIGKILL
    assert list(folder.rglob(".tmp-*")), "the kill did not hit a write"
    assert run_child(folder, resume=True) == 0
    assert_same_run(folder, reference)


@pytest.mark.slow
def test_killed_twice(reference, tmp_path):
    assert run_child(tmp_path / "run", ("signal", 9, signal.SIGKILL)) == -signal.SIGKILL
    assert run_child(tmp_path / "run", ("signal", 17, signal.SIGKILL), resume=True) == -signal.SIGKILL
    assert run_child(tmp_path / "run", resume=True) == 0
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_143(reference, tmp_path):
    folder = tmp_path / "run"
    assert run_child(folder, ("signal", 11, signal.SIGTERM)) == 143
    newest = CheckpointStore(folder / "checkpoints", 2).newest()
    assert newest is not None
    assert newest.name == "step-00000012"  # the step that was running is finished first
    assert run_child(folder, resume=True) == 0
    assert_same_run(folder, reference)


def test_ctrl_c_saves_says_how_to_go_on_and_gives_the_handlers_back(tmp_path, monkeypatch, capsys):
    handler, original = signal.getsignal(signal.SIGINT), train.Run.train_step

    def train_step(run, batch, progress):
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(run, batch, progress)

    monkeypatch.setattr(train.Run, "train_step", train_step)
    with pytest.raises(SystemExit) as stopped:
        train_recipe(tiny_recipe(tmp_path / "run"), progress_bar=False)
    assert stopped.value.code == 130
    assert f"odevit train {tmp_path / 'run'}/recipe.yaml --resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_resume_with_another_recipe_names_the_keys(tmp_path):
    train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 5}), progress_bar=False)
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.003 in the run, 0\.1 now"):
        train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 5, "lr": 0.1}), resume=True, progress_bar=False)
    longer = train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 8}), resume=True, progress_bar=False)
    assert longer.metrics["steps"] == 8


@pytest.mark.slow
def test_damaged_newest_checkpoint_falls_back(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 12})
    expected = train_recipe(recipe, progress_bar=False).model.state_dict()
    before, newest = CheckpointStore(tmp_path / "run" / "checkpoints", 2).paths()
    with (newest / "state.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        resumed = train_recipe(recipe, resume=True, progress_bar=False)
    assert before.name == "step-00000010"
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 4})
    first = train_recipe(recipe, progress_bar=False)
    monkeypatch.setattr(train.Run, "train_step", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: pytest.fail("evaluated again"))
    again = train_recipe(recipe, resume=True, progress_bar=False)
    assert again.metrics == first.metrics
    assert all(torch.equal(v, first.model.state_dict()[n]) for n, v in again.model.state_dict().items())


def test_a_longer_run_that_is_killed_at_its_very_end_is_finished_by_the_next_resume(tmp_path, monkeypatch):
    """Not taken for the shorter one, whose result still lies there; and recipe.yaml is that of the longer one."""
    folder = tmp_path / "run"
    train_recipe(tiny_recipe(folder, optim={"steps": 4}), progress_bar=False)
    longer = tiny_recipe(folder, optim={"steps": 9})
    with monkeypatch.context() as broken:
        broken.setattr(train.Run, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_recipe(longer, resume=True, progress_bar=False)
    assert json.loads((folder / "result.json").read_text())["steps"] == 4
    result = train_recipe(Recipe.load(folder / "recipe.yaml"), resume=True, progress_bar=False)
    assert result.metrics["steps"] == json.loads((folder / "result.json").read_text())["steps"] == 9
    weights, best = (load_file(folder / name / "model.safetensors") for name in ("model", "best"))
    assert all(torch.equal(weights[name], best[name]) for name in best)


def test_recipe_yaml_keeps_the_folder_that_the_run_was_begun_with(tmp_path, monkeypatch):
    """It may be resumed from within, as --output . says; its own recipe goes on to work from outside."""
    folder = tmp_path / "run"
    train_recipe(tiny_recipe(folder, optim={"steps": 4}), progress_bar=False)
    monkeypatch.chdir(folder)
    train_recipe(tiny_recipe(Path(), optim={"steps": 6}), resume=True, progress_bar=False)
    again = Recipe.load(folder / "recipe.yaml")
    assert (again.output, again.optim.steps) == (str(folder), 6)


def killed(monkeypatch, recipe, where, resume=False):
    with monkeypatch.context() as broken:
        broken.setattr(train.Run, where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_recipe(recipe, resume=resume, progress_bar=False)


def test_recipe_yaml_is_that_of_the_run_that_goes_on_without_a_checkpoint(tmp_path, monkeypatch):
    """Killed before its first checkpoint it begins anew, with whatever recipe it is resumed with."""
    folder = tmp_path / "run"
    killed(monkeypatch, tiny_recipe(folder, optim={"steps": 4}), "train_step")
    killed(monkeypatch, tiny_recipe(folder, optim={"steps": 9, "lr": 0.01}), "finish", resume=True)
    again = Recipe.load(folder / "recipe.yaml")
    assert (again.optim.steps, again.optim.lr) == (9, 0.01)
    assert train_recipe(again, resume=True, progress_bar=False).metrics["steps"] == 9


def test_recipe_yaml_of_a_copied_run_goes_on_in_the_copy(tmp_path):
    """As the last words of a stopped run say: odevit train COPY/recipe.yaml --resume."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    train_recipe(tiny_recipe(folder, optim={"steps": 4}), progress_bar=False)
    shutil.copytree(folder, copy)
    train_recipe(tiny_recipe(copy, optim={"steps": 6}), resume=True, progress_bar=False)
    assert Path(Recipe.load(copy / "recipe.yaml").output).samefile(copy)
    assert Recipe.load(folder / "recipe.yaml").optim.steps == 4


def test_recipe_yaml_stays_that_of_the_result(tmp_path):
    """Of a finished run that is resumed with fewer steps."""
    folder = tmp_path / "run"
    train_recipe(tiny_recipe(folder, optim={"steps": 6}), progress_bar=False)
    train_recipe(tiny_recipe(folder, optim={"steps": 4}), resume=True, progress_bar=False)
    assert Recipe.load(folder / "recipe.yaml").optim.steps == 6


def test_a_long_validation_makes_no_checkpoint_late(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(train.Run, "agree", lambda run, stop: (0, 900.0 * (run.validated_at > 0)))
    monkeypatch.setattr(train, "save_run", lambda run: saved.append(run.step))
    loop = {"checkpoint_minutes": 5, "checkpoint_every": 0, "eval_every": 4}
    train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 7}, loop=loop), progress_bar=False)
    assert saved == [4, 7]


def test_late_checkpoints_go_by_the_clock_on_which_all_processes_agree(tmp_path, monkeypatch):
    """By its own clock one process could think it late where another does not, and wait for it for ever."""
    saved = []
    monkeypatch.setattr(train.Run, "agree", lambda run, stop: (0, 60.0 * run.step))  # a minute a step
    monkeypatch.setattr(train, "save_run", lambda run: saved.append(run.step))
    loop = {"checkpoint_minutes": 5, "checkpoint_every": 1000, "eval_every": 1000}
    train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 24}, loop=loop), progress_bar=False)
    assert saved == [7, 14, 21, 24]  # more than five minutes after the one before, and the last step


def test_a_run_ends_with_a_checkpoint_of_its_last_step(tmp_path):
    """Also where the last step is validated but is no multiple of checkpoint_every."""
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 8})  # validated at 8, checkpoints at 5
    train_recipe(recipe, progress_bar=False)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())[-1].endswith("8")
