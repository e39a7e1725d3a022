"""A tree of tensors and plain values as one safetensors file: no pickle, so that reading one never runs code.

The tensors are the file's tensors; the tree that holds them is JSON in its metadata, where dictionaries are written as
lists of pairs (their keys may be numbers) and a tensor as the name under which it is stored.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TREE = "tree"


def save_state(state: Mapping[str, Any], file: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_written(state, tensors))
    file.touch()
    mode = file.stat().st_mode & 0o777  # as the umask says; safetensors makes files for their owner only
    save_file(tensors, file, metadata={TREE: tree})
    file.chmod(mode)


def load_state(file: Path) -> dict[str, Any]:
    """What `save_state` wrote, bit for bit, on the CPU. `state.pt` of earlier versions is read without its classes."""
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
        return _read(json.loads(stored.metadata()[TREE]), tensors)


def _written(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # no memory shared between two of them
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_written(key, tensors), _written(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_written(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_written(item, tensors) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a checkpoint holds tensors, numbers, text, lists and dictionaries, not a {type(value).__name__}")


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_read(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_read(item, tensors) for item in content)
    return {_read(key, tensors): _read(item, tensors) for key, item in content}
