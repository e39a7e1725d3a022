"""One run per folder, also when two start at the same moment, and also after one was killed."""

import os
import signal
import time

import pytest
from child_processes import start_child, wait_for_child
from tiny_runs import tiny_recipe

from odevit.training.claim import LOCK, claim_run


def hold(folder, name):
    """Claim the folder, say so, and hold it until told otherwise."""
    try:
        with claim_run(tiny_recipe(folder / "run")):
            (folder / f"{name}.has-it").touch()
            while not (folder / "let-go").exists():
                time.sleep(0.01)
    except ValueError as error:
        (folder / f"{name}.refused").write_text(str(error))


def wait_for(folder, pattern, count=1):
    deadline = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.01)


@pytest.mark.slow
def test_of_starts_at_the_same_moment_one_is_let_in(tmp_path):
    children = [start_child(hold, tmp_path, name) for name in "abc"]
    wait_for(tmp_path, "*.refused", 2)
    wait_for(tmp_path, "*.has-it")
    taken = pytest.raises(ValueError, match="another process is at work")
    with taken, claim_run(tiny_recipe(tmp_path / "run"), resume=True):
        pass
    (tmp_path / "let-go").touch()
    assert [wait_for_child(child) for child in children] == [0, 0, 0]
    assert len(list(tmp_path.glob("*.has-it"))) == 1
    assert not (tmp_path / "run").exists()  # nothing was written


@pytest.mark.slow
def test_a_killed_process_is_no_obstacle(tmp_path):
    child = start_child(hold, tmp_path, "a")
    wait_for(tmp_path, "a.has-it")
    os.kill(child.pid, signal.SIGKILL)
    assert wait_for_child(child) == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK).exists()
    with claim_run(tiny_recipe(tmp_path / "run")) as claim:
        (claim.folder / "recipe.yaml").touch()
    with pytest.raises(ValueError, match="already holds a run"), claim_run(tiny_recipe(tmp_path / "run")):
        pass
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["recipe.yaml"]
