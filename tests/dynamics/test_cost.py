"""Parameters and multiply-accumulates against closed forms, and the command that prints them."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from problems import tiny_model
from transformers import ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

from odevit import PRESETS, SOLVERS, OdeViTForImageClassification
from odevit.dynamics.cost import count_macs, count_parameters, describe, milliseconds_per_image
from odevit.model.solvers import ADAPTIVE


@pytest.fixture(scope="module")
def paper_base():
    with torch.device("meta"):
        return OdeViTForImageClassification.from_preset("paper-base")


@pytest.mark.parametrize(("preset", "ratio", "total"), [("paper-base", 4, 7_908_196), ("paper-small", 1, 4_369_252)])
def test_parameters_of_the_papers_models(preset, ratio, total):
    d, patch, classes, registers, patches = 768, 16, 100, 10, 14 * 14
    block = (4 + 2 * ratio) * d**2 + 4 * d  # q, k, v, o and the MLP, without bias; two CenterNorms
    tokens = (3 * patch**2 + 1) * d + (1 + (1 + patches) + registers) * d  # projection, CLS, positions, registers
    head = (d + 1) * classes
    assert block + tokens + head == total
    with torch.device("meta"):
        counts = count_parameters(OdeViTForImageClassification.from_preset(preset))
    assert counts == {"total": total, "trainable": total, "blocks": block}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "limit"), [("cifar-nano", 0.25e6), ("cifar-tiny", 0.5e6), ("cifar-small", 4e6)])
def test_cifar_presets_keep_their_limits(preset, limit):
    total = count_parameters(OdeViTForImageClassification.from_preset(preset))["total"]
    assert 0.4 * limit < total <= limit
    hundred = count_parameters(OdeViTForImageClassification.from_preset(preset, num_labels=100))["total"]
    assert hundred <= 1.001 * limit  # cifar-tiny: 500,165


def test_frozen_parameters_are_not_trainable():
    model = tiny_model()
    model.classifier.requires_grad_(False)
    counts = count_parameters(model)
    assert counts["total"] - counts["trainable"] == 33 * 5


@pytest.mark.slow
def test_macs_of_paper_base(paper_base):
    n, d, steps = 1 + 14 * 14 + 10, 768, 23
    macs = count_macs(paper_base)
    assert macs.flow == steps * (12 * n * d**2 + 2 * n**2 * d)
    assert macs.flow / 1e9 == pytest.approx(35.21, abs=0.005)
    assert macs.total == macs.flow + 14 * 14 * 3 * 16**2 * d + d * 100


@pytest.mark.slow
def test_macs_of_a_vit_base_at_224():
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(num_labels=1000))
    macs = count_macs(vit)
    n, d = 197, 768
    assert macs.flow == 12 * (12 * n * d**2 + 2 * n**2 * d)
    assert macs.total == macs.flow + 196 * d * 768 + d * 1000
    assert macs.total / 1e9 == pytest.approx(17.56, abs=0.01)


@pytest.mark.slow
def test_macs_grow_linearly_with_the_steps():
    model = tiny_model()
    one = count_macs(model, num_steps=1)
    for steps in (2, 7, 24):
        macs = count_macs(model, num_steps=steps)
        assert macs.flow == steps * one.flow
        assert macs.total - macs.flow == one.total - one.flow


@pytest.mark.parametrize("solver", SOLVERS)
def test_macs_follow_the_evaluations_of_each_solver(solver):
    model, n, d = tiny_model(), 19, 32
    F, G = 2 * 2 * n * d**2, 4 * n * d**2 + 2 * n**2 * d
    cost = SOLVERS[solver].evaluations
    assert count_macs(model, num_steps=3, solver=solver).flow == 3 * (cost.F * F + cost.G * G)


def test_macs_do_not_depend_on_the_spectral_cap_and_leave_the_model_alone():
    model = tiny_model(spectral_cap=1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert count_macs(model) == count_macs(tiny_model())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    size = model.config.image_size
    assert model(torch.zeros(1, model.config.num_channels, size, size)).logits.isfinite().all()  # it still runs


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_adaptive_solvers_have_no_count(solver):
    for arguments in ((tiny_model(), solver), (tiny_model(solver=solver), None)):
        with pytest.raises(ValueError, match=f"{solver} chooses its steps by the image.*choose one of euler"):
            count_macs(arguments[0], solver=arguments[1])


@pytest.mark.slow
def test_description_agrees_with_the_counts():
    model = tiny_model(num_fields=2, tokenizer="conv")
    numbers = describe(model, num_steps=6, solver="heun")
    assert numbers["parameters"] == count_parameters(model)
    assert (numbers["macs"]["total"], numbers["macs"]["flow"]) == count_macs(model, num_steps=6, solver="heun")
    assert (numbers["num_steps"], numbers["solver"]) == (6, "heun")
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert numbers["bytes"] == 4 * numbers["parameters"]["total"] + buffers
    assert numbers["lipschitz_bound"] > 0
    assert describe(tiny_model(attention="sinkhorn"))["lipschitz_bound"] is None


def test_timing_gives_a_positive_number_per_model():
    times = milliseconds_per_image({"a": tiny_model(), "b": tiny_model(num_steps=60)}, torch.randn(4, 3, 16, 16), 3)
    assert 0 < times["a"] < times["b"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_info_prints_what_was_counted():
    from odevit_cli import app

    result = CliRunner().invoke(app, ["info", "cifar-nano", "--json", "--steps", "9", "--solver", "strang"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    model = OdeViTForImageClassification.from_preset("cifar-nano")
    assert numbers["model"] == "cifar-nano"
    assert numbers["parameters"] == count_parameters(model)
    assert tuple(numbers["macs"].values()) == count_macs(model, num_steps=9, solver="strang")
    table = CliRunner().invoke(app, ["info", "cifar-nano"])
    assert f"{numbers['parameters']['total']:,}" in table.stdout


def test_info_reads_a_saved_model(tmp_path):
    from odevit_cli import app

    model = tiny_model()
    model.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["parameters"] == count_parameters(model)


def test_unknown_presets_end_with_one_sentence_and_code_1(monkeypatch, capsys):
    from odevit_cli import main

    monkeypatch.setattr(sys, "argv", ["odevit", "info", "paper-huge"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: unknown model 'paper-huge'")
    assert all(preset in err for preset in PRESETS)
    assert err.count("\n") == 1


def test_help_answers_at_once():
    probe = "import odevit_cli, sys; assert not {'torch', 'transformers', 'odevit'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-m", "odevit_cli", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "quickstart" in result.stdout
    assert "info" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1  # seconds of CPU time


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_precision_are_counted_and_described(dtype):
    model = tiny_model(mixing="depthwise")
    expected = describe(model)
    found = describe(model.to(dtype))
    assert found["macs"] == expected["macs"]
    assert found["lipschitz_bound"] == pytest.approx(expected["lipschitz_bound"], rel=0.1)


@pytest.mark.parametrize("options", [{"pool": "sequence"}, {"projection_size": 8}])
def test_what_reads_the_state_is_no_part_of_the_flow(options):
    once, twice = (count_macs(tiny_model(**options), num_steps=steps) for steps in (1, 2))
    assert twice.flow == 2 * once.flow
    assert once.flow == count_macs(tiny_model(), num_steps=1).flow
