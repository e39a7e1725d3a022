"""`odevit eval`, `analyze` and `audit` through the command line."""

import json

import pytest
import torch
from problems import tiny_model
from typer.testing import CliRunner

import odevit_cli
from odevit.analysis import load_analyses
from odevit.teachers.teacher import tiny_teacher


def invoke(*arguments):
    return CliRunner().invoke(odevit_cli.app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def digits_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(num_channels=1, num_labels=10).save_pretrained(folder)
    return folder


def test_eval_prints_exact_counts_as_json(digits_model):
    result = json.loads(
        invoke("eval", digits_model, "--data", "digits", "--steps", 2, "--json").stdout.splitlines()[-1]
    )
    assert result["count"] == 359
    assert result["top1"] * 359 == pytest.approx(round(result["top1"] * 359))
    assert result["top1"] <= result["top3"] <= result["top5"]


@pytest.mark.usefixtures("brief")
def test_analyze_runs_every_analysis_and_tells_the_sampling(digits_model, tmp_path):
    folder = tmp_path / "report"
    options = ["--data", "digits", "--max-images", 6, "--quick", "-o", folder]
    assert invoke("analyze", digits_model, *options).exit_code == 0
    report = json.loads((folder / "report.json").read_text())
    assert {name.split("/")[0] for name in report["values"]} == set(load_analyses())
    assert "6 of 359 test images" in report["meta"]["images"]
    assert "no teacher was given" in (folder / "report.html").read_text()


def test_analyze_runs_only_what_was_asked_for(digits_model, tmp_path):
    invoke("analyze", digits_model, "--data", "digits", "--only", "trajectory", "--max-images", 12, "-o", tmp_path)
    values = json.loads((tmp_path / "report.json").read_text())["values"]
    assert {name.split("/")[0] for name in values} == {"trajectory"}


def test_audit_writes_a_report_with_its_verdict_first(tmp_path):
    torch.manual_seed(0)
    tiny_teacher("vit", image_size=16, patch_size=4, num_channels=1).module.save_pretrained(tmp_path / "teacher")
    invoke("audit", tmp_path / "teacher", "--data", "digits", "--max-images", 40, "-o", tmp_path / "audit")
    report = json.loads((tmp_path / "audit/report.json").read_text())
    assert report["headline"]
    assert "audit/verdict" in report["values"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "{teacher}", "--data", "digits"], "odevit audit"),
        (["analyze", "{model}", "--data", "digits", "--only", "nonsense"], "lyapunov"),
        (["eval", "{model}", "--data", "digits", "--solver", "rk5"], "lie_trotter"),
        (["eval", "{model}", "--data", "digits", "--split", "dev"], "train, val, test"),
        (["eval", "{empty}", "--data", "digits"], "config.json"),
        (["eval", "{model}", "--data", "/nowhere/at/all"], "nowhere"),
    ],
)
def test_wrong_input_ends_with_a_sentence(arguments, message, digits_model, tmp_path):
    (tmp_path / "empty").mkdir()
    tiny_teacher("vit", image_size=16, patch_size=4, num_channels=1).module.save_pretrained(tmp_path / "teacher")
    places = {"teacher": tmp_path / "teacher", "model": digits_model, "empty": tmp_path / "empty"}
    with pytest.raises((ValueError, OSError), match=message):
        invoke(*(argument.format(**places) for argument in arguments))
