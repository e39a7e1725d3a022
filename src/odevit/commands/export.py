"""`odevit export`: files that run without odevit, compared with the model on real images before they are praised."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odevit.commands.console import check_output, print_table
from odevit.commands.evaluate import choose_split, load_data_for
from odevit.export import files
from odevit.export.graphs import label_names
from odevit.model.model import OdeViTForImageClassification
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import model_input

FORMATS = ("onnx", "pt2", "hub")
SHARES = ("accuracy", "agreement", "same_steps")  # shown in per cent
IMAGES = 256  # looked at to compare the file with the model


def export(
    model: str,
    kind: str,
    *,
    output: Path | None = None,
    steps: int | None = None,
    solver: str | None = None,
    int8: bool = False,
    parts: bool = False,
    halting: bool = False,
    data: str | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Write, run, compare; the numbers printed. A file further from the model than 1e-4 is deleted and an error."""
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r}; choose one of {', '.join(FORMATS)}")
    wishes = [name for name, wish in (("--int8", int8), ("--parts", parts), ("--halting", halting)) if wish]
    if kind != "onnx" and wishes:
        raise ValueError(f"{wishes[0]} is for --format onnx, got {kind}")
    if kind == "hub" and (steps or solver or data):
        raise ValueError("a hub folder holds the model as it is; leave out --steps, --solver and --data")
    if len(wishes) > 1:
        raise ValueError(f"{' and '.join(wishes)} exclude each other: each writes files of its own")
    if halting and (steps or solver):
        raise ValueError("--halting exports the setting that was calibrated; leave out --steps and --solver")
    name = "hub" if kind == "hub" else "parts" if parts else "halting" if halting else None
    target = output or Path(f"model-{name}" if name else f"model.{kind}")
    check_output(target / "config.json" if name else target)
    network = load_odevit(model)
    if kind == "hub":
        from odevit.export.hub import write_hub_folder

        written = write_hub_folder(network, target)
        print(json.dumps({"files": [str(file) for file in written]}) if as_json else f"hub folder: {target}")
        return {"files": written}
    images, labels = check_images(network, data)
    eager = files.logits_of(files.eager_runner(network, steps, solver), images)
    if kind == "pt2":
        files.write_pt2(network, target, steps, solver)
        numbers = compared(eager, files.logits_of(files.pt2_runner(target), images), labels, [target])
    elif halting:
        numbers = export_halting(network, target, images, labels)
    elif parts:
        written = files.write_parts(network, target, steps, solver)
        run = files.parts_runner(network, target, steps, solver)
        numbers = compared(eager, files.logits_of(run, images), labels, written)
    else:
        files.write_onnx(network, target, steps, solver)
        numbers = compared(eager, files.logits_of(files.onnx_runner(target), images), labels, [target])
        if int8:
            files.quantize_onnx(target, target)
            quantised = files.compare(eager, files.logits_of(files.onnx_runner(target), images), labels)
            numbers |= {
                f"{name} (int8)": value for name, value in quantised.items() if name not in ("images", "accuracy")
            }
            numbers["bytes (int8)"] = target.stat().st_size
    print_comparison(str(target), numbers, as_json)
    return numbers


def export_halting(
    network: OdeViTForImageClassification, folder: Path, images: Tensor, labels: Tensor | None
) -> dict[str, Any]:
    """Graphs that stop early, compared with `model(x, halting="calibrated")`: answers, and after how many steps."""
    from odevit.export.halting import halting_runner, write_halting

    written = write_halting(network, folder)
    theirs = halting_runner(folder)(images)
    ours: Any = network(images, halting="calibrated")
    same = ours.steps == theirs.steps  # a score within rounding of the threshold may stop one step earlier or later
    exact = compared(ours.logits[same], theirs.logits[same], None, written)
    return {
        **files.compare(ours.logits, theirs.logits, labels),
        "largest_difference": exact["largest_difference"],
        "bytes": exact["bytes"],
        "same_steps": float(same.double().mean()),
        "mean_steps": float(theirs.steps.double().mean()),
        "full_depth": network.config.num_steps,
    }


def check_images(network: OdeViTForImageClassification, data: str | None) -> tuple[Tensor, Tensor | None]:
    """Test images (of val when there is no test split) as the model takes them, and labels where they are its own."""
    if data is not None:
        loaded = load_data_for(network, data, IMAGES)
        split = loaded.test if loaded.test is not None else choose_split(loaded, "val")
        images, labels = split.fetch(torch.arange(min(IMAGES, len(split))))
        return model_input(network, images), labels
    from odevit.data import DataConfig, load_data

    digits = load_data(DataConfig(name="digits"))
    split = choose_split(digits, "test")
    images, labels = split.fetch(torch.arange(min(IMAGES, len(split))))
    network.config.image_mean = network.config.image_mean or [0.5] * network.config.num_channels
    network.config.image_std = network.config.image_std or [0.5] * network.config.num_channels
    images = images.expand(-1, network.config.num_channels, -1, -1)
    return model_input(network, images), labels if label_names(network) == digits.class_names else None


def compared(eager: Tensor, theirs: Tensor, labels: Tensor | None, written: list[Path]) -> dict[str, Any]:
    """The comparison of logits (N, classes) with eager's; files that differ are deleted."""
    numbers: dict[str, Any] = files.compare(eager, theirs, labels)
    if not numbers["largest_difference"] <= files.TOLERANCE:
        for file in written:
            file.unlink()
        raise ValueError(
            f"the exported file's logits differ from the model's by {numbers['largest_difference']:.2g} on real images "
            f"(at most {files.TOLERANCE:g} is expected) and it was deleted; use fewer --steps or another --solver"
        )
    return {**numbers, "bytes": sum(file.stat().st_size for file in written)}


def print_comparison(target: str, numbers: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": target, **numbers}))
        return
    shown = {
        name.replace("_", " "): f"{value:.2%}" if any(word in name for word in SHARES) else value
        for name, value in numbers.items()
    }
    print_table(f"{target} against eager PyTorch", shown)
