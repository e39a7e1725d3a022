"""Faults on purpose: commands that write, run in a child that is killed, or whose disk fails.

An event is a file of the task's folder opened for writing, made, renamed, cut or removed (Python's audit events), or a
training step. `run_task(task, folder, fault)` with fault = (kind, number):

kill                    SIGKILL at event `number`
cut                     from event `number` on no file may grow beyond some bytes; the signal of that limit ends the
                        process, so that half a file is left (also of libraries that write without Python)
moment                  SIGKILL after `number` milliseconds
ENOSPC, EIO, EACCES     what the operation of event `number` answers
"""

import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tasks
from child_processes import start_child, wait_for_child

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
ERRORS = ("ENOSPC", "EIO", "EACCES")
KILLS = ("kill", "cut", "moment")
TEMPORARY = (".tmp-", ".previous-")

Fault = tuple[str, int]


# --- one run in a child -----------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A run of a task in a child: its exit code, the events seen and how many of them were writes, what was said."""

    code: int
    events: int = 0
    writes: int = 0
    said: str = ""

    @property
    def well(self) -> bool:
        return (self.code, self.said) == (0, "")


def run_task(name: str, folder: Path, fault: Fault | None = None) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    report = folder.parent / f"{folder.name}.json"
    report.unlink(missing_ok=True)
    child = start_child(_run_task, name, folder, fault, report)
    if fault is not None and fault[0] == "moment":
        child.join(fault[1] / 1000)
        child.kill()
    code = wait_for_child(child)
    return Ended(code, *(json.loads(report.read_text()) if report.exists() else ()))


