"""`odevit page`: where its examples come from, and what it says of wrong input."""

import json
import re

import pytest
import torch

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.commands.page import data_of_the_run, page
from odevit.training.classifiers import load_odevit


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder as a run on digits leaves it: the recipe, and the model beside it."""
    folder = tmp_path_factory.mktemp("run")
    config = OdeViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=1, mlp_ratio=1, depth=1,
        num_steps=2, num_labels=10,
    )  # fmt: skip
    OdeViTForImageClassification(config).save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text(f"output: {folder}\nmodel: {{}}\ndata: {{name: digits}}\noptim: {{steps: 1}}\n")
    return folder


def payload_of(path) -> dict:
    return json.loads(re.search(r'class="payload">(.*?)</script>', path.read_text()).group(1))


def test_the_examples_come_from_the_run_of_the_model(run, tmp_path, capsys):
    assert data_of_the_run(str(run / "model")) == "digits"
    path = page(str(run / "model"), output=tmp_path / "page.html")
    payload = payload_of(path)
    assert [example["label"] for example in payload["examples"]] == list(range(10))
    assert payload["title"] == run.name
    assert f"page: {path}" in capsys.readouterr().out


def test_a_model_without_a_run_has_a_page_without_examples(run, tmp_path, capsys):
    (run / "model").rename(alone := tmp_path / "alone")
    try:
        payload = payload_of(page(str(alone), title="T", output=tmp_path / "page.html"))
    finally:
        alone.rename(run / "model")
    assert payload["examples"] == []
    assert "--data gives them" in capsys.readouterr().out
    assert (payload["title"], len(payload["classes"])) == ("T", 10)


def test_a_shipped_model_has_its_examples(tmp_path):
    payload = payload_of(page("digits", output=tmp_path / "new" / "page.html"))  # the folder is made
    assert [example["label"] for example in payload["examples"]] == list(range(10))
    assert payload["halting"]["alpha"] > 0  # calibrated


def test_the_rule_of_other_weights_is_refused(tmp_path):
    model = load_odevit("digits")
    with torch.no_grad():
        model.classifier.bias[0] += 1
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="calibrated for other weights"):
        page(str(tmp_path / "model"), output=tmp_path / "page.html")
