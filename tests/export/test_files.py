"""Exported files give the model's answers, in processes that know neither odevit nor torch."""

import json
import subprocess
import sys
from itertools import zip_longest

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from problems import perturbed_model
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import odevit_cli
from odevit.export import files
from odevit.model.layers import ATTENTIONS, MIXINGS, NORMS, TOKENIZERS
from odevit.model.pools import POOLS
from odevit.model.solvers import SOLVERS

REGISTRIES = {
    "tokenizer": TOKENIZERS, "pool": POOLS, "attention": ATTENTIONS, "mixing": MIXINGS, "norm": NORMS,
    "final_norm": NORMS, "solver": ["lie_trotter", "midpoint", "euler"], "num_steps": [1, 1, 2, 2, 2],
}  # fmt: skip
# every value of every registry in at least one variant; the two settings without a registry are in the last
VARIANTS = [
    {name: value or next(iter(registry)) for (name, registry), value in zip(REGISTRIES.items(), row, strict=True)}
    for row in zip_longest(*REGISTRIES.values())
]
VARIANTS[-1] |= {"num_fields": 2, "spectral_cap": 0.7, "bias": True}
VARIANTS.append({"field": "contractive", "depth": 1, "num_steps": 1, "pool": "sqrt_mean"})


def digits(count=12):
    images = torch.from_numpy(np.round(load_digits().images[:count] * (255 / 16))).float() / 255
    return (images[:, None] - 0.3) / 0.35


def small(**options):
    fields = {"num_channels": 1, "image_size": 8, "patch_size": 2, "num_steps": 2, **options}
    return perturbed_model(**fields, image_mean=[0.3], image_std=[0.35])


def invoke(*arguments):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def model():
    return small(num_labels=10, id2label={i: f"digit {i}" for i in range(10)}, num_fields=2)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "model.onnx"
    files.write_onnx(model, file)
    return file


