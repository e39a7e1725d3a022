"""One function per verb: the only place that chooses task, device, ranks, printing and files."""

import torch
from transformers.utils import logging

logging.disable_progress_bar()  # "Loading weights": commands have their own bars


def best_device() -> torch.device:
    """The accelerator of this machine, else the CPU."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")
