"""PEFT folders (LoRA and its kin): the base model with the adapter merged into its weights."""

from pathlib import Path
from typing import Any

import torch

from odevit.parse import read_json

ADAPTER_CONFIG = "adapter_config.json"


def is_adapter(folder: str | Path) -> bool:
    """Whether this folder holds an adapter instead of a model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def load_adapted(folder: str | Path) -> tuple[Any, str]:
    """The image classifier with the adapter merged into it, in float32 and eval mode; and its base model's name.

    A new head (PEFT's `modules_to_save`) tells the number of classes.
    """
    from transformers import AutoModelForImageClassification

    settings = read_json(Path(folder) / ADAPTER_CONFIG)
    if not (Path(folder) / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder} holds no adapter_model.safetensors, and weights in a pickle are not read")
    base = settings.get("base_model_name_or_path")
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(
            f"{folder} is a PEFT adapter of {base}, not a whole model. Install peft (pip install peft) to have it "
            "loaded, or merge it once: PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(…)"
        ) from error
    if not base:
        raise ValueError(f"{folder}/{ADAPTER_CONFIG} does not name its base model (base_model_name_or_path)")
    labels = _labels_of_new_head(Path(folder), settings.get("modules_to_save") or [])
    options: dict[str, Any] = {} if labels is None else {"num_labels": labels, "ignore_mismatched_sizes": True}
    model = AutoModelForImageClassification.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **options
    )
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload().eval(), base


def _labels_of_new_head(folder: Path, saved: list[str]) -> int | None:
    """Rows of a classifier that the adapter brings along, if any."""
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    with safe_open(str(file), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            if any(name.endswith(f".{module}.weight") for module in saved):
                return tensors.get_slice(name).get_shape()[0]
    return None
