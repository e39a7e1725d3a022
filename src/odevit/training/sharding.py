"""Models too large for one device: FSDP2 splits every parameter among the processes (`loop.fsdp: true`), of a frozen
teacher too (`distill.shard_teacher: true`).

Checkpoints know nothing of it: state is gathered before it is written and scattered after it is read, so that a run can
be resumed on another number of processes, or without FSDP. Gathering and scattering are done by all processes together.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from odevit.training.config import RunConfig


class Processes(NamedTuple):
    """Which of torchrun's processes this is, of how many."""

    rank: int = 0
    total: int = 1


def processes() -> Processes:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Processes()
    return Processes(torch.distributed.get_rank(), torch.distributed.get_world_size())


def summed(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The sum over all processes, on the CPU."""
    if processes().total == 1:
        return tensor
    total = tensor.to(device)
    torch.distributed.all_reduce(total)
    return total.cpu()


def check_shardable(config: RunConfig) -> None:
    """What would read a parameter outside the model's own forward does not go with FSDP."""
    if config.optim.name != "adamw" or config.optim.ema or config.loop.monitor_every:
        raise ValueError(
            "loop.fsdp works with optim.name: adamw, optim.ema: 0 and loop.monitor_every: 0; got "
            f"{config.optim.name}, {config.optim.ema:g} and {config.loop.monitor_every}. "
            "Without loop.fsdp, several processes train a copy of the model each, and all of these work"
        )
    if not torch.distributed.is_initialized():
        raise ValueError("loop.fsdp needs several processes: torchrun --nproc_per_node N -m odevit train …")


def shard_(model: nn.Module) -> None:
    """Split the parameters among the processes: each block of a ViT by itself, then the rest with the model.

    The fields of an ODE-ViT stay with the model: solvers also call F and G of a field, without its forward.
    """
    from torch.distributed.fsdp import fully_shard

    if not hasattr(model, "odevit"):
        for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block)
    empty = {parameter for parameter in model.parameters() if parameter.numel() == 0}  # no registers
    fully_shard(model, ignored_params=empty)


def gathered(state: Any) -> Any:
    """The same nested state with whole tensors in place of split ones."""
    if isinstance(state, Mapping):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gathered(value) for value in state)
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def _split_like(value: Tensor, target: Tensor) -> Tensor:
    if not hasattr(target, "full_tensor") or value.shape != target.shape:
        return value  # plain training, or a counter of the optimiser
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(target.device), mesh, placements)


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`load_state_dict` of whole tensors into a model that may be split."""
    targets = model.state_dict()
    model.load_state_dict({name: _split_like(v, targets[name]) if name in targets else v for name, v in state.items()})


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """`load_state_dict` of whole tensors into an optimiser whose parameters may be split."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {name: _split_like(v, parameters[index]) if isinstance(v, Tensor) else v for name, v in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})


def share_buffers(model: nn.Module, accelerator: Any) -> None:
    """BatchNorm has seen other images in every process: all take those of the first one, which are also saved."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