def _run_task(name: str, folder: Path, fault: Fault | None, report: Path) -> None:
    seen, written, inside = 0, 0, str(folder)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen, written
        writes = event == "open" and bool((arguments[2] or 0) & WRITING)
        if not (writes or event in CHANGES or event == "odevit.step") or not str(arguments[0]).startswith(inside):
            return
        seen, written = seen + 1, written + (event != "odevit.step")
        if fault is None or fault[0] == "moment" or (written if fault[0] in ERRORS else seen) != fault[1]:
            return
        if fault[0] == "cut":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (7 * seen % 300, resource.RLIM_INFINITY))
        elif fault[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif event != "odevit.step":
            number = getattr(errno, fault[0])
            raise OSError(number, os.strerror(number), str(arguments[0]))

    random.seed(0)  # checkpoints hold the state of every generator, also of those that nobody draws from
    np.random.seed(0)  # noqa: NPY002
    sys.addaudithook(hook)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    said = ""
    try:
        tasks.TASKS[name](folder)
    except (ValueError, OSError, ArithmeticError) as error:
        said = tasks.printed(error)
    counts = [seen, written]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report.write_text(json.dumps([*counts, said]))


# --- what it left -----------------------------------------------------------------------------------------------------

TIMES = {"seconds", "elapsed", "meta_sha256", "milliseconds", "images_per_second", "ms_per_image", "speedup"}
DIFFERENT = ("timing.jsonl", "curve.png", "lock")  # tell times


def outcome(folder: Path) -> dict[str, str]:
    """sha256 of every file that the task is there to write; times and the folder's name are left out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in DIFFERENT)
    return {str(f.relative_to(folder)): _hash(f, folder) for f in files}


def _hash(file: Path, folder: Path) -> str:
    content = file.read_bytes()
    if file.suffix in (".json", ".yaml", ".html", ".md"):
        content = content.replace(str(folder).encode(), b"FOLDER")
    if file.suffix == ".json":
        content = json.dumps(_timeless(json.loads(content))).encode()
    return hashlib.sha256(content).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in TIMES}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.startswith(TEMPORARY)]


def half_written(folder: Path, reference: dict[str, str]) -> list[str]:
    """Things with their final name that are not whole. Logs and a cache's columns grow; their readers know how far."""
    bad = []
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if any(part.startswith(TEMPORARY) for part in inside.parts) or not _whole(path):
            bad += [] if any(part.startswith(TEMPORARY) for part in inside.parts) else [str(inside)]
        if path.name == "config.json":  # where it is, the model is read
            beside = {name for name in reference if Path(name).parent == inside.parent}
            bad += sorted(name for name in beside if not (folder / name).exists())
    return bad


def _whole(path: Path) -> bool:
    from PIL import Image
    from safetensors import safe_open

    from odevit.training.checkpoint import read_checkpoint

    try:
        if path.is_dir():
            if re.fullmatch(r"step-\d+", path.name):
                read_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as stored:
                stored.keys()
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")
        elif path.suffix == ".pt2":
            assert zipfile.ZipFile(path).testzip() is None
        elif path.suffix == ".png":
            Image.open(path).load()
    except Exception:  # of whatever library
        return False
    return True


# --- a fault, and a run after it --------------------------------------------------------------------------------------

WHAT_TO_DO = re.compile(r"[Ff]ree some space|rights|disk|choose another")


class Survey:
    """Runs of one task: the one that nothing happens to, and those with faults, which must end like it."""

    def __init__(self, name: str, parent: Path):
        self.name, self.parent = name, parent / name
        tasks.prepare(name, self.parent / "reference")
        began = time.monotonic()
        ended = run_task(name, self.parent / "reference")
        self.events, self.writes = ended.events, ended.writes
        self.milliseconds = int(1000 * (time.monotonic() - began))
        assert ended.well, f"{name}: {ended}"
        assert not leftovers(self.parent / "reference")
        self.reference = outcome(self.parent / "reference")
        assert self.reference

    def try_fault(self, kind: str, number: int) -> str:
        """A run with one fault, and one more without: "survived", "not reached", or what is wrong."""
        folder = self.parent / "x"
        shutil.rmtree(folder, ignore_errors=True)
        tasks.prepare(self.name, folder)
        began = time.monotonic()
        ended = run_task(self.name, folder, (kind, number))
        if kind in KILLS and ended.well:
            self.milliseconds = min(self.milliseconds, int(1000 * (time.monotonic() - began)))
            return "not reached"
        if kind in KILLS and ended.code not in (-signal.SIGKILL, -signal.SIGXFSZ):
            return f"{ended}"
        if kind in ERRORS and ended.code != 0:
            return f"raw exception: {ended}"
        if kind in ERRORS and ended.said and not WHAT_TO_DO.search(ended.said):
            return f"does not say what to do: {ended.said}"
        if half := half_written(folder, self.reference):
            return f"half written: {half}"
        ended = run_task(self.name, folder)
        if not ended.well:
            return f"the second run failed: {ended}"
        if leftovers(folder):
            return f"left behind: {leftovers(folder)}"
        found = outcome(folder)
        if found != self.reference:
            names = sorted(found.keys() | self.reference.keys())
            return f"other results: {[name for name in names if found.get(name) != self.reference.get(name)]}"
        return "survived"


def try_full_disk(survey: Survey, kilobytes: int, place: Path) -> str:
    """The task in a file system of this size, and once more when it is large: as `Survey.try_fault`. As root only."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place], check=True)
    try:
        tasks.prepare(survey.name, place)
        ended = run_task(survey.name, place)
        if ended.well:
            return "not reached"
        if ended.code != 0 or "No space left" not in ended.said or not WHAT_TO_DO.search(ended.said):
            return f"{ended}"
        if half := half_written(place, survey.reference):
            return f"half written: {half}"
        subprocess.run(["mount", "-o", "remount,size=16m", place], check=True)
        ended = run_task(survey.name, place)
        if not ended.well:
            return f"the second run failed: {ended}"
        found = outcome(place)
        return "survived" if found == survey.reference and not leftovers(place) else "other results"
    finally:
        subprocess.run(["umount", place], check=True)
