"""`odevit plan`: what a run will cost, before it is started."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from odevit.commands.console import print_table
from odevit.data import DataConfig, Wanted, load_data
from odevit.distill.plan import SOURCES, Source, make_plan, teacher_here
from odevit.recipe import Recipe, assignment
from odevit.teachers.preprocessing import wanted_by_saved
from odevit.words import si


def plan(
    recipe: str | Path,
    overrides: Sequence[str] | None = None,
    *,
    teacher: str | None = None,
    data: str | None = None,
    device_tflops: float | None = None,
    processes: int = 1,
    images: int | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Parameters, arithmetic, memory, cache and hours of a recipe, here and on a device of so many TFLOPS."""
    if processes < 1 or (device_tflops is not None and device_tflops <= 0):
        raise ValueError(f"processes and device_tflops must be positive, got {processes} and {device_tflops}")
    given = [assignment(key, value) for key, value in (("distill.teacher", teacher), ("data.name", data)) if value]
    loaded = Recipe.load(recipe, [*(overrides or ()), *given])
    here, extra = teacher_here(loaded), 0
    source = find_source(loaded.data, images, wanted_by_saved(here) if here else None)
    if loaded.distill is not None and loaded.distill.extra_images:
        others = DataConfig(name=loaded.distill.extra_images, image_size=source.size, limit=loaded.data.limit)
        extra = find_source(others).images
    numbers = make_plan(loaded, source, extra=extra, processes=processes, tflops=device_tflops)
    if as_json:
        print(json.dumps({"recipe": str(recipe), "processes": processes, **numbers}))
        return numbers
    views = f" × {numbers['views']} views" if numbers["views"] > 1 else ""
    rows = {
        "images": f"{numbers['images']:,}{views}",
        "extra images": f"{extra:,}{views}" if extra else None,
        "parameters (trained)": f"{numbers['parameters']:,} ({numbers['trainable']:,})",
        "teacher's parameters": numbers["teacher_parameters"],
        "multiply-accumulates to train on an image": si(numbers["macs_per_image"]),
        "multiply-accumulates, an epoch": si(numbers["macs_per_epoch"]),
        "memory of a process": f"{si(numbers['memory_per_process'])}B",
        "cache on disk": f"{si(numbers['cache'])}B" + _shared(numbers) if numbers["cache"] else None,
        "images/s, measured here": _speed(numbers["images_per_second_here"]),
        "epochs": f"{numbers['epochs_here']:.1f}" + ("" if numbers["epochs"] else " in the recipe's minutes, here"),
        "hours of the teacher here": _teacher_hours(numbers["teacher_hours_here"]),
        "hours of training here": _hours(numbers["hours_here"]),
    }
    if device_tflops is not None:
        where = f"hours on {processes} × {device_tflops:g} TFLOPS, {numbers['utilisation']:.0%} used"
        rows[where] = _hours(numbers["hours_there"])
    print_table(f"Plan of {recipe}", {name: value for name, value in rows.items() if value is not None})
    return numbers


def find_source(config: DataConfig, images: int | None = None, wanted: Wanted | None = None) -> Source:
    """The images that a run trains on: from the table of known data sets, or by opening what is here.

    wanted: what its teacher takes, to which images of several sizes are brought.
    """
    known = SOURCES.get(config.name)
    if known is not None:
        kept = known.images if known.has_val else round(known.images * (1 - config.val_fraction))
        known = known._replace(images=min(kept, config.limit or kept))
    elif Path(config.name).exists():
        data = load_data(config, wanted=wanted)
        side = int(data.train.fetch(torch.tensor([0]))[0].shape[-1])
        known = Source(len(data.train), side, data.channels, len(data.class_names))
    else:
        raise ValueError(
            f"the size of {config.name!r} is not known: give a local folder, or one of {', '.join(SOURCES)}"
        )
    return known if images is None else known._replace(images=images)


def _shared(numbers: dict[str, Any]) -> str:
    each = numbers["cache_per_process"]
    return f", {si(each)}B of each process" if each < numbers["cache"] else ""


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _teacher_hours(value: float | None) -> str | None:
    return "not counted: it is not here" if value is None else _hours(value)


def _hours(value: float) -> str | None:
    return f"{value:,.2f}" if value else None
