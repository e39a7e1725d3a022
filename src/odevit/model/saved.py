"""A model's folder: read with every weight accounted for, and written for everybody whom the umask lets in."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from odevit.model.config import OdeViTConfig
from odevit.parse import UnreadableError, read_config, reading

HUB_OPTIONS = ("revision", "cache_dir", "token", "subfolder", "local_files_only")


def read_model(
    kind: Any, from_pretrained: Callable[..., Any], path: str | os.PathLike, *args: Any, **kwargs: Any
) -> Any:
    """A model of class `kind` by transformers' own `from_pretrained`, and what it lets pass is an error.

    `image_size=S` interpolates the positions. Weights are read from safetensors only, which cannot hold code.
    """
    with reading(f"the model in {path}"):
        config, kwargs = copy.deepcopy(kwargs.pop("config", None)), {"use_safetensors": True, **kwargs}
        hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        wanted = kwargs.pop("image_size", config.image_size if config is not None else None)
        if (file := Path(path) / "config.json").is_file():
            read_config(file)
        stored = OdeViTConfig.from_pretrained(path, **hub)
        if config is not None:
            config.image_size = stored.image_size
        want_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise UnreadableError(
                f"the weights in {path} are corrupt or incomplete ({error}); copy or save them again"
            ) from error
        check_names(kind, stored, path, info)
        model.resize_images(wanted or stored.image_size)
        return (model, info) if want_info else model


def check_names(kind: Any, stored: OdeViTConfig, path: str | os.PathLike, info: dict[str, Any]) -> None:
    """Every tensor of the model is in the file, and every field of the file in the model."""
    missing, prefix = sorted(info["missing_keys"]), kind.base_model_prefix
    if stored.architectures == ["OdeViTModel"] and kind.__name__ != "OdeViTModel":  # a flow without a head gets one
        missing = [key for key in missing if key.startswith(f"{prefix}.")]
    if missing:
        names = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise UnreadableError(f"the weights in {path} lack {len(missing)} tensor(s) of this model: {names}")
    strange = [key for key in info["unexpected_keys"] if key.removeprefix(f"{prefix}.").startswith("fields.")]
    if strange:
        raise UnreadableError(
            f"the weights in {path} have {len(strange)} tensor(s) of a field that config.json does not speak of: "
            f"{sorted(strange)[0]}"
        )


def follow_umask(folder: str | os.PathLike) -> None:
    """safetensors writes for the owner only, whatever the umask says; the files beside it have the mode it says."""
    mode = (Path(folder) / "config.json").stat().st_mode
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(mode & 0o777)
