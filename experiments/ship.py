"""A finished run → a model of the zoo: weights in half precision, measured again, with its card.

    python experiments/ship.py runs/quickstart/student digits --data digits --command "odevit quickstart"
    python experiments/ship.py RUN NAME --data DIRECTORY --data-name CIFAR-10 --recipe cifar10/scratch \
        --command "odevit train cifar10/scratch" --about "A flow of …."

The test split is read with the weights as they are shipped: at the model's own setting, for its flow gap and for
its rule to stop early, which the validation images calibrate.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from odevit.analysis.flow import flow_gap
from odevit.atomic import write_file
from odevit.commands.calibrate import MOST_IMAGES, adopt_cheapest, shuffled, write_config
from odevit.commands.distill import images_to_choose_by
from odevit.commands.evaluate import held_out, load_data_for
from odevit.data import Split
from odevit.dynamics.calibration import calibrate_model, images_needed
from odevit.dynamics.cost import count_macs
from odevit.model.halting import saved_rule
from odevit.parse import plain
from odevit.recipe import Recipe
from odevit.shipped import FOLDER, checksum
from odevit.training.checkpoint import recover_folders, write_folder
from odevit.training.classifiers import load_odevit
from odevit.training.evaluation import certified_accuracy, evaluate, model_input

ALPHAS = (0.01, 0.02, 0.03, 0.05)  # of stopping early; the least that the validation images can prove is shipped

USE = "learning and research on Vision Transformers as flows; a start for fine-tuning on small images"
CARD = """\
---
library_name: odevit
pipeline_tag: image-classification
license: apache-2.0
tags: [odevit, neural-ode, vision-transformer]
---
# {name}

An ODE-ViT: one shared attention + MLP block, integrated over time. {about}

| | |
|---|---|
| data | {data} |
| test accuracy | {accuracy:.2%} ({images:,} images of the test split) |
| parameters | {parameters:,} ({bytes:,} bytes on disk, half precision) |
| multiply-accumulates | {macs:,} at its own setting: {num_steps} {solver} steps |
| flow gap | {flow_gap} |
| stops early | {stops} |
| certified | {proven} |
| trained in | {took}, {passes}, seed {seed} |
| recipe | {recipe} |
| command | `{command}` |

Accuracy by number of steps: {by_steps}.
{table}
```python
import odevit  # makes the architecture known to transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

folder = odevit.zoo("{name}")
processor, model = AutoImageProcessor.from_pretrained(folder), AutoModelForImageClassification.from_pretrained(folder)
images = processor(Image.open("PHOTO"), return_tensors="pt")["pixel_values"]
print(model.config.id2label[int(model(images{call}).logits.argmax())])
```

**Intended use**: {intended_use}.
**Limits**: {limits}.
**Licence**: Apache-2.0.{licence}
"""


class Words(NamedTuple):
    """What a card says that no run knows. learnt_from: its teacher and the licence of that."""

    data_name: str = ""
    about: str = ""
    recipe: str = ""
    learnt_from: str = ""


def ship(
    run: Path, name: str, *, data: str, command: str, words: Words | None = None, folder: Path = FOLDER,
    faster: float | None = None, halting: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Write folder/name from run/model and return its card.

    faster: accuracy that a cheaper setting may cost. halting: calibrate when an image may stop.
    """
    entry: dict[str, Any] = {}
    recover_folders(folder)
    options = (run, name, data, command, words or Words(), faster, halting)
    write_folder(folder / name, lambda target: entry.update(_fill(target, *options)))
    return entry


