"""Are these the same weights?"""

import hashlib
from typing import Any

import torch
from torch import nn


def checksum(module: nn.Module) -> str:
    """sha256 of the name, type, shape and bytes of every parameter and buffer. Of a model that is split among processes
    (FSDP2) all of them must ask together."""
    digest = hashlib.sha256()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
