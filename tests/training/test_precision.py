"""bfloat16 on a CPU: the same answers to its eight bits, weights that stay float32, and a word where it is slow."""

import pytest
import torch
from tiny_runs import tiny_recipe

from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.training.config import LoopConfig
from odevit.training.precision import autocast, precision_of, slow_on


def test_auto_means_float32_without_a_gpu_that_can_do_less():
    assert precision_of(LoopConfig()) == ("bf16" if torch.cuda.is_available() else "no")
    assert precision_of(LoopConfig(mixed_precision="bf16")) == "bf16"
    assert precision_of(LoopConfig(mixed_precision="no")) == "no"


def test_the_context_is_the_precision():
    matrix = torch.eye(2)
    seen = {}
    for name in ("no", "bf16", "fp16"):
        with autocast(name, "cpu"):
            seen[name] = (matrix @ matrix).dtype
    assert seen == {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(("instructions", "slow"), [(True, False), (False, True)])
def test_slow_is_what_the_processor_cannot_multiply(instructions, slow, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert slow_on("bf16", "cpu") is slow
    assert slow_on("fp16", "cpu")
    assert not slow_on("no", "cpu")
    assert not slow_on("bf16", "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True])
def test_a_run_in_bfloat16_learns_as_one_in_float32(slow, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("odevit.training.claim.slow_on", lambda precision, device: slow and precision != "no")
    data = load_data(DataConfig(name="digits", limit=640))
    models = {}
    for name in ("no", "bf16"):
        recipe = tiny_recipe(tmp_path / name, optim={"steps": 8}, loop={"mixed_precision": name})
        result = train_recipe(recipe, data=data, progress_bar=False)
        models[name] = result.model.state_dict()
        told = "likely slower than loop.mixed_precision=no" in capsys.readouterr().err
        assert told == (slow and name == "bf16")
    differ = False
    for name, value in models["no"].items():
        other = models["bf16"][name]
        assert other.dtype == torch.float32
        # eight steps of Adam at this rate move a weight by at most 8 rates; the two went the same way by and large
        assert (other - value).norm() <= 0.1 * value.norm() + 1e-3, name
        differ |= not torch.equal(other, value)
    assert differ  # it really was another arithmetic


def test_fp16_and_muon_exclude_each_other(tmp_path):
    """Two optimisers behind one scaler: the second would get gradients 65,536 times too small."""
    recipe = tiny_recipe(tmp_path / "run", optim={"name": "muon"}, loop={"mixed_precision": "fp16"})
    with pytest.raises(ValueError, match="use bf16 or no"):
        train_recipe(recipe, progress_bar=False)
