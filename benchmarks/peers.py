"""The models that ours stand beside: of other libraries where they are installed, at the same tokens and width.

timm and vit-pytorch are looked for in .venv/timm, where `make bench` puts them (they want torchvision, which does not
import here); what is missing is left out, and the report says so.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "experiments"))

SIDE, PATCH, CLASSES = 32, 4, 10


def imported(name: str) -> Any:
    """A module of .venv/timm (experiments/studies.py)."""
    return importlib.import_module("studies").imported_from_timm(name)


def hugging_face_vit(width: int = 192, depth: int = 12, heads: int = 3, mlp: int = 4, side: int = SIDE) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=side, patch_size=PATCH, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=mlp * width, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


def timm_vit(name: str) -> nn.Module:
    timm = imported("timm")
    return timm.create_model(name, img_size=SIDE, patch_size=PATCH, num_classes=CLASSES, pretrained=False)


def simple_vit() -> nn.Module:
    module = imported("vit_pytorch.simple_vit")
    return module.SimpleViT(
        image_size=SIDE, patch_size=PATCH, num_classes=CLASSES, dim=192, depth=12, heads=3, mlp_dim=768, dim_head=64
    )


def cct(width: int = 128) -> nn.Module:
    """CCT-2/3x2: two convolutions, two blocks (experiments/cct.py)."""
    module = importlib.import_module("cct")
    return module.CctForImageClassification(module.CctConfig(width=width, num_labels=CLASSES))


PEERS: dict[str, Callable[[], nn.Module]] = {
    "Hugging Face ViT-tiny": hugging_face_vit,
    "timm ViT-tiny": lambda: timm_vit("vit_tiny_patch16_224"),
    "timm DeiT-tiny": lambda: timm_vit("deit_tiny_patch16_224"),
    "vit-pytorch SimpleViT-tiny": simple_vit,
}


def available(peers: dict[str, Callable[[], nn.Module]]) -> tuple[dict[str, nn.Module], list[str]]:
    """Those that can be built, in eval mode, and the names of the others with the reason."""
    built, missing = {}, []
    for name, build in peers.items():
        try:
            built[name] = build().eval()
        except (ImportError, RuntimeError, AttributeError) as error:
            missing.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[0][:80]})")
    return built, missing


def answer(model: Any, images: Tensor) -> Tensor:
    output = model(images)
    return output if isinstance(output, Tensor) else output.logits
