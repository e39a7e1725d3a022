"""timm imports torchvision, whose usual wheel does not import on a CPU build of torch: its operators cannot load.

Where they cannot, the two operators that the import asks for are declared here (never in the package) so that the timm
and torchvision teachers are tested. Nothing happens without torchvision.
"""

import importlib.util
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS), str(TESTS / "distill")]  # teacher_contract.py, test_student.py


def declare_missing_operators() -> None:
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None or torchvision.origin is None:
        return
    try:
        for library in Path(torchvision.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except (OSError, RuntimeError):
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)


declare_missing_operators()
