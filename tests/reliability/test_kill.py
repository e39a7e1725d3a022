"""SIGKILL and a failing disk: what is there is whole, and the next run ends as if nothing had been. See faults.py.

`make torture` does the same a hundred times and more, and injects every error at every write.
"""

import os
import random

import faults
import pytest
import tasks

FAULTS = {  # task → (kills, cuts, errors); exporting a graph and the distillation take their time
    "train": (1, 1, 1), "cache": (1, 1, 1), "calibrate": (1, 0, 0), "hub": (0, 1, 1), "page": (1, 0, 0),
    "zoo": (1, 0, 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_next_run_ends_as_if_nothing_had_been(name, tmp_path):
    survey, draw = faults.Survey(name, tmp_path), random.Random(f"{name} 1")
    kills, cuts, errors = FAULTS[name]
    kinds = ["kill"] * kills + ["cut"] * cuts + draw.sample(faults.ERRORS, errors)
    outcomes = {}
    for kind in kinds:
        number = draw.randrange(1, 1 + (survey.writes if kind in faults.ERRORS else survey.events))
        outcomes[f"{kind} at {number} of {survey.events}"] = survey.try_fault(kind, number)
    assert {fault: found for fault, found in outcomes.items() if found not in ("survived", "not reached")} == {}


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """A file system of 100 kB, as root; the run says what to free, and goes on when there is room."""
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    survey = faults.Survey("train", tmp_path)
    assert [faults.try_full_disk(survey, size, tmp_path / "small") for size in (100,)] == ["survived"]


def test_what_is_half_written_would_be_noticed(tmp_path):
    tasks.prepare("calibrate", tmp_path / "x")
    model, names = tmp_path / "x" / "model", {"model/model.safetensors": "", "model/config.json": ""}
    assert faults.half_written(tmp_path / "x", names) == []
    before = faults.outcome(tmp_path / "x")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + b"\x07")
    assert faults.outcome(tmp_path / "x") != before
    (model / "model.safetensors").write_bytes(weights[:-1])
    (model / "page.html").write_text("<html>")
    (model / ".tmp-page.html").write_text("<html>")
    assert sorted(faults.half_written(tmp_path / "x", names)) == ["model/model.safetensors", "model/page.html"]
    assert faults.leftovers(tmp_path / "x") == ["model/.tmp-page.html"]
    (model / "model.safetensors").unlink()
    assert "model/model.safetensors" in faults.half_written(tmp_path / "x", names)
