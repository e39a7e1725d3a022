"""Imported by the server from which the children of `make torture` are forked: what a first run pays for.

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
with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
    nowhere = stack.enter_context(open(os.devnull, "w"))
    stack.enter_context(contextlib.redirect_stdout(nowhere))
    stack.enter_context(contextlib.redirect_stderr(nowhere))
    stack.enter_context(torch.no_grad())
    for task in ("calibrate", "cache"):
        tasks.prepare(task, folder / task)
        tasks.TASKS[task](folder / task)
