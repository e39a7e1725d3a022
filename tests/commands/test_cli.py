"""The table of verbs: what is declared on the command line is what the functions take, and help costs nothing."""

import importlib
import inspect
import subprocess
import sys

import pytest

import odevit_cli

COMMANDS = {c.name or c.callback.__name__: c.callback for c in odevit_cli.app.registered_commands}


def test_every_verb_is_in_the_table():
    assert set(COMMANDS) == set(odevit_cli.VERBS)


@pytest.mark.parametrize("verb", odevit_cli.VERBS)
def test_a_verb_hands_its_options_to_a_function_that_takes_them(verb):
    module, _, name = odevit_cli.VERBS[verb].partition(":")
    function = getattr(importlib.import_module(module), name)
    takes = inspect.signature(function).parameters
    given = inspect.signature(COMMANDS[verb]).parameters
    assert set(given) <= set(takes)
    needed = {name for name, p in takes.items() if p.default is p.empty}
    assert needed <= set(given)
    assert function.__doc__


def test_help_of_every_verb_answers_without_torch():
    script = """
import sys, odevit_cli
from typer.testing import CliRunner
for words in ([], *([verb] for verb in odevit_cli.VERBS)):
    result = CliRunner().invoke(odevit_cli.app, [*words, "--help"], catch_exceptions=False)
    assert result.exit_code == 0 and "Usage" in result.stdout, words
assert not {"torch", "transformers", "odevit"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_config_of_a_wrong_type_ends_in_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "odevit", "hidden_size": "wide"}')
    monkeypatch.setattr("sys.argv", ["odevit", "info", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        odevit_cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert said.startswith("error:")
    assert "hidden_size" in said
    assert "Traceback" not in said


def test_train_takes_data_and_output_beside_the_recipe(tmp_path):
    from odevit.commands.train import train

    train("digits", ["optim.steps=1", "optim.batch_size=16", "loop.eval_every=1"], output=tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists()
    with pytest.raises(ValueError, match="not-there"):
        train("digits", data=str(tmp_path / "not-there"), output=tmp_path / "other")
