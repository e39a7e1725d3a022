"""In how many bits a run computes: float32, or mixed with 16 bits under autocast. Weights and states stay float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from odevit.training.config import LoopConfig

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(loop: LoopConfig) -> str:
    """What `loop.mixed_precision` means on this machine: "no", "bf16" or "fp16"."""
    if loop.mixed_precision != "auto":
        return loop.mixed_precision
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False) else "no"


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager[Any]:
    """The context in which models compute in this precision."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(torch.device(device).type, KINDS[precision])


def slow_on(precision: str, device: torch.device | str) -> bool:
    """Whether float32 is likely faster: on a CPU without matrix products in bfloat16."""
    if precision == "no" or torch.device(device).type != "cpu":
        return False
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return precision != "bf16" or not multiplies
