"""SIGKILL and a failing disk at chosen writes: what is there is whole, and the next run ends as if nothing had been."""

import os
import random

import faults
import pytest

# written on a machine too busy to run it: `ODEVIT_TORTURE=1 pytest tests/reliability/test_kill.py`, then take this away
pytestmark = pytest.mark.skipif("ODEVIT_TORTURE" not in os.environ, reason="set ODEVIT_TORTURE=1")

KILLS = {"train": 3, "distill": 2, "cache": 2, "hub": 2, "page": 1, "calibrate": 2}  # make torture: 100 and more
DISK = {"train": 2, "cache": 1, "hub": 1, "page": 1}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """task → (events, outcome) of the run that nothing happens to."""
    found = {}
    for name in faults.TASKS:
        folder = tmp_path_factory.mktemp(name) / "reference"
        code, events, said = faults.run_task(name, folder)
        assert (code, said) == (0, ""), name
        assert not faults.leftovers(folder)
        found[name] = (events, faults.outcome(folder))
    return found


@pytest.mark.parametrize("name", KILLS)
def test_killed_at_random_writes(name, references, tmp_path):
    events, reference = references[name]
    assert events > 1
    draw = random.Random(name)
    for number in sorted(draw.sample(range(1, events + 1), min(events, KILLS[name]))):
        assert faults.try_fault(name, "kill", number, reference, tmp_path / "x") == "survived", f"at event {number}"


@pytest.mark.parametrize("name", DISK)
def test_a_failing_disk(name, references, tmp_path):
    events, reference = references[name]
    draw = random.Random(f"disk {name}")
    for kind in draw.sample(faults.ERRORS, DISK[name]):
        number = draw.randrange(1, events + 1)
        assert faults.try_fault(name, kind, number, reference, tmp_path / "x") == "survived", f"{kind} at {number}"
