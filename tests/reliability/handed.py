"""Every kind of file that a user can hand to odevit: a good one, tiny, and the way it is read."""

import copy
import importlib.util
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import torch


class Target(NamedTuple):
    """A file (glob) of a prepared folder, how it is spoilt, and how it is read: folder → something comparable."""

    file: str
    spoil: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], Any]
    verified: bool = False  # whether a checksum should notice every change, so that `other` must not be


# --- good files -------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """One good file of each kind, tiny."""
    from PIL import Image

    from odevit import OdeViTConfig, OdeViTForImageClassification
    from odevit.dynamics.calibration import calibrate_model
    from odevit.teachers.teacher import tiny_teacher
    from odevit.training.classifiers import save_classifier

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2)
    config = OdeViTConfig(**sizes, mlp_ratio=1, depth=1, num_steps=2, num_labels=3, image_mean=[0.5], image_std=[0.5])
    model = OdeViTForImageClassification(config).eval()
    model.config.halting = calibrate_model(model, torch.randn(60, 1, 8, 8), alpha=0.2, delta=0.2)
    for name in ("config.json", "preprocessor_config.json", "model.safetensors", "calibration"):
        save_classifier(model, folder / name)
    save_classifier(model, folder / "index of shards")
    (folder / "index of shards" / "model.safetensors").unlink()
    model.save_pretrained(folder / "index of shards", max_shard_size="1KB")
    vit = tiny_teacher("vit", image_size=8, patch_size=4, num_labels=3).module
    vit.config.image_mean, vit.config.image_std = [0.5] * 3, [0.5] * 3
    for name in ("ViT config.json", "ViT preprocessor_config.json", "teacher config.json", "teacher weights"):
        save_classifier(vit, folder / name)
    if importlib.util.find_spec("peft"):
        _prepare_adapters(folder, vit)
    generator = random.Random(0)
    pixels = Image.frombytes("RGB", (24, 16), generator.randbytes(24 * 16 * 3))
    for suffix in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm"):
        (folder / f"image {suffix}").mkdir()
        pixels.save(folder / f"image {suffix}" / f"image.{suffix}")
    _prepare_runs(folder)


def _prepare_adapters(folder: Path, base: Any) -> None:
    """PEFT's files beside the model that they adapt."""
    import peft

    from odevit.training.classifiers import save_classifier

    for name in ("adapter config", "adapter weights"):
        save_classifier(base, folder / f"base of {name}")
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        network = peft.get_peft_model(copy.deepcopy(base).requires_grad_(True), settings)
        network.peft_config["default"].base_model_name_or_path = str(folder / f"base of {name}")
        network.save_pretrained(folder / name)


def _prepare_runs(folder: Path) -> None:
    import datasets
    from PIL import Image
    from tiny_runs import stateful_recipe

    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text(stateful_recipe(folder / "run").to_yaml())
    norms = {"model.odevit.fields.0.mlp": 1.5}
    lines: list[dict[str, Any]] = [{"kind": "monitor", "step": 9, "spectral_norms": norms}]
    for step in range(1, 9):
        lines.append({"kind": "train", "step": step, "loss": 2.0 / step, "losses": {"a": 1.0}, "top1": 0.1 * step})
        lines.append({"kind": "val", "step": step, "loss": 2.1 / step, "top1": 0.1 * step, "count": 100})
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "image folder").mkdir()
    for i, name in enumerate(("a", "b") * 6):
        (folder / "image folder" / name).mkdir(exist_ok=True)
        Image.new("L", (8, 8), 20 * i).save(folder / "image folder" / name / f"{i}.png")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "recipe.yaml").write_text(stateful_recipe(folder / "run").to_yaml())
    for name in ("checkpoint meta", "checkpoint state"):
        _store(folder / name).save(5, _state(), {"note": "good", "grouping": 2, "window": {"loss": 0.1}})
    for name in ("cache meta", "cache states", "cache labels"):
        open_cache_of_digits(folder / name)
    images = [Image.new("L", (8, 8), 20 * i) for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": _png(image), "path": None} for image in images], "label": [i % 2 for i in range(12)]}
    (folder / "parquet").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "parquet" / "train.parquet")


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _store(folder: Path) -> Any:
    from odevit.training.checkpoint import CheckpointStore

    return CheckpointStore(folder, keep=2)


def _state() -> dict[str, Any]:
    weights = torch.arange(60.0).reshape(3, 20)
    return {"model": {"weight": weights}, "average": {}, "optimizers": [{"state": {0: {"step": torch.tensor(3.0)}}}]}


# --- how they are read ------------------------------------------------------------------------------------------------


def _read_classifier(folder: Path) -> Any:
    from odevit.training.classifiers import load_classifier

    model = load_classifier(str(folder))
    config = model.config
    images = torch.linspace(0, 1, config.num_channels * config.image_size**2)
    with torch.no_grad():
        logits = model(images.reshape(1, config.num_channels, config.image_size, config.image_size)).logits
    assert bool(torch.isfinite(logits).all()), "silent NaN"
    return logits.tolist(), {index: str(name) for index, name in config.id2label.items()}


def _read_prediction(folder: Path) -> Any:
    from odevit.commands.predict import predictions
    from odevit.training.classifiers import load_classifier

    image = folder / "image.png"
    image.write_bytes(KEPT["picture"])
    (answer,) = predictions(load_classifier(str(folder)), [str(image)], {})
    if answer.error is not None:
        raise ValueError(answer.error)
    return answer.answers


