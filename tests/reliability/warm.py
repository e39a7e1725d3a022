"""Imported by the server from which the children of `make torture` are forked: what the first run of a process pays for.

Nothing here needs a gradient: autograd's threads do not survive a fork.
"""

import contextlib
import os
import tempfile
from pathlib import Path

import tasks
import torch

import odevit.commands.calibrate
import odevit.commands.distill
import odevit.commands.export
import odevit.commands.page
import odevit.commands.train  # noqa: F401

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere, torch.no_grad():
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for task in ("calibrate", "cache"):
            tasks.prepare(task, Path(name).resolve() / task)
            tasks.TASKS[task](Path(name).resolve() / task)
