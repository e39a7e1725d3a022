"""Files that a user can hand to odevit, each with the way it is read: `try_case` spoils one and says how that ended.

same        the answer of the good file
other       another answer: the spoilt file is a valid one that says something else (a weight's bit, a number of steps)
refused     a ValueError, OSError or ArithmeticError raised by odevit itself, so one sentence that names what is wrong
raw         an exception from inside a library, or one of another kind                                  (must not be)
slow        more than `SECONDS` of computing, or `WAITING` by the clock                                  (must not be)
died        the process ended, by memory or a crash                                                     (must not be)
escaped     a process started, a connection opened, a class unpickled or a file written elsewhere       (must not be)
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hostile
from handed import KEPT, TARGETS, prepare

SECONDS = 20  # of computing: on a busy machine the clock says nothing
WAITING = 60  # by the clock, for something that never comes
MEMORY = 3 << 30  # bytes that reading one file may take beyond what torch and transformers take
OUTCOMES = ("same", "other", "refused", "raw", "slow", "died", "escaped")
GOOD = ("same", "other", "refused")
WATCHED = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
}


# --- one case, and many in a child ------------------------------------------------------------------------------------


class TooSlowError(BaseException):
    pass


def ours(error: BaseException) -> bool:
    """Whether it was raised in odevit's own code, is of a kind that the command line prints as one sentence, and says
    something."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = frames[-1].filename if frames else ""
    kinds = (ValueError, OSError, ArithmeticError)
    return isinstance(error, kinds) and ("/odevit/" in innermost or __file__ == innermost) and len(str(error)) > 10


def try_case(name: str, number: int, good: Path, work: Path, expected: Any) -> tuple[str, str]:
    """(outcome, what was said) of one spoilt file."""
    target, folder = TARGETS[name], work / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good / name, folder)
    draw = random.Random(f"{name} {number}")
    hostile.spoil(next(folder.glob(target.file)), target.spoil, draw)
    ESCAPES.clear()
    signal.alarm(WAITING)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        answer = target.read(folder)
        outcome, said = ("same", "") if repr(answer) == repr(expected) else ("other", "")
    except TooSlowError:
        outcome, said = "slow", ""
    except Exception as error:
        outcome = "refused" if ours(error) else "raw"
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:300]} [{innermost.filename}:{innermost.lineno}]"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if ESCAPES:
        outcome, said = "escaped", f"{ESCAPES[0]} {said}"
    return outcome, said


ESCAPES: list[str] = []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _watch(work: Path) -> None:
    """Note every started process, connection, unpickled class, and file opened for writing outside `work`."""
    places = [str(work), "/dev/null", "/proc/self"]

    def hook(event: str, arguments: tuple) -> None:
        if event in WATCHED:
            ESCAPES.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & WRITING:
            path = os.path.abspath(arguments[0])
            if not path.startswith(tuple(places)):
                ESCAPES.append(f"write {path}")

    sys.addaudithook(hook)


def run_cases(names: Iterable[str], numbers: dict[str, list[int]], good: Path, work: Path, log: Path) -> None:
    """In a child: the cases one after the other, a line in `log` before and after each."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TMPDIR": str(work), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}
    import datasets

    datasets.config.HF_DATASETS_CACHE = str(work / "datasets")
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    KEPT["picture"] = (good / "image png" / "image.png").read_bytes()
    expected: dict[str, Any] = {}
    for name in names:
        shutil.copytree(good / name, work / name, dirs_exist_ok=True)
        expected[name] = TARGETS[name].read(work / name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def too_slow(*_: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, too_slow)
    signal.signal(signal.SIGPROF, too_slow)
    _watch(work)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the child ends)
    for name in names:
        for number in numbers[name]:
            os.write(descriptor, (json.dumps([name, number]) + "\n").encode())
            outcome, said = try_case(name, number, good, work, expected[name])
            os.write(descriptor, (json.dumps([name, number, outcome, said]) + "\n").encode())


def run(counts: dict[str, int], folder: Path, start: int = 0) -> list[tuple[str, int, str, str]]:
    """(target, number, outcome, what was said) of every case; a child that dies or hangs costs one case."""
    from child_processes import start_child

    prepare(folder / "good")
    numbers = {name: list(range(start, start + count)) for name, count in counts.items()}
    results: list[tuple[str, int, str, str]] = []
    attempt = 0
    while any(numbers.values()):
        log = folder / f"log-{attempt}"
        left = {name: cases for name, cases in numbers.items() if cases}
        child = start_child(run_cases, list(left), left, folder / "good", folder / f"work-{attempt}", log)
        size, since = -1, time.monotonic()
        while child.is_alive():
            child.join(0.2)
            now = log.stat().st_size if log.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif now and time.monotonic() - since > 3 * WAITING:  # deaf to its alarm
                child.kill()
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert lines, f"reading the good files failed (exit code {child.exitcode})"
        results += [tuple(line) for line in lines if len(line) == 4]
        if len(lines[-1]) == 2:
            results.append((*lines[-1], "slow" if time.monotonic() - since > 3 * WAITING else "died", "no word"))
        done = {(name, number) for name, number, *_ in results}
        numbers = {name: [n for n in cases if (name, n) not in done] for name, cases in numbers.items()}
        shutil.rmtree(folder / f"work-{attempt}", ignore_errors=True)
        attempt += 1
    return results
