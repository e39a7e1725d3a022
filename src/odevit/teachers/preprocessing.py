"""What a trained model does to an image before it looks at it, read where it is saved."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from odevit.data.decode import BICUBIC, Frame

TIMM_FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": BICUBIC}  # PIL's numbers


class Preprocessing(NamedTuple):
    """None where the model does not say."""

    mean: tuple[float, ...] | None = None  # per channel, of images on the scale 0..1
    std: tuple[float, ...] | None = None
    frame: Frame | None = None


def saved_preprocessing(name: str) -> Preprocessing:
    """Of a transformers model in a folder or on the hub: what its preprocessor_config.json says."""
    from transformers.utils import cached_file

    file = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return Preprocessing()
    settings = json.loads(Path(file).read_text())
    # pixels are bytes · rescale_factor; ours are bytes / 255
    scale = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255.0
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", mean is not None):
        mean, std = [0.0] * len(mean or [0] * 3), [1.0] * len(mean or [0] * 3)
    if mean is None or std is None:
        return Preprocessing(frame=_saved_frame(settings))
    return Preprocessing(tuple(x / scale for x in mean), tuple(x / scale for x in std), _saved_frame(settings))


def _saved_frame(settings: dict[str, Any]) -> Frame | None:
    size, crop = settings.get("size"), settings.get("crop_size")
    if not settings.get("do_resize", True) or size is None:
        return None
    size, crop = (value if isinstance(value, dict) else {"height": value} for value in (size, crop))
    resize = size.get("shortest_edge") or size.get("height")
    if not resize:  # a longest edge, or limits: no square
        return None
    cut = crop.get("height") if settings.get("do_center_crop", False) else None
    return Frame(resize, cut or resize, squash="shortest_edge" not in size, resample=settings.get("resample", 2))


def carried_preprocessing(module: nn.Module) -> Preprocessing:
    """Of a model in memory: what timm's `pretrained_cfg` or its own config says."""
    settings = vars(module).get("pretrained_cfg") or {}  # only models made by timm.create_model carry it
    if settings.get("mean") and settings.get("std"):
        side = settings.get("input_size", (3, 224, 224))[-1]
        resize = math.floor(side / settings.get("crop_pct", 1.0))
        squash = settings.get("crop_mode") == "squash"
        frame = Frame(resize, side, squash, TIMM_FILTERS.get(settings.get("interpolation", ""), BICUBIC))
        return Preprocessing(tuple(settings["mean"]), tuple(settings["std"]), frame)
    config = getattr(module, "config", None)
    mean, std = getattr(config, "image_mean", None), getattr(config, "image_std", None)
    return Preprocessing(tuple(mean), tuple(std)) if mean and std else Preprocessing()
