"""A calibrated model as a family of ONNX graphs, one for each number of steps, so that others can stop early too.

`first.onnx` takes images to the state after one step, `next.onnx` (one for each field and step size) a state one step
further; both say the logits there and the score of the rule. An image is done after the first step whose score reaches
the threshold of halting.json; the others go on with the state they have, so that no step is computed twice.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from odevit.export.files import example, onnx_session, write_graph
from odevit.export.graphs import metadata
from odevit.model.halting import SCORES, Moment, saved_rule
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS, Grid
from odevit.model.spectral import plain_copy

RULE = "halting.json"
INPUTS, OUTPUTS = ["state_before", "logits_before"], ["state", "logits", "score"]
HOW = (
    "Run the graphs in their order: the first on images, each later one on the state and the logits of the one before. "
    "After each, images whose score is at least the threshold are done: their logits are the answer. Go on with the "
    "rest; after the last graph all are done."
)


class Step(nn.Module):
    """State (b, n, d) and logits (b, C) before a step → state, logits and score (b,) after it."""

    def __init__(self, model: OdeViTForImageClassification, grid: Grid, phase: int, h: float, score: str):
        super().__init__()
        self.model, self.grid, self.phase, self.h, self.score = model, grid, phase, h, score

    def forward(self, state_before: Tensor, logits_before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        solver = self.model.config.solver
        state = SOLVERS[solver].step(self.model.odevit.fields[self.phase], state_before, self.h)
        logits = self.model.classify(state)
        moment = Moment(1, self.grid, solver, state_before, state, logits_before, logits)
        return state, logits, SCORES[self.score].value(moment)


class FirstStep(nn.Module):
    """Normalised images (b, c, S, S) → state, logits and score after the first step."""

    def __init__(self, step: Step):
        super().__init__()
        self.step = step

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.step.model.odevit.embed(images)
        return self.step(state, self.step.model.classify(state))


def write_halting(model: OdeViTForImageClassification, folder: Path) -> list[Path]:
    """The graphs and halting.json, which names them in their order; ValueError without a calibration of these weights.

    Steps of one field and one length share a file.
    """
    rule = saved_rule(model)
    network, config = plain_copy(model), model.config
    grid = config.time_grid()
    steps, notes = list(grid.steps()), metadata(model, config.num_steps, config.solver)
    images = example(network)
    state = network.odevit.embed(images)
    examples = {True: (images,), False: (state, network.classify(state))}
    kinds = sorted(set(steps[1:]))
    names = {kind: f"next_{i}.onnx" if len(kinds) > 1 else "next.onnx" for i, kind in enumerate(kinds)}
    for (phase, h), name in ((steps[0], "first.onnx"), *names.items()):
        step = Step(network, grid, phase, h, rule.score)
        first = name == "first.onnx"
        inputs, module = (["images"], FirstStep(step)) if first else (INPUTS, step)
        write_graph(module, examples[first], folder / name, inputs, OUTPUTS, notes)
    saved: Any = config.halting
    told = {key: saved[key] for key in ("alpha", "delta", "images", "disagreements", "mean_steps") if key in saved}
    values = {"how": HOW, "score": rule.score, "threshold": rule.threshold, **told}
    values |= {name: json.loads(text) for name, text in notes.items()}
    values["graphs"] = ["first.onnx", *(names[kind] for kind in steps[1:])]
    (folder / RULE).write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return [folder / RULE, folder / "first.onnx", *(folder / name for name in names.values())]


class Halted(NamedTuple):
    """logits (b, C) where each image stopped, and the step (b,) after which it did."""

    logits: Tensor
    steps: Tensor


def halting_runner(folder: Path) -> Any:
    """images (b, c, S, S) → Halted, by the graphs alone, as halting.json says."""
    rule = json.loads((folder / RULE).read_text())
    sessions = {name: onnx_session(folder / name) for name in set(rule["graphs"])}

    def run(images: Tensor) -> Halted:
        under_way, steps = torch.arange(len(images)), torch.zeros(len(images), dtype=torch.long)
        inputs, answers = {"images": images.numpy()}, torch.empty(len(images), len(rule["labels"]))
        for count, name in enumerate(rule["graphs"], start=1):
            state, logits, score = sessions[name].run(None, inputs)
            done = (score >= rule["threshold"]) | (count == len(rule["graphs"]))
            answers[under_way[done]], steps[under_way[done]] = torch.from_numpy(logits[done]), count
            under_way, inputs = under_way[~done], {"state_before": state[~done], "logits_before": logits[~done]}
            if not len(under_way):
                break
        return Halted(answers, steps)

    return run
