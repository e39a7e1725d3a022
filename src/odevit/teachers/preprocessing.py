"""What a trained model does to an image before it looks at it, read where it is saved."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from odevit.data import Wanted
from odevit.data.decode import BICUBIC, Frame
from odevit.parse import read_json, reading

LARGEST = 1 << 14  # side of a square that pictures are brought to
TIMM_FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": BICUBIC}  # PIL's numbers


class Preprocessing(NamedTuple):
    """None where the model does not say."""

    mean: tuple[float, ...] | None = None  # per channel, of images on the scale 0..1
    std: tuple[float, ...] | None = None
    frame: Frame | None = None


def saved_preprocessing(name: str) -> Preprocessing:
    """Of a transformers model in a folder or on the hub: what its preprocessor_config.json says."""
    from transformers.utils import cached_file

    for name_of_file in ("preprocessor_config.json", "processor_config.json"):  # the latter of models with two towers
        file = cached_file(name, name_of_file, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            with reading(file):
                settings = read_json(file)
                return _preprocessing(settings.get("image_processor") or settings)
    return Preprocessing()


def wanted_by(module: Any) -> Wanted:
    """What a model in memory takes, by its config."""
    config: Any = getattr(module, "config", None)
    return _wanted(config.to_dict()) if hasattr(config, "to_dict") else Wanted()


def wanted_by_saved(name: str) -> Wanted:
    """What a model in a folder or on the hub takes, by its config.json alone."""
    from transformers.utils import cached_file

    file: Any = Path(name) / "config.json"
    if not file.is_file():
        if Path(name).exists() or name.count("/") != 1:
            return Wanted()
        missing = "_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"
        file = cached_file(name, "config.json", **dict.fromkeys(missing, False))
    if file is None:
        return Wanted()
    with reading(str(file)):
        return _wanted(read_json(file))


def _wanted(values: dict[str, Any]) -> Wanted:
    """Of what a config.json says; what is not as expected counts as not said."""

    def group(name: str) -> dict[str, Any]:
        found = values.get(name)
        return found if isinstance(found, dict) else {}

    seen = {**values, **group("vision_config")}  # the image tower of CLIP
    size = seen.get("image_size") or group("pretrained_cfg").get("input_size", [None])[-1]  # timm
    sides = set(size) if isinstance(size, list | tuple) else {size}
    side, channels = sides.pop() if len(sides) == 1 else None, seen.get("num_channels", 3)
    labels, names = group("id2label"), None
    if labels and not any(str(name).startswith("LABEL_") for name in labels.values()):
        names = [str(name) for _, name in sorted(labels.items(), key=lambda item: int(item[0]))]
    return Wanted(side if type(side) is int else None, channels if type(channels) is int else None, names)


def _preprocessing(settings: dict[str, Any]) -> Preprocessing:
    """What a preprocessor_config.json says; ValueError where it says something impossible."""
    for key in ("do_flip_channel_order", "include_top"):  # of MobileViT and EfficientNet
        if settings.get(key):
            raise ValueError(f"{key} is not supported: images would arrive otherwise than it has learnt them")
    for key in ("image_mean", "image_std"):
        values = settings.get(key)
        if values is not None and not (isinstance(values, list) and values and all(map(_finite, values))):
            raise ValueError(f"{key} must be a list of numbers, got {values!s:.80}")
    if not all(settings.get("image_std") or [1]) or not _finite(settings.get("rescale_factor", 1), positive=True):
        raise ValueError("image_std and rescale_factor must not be zero")
    if len(settings.get("image_mean") or [0]) != len(settings.get("image_std") or settings.get("image_mean") or [0]):
        raise ValueError("image_mean and image_std must have the same number of values")
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
    resample = settings.get("resample", 2)
    for name, value, most in (
        ("size", resize, LARGEST),
        ("crop_size", cut or resize, LARGEST),
        ("resample", resample, 5),
    ):
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name} must be a whole number of at most {most}, got {value!s:.80}")
    return Frame(resize, cut or resize, squash="shortest_edge" not in size, resample=resample)


def _finite(value: Any, positive: bool = False) -> bool:
    """Whether this is a number in a single-precision float's range."""
    return type(value) in (int, float) and abs(value) < 1e38 and (value > 0 or not positive)


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
