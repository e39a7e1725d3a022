"""Children from a server that has imported everything and computed nothing: cheap, and safe to kill."""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

processes = multiprocessing.get_context("forkserver")
PRELOAD = [
    "odevit_cli",
    "odevit.training.loop",
    "odevit.model",
    "accelerate",
    "kornia.augmentation",
    "sklearn.datasets",
]
PRELOAD += ["matplotlib.figure", "torch.distributed.fsdp", "child_processes"]
processes.set_forkserver_preload(PRELOAD)


def start_child(target: Callable[..., None], *arguments: Any) -> Any:
    child = processes.Process(target=_on_one_thread, args=(target, *arguments))
    child.start()
    return child


def wait_for_child(child: Any) -> int:
    """Its exit code, negative for a signal."""
    child.join(560)  # a busy machine is slow, not wrong
    assert child.exitcode is not None, "the child hangs"
    return child.exitcode


def _on_one_thread(target: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    target(*arguments)


def start_pair(arguments: Sequence[str]) -> list[Any]:
    """`odevit …` in two processes with the environment that torchrun gives them."""
    port = free_port()
    return [start_child(_ranked, rank, port, ["odevit", *arguments]) for rank in range(2)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join_group(rank: int, port: int) -> None:
    """The environment of one of two processes."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})


def _ranked(rank: int, port: int, arguments: list[str]) -> None:
    join_group(rank, port)
    sys.argv = arguments
    runpy.run_module("odevit", run_name="__main__")