def _read_calibration(folder: Path) -> Any:
    from odevit.training.classifiers import load_odevit

    with torch.no_grad():
        out = load_odevit(str(folder))(torch.linspace(0, 1, 64).reshape(1, 1, 8, 8), halting="calibrated")
    return out.logits.tolist(), out.steps.tolist()


def _read_teacher(folder: Path) -> Any:
    from odevit.teachers.teacher import load_teacher

    teacher = load_teacher(str(folder))
    trace = teacher.trace(torch.linspace(0, 1, 192).reshape(1, 3, 8, 8))
    return [state.tolist() for state in trace.states]


def _read_recipe(folder: Path) -> Any:
    from odevit.recipe import Recipe
    from odevit.training.classifiers import build_classifier

    recipe = Recipe.load(folder / "recipe.yaml")
    build_classifier(recipe.model, _digits(), recipe.data)
    values = recipe.to_dict()
    return values


def _digits() -> Any:
    from odevit.data import DataConfig, load_data

    if "digits" not in KEPT:
        KEPT["digits"] = load_data(DataConfig(name="digits", limit=32))
    return KEPT["digits"]


def _read_checkpoint(folder: Path) -> Any:
    state, meta = _store(folder).load()
    return state["model"]["weight"].tolist(), meta


def open_cache_of_digits(folder: Path) -> Any:
    from odevit.data.augment import AugmentConfig
    from odevit.data.splits import MemorySplit
    from odevit.distill.cache import open_cache
    from odevit.distill.cache_key import Transform
    from odevit.teachers.teacher import tiny_teacher

    torch.manual_seed(0)
    teacher = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)
    pixels = torch.arange(12 * 64, dtype=torch.uint8).reshape(12, 1, 8, 8)
    transform = Transform(image_size=8, mean=(0.5,), std=(0.5,), augment=AugmentConfig())
    return open_cache(folder, teacher, MemorySplit(pixels, torch.arange(12) % 10, []), transform, say=lambda text: None)


def _read_cache(folder: Path) -> Any:
    cache = open_cache_of_digits(folder)
    trace = cache.trace(torch.arange(12))
    return [state.tolist() for state in trace.states], trace.logits.tolist(), cache.split.labels.tolist()


def _read_parquet(folder: Path) -> Any:
    from odevit.data import DataConfig, load_data

    data = load_data(DataConfig(name=str(folder / "train.parquet"), workers=0))
    images, labels = data.train.fetch(torch.arange(len(data.train)))
    return images.tolist(), labels.tolist(), data.class_names


def _read_image_folder(folder: Path) -> Any:
    from odevit.data import DataConfig, load_data

    data = load_data(DataConfig(name=str(folder), workers=0))
    images, labels = data.train.fetch(torch.arange(len(data.train)))
    return images.tolist(), labels.tolist(), data.class_names


def _read_run(folder: Path) -> Any:
    from odevit.analysis.doctor import diagnose

    return diagnose(folder)


def _read_image(folder: Path) -> Any:
    from odevit.data.decode import Frame, read_image

    (file,) = [path for path in folder.iterdir() if path.name.startswith("image.")] or [folder / "image.png"]
    return read_image(str(file), 3, Frame.middle(8)).tolist()


KEPT: dict[str, Any] = {}


def _halting_only(good: bytes, draw: random.Random) -> bytes:
    config = json.loads(good)
    return json.dumps({**config, **hostile.changed({"halting": config["halting"]}, draw)}).encode(
        "utf-8", "surrogatepass"
    )


TARGETS: dict[str, Target] = {
    "config.json": Target("config.json", hostile.bad_json, _read_classifier),
    "preprocessor_config.json": Target("preprocessor_config.json", hostile.bad_json, _read_prediction),
    "model.safetensors": Target("model.safetensors", hostile.bad_safetensors, _read_classifier),
    "index of shards": Target("model.safetensors.index.json", hostile.bad_json, _read_classifier),
    "calibration": Target("config.json", _halting_only, _read_calibration),
    "ViT config.json": Target("config.json", hostile.bad_json, _read_classifier),
    "ViT preprocessor_config.json": Target("preprocessor_config.json", hostile.bad_json, _read_prediction),
    "teacher config.json": Target("config.json", hostile.bad_json, _read_teacher),
    "teacher weights": Target("model.safetensors", hostile.bad_safetensors, _read_teacher),
    "adapter config": Target("adapter_config.json", hostile.bad_json, _read_teacher),
    "adapter weights": Target("adapter_model.safetensors", hostile.bad_safetensors, _read_teacher),
    "recipe": Target("recipe.yaml", hostile.bad_yaml, _read_recipe),
    "checkpoint meta": Target("step-00000005/meta.json", hostile.bad_json, _read_checkpoint, verified=True),
    "checkpoint state": Target("step-00000005/state.safetensors", hostile.bad_safetensors, _read_checkpoint, True),
    "cache meta": Target("*/meta.json", hostile.bad_json, _read_cache),
    "cache states": Target("*/states.npy", hostile.bad_image, _read_cache),
    "cache labels": Target("*/labels.npy", hostile.bad_image, _read_cache),
    "run": Target("metrics.jsonl", hostile.bad_lines, _read_run),
    "image folder": Target("a/0.png", hostile.bad_image, _read_image_folder),
    "parquet": Target("train.parquet", hostile.bad_bytes, _read_parquet),
    **{
        f"image {suffix}": Target(f"image.{suffix}", hostile.bad_image, _read_image)
        for suffix in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm")
    },
}
if not importlib.util.find_spec("peft"):
    TARGETS = {name: target for name, target in TARGETS.items() if "adapter" not in name}