@pytest.fixture(scope="module")
def parts(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    files.write_parts(model, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(map(str, options.values())))
def test_every_option_of_the_model_can_be_exported(options, tmp_path):
    network = small(**options)
    files.write_onnx(network, tmp_path / "model.onnx")
    files.write_pt2(network, tmp_path / "model.pt2")
    with torch.no_grad():
        expected = network.eval()(digits()).logits
    for run in (files.onnx_runner(tmp_path / "model.onnx"), files.pt2_runner(tmp_path / "model.pt2")):
        assert (files.logits_of(run, digits(), (1, 5)) - expected).abs().max() < files.TOLERANCE


SCRIPT = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
notes = session.get_modelmeta().custom_metadata_map
labels, how = json.loads(notes["labels"]), json.loads(notes["preprocessing"])
pixels = [np.asarray(Image.open(file).convert("L"), np.float32) / 255 for file in sys.argv[2:]]
assert all(image.shape == (how["image_size"],) * 2 for image in pixels)
images = (np.stack(pixels)[:, None] - np.float32(how["mean"][0])) / np.float32(how["std"][0])
logits = session.run(None, {"images": images})[0]
assert not {"torch", "odevit", "transformers"} & set(sys.modules), "onnxruntime must be enough"
print(json.dumps({"labels": [labels[i] for i in logits.argmax(-1)], "logits": logits.tolist()}))
"""


def test_the_file_runs_in_a_process_without_odevit_and_torch(model, whole, tmp_path):
    pixels = np.round(load_digits().images[:5] * (255 / 16)).astype(np.uint8)
    names = [tmp_path / f"{i}.png" for i in range(5)]
    for name, image in zip(names, pixels, strict=True):
        Image.fromarray(image).save(name)
    script = [sys.executable, "-I", "-c", SCRIPT, whole, *names]
    output = json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    with torch.no_grad():
        expected = model.eval()(digits(5)).logits
    assert output["labels"] == [f"digit {i}" for i in expected.argmax(-1)]
    assert np.abs(np.array(output["logits"]) - expected.numpy()).max() < files.TOLERANCE


def test_weights_are_stored_once_and_no_path_of_this_machine(model, whole, tmp_path):
    stored = sum(np.prod(tensor.dims) * 4 for tensor in onnx.load(whole).graph.initializer)
    assert stored < 1.1 * model.num_parameters() * 4  # two steps for each field share its matrices
    files.write_pt2(model, tmp_path / "model.pt2")
    for file in (whole, tmp_path / "model.pt2"):
        assert b"site-packages" not in file.read_bytes()
        assert b"/src/" not in file.read_bytes()
    notes = {name: "" for name in ("labels", "flow", "preprocessing")}
    torch.export.load(tmp_path / "model.pt2", extra_files=notes)
    assert json.loads(notes["labels"]) == [f"digit {i}" for i in range(10)]
    assert json.loads(notes["flow"])["steps"] == [[0, 0.5], [1, 0.5]]


def test_the_parts_can_be_driven_by_a_loop_of_ones_own(model, parts):
    """Euler in three lines of numpy, the grid read from the metadata."""
    sessions = {file.stem: files.onnx_session(file) for file in parts.iterdir()}
    assert set(sessions) == {"embed", "field_0", "field_1", "head"}
    flow = json.loads(sessions["embed"].get_modelmeta().custom_metadata_map["flow"])
    [state] = sessions["embed"].run(None, {"images": digits().numpy()})
    for field, step in flow["steps"]:
        state = state + np.float32(step) * sum(sessions[f"field_{field}"].run(None, {"state": state}))
    [logits] = sessions["head"].run(None, {"state": state})
    with torch.no_grad():
        assert np.abs(logits - model.eval()(digits()).logits.numpy()).max() < files.TOLERANCE


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_parts_serve_every_solver(solver, model, parts):
    run = files.parts_runner(model, parts, 3, solver)
    with torch.no_grad():
        expected = model.eval()(digits(), num_steps=3, solver=solver).logits
        assert (run(digits()) - expected).abs().max() < files.TOLERANCE


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small(num_labels=10, id2label={i: str(i) for i in range(10)}).save_pretrained(path)
    return path


def test_int8_prints_accuracy_and_agreement(folder, tmp_path):
    options = ["--format", "onnx", "--int8", "--steps", 1, "-o", tmp_path / "new" / "m.onnx", "--json"]
    numbers = json.loads(invoke("export", folder, *options).stdout.splitlines()[-1])
    assert numbers["images"] == 256
    assert numbers["largest_difference"] <= 1e-4
    assert numbers["agreement"] == 1
    assert 0.5 < numbers["agreement (int8)"] <= 1
    assert numbers["largest_difference (int8)"] > 1e-4  # it was quantised
    assert abs(numbers["accuracy_exported (int8)"] - numbers["accuracy"]) < 0.2
    kinds = {node.op_type for node in onnx.load(tmp_path / "new" / "m.onnx").graph.node}
    assert "MatMulInteger" in kinds


def test_a_file_that_differs_is_deleted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "pt2_runner", lambda file: lambda images: torch.zeros(len(images), 10))
    with pytest.raises(ValueError, match="differ from the model's by"):
        invoke("export", folder, "--format", "pt2", "--steps", 1, "-o", tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "tflite"], "unknown format 'tflite'; choose one of onnx, pt2, hub"),
        (["--format", "pt2", "--int8"], "--int8 is for --format onnx"),
        (["--format", "onnx", "--int8", "--parts"], "exclude each other"),
        (["--format", "onnx", "--solver", "dopri5"], "fixed number of steps, dopri5 chooses its own"),
        (["--format", "onnx", "--solver", "eulr"], "eulr"),
        (["--format", "onnx", "-o", "{tmp_path}"], "it is a folder"),
        (["--format", "hub", "-o", "{tmp_path}/file"], "cannot write"),
    ],
)
def test_impossible_wishes_are_refused(options, message, folder, tmp_path):
    (tmp_path / "file").touch()
    options = [option.format(tmp_path=tmp_path) for option in options]
    with pytest.raises(ValueError, match=message):
        invoke("export", folder, "-o", tmp_path / "m", *options)
