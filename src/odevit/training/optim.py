"""Optimisers over the right parameters, the learning-rate schedule, and averaged weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from odevit.model.layers import StemConvolution
from odevit.training.config import OptimConfig


def learning_rate_factor(progress: float, warmup: float, cycles: int = 1) -> float:
    """Linear from 0 to 1 over the first `warmup` of the run, then `cycles` half cosines from 1 to 0 one after another
    (hard restarts). A pure function of progress."""
    if progress < warmup:
        return progress / warmup
    done = min(1.0, (progress - warmup) / (1 - warmup))
    return (1 + math.cos(math.pi * (cycles * done % 1.0 if done < 1 else 1.0))) / 2


GROUPING = 3
"""How parameters are grouped, part of every checkpoint; runs begun another way end that way. In 1 the name `tokenizer`
counted as a token, so that its convolutions were not decayed; before 3 AdamW moved those of pooling stems."""


def split_parameters(model: nn.Module, grouping: int = GROUPING) -> dict[str, dict[str, nn.Parameter]]:
    """Trainable parameters by name in three groups, each parameter in exactly one:

    hidden: matrices inside a ModuleList (the fields of an ODE-ViT, the blocks of a ViT) and the convolutions of pooling
        stems: what Muon is made for;
    decayed: other matrices and convolutions;
    plain: vectors, tokens, positions and the mixing of patches (the identity at the start), which are not decayed.
    """
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    stems = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, StemConvolution)]
    groups: dict[str, dict[str, nn.Parameter]] = {"hidden": {}, "decayed": {}, "plain": {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        words = name.replace("tokenizer", "") if grouping > 1 else name
        is_weight = parameter.ndim in (2, 4) and not any(word in words for word in ("token", "position", "mixing"))
        in_block = parameter.ndim == 2 and name.startswith(blocks or ("\0",))
        if is_weight and (in_block or (grouping > 2 and name in stems)):
            groups["hidden"][name] = parameter
        else:
            groups["decayed" if is_weight else "plain"][name] = parameter
    return groups


def build_optimizers(model: nn.Module, config: OptimConfig, grouping: int = GROUPING) -> list[Optimizer]:
    """AdamW for everything, or Muon for the hidden matrices and AdamW for the rest. Groups remember their `base_lr`."""
    groups = {name: list(parameters.values()) for name, parameters in split_parameters(model, grouping).items()}
    if not any(groups.values()):
        raise ValueError("the model has no trainable parameter: unfreeze some of it (requires_grad_(True))")
    optimizers: list[Optimizer] = []
    decayed = groups["decayed"] + (groups["hidden"] if config.name == "adamw" else [])
    if config.name == "muon":
        if not groups["hidden"]:
            raise ValueError("optim.name: muon needs trainable matrices in fields or blocks; use adamw for this model")
        lr = config.muon_lr if config.muon_lr is not None else config.lr
        decay = config.muon_weight_decay if config.muon_weight_decay is not None else config.weight_decay
        optimizers.append(Muon(groups["hidden"], lr=lr, weight_decay=decay))
    adamw_groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": groups["plain"], "weight_decay": 0.0},
    ]
    adamw_groups = [group for group in adamw_groups if group["params"]]
    if adamw_groups:
        optimizers.append(torch.optim.AdamW(adamw_groups, lr=config.lr, betas=config.betas))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float) -> Tensor:
    """About U Vᵀ of matrix = U S Vᵀ, by Newton–Schulz: in bfloat16 on a GPU, as usual; elsewhere in the given type."""
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = (x if wide else x.mT) / x.norm().clamp_min(eps)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrix.dtype)


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) with steps of the size of AdamW's (match_rms_adamw of Liu et al., arXiv 2502.16982).

    A convolution moves as the matrix (out, in · height · width), which PyTorch's own Muon refuses; and that one's
    bfloat16 took half of a training step on two CPU cores. State and options are PyTorch's."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1):
        options = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": 1e-7, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        direction = direction.flatten(1)
        size = 0.2 * math.sqrt(max(direction.shape))  # match_rms_adamw
        direction = orthogonalise(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        step = direction.view_as(parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"] * size)


def set_learning_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor


class AveragedWeights:
    """Exponential moving average of trainable parameters and floating-point buffers.

    average ← δ · average + (1 - δ) · weight after every step, with δ = min(decay, (1 + step) / (10 + step)): the ramp
    of TensorFlow's ExponentialMovingAverage, which keeps the random initialisation out of short runs.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = {name: tensor.detach().clone() for name, tensor in self._tracked(model).items()}

    @staticmethod
    def _tracked(model: nn.Module) -> dict[str, Tensor]:
        parameters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        return parameters | {name: b for name, b in model.named_buffers() if b.is_floating_point()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """`step` counts from 0: the step whose weights are taken in."""
        decay = min(self.decay, (1 + step) / (10 + step))
        current = self._tracked(model)
        names = list(self.values)
        torch._foreach_lerp_([self.values[n] for n in names], [current[n] for n in names], 1 - decay)

    def load(self, values: Mapping[str, Tensor]) -> None:
        if values.keys() != self.values.keys():
            raise ValueError("the averaged weights to load are not those of this model")
        _copy(values, self.values)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model holds the averages; afterwards exactly what it held before."""
        current = self._tracked(model)
        saved = {name: tensor.clone() for name, tensor in current.items()}
        _copy(self.values, current)
        try:
            yield
        finally:
            _copy(saved, self._tracked(model))


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
