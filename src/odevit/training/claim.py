"""Before a run: a folder that no other run has, and the device and processes it will use."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from odevit.atomic import write_file
from odevit.training.checkpoint import recover_folders
from odevit.training.config import RunConfig
from odevit.training.heartbeat import heartbeat
from odevit.training.precision import precision_of, slow_on
from odevit.training.runlog import METRICS, TIMING

LOCK = ".lock"
LATER = (METRICS, TIMING, "result.json", "curve.png", "comparison.json", "report.json", "report.html")  # of a run


class Claim(NamedTuple):
    """A run folder that nobody else has, and the device and processes that the run will use."""

    accelerator: Any
    folder: Path
    resume: bool

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.accelerator.is_main_process


@contextmanager
def claim_run(config: RunConfig, *, resume: bool = False, overwrite: bool = False) -> Iterator[Claim]:
    """The first thing a run does, before data is loaded or a cache is built: a folder that is taken is told at once.

    The folder is nobody else's within the context: of two starts at the same moment one is refused.
    resume: continue the run in config.output (or start it, when there is none yet); overwrite: `fit` will delete it.
    """
    accelerator = _accelerator(config)
    with heartbeat(accelerator, Path(config.output)), _locked(Path(config.output), accelerator):
        yield Claim(accelerator, _check_folder(config, resume=resume, overwrite=overwrite), resume)


@contextmanager
def _locked(folder: Path, accelerator: Any) -> Iterator[None]:
    """Hold the folder's lock file in the first process; the system lets go of it when that process ends, however it
    does. Nothing is left of a folder into which nothing was written."""
    from accelerate.utils import broadcast_object_list

    lock, trouble = FileLock(folder / LOCK, timeout=0), [""]
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            trouble = [f"another process is at work in {folder}: wait until it ends, or"]
        except OSError as error:
            trouble = [f"cannot write {folder}: {error.strerror or error};"]
    if accelerator.num_processes > 1:
        broadcast_object_list(trouble)
    try:
        if trouble[0]:
            raise ValueError(f"{trouble[0]} choose another folder with --set output=…")
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()
        lock.release()


def _check_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> Path:
    """The run folder; an error when it holds another run. Nothing is changed."""
    folder = Path(config.output)
    for file in folder.glob("*"):
        if file.is_symlink():
            raise ValueError(
                f"{file} is a link: a run writes inside its folder only. Remove it, or choose another folder"
            )
    if (folder / "recipe.yaml").exists() and not resume and not overwrite:
        raise ValueError(
            f"{folder} already holds a run: continue it with --resume, start again with --overwrite, or choose another "
            "folder with --set output=…"
        )
    return folder


def prepare_folder(config: RunConfig, accelerator: Any, *, resume: bool) -> None:
    """Clean the run folder of what a killed process left, and of the run before unless it is resumed."""
    folder = Path(config.output)
    accelerator.wait_for_everyone()  # every process has looked before the first one writes
    if accelerator.is_main_process:
        taken = (folder / "recipe.yaml").exists()
        if taken and not resume:
            for name in ("checkpoints", "best", "model", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in LATER:
                (folder / name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, folder / "checkpoints"):
            recover_folders(parent)
        if not (taken and resume):
            write_file(folder / "recipe.yaml", config.to_yaml())
    accelerator.wait_for_everyone()


def _accelerator(config: RunConfig) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # a process may run several recipes, of different precision
    # an objective may leave parts of the model out, for example the head while states are being matched
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    # without an accelerator device, accelerate joins a group of torchrun's processes only when told to use the CPU
    cpu = not torch.accelerator.is_available()
    precision = precision_of(config.loop)
    if precision == "fp16" and config.optim.name == "muon":
        raise ValueError(
            "loop.mixed_precision=fp16 scales its loss, and Muon's two optimisers would undo that twice: use bf16 or "
            "no, or optim.name=adamw"
        )
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=[unused])
    if accelerator.is_main_process and slow_on(precision, accelerator.device):
        told = f"loop.mixed_precision={precision}: this processor has no matrix products in 16 bits, "
        print(told + "likely slower than loop.mixed_precision=no", file=sys.stderr, flush=True)
    return accelerator
