"""Several processes: a run that loses one of them ends with a sentence, instead of waiting for it for ever.

A killed process closes its connections, and the others' next exchange fails. A frozen one (SIGSTOP, a machine out of
memory, a network gone) keeps them open: so a thread of each process says once a second that it is alive, in the store
through which the group was formed, and looks when the others last did. Work of any length is no silence: the thread
goes on while the main one computes, writes, or waits for a cache.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from odevit.training.checkpoint import CheckpointStore

PATIENCE = 40.0  # seconds of silence; longer than any call that keeps Python's lock, and the job ends within a minute
BEAT = 1.0  # seconds
DONE = b"done"


class LostProcessError(OSError):
    """Another process of the run was killed or does not answer."""


@contextmanager
def heartbeat(accelerator: Any, folder: Path) -> Iterator[None]:
    """Within the context the loss of another process ends this one, and says where the run can be resumed."""
    if accelerator.num_processes == 1:
        yield
        return
    from accelerate.utils import gather_object

    watch = Watch(accelerator.process_index, accelerator.num_processes, folder)
    watch.start()
    try:
        watch.find(gather_object([(socket.gethostname(), os.getpid())]))
        yield
        watch.stop(DONE)
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        raise LostProcessError(watch.sentence("another process of this run ended")) from error
    finally:
        watch.stop()


class Watch:
    """The signs of life of one process, and its view of the others'.

    Two threads: `talk` asks the store, which may never answer when the process that keeps it is frozen; `look` counts.
    """

    def __init__(self, rank: int, world: int, folder: Path):
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.world, self.folder = rank, world, folder
        store: Any = _get_default_store()
        self.store: Any = store.clone() if hasattr(store, "clone") else None  # its own connection; not in old torch
        self.stopped = threading.Event()
        self.handles: dict[int, int] = {}  # of the processes on this machine
        self.heard = {other: b"" for other in range(world) if other != rank}  # last words
        self.silent = dict.fromkeys(self.heard, 0)  # looks since then: while we are frozen ourselves, we do not look
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self.talk, self.look)]

    def start(self) -> None:
        if self.store is None:  # only kills are noticed: behind the main thread's questions we might seem silent
            self.threads = []
            return
        for thread in self.threads:
            thread.start()

    def stop(self, last_word: bytes | None = None) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(5 * BEAT)
        if last_word is not None and not any(thread.is_alive() for thread in self.threads) and self.store is not None:
            with suppress(RuntimeError):  # the process that keeps the store has ended before us
                self.store.set(f"odevit/alive/{self.rank}", last_word)

    def talk(self) -> None:
        count = 0
        while not self.stopped.wait(BEAT):
            count += 1
            with suppress(RuntimeError):  # no answer is silence too
                self.store.set(f"odevit/alive/{self.rank}", str(count))
                for rank, before in self.heard.items():
                    if self.store.check([f"odevit/alive/{rank}"]):
                        self.heard[rank] = self.store.get(f"odevit/alive/{rank}")
                        self.silent[rank] *= self.heard[rank] == before

    def look(self) -> None:
        while not self.stopped.wait(BEAT):
            for rank, word in self.heard.items():
                self.silent[rank] += word != DONE
            longest = max(self.silent, key=lambda rank: self.silent[rank])
            if self.silent[longest] * BEAT > PATIENCE:
                self.end(longest)

    def find(self, places: list[tuple[str, int]]) -> None:
        """Handles of the processes on this machine, from (host, number) of all: unlike numbers, they never mean another
        process later. All are found before the first step, lest one be frozen that nobody can end."""
        for rank in self.heard:
            host, number = places[rank]
            if host == socket.gethostname() and hasattr(os, "pidfd_open"):
                with suppress(OSError):
                    self.handles[rank] = os.pidfd_open(number)

    def end(self, rank: int) -> None:
        """End a silent process, lest it hold the run's lock or write when it wakes, and this one: it cannot go on."""
        if rank in self.handles:
            with suppress(OSError):
                signal.pidfd_send_signal(self.handles[rank], signal.SIGKILL)
        print(f"error: {self.sentence(f'process {rank} of this run is silent')}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread waits for the lost process and cannot be told

    def sentence(self, what: str) -> str:
        newest = CheckpointStore(self.folder / "checkpoints", 1).newest()
        good = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        return (
            f"{what} (killed, out of memory, frozen, or its machine is gone), so the other {self.world - 1} cannot go "
            f"on; {good}. See what that process said, then resume with --resume, on any number of processes"
        )