def _fill(
    target: Path, run: Path, name: str, data: str, command: str, words: Words, faster: float | None, stops: bool
) -> dict[str, Any]:
    """The model's files and its card, measured with the weights as they are written."""
    shutil.copytree(
        run / "model", target, ignore=shutil.ignore_patterns("selected.json", "README.md"), dirs_exist_ok=True
    )
    weights = load_file(target / "model.safetensors")
    halved = {key: value.half() if value.is_floating_point() else value for key, value in weights.items()}
    save_file(halved, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    model: Any = load_odevit(str(target))
    assert next(model.parameters()).dtype == torch.float32, "half-precision weights must be loaded in single precision"
    loaded = load_data_for(load_odevit(str(run / "model")), data)  # with the validation images of the run
    test = loaded.test or loaded.val
    if faster is not None:
        adopt_cheapest(model, *images_to_choose_by(model, loaded), faster)
    scores = evaluate(model, test)
    images, labels = test.fetch(torch.arange(min(1000, len(test))))
    flow = flow_gap(model, model_input(model, images), labels)
    halting = calibrate_shipped(model, target, loaded.val if stops else None, test)
    certified = certified_shares(model, test)
    result = json.loads((run / "result.json").read_text())
    recipe = Recipe.load(run / "recipe.yaml")
    entry = {
        "name": name, "data": words.data_name or data, "about": words.about, "accuracy": scores["top1"],
        "images": scores["count"], "accuracy_before_halving": result["top1"],
        "parameters": sum(p.numel() for p in model.parameters()), "macs": count_macs(model).total,
        "solver": model.config.solver, "num_steps": model.config.num_steps, "image_size": model.config.image_size,
        "flow": plain(flow), "halting": halting, **({"certified": certified} if certified else {}),
        "bytes": (target / "model.safetensors").stat().st_size, "sha256": checksum(target), "recipe": words.recipe,
        "command": command, "learnt_from": words.learnt_from, "seconds": result["seconds"],
        "epochs": result["epochs"], "passes": passes_of(result, recipe), "seed": recipe.seed,
        "held_out": held_out(recipe), "intended_use": USE,
    }  # fmt: skip
    entry["limits"] = limits_of(entry)
    (target / "README.md").write_text(card_text(entry))
    write_file(target / "card.json", json.dumps(entry, indent=1) + "\n")
    return entry


def limits_of(entry: dict[str, Any]) -> str:
    """What its measurements say that nobody should expect of it."""
    size, gap = entry["image_size"], 100 * entry["flow"]["gap"]
    found = [f"images like those it was trained on, of {size} × {size} pixels"]
    if entry.get("certified"):
        found.append("the proofs are of its own steps and of small changes (ℓ₂), and cost much accuracy")
    else:
        found.append("nothing is proven about changed images, and a small change may grow along the flow")
    if gap > 2:
        found.append(f"not quite a flow: its exact solution has {gap:.1f} points less than its own steps")
    return "; ".join(found)


def card_text(entry: dict[str, Any]) -> str:
    """The model card, all of it from card.json."""
    flow, halting, learnt_from = entry["flow"], entry["halting"], entry["learnt_from"]
    steps, images = [int(count) for count in flow["accuracy_by_steps"]], f"{flow['images']:,} images"
    varies = f"accuracy varies by {100 * flow['spread']:.2f} points over K = {min(steps)} … {max(steps)}"
    return CARD.format(
        **{key: value for key, value in entry.items() if key != "flow"},
        flow_gap=f"{100 * flow['gap']:+.2f} points (own setting minus exact flow, {images}); {varies}",
        proven=proven(entry.get("certified")), stops=in_words(halting, entry["num_steps"]),
        table=halting_table(halting), took=time_spent(entry["seconds"]),
        by_steps=", ".join(f"{steps}: {value:.1%}" for steps, value in flow["accuracy_by_steps"].items()),
        call=', halting="calibrated"' if halting else "", licence=f" It learnt from {learnt_from}." * bool(learnt_from),
    )  # fmt: skip


def passes_of(result: dict[str, Any], recipe: Recipe) -> str:
    """How often it saw its images. With a cache an epoch is a pass over its rows: every view of every image."""
    epochs = result["epochs"]
    if recipe.distill is None or recipe.distill.cache == "none" or recipe.distill.cache_views == 1:
        return f"{epochs} epochs"
    if recipe.distill.extra_images:
        rows = float(f"{result['steps'] * recipe.optim.batch_size / epochs:.3g}")
        return f"{epochs} passes over {rows:,.0f} rows of answers"
    views = recipe.distill.cache_views
    return f"{views * epochs:.0f} passes over the images ({epochs} over a cache of {views} views)"


def time_spent(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} CPU minutes"


@torch.no_grad()
def calibrate_shipped(model: Any, target: Path, val: Split | None, test: Split) -> dict[str, Any] | None:
    """Calibrate the weights as they are shipped on all validation images: the least α that they can prove goes into
    target/config.json, and `table` has what the rules of all of ALPHAS do on the test images. None without images, or
    where they are too few for any."""
    count = 0 if val is None else min(len(val), MOST_IMAGES)
    rows = []
    for alpha in [alpha for alpha in reversed(ALPHAS) if images_needed(alpha, 0.05) <= count]:
        assert val is not None
        model.config.halting = calibrate_model(model.eval(), shuffled(model, val, MOST_IMAGES)[0], alpha=alpha)
        found = {key: model.config.halting[key] for key in ("score", "threshold", "alpha", "delta", "images")}
        rows.append(found | stopping(model, test))
    if not rows:
        model.config.halting = None  # a rule that came with the run was that of the weights before rounding
    write_config(model, target)
    return {**rows[-1], "table": rows[::-1]} if rows else None


def stopping(model: Any, test: Split) -> dict[str, float]:
    """What the rule in the model's config does on these images."""
    rule = saved_rule(model)
    right = same = steps = 0
    for pixels, labels in test.stream(list(torch.arange(len(test)).split(256))):
        x = model_input(model, pixels)
        halted, full = model(x, halting=rule), model(x).logits.argmax(dim=1)
        answers = halted.logits.argmax(dim=1)
        right += int((answers.cpu() == labels.cpu()).sum())
        same += int((answers == full).sum())
        steps += int(halted.steps.sum())
    shares = {"test_accuracy": right, "test_disagreement": len(test) - same, "mean_steps": steps}
    return {name: value / len(test) for name, value in shares.items()}


def halting_table(halting: dict[str, Any] | None) -> str:
    """Markdown: what may change, what it saves, what it changed."""
    if halting is None:
        return ""
    head = "| answers that may change | steps on average | test accuracy | answers that changed |\n|---|---|---|---|"
    keys = ("mean_steps", "test_accuracy", "test_disagreement")
    rows = [(f"{row['alpha']:.0%}", *(row[key] for key in keys)) for row in halting["table"]]
    lines = [f"| {alpha} | {steps:.2f} | {right:.2%} | {changed:.2%} |" for alpha, steps, right, changed in rows]
    return "\n".join(["", head, *lines, ""])


def in_words(halting: dict[str, Any] | None, num_steps: int) -> str:
    if halting is None:
        return "not calibrated"
    return (
        f"after {halting['mean_steps']:.2f} of {num_steps} steps on average, {halting['test_accuracy']:.2%} right; "
        f"{halting['test_disagreement']:.2%} of the test images answered otherwise than at full depth (at most "
        f"{halting['alpha']:.0%} with confidence {1 - halting['delta']:.0%}, from {halting['images']:,} images)"
    )


def certified_shares(model: Any, test: Split) -> dict[str, float] | None:
    """Certified accuracy by radius; None for a model that the certificate does not cover."""
    try:
        return certified_accuracy(model, test)["certified"]
    except ValueError:
        return None


def proven(certified: dict[str, float] | None) -> str:
    if certified is None:
        return "nothing"
    shares = ", ".join(f"{share:.1%} within {radius}" for radius, share in certified.items())
    return f"{shares} (test images answered rightly and provably so; ℓ₂, pixels of [0, 1])"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    for option in ("--data", "--command"):
        parser.add_argument(option, required=True)
    parser.add_argument("--data-name", default="", help="what the card calls the data")
    parser.add_argument("--about", default="", help="a sentence for the card")
    parser.add_argument("--recipe", default="", help="its name, and what was changed in it")
    parser.add_argument("--learnt-from", default="", help="the teacher and its licence: 'DeiT-tiny (Apache-2.0)'")
    parser.add_argument("--faster", type=float, help="choose the cheapest setting that costs at most so much accuracy")
    parser.add_argument("--no-halting", dest="halting", action="store_false", help="no rule for stopping early")
    options = vars(parser.parse_args(arguments))
    options["words"] = Words(*(options.pop(field) for field in Words._fields))
    entry = ship(options.pop("run"), options.pop("name"), **options)
    print(json.dumps({key: value for key, value in entry.items() if key != "flow"}, indent=1))
    return entry


if __name__ == "__main__":
    main()
