"""Every verb that writes says before any work that it cannot."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import odevit
import odevit_cli
from odevit.commands.console import print_table

VERBS = {
    "predict": ["digits", "image.png", "--attention", "{place}"],
    "export": ["digits", "--format", "onnx", "-o", "{place}"],
    "page": ["digits", "-o", "{place}"],
    "analyze": ["digits", "--data", "digits", "-o", "{place}"],
    "audit": ["no-teacher", "--data", "digits", "-o", "{place}"],
    "calibrate": ["{broken}", "--data", "digits"],
    "train": ["digits", "--set", "output={place}"],
    "distill": ["--teacher", "no-teacher", "--data", "digits", "-o", "{place}"],
    "quickstart": ["-o", "{place}"],
}
SILENT = {"info", "recipes", "eval", "doctor", "zoo", "plan"}  # these write nothing


def test_every_verb_is_here():
    assert set(VERBS) | SILENT == set(odevit_cli.VERBS)


def refuse(path, *mode, **options):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_cannot_be_written_is_told_before_work(verb, tmp_path, monkeypatch):
    """Below a file nothing can be made; neither models nor data may have been loaded by then."""
    (tmp_path / "file").touch()
    broken = tmp_path / "model"  # whose config.json cannot be opened for writing
    shutil.copytree(odevit.zoo("digits"), broken)
    if verb == "calibrate":
        monkeypatch.setattr(Path, "open", refuse)
    for name in ("odevit.commands.page.load_odevit", "odevit.commands.analyze.load_odevit",
                 "odevit.commands.audit.load_teacher", "odevit.commands.calibrate.load_odevit",
                 "odevit.commands.train.load_data", "odevit.commands.distill.load_data",
                 "odevit.commands.predict.load_classifier", "odevit.commands.export.load_odevit"):  # fmt: skip
        monkeypatch.setattr(name, lambda *a, **k: pytest.fail("work began"))
    words = [word.format(place=tmp_path / "file" / "below" / "x", broken=broken) for word in VERBS[verb]]
    with pytest.raises(ValueError, match="cannot write"):
        CliRunner().invoke(odevit_cli.app, [verb, *words], catch_exceptions=False)


def test_a_table_in_a_log_cuts_no_number(capsys):
    columns = ("held-out", "top-1", "agreement", "certified", "flow gap", "parameters", "steps")
    print_table("study", {"an arm with quite a long name (seed 0)": dict.fromkeys(columns, "1,234,567.89")}, columns)
    assert capsys.readouterr().out.count("1,234,567.89") == len(columns)
