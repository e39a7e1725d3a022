"""Lines of the benchmark that need a trained model: beside its teacher, its guarantee, its time to accuracy."""

import json
from pathlib import Path
from typing import Any

import torch
from peers import answer
from torch import Tensor

from odevit.commands.evaluate import choose_split, load_data_for
from odevit.dynamics.calibration import Record as Recorded
from odevit.dynamics.calibration import calibrate, disagreements, images_needed, record
from odevit.dynamics.cost import count_parameters
from odevit.model.halting import SCORES, saved_rule
from odevit.training.classifiers import load_classifier, load_odevit
from odevit.training.evaluation import model_input

SPLITS = 50  # of the images into those that calibrate and those that judge
TARGETS = {"digits": (1.3, None)}  # of plain and halted throughput; of everything else:
OTHERWISE = (2.5, 4.0)


def trained_pair(bench: Any, student: str, teacher: str, data: str, quick: bool) -> None:
    """A student beside its teacher, or any classifier, on real images: accuracy of both, milliseconds, and with its
    calibrated rule."""
    mine, theirs = load_odevit(student), load_classifier(teacher)
    split = choose_split(load_data_for(mine, data, 64 if quick else 2000), "test")
    pixels, labels = split.fetch(torch.arange(len(split)))
    small, large = model_input(mine, pixels), model_input(theirs, pixels)
    name, plain, halted = in_short(student), *TARGETS.get(data, OTHERWISE)
    pair = f"{name} against {in_short(teacher)}"
    right = []
    for model, images in ((mine, small), (theirs, large)):
        with torch.no_grad():
            said = torch.cat([answer(model, part).argmax(1) for part in images.split(64)])
        right.append(float((said == labels).double().mean()))
    bench.add(f"{pair}: accuracy, {len(labels)} images", *right, right[0] / right[1], "share")
    held = [count_parameters(model)["total"] for model in (mine, theirs)]
    bench.add(f"{pair}: parameters", *held, held[1] / held[0], "")
    for batch, target in ((1, None), (64, plain)):
        a, b = small[:batch], large[:batch]
        bench.faster(f"{pair}: batch {batch}, {mine.config.num_steps} {mine.config.solver} steps",
                     lambda x=a: mine(x), lambda x=b: answer(theirs, x), target, per=batch)  # fmt: skip
    if mine.config.halting:
        with_halting(bench, pair, mine, theirs, small, large, halted, quick)
        guarantee(bench, name, record(mine, all_images(mine, data, quick)), mine.config.halting)


def all_images(model: Any, data: str, quick: bool) -> Tensor:
    """The whole test split: a half must be large enough to judge by, or its own luck is taken for the rule's."""
    split = choose_split(load_data_for(model, data, 64 if quick else None), "test")
    return model_input(model, split.fetch(torch.arange(len(split)))[0])


def in_short(name: str) -> str:
    """The folder's name, or that of the run it lies in."""
    path = Path(name).resolve()
    return path.parent.name if path.name == "model" else path.name


def with_halting(
    bench: Any, name: str, mine: Any, theirs: Any, small: Any, large: Any, target: float | None, quick: bool
) -> None:
    """The milliseconds of whole batches that images leave when they may stop."""
    rule, batch = saved_rule(mine), 64
    with torch.no_grad():
        outputs = [mine(part, halting=rule) for part in small.split(64)]
        full = torch.cat([mine(part).logits.argmax(1) for part in small.split(64)])
    said = torch.cat([output.logits.argmax(1) for output in outputs])
    steps = float(torch.cat([output.steps for output in outputs]).double().mean())
    bench.notes.append(
        f"{name}: halting at alpha = {mine.config.halting['alpha']:g} takes {steps:.2f} of {mine.config.num_steps} "
        f"steps and answers {float((said != full).double().mean()):.2%} of {len(full)} test images otherwise than the "
        "full depth"
    )
    parts = list(zip(small.split(batch), large.split(batch), strict=True))[: 2 if quick else 8]
    bench.faster(f"{name}: batch {batch}, stopping early", lambda: [mine(x, halting=rule) for x, _ in parts],
                 lambda: [answer(theirs, x) for _, x in parts], target, per=batch * len(parts))  # fmt: skip


def guarantee(bench: Any, name: str, recorded: Recorded, rule: dict[str, Any]) -> None:
    """Calibrate on a random half, count disagreements on the other, 50 times: how often is it at most alpha?"""
    count, alpha = recorded.answers.shape[1], rule["alpha"]
    if count // 2 < images_needed(alpha, rule["delta"]):
        bench.notes.append(f"{name}: {count} images are too few for random calibration splits at alpha = {alpha:g}")
        return
    generator, kept = torch.Generator().manual_seed(0), 0
    for _ in range(SPLITS):
        first, second = torch.randperm(count, generator=generator).split([count // 2, count - count // 2])
        half, other = (Recorded(recorded.answers[:, part], recorded.scores[:, part]) for part in (first, second))
        found = calibrate(half, SCORES[rule["score"]].thresholds, alpha, rule["delta"])
        kept += float(disagreements(other, found.threshold).double().mean()) <= alpha
    share = kept / SPLITS
    if share < 0.95:
        bench.notes.append(
            f"{name}: {count - count // 2} images judge a split, and see a rule whose true rate lies just below alpha "
            "above it almost every second time: the share may fall short where the promise holds"
        )
    bench.add(f"{name}: {SPLITS} random splits, share with at most alpha = {alpha:g} disagreement, against 95 %",
              share, 0.95, share / 0.95, "share", 1.0)  # fmt: skip


def time_to_accuracy(bench: Any, run: Path, accuracy: float, minutes: float) -> None:
    """Minutes until the run's held-out images were first answered that well, against those of another recipe."""
    files = (run / "metrics.jsonl", run / "timing.jsonl")
    records, timing = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    step = next((r["step"] for r in records if r["kind"] == "val" and r["top1"] >= accuracy), None)
    if step is None:
        bench.notes.append(f"{run.resolve().name} never reached {accuracy:.1%}")
        return
    spent = next(row["seconds"] for row in timing if row["step"] >= step) / 60
    bench.add(f"time to {accuracy:.1%}: {run.resolve().name} against {minutes:g} minutes of the paper's recipe",
              spent, minutes, minutes / spent, "min", 5.0)  # fmt: skip
