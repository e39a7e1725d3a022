"""A calibrated model as a family of graphs: driven by onnxruntime alone, it stops where the model stops."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from problems import perturbed_model
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner

import odevit_cli
from odevit.checksum import checksum
from odevit.dynamics.calibration import record
from odevit.export.files import onnx_session, write_graph
from odevit.export.halting import INPUTS, Step, write_halting
from odevit.model.halting import SCORES
from odevit.model.solvers import Grid

PIXELS = np.round(load_digits().images[:40] * (255 / 16)).astype(np.uint8)
IMAGES = (torch.from_numpy(PIXELS)[:, None].float() / 255 - 0.3) / 0.35

SCRIPT = """
import json, sys
import numpy as np, onnxruntime
folder, pixels = sys.argv[1], np.load(sys.argv[2])
rule = json.load(open(f"{folder}/halting.json"))
graphs = {name: onnxruntime.InferenceSession(f"{folder}/{name}") for name in set(rule["graphs"])}
how = rule["preprocessing"]
images = ((pixels[:, None] / np.float32(255)) - np.float32(how["mean"][0])) / np.float32(how["std"][0])
answers, steps, left = np.zeros(len(images), int), np.zeros(len(images), int), np.arange(len(images))
inputs = {"images": images}
for count, name in enumerate(rule["graphs"], start=1):
    state, logits, score = graphs[name].run(None, inputs)
    done = (score >= rule["threshold"]) | (count == len(rule["graphs"]))
    answers[left[done]], steps[left[done]] = logits[done].argmax(1), count
    left, inputs = left[~done], {"state_before": state[~done], "logits_before": logits[~done]}
    if len(left) == 0:
        break
assert not {"torch", "odevit", "transformers"} & set(sys.modules), "onnxruntime must be enough"
print(json.dumps({"labels": [rule["labels"][i] for i in answers], "steps": steps.tolist()}))
"""


def calibrated(score="margin", threshold=None, **options):
    """A model that stops about half of the digits early."""
    fields = {"num_channels": 1, "image_size": 8, "patch_size": 2, "num_steps": 3, "num_labels": 10, **options}
    model = perturbed_model(**fields, image_mean=[0.3], image_std=[0.35]).eval()
    model.config.id2label = {i: f"digit {i}" for i in range(10)}
    own = {"solver": model.config.solver, "num_steps": model.config.num_steps, "checksum": checksum(model)}
    if threshold is None:
        threshold = float(record(model, IMAGES, score).scores[0].sort().values[19:21].mean())  # no image's own score
    told = {"alpha": 0.01, "delta": 0.05, "images": 40, "disagreements": 0, "mean_steps": 2.0}
    model.config.halting = {"score": score, "threshold": threshold, **own, **told}
    return model


def invoke(*arguments):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False)


def test_onnxruntime_alone_stops_where_the_model_stops(tmp_path):
    model = calibrated(num_fields=2, num_steps=2)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "pixels.npy", PIXELS)
    result = invoke("export", tmp_path / "model", "--format", "onnx", "--halting", "-o", tmp_path / "family", "--json")
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert numbers["largest_difference"] <= 1e-4
    assert numbers["agreement"] == numbers["same_steps"] == 1
    assert 1 < numbers["mean_steps"] < numbers["full_depth"] == 2
    names = sorted(file.name for file in (tmp_path / "family").iterdir())
    assert names == ["first.onnx", "halting.json", "next.onnx"]  # a step of each field
    script = [sys.executable, "-I", "-c", SCRIPT, tmp_path / "family", tmp_path / "pixels.npy"]
    found = json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    with torch.no_grad():
        wanted = model(IMAGES, halting="calibrated")
    assert set(wanted.steps.tolist()) == {1, 2}
    assert found["steps"] == wanted.steps.tolist()
    assert found["labels"] == [f"digit {i}" for i in wanted.logits.argmax(1).tolist()]


class EveryScore(nn.Module):
    """One step, and what each score says of it: one graph for all of them."""

    def __init__(self, model):
        super().__init__()
        self.steps = nn.ModuleList(Step(model, Grid(3), 0, 1 / 3, score) for score in SCORES)

    def forward(self, state_before, logits_before):
        return tuple(step(state_before, logits_before)[2] for step in self.steps)


def test_every_score_can_be_exported(tmp_path):
    model = calibrated(threshold=0.0)
    with torch.no_grad():
        before = model.odevit.embed(IMAGES)
        inputs = before, model.classify(before)
        wanted = EveryScore(model)(*inputs)
        examples = tuple(part[:2] for part in inputs)
        write_graph(EveryScore(model), examples, tmp_path / "scores.onnx", INPUTS, list(SCORES), {})
    found = onnx_session(tmp_path / "scores.onnx").run(
        None, dict(zip(INPUTS, [p.numpy() for p in inputs], strict=True))
    )
    for score, ours, theirs in zip(SCORES, wanted, found, strict=True):
        assert torch.equal(ours.double(), record(model, IMAGES, score).scores[0]), score  # what the calibration saw
        assert float((ours - torch.from_numpy(theirs)).abs().max()) < 1e-5, score


def test_what_cannot_be_is_refused_before_a_graph_is_written(tmp_path):
    model = calibrated(threshold=0.5, num_steps=1)
    for field in ("halting", "classifier"):
        if field == "halting":
            kept, model.config.halting = model.config.halting, None
            message = "no calibrated rule"
        else:
            model.config.halting, message = kept, "calibrated for other weights"
            with torch.no_grad():
                model.classifier.bias[0] += 1
        with pytest.raises(ValueError, match=message):
            write_halting(model, tmp_path)
    for options, message in (
        (["--parts"], "--parts and --halting exclude each other"),
        (["--steps", 2], "leave out --steps and --solver"),
    ):
        with pytest.raises(ValueError, match=message):
            invoke("export", "digits", "--format", "onnx", "--halting", *options, "-o", tmp_path / "x")
    with pytest.raises(ValueError, match="--halting is for --format onnx"):
        invoke("export", "digits", "--format", "pt2", "--halting")
    assert list(tmp_path.iterdir()) == []
