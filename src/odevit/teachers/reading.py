"""A trained model by its folder or hub name: the module, and what it does to images first."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from odevit.parse import read_config, reading
from odevit.teachers.adapters import is_adapter, load_adapted
from odevit.teachers.preprocessing import Preprocessing, carried_preprocessing, saved_preprocessing


def model_class(config: Any) -> Any:
    """The class of transformers that a checkpoint's config names."""
    import transformers

    kind = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if known else transformers.AutoModelForImageClassification


def read_model(name: str) -> tuple[nn.Module, Preprocessing]:
    """From safetensors only, without any code that lies beside them."""
    config_file = Path(name) / "config.json"
    if Path(name).exists():
        with reading(f"the teacher in {name}"):
            return _read_model(name, config_file)
    return _read_model(name, config_file)


def _read_model(name: str, config_file: Path) -> tuple[nn.Module, Preprocessing]:
    if is_adapter(name):
        module, base = load_adapted(name)
        return module, saved_preprocessing(base)
    if Path(name).exists() and not config_file.is_file():
        raise ValueError(f"a teacher's folder must hold a config.json and its weights, {name} has no config.json")
    try:
        if config_file.is_file() and "model_type" not in read_config(config_file):
            if not list(Path(name).glob("*.safetensors")):
                raise ValueError("it holds no .safetensors, and weights in a pickle are not read")
            return read_timm(f"local-dir:{name}")
        return read_timm(f"hf-hub:{name}") if name.startswith("timm/") else read_huggingface(name)
    except OSError as error:
        if Path(name).exists():
            raise
        raise ValueError(f"cannot read a teacher from {name!r}, neither a folder nor a model of the hub") from error


def read_tokenizer(source: Any) -> Any:
    """The tokenizer beside a two-tower model's weights."""
    from transformers import AutoTokenizer

    if isinstance(source, nn.Module):
        raise ValueError("prompts need a folder or hub name with a tokenizer; in memory: zero_shot_tower(model, …)")
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"prompts need the tokenizer of the text tower, and {source} has none that can be read"
        ) from error


def read_timm(name: str) -> tuple[nn.Module, Preprocessing]:
    try:
        import timm
    except ImportError as error:
        raise ValueError(f'the teacher {name} needs timm: pip install "odevit[timm]"') from error
    module = timm.create_model(name, pretrained=True)
    return module, carried_preprocessing(module)


def read_huggingface(name: str) -> tuple[nn.Module, Preprocessing]:
    """The class that the checkpoint names, in float32, every weight accounted for."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    kind = model_class(config)
    options = {"add_pooling_layer": False} if kind.__name__ in ("ViTModel", "DeiTModel") else {}  # unused and random
    module, info = kind.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, use_safetensors=True, **options
    )
    missing = [key for key in info["missing_keys"] if "mask_token" not in key]
    if missing:
        raise ValueError(f"the checkpoint {name} lacks weights of {kind.__name__}: {', '.join(sorted(missing))}")
    module.config.return_dict = True
    return module, saved_preprocessing(name)
