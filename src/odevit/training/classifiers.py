"""A recipe's `model:` → a Hugging Face image classifier made for the data, and the way it is saved."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from odevit.data import Data, DataConfig
from odevit.data.decode import Frame
from odevit.model.config import OdeViTConfig, own_fields
from odevit.model.image_processor import square_processor
from odevit.model.model import OdeViTForImageClassification
from odevit.model.saved import follow_umask
from odevit.parse import read_config, reading
from odevit.shipped import names, zoo
from odevit.teachers.adapters import is_adapter, load_adapted
from odevit.teachers.preprocessing import saved_preprocessing


def resolve_model(name: str) -> str:
    """What a user calls a model → what `from_pretrained` takes: a folder of a model or run, a zoo or a hub name."""
    if name in names():
        return zoo(name)
    path = Path(name).expanduser()
    if path.is_dir():
        for folder in (path, path / "model"):
            if (folder / "config.json").is_file() or is_adapter(folder):
                return str(folder)
        raise ValueError(f"{name} holds no model: a config.json and model.safetensors are expected")
    if path.exists():
        raise ValueError(f"{name} is a file; a model is a folder with a config.json and model.safetensors")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"unknown model {name!r}: neither a folder here, nor a hub name (owner/name), nor one of the zoo "
            f"({', '.join(names())}). A run keeps its model in RUN/model."
        )
    return name


def load_classifier(name: str) -> Any:
    """Any Hugging Face image classifier, an ODE-ViT or not, from a folder or the hub; in float32 and eval mode.

    The normalisation that its image processor declares stands in its config, where `model_input` reads it. Nothing in
    the folder is run: no code beside the weights, and no weights in a pickle.
    """
    source = resolve_model(name)
    with quiet_transformers():
        if Path(source).exists():
            with reading(f"the model in {source}"):
                return _load_classifier(source)
        try:
            return _load_classifier(source)
        except OSError as error:
            raise ValueError(f"unknown model {name!r}: no folder here, and the hub says: {error}") from error


def _load_classifier(source: str) -> Any:
    from transformers import AutoModelForImageClassification

    if is_adapter(source):
        model, source = load_adapted(source)
    else:
        if Path(source).exists():
            read_config(Path(source) / "config.json")
        model, info = AutoModelForImageClassification.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
        if missing := sorted(info["missing_keys"]):
            headless = any("classifier." in key for key in missing)
            hint = ": it has no head, so there are no answers; train one first" if headless else ""
            raise ValueError(f"its weights lack {', '.join(missing[:5])}{hint}")
    labels = model.config.id2label
    if sorted(labels) != list(range(len(labels))):
        raise ValueError(f"id2label in its config.json must name the classes 0 … {len(labels) - 1}, got {labels}")
    model.config.return_dict = True
    return adopt_preprocessing(model.eval(), source)


def adopt_preprocessing(model: Any, name: str) -> Any:
    """Write the mean and std of a saved classifier's image processor into its config, if it has one."""
    saved = saved_preprocessing(name)
    if not isinstance(model, OdeViTForImageClassification):
        config = model.config
        config.image_mean, config.image_std = saved.mean and list(saved.mean), saved.std and list(saved.std)
    return model


def own_frame(model: Any) -> Frame:
    """How a classifier brings pictures into its square: as it was saved, an ODE-ViT by the square in the middle."""
    saved = None
    if model.name_or_path and not isinstance(model, OdeViTForImageClassification):
        saved = saved_preprocessing(model.name_or_path).frame
    return Frame.middle(model.config.image_size) if saved is None else saved.scaled(model.config.image_size)


def load_odevit(name: str) -> OdeViTForImageClassification:
    """The same, for what only an ODE-ViT can do."""
    model = load_classifier(name)
    if not isinstance(model, OdeViTForImageClassification):
        raise ValueError(f"{name} is a {type(model).__name__}, not an ODE-ViT; for a discrete ViT use: odevit audit")
    return model


def build_classifier(spec: Mapping[str, Any], data: Data, config: DataConfig) -> Any:
    """One of {preset, …}, {…OdeViTConfig fields}, {pretrained, image_size} or {type: vit, …ViTConfig fields}.

    Image size, channels and number of classes come from the data where the spec leaves them open.
    """
    with reading("the recipe's model", "made"):  # of the wrong type, or larger than the memory
        return _build_classifier(dict(spec), data, config)


