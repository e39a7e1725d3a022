"""`odevit calibrate` on a small model of digits: the guarantee over random splits, and what predict makes of it."""

import json
import shutil

import pytest
import torch
from PIL import Image
from problems import tiny_model
from tiny_runs import tiny_recipe
from typer.testing import CliRunner

import odevit_cli
from odevit import OdeViTConfig, OdeViTForImageClassification, OdeViTModel
from odevit.commands.calibrate import write_config
from odevit.commands.page import page_of
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.dynamics.calibration import Record, calibrate, disagreements, record, stopping_steps
from odevit.model.halting import SCORES
from odevit.training.evaluation import model_input


def invoke(*arguments):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that is right on most digits, and all digits as its model takes them."""
    folder = tmp_path_factory.mktemp("calibrate") / "run"
    recipe = tiny_recipe(
        folder, data={"limit": None}, model={"num_steps": 6, "depth": 4}, loop={"eval_every": 120},
        optim={"steps": 120, "lr": 5e-3},
    )  # fmt: skip
    train_recipe(recipe, progress_bar=False)
    model = OdeViTForImageClassification.from_pretrained(folder / "model").eval()
    data = load_data(DataConfig(name="digits", image_size=8))
    images = torch.cat([split.fetch(torch.arange(len(split)))[0] for split in (data.train, data.val, data.test)])
    return folder, model, model_input(model, images)


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained[0] / "model", tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("score", list(SCORES))
def test_disagreement_stays_below_alpha_over_random_splits(trained, score):
    """60 random splits: calibrated on 500 digits, observed on the other 1,297; and steps are really saved."""
    _, model, images = trained
    recorded = record(model, images, score, batch_size=256)
    held, saved = 0, []
    for seed in range(60):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        chosen, rest = order[:500], order[500:]
        found = calibrate(Record(recorded.answers[:, chosen], recorded.scores[:, chosen]), SCORES[score].thresholds)
        there = Record(recorded.answers[:, rest], recorded.scores[:, rest])
        held += float(disagreements(there, found.threshold).double().mean()) <= 0.01
        saved.append(6 - float(stopping_steps(there.scores, found.threshold).double().mean()))
    assert held >= 57  # 95 %
    print(f"{score}: held in {held} of 60, {sum(saved) / 60:.2f} of 6 steps saved")
    assert score == "velocity" or sum(saved) / 60 > 0.2  # on this flow how fast a state moves says little


def test_it_is_written_into_the_config_and_used_by_predict(trained, folder, tmp_path):
    weights = (folder / "model.safetensors").read_bytes()
    result = invoke("calibrate", folder, "--data", "digits", "--split", "train", "--alpha", 0.05, "--json")
    said = json.loads(result.stdout)
    config = OdeViTConfig.from_pretrained(folder)
    assert config.halting == {key: value for key, value in said.items() if key != "setting"}
    assert (config.solver, config.num_steps) == (said["setting"]["solver"], said["setting"]["num_steps"])
    assert said["images"] == 647  # the other half of 1,294 chose the setting
    assert (folder / "model.safetensors").read_bytes() == weights

    model = OdeViTForImageClassification.from_pretrained(folder).eval()
    pixels = load_data(DataConfig(name="digits", image_size=8)).test.fetch(torch.arange(20))[0]
    for i, image in enumerate(pixels):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{i:02}.png")
    found = [json.loads(line) for line in invoke("predict", folder, tmp_path / "*.png", "--json").stdout.splitlines()]
    halted = model(model_input(model, pixels), halting="calibrated")
    assert [entry["steps"] for entry in found] == halted.steps.tolist()
    assert [entry["answers"][0]["label"] for entry in found] == [str(i) for i in halted.logits.argmax(1).tolist()]
    full = [
        json.loads(line)
        for line in invoke("predict", folder, tmp_path / "*.png", "--json", "--full-depth").stdout.splitlines()
    ]
    assert "steps" not in full[0]


def test_keeping_the_setting(folder):
    before = OdeViTConfig.from_pretrained(folder)
    text = invoke(
        "calibrate", folder, "--data", "digits", "--split", "train", "--keep-setting", "--score", "change"
    ).stdout
    after = OdeViTConfig.from_pretrained(folder)
    assert (after.solver, after.num_steps) == (before.solver, before.num_steps)
    assert (after.halting["score"], after.halting["images"]) == ("change", 1294)
    assert "at most 1.0% of all images" in " ".join(text.split())


def test_bad_input(folder, tmp_path):
    def error(*arguments, model=folder):
        with pytest.raises(ValueError, match=r".") as caught:
            invoke("calibrate", model, "--data", "digits", *arguments)
        return str(caught.value)

    assert "needs at least 299 images" in error()  # 144 in val
    assert "--keep-setting" in error()
    assert "alpha must lie strictly between 0 and 1, got 1.5" in error("--alpha", 1.5)
    assert "delta must lie strictly between 0 and 1, got 0.0" in error("--delta", 0)
    assert "choose one of margin" in error("--split", "train", "--keep-setting", "--score", "luck")
    headless = OdeViTModel(OdeViTConfig.from_pretrained(folder))
    headless.save_pretrained(tmp_path / "headless")
    assert "has no head" in error("--split", "train", model=tmp_path / "headless")


def test_predict_refuses_the_rule_of_other_weights(folder, tmp_path):
    invoke("calibrate", folder, "--data", "digits", "--split", "train", "--keep-setting", "--alpha", 0.05)
    model = OdeViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        model.classifier.bias[0] += 1
    model.save_pretrained(folder)
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    with pytest.raises(ValueError, match="calibrated for other weights"):
        invoke("predict", folder, tmp_path / "image.png")
    assert invoke("predict", folder, tmp_path / "image.png", "--full-depth").exit_code == 0


def test_the_zoo_is_not_rewritten_and_a_wrong_score_is_told_first(folder):
    with pytest.raises(ValueError, match="belongs to the package"):
        invoke("calibrate", "digits", "--data", "digits")
    with pytest.raises(ValueError, match="unknown score 'margn'"):
        invoke("calibrate", folder, "--data", "nowhere", "--score", "margn")


def test_labels_keep_their_order_in_the_file(folder):
    """Of more than ten classes: sorted as text, 10 comes before 2, and a page named its answers so."""
    network = OdeViTForImageClassification.from_pretrained(folder)
    write_config(network, folder)
    assert list(json.loads((folder / "config.json").read_text())["id2label"]) == [str(i) for i in range(10)]
    more = tiny_model(num_labels=12)
    more.config.id2label = {index: f"class {index}" for index in (0, 1, 10, 11, *range(2, 10))}
    assert page_of(more, None, title="")["classes"] == [f"class {index}" for index in range(12)]
