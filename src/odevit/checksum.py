"""Are these the same weights?"""

import hashlib

import torch
from torch import nn


def checksum(module: nn.Module) -> str:
    """sha256 of the name, type, shape and bytes of every parameter and buffer."""
    digest = hashlib.sha256()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