def _build_classifier(fields: dict[str, Any], data: Data, config: DataConfig) -> Any:
    native = int(data.train.fetch(torch.tensor([0]))[0].shape[-1])
    wanted_size = fields.pop("image_size", None) or config.image_size
    kind = fields.pop("type", "odevit")
    if kind not in ("odevit", "vit"):
        raise ValueError(f"model.type must be 'odevit' or 'vit', got {kind!r}")
    if "pretrained" in fields:
        head_only = fields.get("train") == "head"
        model = _load_pretrained(fields, wanted_size, native, data)
        if head_only:
            model.base_model.requires_grad_(False)
    elif kind == "vit":
        model = _build_vit({**fields, "image_size": wanted_size or native}, data)
    else:
        fields = {"num_channels": data.channels, "num_labels": len(data.class_names), **fields}
        if wanted_size or "preset" not in fields:
            fields["image_size"] = wanted_size or native
        model = _build_odevit(fields)
    if config.mean and config.std:
        model.config.image_mean, model.config.image_std = list(config.mean), list(config.std)
    return adapt_to_data(model, data)


def adapt_to_data(model: Any, data: Data) -> Any:
    """Write what belongs to the data into the model's config: class names, and mean and std unless it has its own."""
    config = model.config
    if config.num_labels != len(data.class_names):
        raise ValueError(
            f"the model answers with {config.num_labels} classes but the data has {len(data.class_names)}; "
            "leave model.num_labels out, or set it to the number of classes"
        )
    if getattr(config, "num_channels", data.channels) != data.channels:
        raise ValueError(f"the model takes {config.num_channels} channels but the images have {data.channels}")
    config.id2label = dict(enumerate(data.class_names))
    config.label2id = {name: i for i, name in enumerate(data.class_names)}
    if not getattr(config, "image_mean", None) or not getattr(config, "image_std", None):
        config.image_mean, config.image_std = list(data.mean), list(data.std)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers for reading and writing weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_classifier(model: Any, folder: Path, state: dict[str, Any] | None = None) -> None:
    """`save_pretrained`, with the image processor beside the weights, so that `pipeline` can load the folder.

    state: the weights to save; default: the model's own."""
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=state)
    follow_umask(folder)
    if not isinstance(model, OdeViTForImageClassification):
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        ViTImageProcessorPil(
            **square_processor(model.config.image_size),
            image_mean=model.config.image_mean,
            image_std=model.config.image_std,
        ).save_pretrained(folder)


def _build_odevit(fields: dict[str, Any]) -> OdeViTForImageClassification:
    if "preset" in fields:
        return OdeViTForImageClassification.from_preset(fields.pop("preset"), **fields)
    unknown = [name for name in fields if name not in own_fields()]
    if unknown:
        valid = ["preset", "pretrained", "type", *own_fields()]
        raise ValueError(f"unknown key {', '.join('model.' + n for n in unknown)}; valid keys: {', '.join(valid)}")
    return OdeViTForImageClassification(OdeViTConfig(**fields))


def _build_vit(fields: dict[str, Any], data: Data) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    unknown = [name for name in fields if name not in (valid := list(ViTConfig().to_dict()))]
    if unknown:
        raise ValueError(f"unknown key {', '.join('model.' + n for n in unknown)}; valid keys: {', '.join(valid)}")
    fields = {"num_channels": data.channels, "num_labels": len(data.class_names), **fields}
    return ViTForImageClassification(ViTConfig(**fields))


def _load_pretrained(fields: dict[str, Any], image_size: int | None, native: int, data: Data) -> Any:
    from transformers import AutoModelForImageClassification

    name, trained = fields.pop("pretrained"), fields.pop("train", "all")
    if fields:
        raise ValueError(f"beside model.pretrained only image_size and train may be given, got {', '.join(fields)}")
    if trained not in ("all", "head"):
        raise ValueError(f"model.train must be 'all' or 'head', got {trained!r}")
    labels = len(data.class_names)
    with reading(f"the model in {name}"):
        model = AutoModelForImageClassification.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
    if isinstance(model, OdeViTForImageClassification):
        if model.config.num_labels != labels:
            model = type(model).from_pretrained(name, num_labels=labels, ignore_mismatched_sizes=True)
        model.resize_images(image_size or model.config.image_size)
        model.config.halting = None  # it was calibrated for the weights that training is about to move
        return model
    from odevit.teachers.teacher import is_known, resize_classifier

    fresh = model.config.num_labels != labels
    if is_known(model):
        size = image_size or model.config.image_size
        model = resize_classifier(model, size, labels if fresh else None)
    else:  # a CNN and the like: no positions to interpolate
        if fresh:
            options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
            model = type(model).from_pretrained(name, num_labels=labels, ignore_mismatched_sizes=True, **options)
        model.config.image_size = image_size or getattr(model.config, "image_size", native)
    return adopt_preprocessing(model, name)  # without a processor the data's own mean and std are used
