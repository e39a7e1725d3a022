"""Models in the package: found by name, whole, and as good as their cards say. And how one is made from a run."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from ship import card_text, ship
from ship import main as ship_main
from tiny_runs import tiny_recipe

import odevit
from odevit.commands.evaluate import evaluate
from odevit.commands.train import train, train_recipe
from odevit.commands.zoo import zoo as list_zoo
from odevit.model.halting import saved_rule
from odevit.shipped import card, checksum, names
from odevit.training.classifiers import load_odevit, resolve_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder / "run", optim={"steps": 4}, data={"limit": 100})
    return train_recipe(recipe, progress_bar=False).folder


def test_a_run_is_shipped_in_half_precision_with_what_was_measured(run, tmp_path):
    entry = ship(run, "tiny", data="digits", command="odevit train tiny", folder=tmp_path)
    folder = tmp_path / "tiny"
    assert json.loads(json.dumps(entry)) == json.loads((folder / "card.json").read_text())
    assert entry["sha256"] == checksum(folder)
    assert entry["bytes"] < 0.6 * (run / "model/model.safetensors").stat().st_size
    assert "`odevit train tiny`" in (folder / "README.md").read_text()
    model, before = load_odevit(str(folder)), load_odevit(str(run / "model"))
    for (name, half), full in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert half.dtype == torch.float32, name
        assert torch.equal(half, full.half().float()), name
    assert evaluate(str(folder), "digits")["top1"] == entry["accuracy"]
    assert entry["halting"]["alpha"] == 0.03  # what 144 validation images can prove
    assert saved_rule(model).threshold == entry["halting"]["threshold"]  # calibrated for the weights as shipped
    table = entry["halting"]["table"]
    assert [row["alpha"] for row in table] == [0.03, 0.05]
    assert table[0]["threshold"] == entry["halting"]["threshold"]
    assert table[0]["mean_steps"] >= table[1]["mean_steps"]  # who may change more may stop earlier
    for row in table:
        line = f"| {row['alpha']:.0%} | {row['mean_steps']:.2f} | {row['test_accuracy']:.2%} |"
        assert line in (folder / "README.md").read_text()


def test_a_contractive_model_is_shipped_with_what_is_proven(tmp_path):
    train("digits-certified", ["optim.steps=30", f"output={tmp_path / 'run'}"])
    entry = ship(tmp_path / "run", "sure", data="digits", command="a test", folder=tmp_path, halting=False)
    shares = list(entry["certified"].values())
    assert entry["accuracy"] >= shares[0] >= shares[1] >= shares[2]
    assert shares[0] > 0
    assert f"{shares[0]:.1%} within 36/255" in (tmp_path / "sure/README.md").read_text()


def test_a_shipped_model_may_take_a_cheaper_setting(run, tmp_path):
    own = ship(run, "own", data="digits", command="a test", folder=tmp_path)
    entry = ship(
        run, "fast", data="digits", command="a test", folder=tmp_path, faster=1.0, halting=False
    )  # any accuracy will do
    assert entry["halting"] is None
    assert entry["macs"] < own["macs"]
    model = load_odevit(str(tmp_path / "fast"))
    assert (model.config.solver, model.config.num_steps) == (entry["solver"], entry["num_steps"])
    assert entry["num_steps"] == 1
    assert evaluate(str(tmp_path / "fast"), "digits")["top1"] == entry["accuracy"]


@pytest.mark.parametrize("name", names())
def test_every_shipped_model_is_whole(name):
    entry, folder = card(name), odevit.zoo(name)
    assert entry["name"] == name
    assert checksum(folder) == entry["sha256"]
    model = load_odevit(name)
    assert sum(p.numel() for p in model.parameters()) == entry["parameters"]
    if entry["halting"] is None:
        assert model.config.halting is None
        return
    assert saved_rule(model).threshold == entry["halting"]["threshold"]
    assert entry["halting"]["test_disagreement"] <= entry["halting"]["alpha"]


@pytest.mark.parametrize("name", names())
def test_every_card_is_written_from_its_numbers(name):
    entry = card(name)
    assert Path(odevit.zoo(name), "README.md").read_text() == card_text(entry)
    assert all(entry[field] for field in ("about", "recipe", "command", "intended_use", "limits"))
    assert ("exact solution has" in entry["limits"]) == (entry["flow"]["gap"] > 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_shipped_model_is_as_good_as_its_card_says(name):
    """On digits always; of the others where a variable says which folder has the data: ODEVIT_CIFAR_10=DIRECTORY."""
    entry = card(name)
    variable = f"ODEVIT_{entry['data'].upper().replace('-', '_')}"
    data = "digits" if entry["data"] == "digits" else os.environ.get(variable)
    if not data:
        pytest.skip(f"{variable} names no folder with {entry['data']}")
    found = evaluate(name, data)
    assert found["count"] == entry["images"]
    assert found["top1"] == pytest.approx(entry["accuracy"], abs=1.5 / entry["images"])  # one image


def test_the_list_has_every_model(capsys):
    assert [entry["name"] for entry in list_zoo(as_json=True)] == names()
    assert json.loads(capsys.readouterr().out) == [card(name) for name in names()]
    list_zoo()
    printed = capsys.readouterr().out
    assert all(name in printed for name in names())


def test_names_are_known_everywhere_and_unknown_ones_list_the_zoo():
    assert all(resolve_model(name) == odevit.zoo(name) for name in names())
    with pytest.raises(ValueError, match="the zoo has: " + ", ".join(names())):
        odevit.zoo("digit")
    with pytest.raises(ValueError, match="nor one of the zoo"):
        resolve_model("digit")


def test_the_script_wants_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ship.py", "run", "name"])
    with pytest.raises(SystemExit):
        ship_main()
    assert "--data" in capsys.readouterr().err
