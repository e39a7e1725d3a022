"""`odevit predict`: what is in these images?"""

import json
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.text import Text
from torch import Tensor

from odevit.commands import best_device
from odevit.commands.console import check_output
from odevit.data.decode import CorruptImageError, find_images, read_image
from odevit.model.halting import saved_rule
from odevit.model.solvers import given
from odevit.training.classifiers import load_classifier, own_frame
from odevit.training.evaluation import model_input

BATCH = 64  # images decoded and answered at once
THREADS = 2  # more only wait for each other on small images
FEW = 8  # up to so many images get five answers each and a place in the attention figure, more get one answer
BAR = 30  # characters of a bar that means 100 %


class Prediction(NamedTuple):
    """The classes of one image from the most probable on, or why there are none."""

    file: str
    answers: list[tuple[str, float]]  # (class, probability)
    error: str | None = None
    steps: int | None = None  # that the flow took, when it may stop early


def predict(
    model: str,
    images: Sequence[str],
    *,
    top_k: int | None = None,
    as_json: bool = False,
    attention: Path | None = None,
    steps: int | None = None,
    solver: str | None = None,
    full_depth: bool = False,
) -> int:
    """Print the answer for every image; the number of images that could not be read."""
    if attention is not None:
        check_output(attention)
    network = load_classifier(model).to(best_device())
    files = list(find_images(images))
    if not files:
        raise ValueError("no images given")
    options = flow_options(network, steps, solver, full_depth)
    if attention is not None and not hasattr(network, "odevit"):
        raise ValueError(f"--attention needs an ODE-ViT; {model} is a {type(network).__name__}")
    shown = top_k or (5 if as_json or len(files) <= FEW else 1)
    failed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's remarks about large or odd images; what fails is named below
        for prediction in predictions(network, files, options, bar=len(files) > BATCH):
            failed += prediction.error is not None
            print_prediction(prediction, shown, as_json)
        if failed:
            Console(stderr=True).print(f"{failed} of {len(files)} images could not be read", highlight=False)
        if attention is not None and failed < len(files):
            draw_attention(network, files, attention, options)
    return failed


def flow_options(network: Any, steps: int | None, solver: str | None, full_depth: bool = False) -> dict[str, Any]:
    """Keyword arguments of the forward pass; only an ODE-ViT has steps and a solver. A calibrated one stops early."""
    options = given(steps, solver)
    if not options and not full_depth and getattr(network.config, "halting", None):
        return {"halting": saved_rule(network)}  # its weights are looked at once, not at every batch
    if options and not hasattr(network, "odevit"):
        raise ValueError(f"--steps and --solver are for ODE-ViTs; this is a {type(network).__name__}")
    return options


def predictions(
    network: Any, files: Sequence[str], options: dict[str, Any], *, bar: bool = False
) -> Iterator[Prediction]:
    """Answers in the order of the files, one batch after the other; an unreadable file has none and stops nothing."""
    starts = range(0, len(files), BATCH)
    console = Console(stderr=True)
    for start in track(starts, "images", console=console, transient=True, disable=not bar):
        names = files[start : start + BATCH]
        read = list(zip(names, read_all(network, names), strict=True))
        good = [pixels for _, pixels in read if isinstance(pixels, np.ndarray)]
        scores = iter(probabilities(network, good, options)) if good else iter(())
        for name, pixels in read:
            if isinstance(pixels, np.ndarray):
                row, taken = next(scores)
                yield Prediction(name, ranked(network, row), steps=taken)
            else:
                yield Prediction(name, [], str(pixels))


def read_all(network: Any, names: Sequence[str]) -> Iterator[np.ndarray | CorruptImageError]:
    """Pixels (c, S, S) of every file, or the error that names it."""
    channels, frame = getattr(network.config, "num_channels", 3), own_frame(network)

    def read(name: str) -> np.ndarray | CorruptImageError:
        try:
            return read_image(name, channels, frame)
        except CorruptImageError as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(read, names)


@torch.no_grad()
def probabilities(
    network: Any, pixels: Sequence[np.ndarray], options: dict[str, Any]
) -> list[tuple[Tensor, int | None]]:
    """Of every decoded image (c, S, S): the probabilities (classes,), and its steps where it may stop early."""
    output = network(model_input(network, torch.from_numpy(np.stack(pixels))), **options)
    taken = output.steps.tolist() if options.get("halting") else [None] * len(pixels)
    return list(zip(output.logits.softmax(-1).cpu(), taken, strict=True))


def ranked(network: Any, scores: Tensor) -> list[tuple[str, float]]:
    order = scores.argsort(descending=True, stable=True).tolist()
    return [(str(network.config.id2label[index]), float(scores[index])) for index in order]


def print_prediction(prediction: Prediction, top_k: int, as_json: bool) -> None:
    """One line of JSON, or the file's name and a bar for each of its first classes."""
    answers = prediction.answers[:top_k]
    if as_json:
        record: dict[str, Any] = {"file": prediction.file}
        if prediction.error is None:
            record["answers"] = [{"label": label, "score": score} for label, score in answers]
            record |= {} if prediction.steps is None else {"steps": prediction.steps}
        else:
            record["error"] = prediction.error
        print(json.dumps(record, ensure_ascii=False), flush=True)
        return
    console = Console()
    if prediction.error is not None:
        console.print(Text(f"cannot read {prediction.error}", style="red"), soft_wrap=True)
        return
    width = max(len(label) for label, _ in answers)
    if top_k > 1:
        taken = "" if prediction.steps is None else f"  (arrived after step {prediction.steps})"
        console.print(Text.assemble((prediction.file, "bold"), taken), soft_wrap=True)
    for label, score in answers:
        line = f"  {label:<{width}}  {score:7.2%}  {'█' * round(BAR * score)}"
        console.print(Text(line if top_k > 1 else f"{prediction.file}{line}"), soft_wrap=True)


def draw_attention(network: Any, files: Sequence[str], target: Path, options: dict[str, Any]) -> None:
    """What CLS looks at, from the first step to the last, for the first few images."""
    from odevit.analysis.attention import attention_over_time, displayed, grid_figure

    readable = zip(files, read_all(network, files[:FEW]), strict=False)
    good = {name: pixels for name, pixels in readable if isinstance(pixels, np.ndarray) and name != "-"}
    if not good:
        raise ValueError("the attention of standard input cannot be drawn: give the image as a file")
    images = model_input(network, torch.from_numpy(np.stack(list(good.values()))))
    path = attention_over_time(network, images, **{k: v for k, v in options.items() if k != "halting"})
    mean = path.maps.mean(dim=2)  # (K, b, M): over heads
    colors = [displayed(image, network.config.image_mean, network.config.image_std) for image in images]
    steps = torch.linspace(0, len(path.times) - 1, min(6, len(path.times))).round().long().tolist()
    answers = [ranked(network, row)[0][0] for row, _ in probabilities(network, list(good.values()), options)]
    figure = grid_figure([mean[:, i] for i in range(len(good))], colors, answers, path.times, steps)
    figure.savefig(target, dpi=160, facecolor="white")
    Console(stderr=True).print(f"attention: {target}", highlight=False, soft_wrap=True)
