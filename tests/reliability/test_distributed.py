"""One of two processes is killed or frozen in the middle of a step: the other one ends soon and says so, and the run is
resumed from its last checkpoint. `make torture` does it with the patience of a real run."""

import signal

import pytest
import ranks

from odevit.training.heartbeat import PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_a_lost_process_ends_the_run(number, victim, tmp_path):
    assert ranks.lose_one(tmp_path, number, victim, patience=6.0)[0] == "survived"
    assert ranks.resume(tmp_path, world=1) == "survived"


def test_the_job_ends_within_a_minute():
    assert PATIENCE <= 45
