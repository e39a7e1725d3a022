"""`odevit eval` and its data: validation images are those that the model's own run held out."""

import pytest
import torch
from tiny_runs import tiny_recipe

from odevit.commands.evaluate import held_out_by_run, load_data_for
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.training.classifiers import load_odevit


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    data = {"limit": None, "val_fraction": 0.02, "seed": 5}
    return train_recipe(tiny_recipe(folder, optim={"steps": 1}, data=data), progress_bar=False).folder


def images_of(split):
    return {tuple(image.flatten().tolist()) for image in split.fetch(torch.arange(len(split)))[0]}


@pytest.mark.slow
def test_no_validation_image_was_trained_on(run):
    seen = images_of(load_data(DataConfig(name="digits", image_size=8, val_fraction=0.02, seed=5)).train)
    found = load_data_for(load_odevit(str(run)), "digits").val
    assert len(found) == 29
    assert len(images_of(found) & seen) <= 1  # digits has a few pictures twice
    usual = load_data(DataConfig(name="digits", image_size=8)).val
    assert len(images_of(usual) & seen) > 100  # what was taken before


@pytest.mark.slow
def test_a_model_without_a_run_and_one_of_the_zoo(run, tmp_path):
    assert held_out_by_run(load_odevit(str(run)), "other") == {"val_fraction": 0.02, "seed": 5}
    load_odevit(str(run)).save_pretrained(tmp_path / "alone")
    assert held_out_by_run(load_odevit(str(tmp_path / "alone")), "digits") == {}
    assert held_out_by_run(load_odevit("digits"), "digits") == {"val_fraction": 0.1, "seed": 0}


def test_columns_of_the_run_are_read_again_for_its_own_data_and_best_is_of_the_run_too(run):
    model = load_odevit(str(run))
    columns = {"image_column": None, "label_column": None}
    assert held_out_by_run(model, "digits") == {"val_fraction": 0.02, "seed": 5, **columns}
    model.name_or_path = str(run / "best")
    assert held_out_by_run(model, "other") == {"val_fraction": 0.02, "seed": 5}


def test_classes_of_other_names_are_told(run, capsys):
    model = load_odevit(str(run))
    model.config.id2label = {index: name for index, name in enumerate("abcdefghij")}
    load_data_for(model, "digits", 64)
    assert "the model's classes are not named as those of the data: its 'a' is taken for '0'" in capsys.readouterr().err
