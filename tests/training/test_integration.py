"""Flow training: which integration each optimiser step gets."""

from collections import Counter

import pytest
import torch
from problems import contractive_model
from tiny_runs import tiny_recipe

from odevit.commands.train import train_recipe
from odevit.training.config import LoopConfig
from odevit.training.integration import Integration, check_schedule, draw_integration, parse_setting
from odevit.training.loop import TrainingInterrupted
from odevit.training.runlog import read_metrics


def draws(count=400, progress=0.5, **loop):
    return [draw_integration(LoopConfig(**loop), progress, 0, step) for step in range(count)]


def test_without_a_schedule_the_model_decides():
    assert set(draws(8)) == {Integration()}


def test_a_schedule_of_numbers_is_followed():
    loop = LoopConfig(step_schedule=[(0.0, 2), (0.5, 6), (0.8, 12)])
    steps = [draw_integration(loop, p, 0, 7).num_steps for p in (0, 0.49, 0.5, 0.79, 0.8, 1)]
    assert steps == [2, 2, 6, 6, 12, 12]


def test_a_list_is_drawn_from_evenly_and_by_the_step_alone():
    drawn = draws(step_schedule=[(0.0, [3, 4, "midpoint 3", 4])])
    counts = Counter(drawn)
    assert counts.keys() == {Integration(3), Integration(4), Integration(3, "midpoint")}
    assert 160 < counts[Integration(4)] < 240  # named twice
    assert drawn == draws(step_schedule=[(0.0, [3, 4, "midpoint 3", 4])], progress=0.9)
    assert drawn[:50] != drawn[50:100]


def test_anytime_reads_the_head_in_the_second_half():
    untils = [d.until for d in draws(anytime=0.5)]
    early = [u for u in untils if u < 1]
    assert 160 < len(early) < 240
    assert min(early) >= 0.5
    assert max(early) > 0.95
    assert Integration(4, until=0.75).options(2.0) == {"num_steps": 4, "until": 1.5}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[0, [3, 0]]], "num_steps must be at least 1"),
        ([[0, [2, 1]]], "2 fields need at least one step each"),
        ([[0, []]], "leaves no number of steps"),
        ([[0, ["dopri5 3"]]], "must be a number of steps"),
        ([[0.5, 3]], "must start at progress 0"),
    ],
)
def test_impossible_schedules_are_refused_before_the_first_step(tmp_path, schedule, message):
    with pytest.raises(ValueError, match=message):
        train_recipe(
            tiny_recipe(tmp_path, model={"num_fields": 2}, loop={"step_schedule": schedule}), progress_bar=False
        )


def test_a_setting_is_a_number_or_a_solver_with_one():
    assert parse_setting("rk4 2") == Integration(2, "rk4")
    with pytest.raises(ValueError, match="midpoint 3"):
        parse_setting("rk4")


@pytest.mark.slow
def test_a_run_with_drawn_steps_resumes_bit_for_bit(tmp_path, monkeypatch):
    changes = {"loop": {"step_schedule": [[0, [1, 2, 3, "heun 2"]]], "anytime": 0.3}}
    whole = train_recipe(tiny_recipe(tmp_path / "whole", **changes), progress_bar=False)
    evaluations = {r["evaluations"] for r in read_metrics(tmp_path / "whole") if r["kind"] == "train"}
    assert len(evaluations) > 1
    from odevit.training.loop import Run

    original = Run.train_step

    def stop_at_13(run, *args):
        if run.step == 13:
            raise TrainingInterrupted(1)
        return original(run, *args)

    monkeypatch.setattr(Run, "train_step", stop_at_13)
    with pytest.raises(TrainingInterrupted):
        train_recipe(tiny_recipe(tmp_path / "run", **changes), progress_bar=False)
    monkeypatch.setattr(Run, "train_step", original)
    resumed = train_recipe(tiny_recipe(tmp_path / "run", **changes), resume=True, progress_bar=False)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_schedule_that_a_contractive_field_is_too_stiff_for_is_told_before_the_first_step():
    config = contractive_model(num_steps=8).config
    check_schedule(LoopConfig(step_schedule=[(0.0, [4, 8])]), config)
    with pytest.raises(ValueError, match="never expands"):
        check_schedule(LoopConfig(step_schedule=[(0.0, 8), (0.5, 2)]), config)
