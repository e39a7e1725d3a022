"""`odevit predict` through the command line."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from problems import tiny_model
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import odevit_cli
from odevit.checksum import checksum
from odevit.commands import predict as command
from odevit.training.classifiers import load_classifier


def invoke(*arguments, **options):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False, **options)


def records(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def digits():
    return np.round(load_digits().images * (255 / 16)).astype(np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    network = tiny_model(
        num_channels=1, image_size=8, patch_size=2, id2label={i: f"class {i}" for i in range(5)}, image_mean=[0.3],
        image_std=[0.4],
    )  # fmt: skip
    network.save_pretrained(folder / "model")
    return network.eval(), folder


@pytest.fixture
def images(tmp_path, digits):
    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.fromarray(digits[i]).save(tmp_path / f"images/{i}.png")
    return tmp_path / "images"


def expected(network, pixels, **options):
    with torch.no_grad():
        images = (torch.from_numpy(pixels)[:, None].float() / 255 - 0.3) / 0.4
        return network(images, **options).logits.softmax(-1)


@pytest.mark.parametrize("options", [{}, {"num_steps": 3, "solver": "rk4"}])
def test_answers_are_the_models(model, images, digits, options):
    network, folder = model
    flags = ["--steps", 3, "--solver", "rk4"] if options else []
    found = records(invoke("predict", folder, images, "--json", *flags))  # a run's folder holds its model
    scores = expected(network, digits[:3], **options)
    assert [record["file"] for record in found] == [str(images / f"{i}.png") for i in range(3)]
    for record, row in zip(found, scores, strict=True):
        assert [answer["label"] for answer in record["answers"]] == [f"class {i}" for i in row.argsort(descending=True)]
        best = row.sort(descending=True).values
        assert [answer["score"] for answer in record["answers"]] == pytest.approx(best.tolist(), abs=1e-6)


def test_a_shipped_model_answers_out_of_the_box(tmp_path, digits):
    """`odevit predict digits IMAGE`, as the README has it: the answers, and that it stops when it has arrived."""
    for i in range(30):
        Image.fromarray(digits[i]).save(tmp_path / f"{i:02}.png")
    found = records(invoke("predict", "digits", tmp_path, "--json"))
    right = sum(record["answers"][0]["label"] == str(load_digits().target[i]) for i, record in enumerate(found))
    assert right >= 28
    assert {record["steps"] for record in found} <= {1, 2, 3, 4}
    assert "arrived after" in invoke("predict", "digits", tmp_path / "00.png").stdout


def test_bars_are_as_long_as_the_probabilities(model, images, digits):
    network, folder = model
    lines = invoke("predict", folder / "model", images / "0.png", "--top-k", 2).stdout.splitlines()
    best = expected(network, digits[:1])[0].topk(2)
    assert lines[0] == str(images / "0.png")
    assert len(lines) == 3
    for line, score, index in zip(lines[1:], best.values, best.indices, strict=True):
        assert line.split()[:3] == ["class", str(int(index)), f"{score:.2%}"]
        assert line.count("█") == round(command.BAR * float(score))


def test_a_broken_file_is_named_and_the_rest_goes_on(model, images):
    (images / "1.png").write_bytes((images / "1.png").read_bytes()[:50])
    result = invoke("predict", model[1], images, images / "gone.png", "--json")
    assert result.exit_code == 1
    found = records(result)
    assert ["answers" in record for record in found] == [True, False, True, False]
    assert "1.png (" in found[1]["error"]
    assert "no such file" in found[3]["error"]
    assert "2 of 4 images could not be read" in result.stderr
    assert f"cannot read {images / '1.png'} (" in invoke("predict", model[1], images).stdout


def test_hundreds_of_images_stream_in_batches_and_in_order(model, tmp_path, digits, monkeypatch):
    monkeypatch.setattr(command, "BATCH", 16)
    for i in range(50):
        Image.fromarray(digits[i]).save(tmp_path / f"{i:03}.png")
    (tmp_path / "020.png").write_bytes(b"broken")
    sizes = []
    original = command.probabilities
    monkeypatch.setattr(command, "probabilities", lambda n, p, o: sizes.append(len(p)) or original(n, p, o))
    found = records(invoke("predict", model[1], tmp_path / "*.png", "--json", "--top-k", 1))
    assert sizes == [16, 15, 16, 2]
    best = expected(model[0], digits[:50]).argmax(-1).tolist()
    answers = [record["answers"][0]["label"] if "answers" in record else None for record in found]
    assert answers == [f"class {label}" if i != 20 else None for i, label in enumerate(best)]


def test_standard_input_is_read(model, images, digits):
    result = invoke("predict", model[1], "-", "--json", input=(images / "2.png").read_bytes())
    best = expected(model[0], digits[2:3])[0].max()
    assert records(result)[0]["answers"][0]["score"] == pytest.approx(float(best), abs=1e-6)


def test_attention_is_drawn(model, images, tmp_path):
    invoke("predict", model[1], images, "--attention", tmp_path / "new" / "attention.png")
    width, height = Image.open(tmp_path / "new" / "attention.png").size
    assert width > 500
    assert height > 200


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-here", "unknown model 'nothing-here'.*zoo"),
        ("{images}", "holds no model"),
        ("{images}/0.png", "is a file; a model is a folder"),
    ],
)
def test_unknown_models_are_named(name, message, images, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        invoke("predict", name.format(images=images), images)


def test_steps_are_refused_for_a_discrete_vit(tmp_path, images):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="mean and std"):
        invoke("predict", tmp_path / "vit", images)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "ViTImageProcessor"}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    assert len(records(invoke("predict", tmp_path / "vit", images, "--json"))) == 3
    for flags in (["--steps", 3], ["--attention", tmp_path / "a.png"]):
        with pytest.raises(ValueError, match="ODE-ViT"):
            invoke("predict", tmp_path / "vit", images, *flags)


# --- PEFT folders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(model, tmp_path):
    """A LoRA of the ODE-ViT with a new head of three classes, all weights away from their start."""
    peft = pytest.importorskip("peft")
    base = command.load_classifier(str(model[1] / "model"))
    base.classifier = torch.nn.Linear(base.config.hidden_size, 3)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    network = peft.get_peft_model(base, config)
    for parameter in network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    network.peft_config["default"].base_model_name_or_path = str(model[1] / "model")
    network.save_pretrained(tmp_path / "adapter")
    return network.eval(), tmp_path / "adapter"


def test_an_adapter_is_loaded_through_peft(adapter, images, digits):
    network, folder = adapter
    found = records(invoke("predict", folder, images, "--json"))
    best = expected(network, digits[:3]).max(-1).values
    assert [len(record["answers"]) for record in found] == [3, 3, 3]
    assert [record["answers"][0]["score"] for record in found] == pytest.approx(best.tolist(), abs=1e-5)


def test_without_peft_the_error_says_how_to_merge(adapter, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"is a PEFT adapter of .*pip install peft.*merge_and_unload"):
        invoke("predict", adapter[1], images)


def test_a_calibrated_model_stops_early_and_says_so(model, images, tmp_path):
    network = load_classifier(str(model[1]))
    own = {"solver": network.config.solver, "num_steps": network.config.num_steps, "checksum": checksum(network)}
    network.config.halting = {"score": "margin", "threshold": -1.0, **own}  # all are content after the first step
    network.save_pretrained(tmp_path / "calibrated")
    found = records(invoke("predict", tmp_path / "calibrated", images, "--json"))
    assert {record["steps"] for record in found} == {1}
    assert "arrived after step 1" in invoke("predict", tmp_path / "calibrated", images).output
    chosen = records(invoke("predict", tmp_path / "calibrated", images, "--json", "--steps", "3"))
    assert all("steps" not in record for record in chosen)
    invoke("predict", tmp_path / "calibrated", images, "--attention", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
