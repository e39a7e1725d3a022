"""Each rule on a run that shows its failure, and on the healthy run that it was made from."""

import contextlib
import json
import math

import pytest
import yaml
from tiny_runs import tiny_recipe

from odevit.analysis.doctor import RULES, diagnose
from odevit.commands.doctor import doctor
from odevit.commands.train import train_recipe

FLOW = {
    "gap": 0.002, "standard_error": 0.002, "own": 0.97, "exact_flow": 0.968, "num_steps": 4,
    "accuracy_by_steps": {"3": 0.96, "4": 0.97, "8": 0.972, "24": 0.968},
}  # fmt: skip
VERDICT = {"suggested_fields": 1, "explained_by_one_field": 0.8, "explained_by_suggested_fields": 0.8}


class RunFolder:
    """A healthy distillation in the format that the loop writes; tests spoil one thing."""

    def __init__(self):
        losses = [4 * math.exp(-i / 8) + 0.05 for i in range(30)]
        self.train = [
            {"kind": "train", "step": 10 * (i + 1), "loss": loss, "losses": {"cls_path": loss}, "top1": 0.9}
            for i, loss in enumerate(losses)
        ]
        self.monitor = [
            {
                "kind": "monitor", "step": 100 * (i + 1), "map_norm": {"median": 1.1, "largest": 1.2},
                "spectral_norms": {"odevit.fields.0.mlp.w1": 1 + 0.3 * i, "classifier": 9.0**i},
                "lyapunov": [0.5 + 0.1 * i] * 4, "distance_over_radius": {"median": 3 / (1 + 2 * i), "largest": 9.0},
            }
            for i in range(3)
        ]  # fmt: skip
        self.comparison = {"agreement": 0.97, "flow": dict(FLOW, accuracy_by_steps=dict(FLOW["accuracy_by_steps"]))}
        self.config = {"image_size": 8, "patch_size": 2, "num_registers": 0, "num_fields": 1, "num_steps": 4}
        self.recipe = {"task": "distill", "optim": {"lr": 2e-3, "epochs": 10}, "distill": {"losses": {"kl": 1.0}}}
        self.verdict = dict(VERDICT)

    def write(self, folder):
        (folder / "model").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe))
        records = sorted(self.train + self.monitor, key=lambda record: record["step"])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "model/config.json").write_text(json.dumps(self.config))
        (folder / "comparison.json").write_text(json.dumps(self.comparison))
        (folder / "report.json").write_text(json.dumps({"values": {"audit/verdict": self.verdict}}))
        return folder


def weights(run):
    run.monitor[-1]["spectral_norms"]["odevit.fields.0.mlp.w1"] = 9.0


def diverged(run):
    run.train[-1]["loss"] = math.inf


def attention(run):
    run.monitor[-1]["map_norm"]["median"] = 4.1  # √17 = 4.12


def exponents(run):
    for record, value in zip(run.monitor, (0.4, 1.0, 2.5), strict=True):
        record["lyapunov"] = [value] * 4


def hard_teacher(run):
    run.verdict |= {"suggested_fields": 3, "explained_by_one_field": 0.3, "explained_by_suggested_fields": 0.7}


def too_few_steps(run):
    run.comparison["flow"]["accuracy_by_steps"]["8"] = 0.995


def flow_gap(run):
    run.comparison["flow"] |= {"gap": 0.2, "exact_flow": 0.77}


def plateau(run):
    for record in run.train[5:]:
        record["losses"]["cls_path"] = 2.0
    run.comparison["agreement"] = 0.7


def outside(run):
    for record in run.monitor:
        record["distance_over_radius"]["median"] = 8.0


SETTINGS = {
    weights: "model.spectral_cap=1.5",
    diverged: "optim.lr=0.0005",
    attention: "distill.losses.jasmin=0.01",
    exponents: "model.spectral_cap=1.5",
    hard_teacher: "model.num_fields=3",
    too_few_steps: "model.num_steps=8",
    flow_gap: "loop.step_schedule=[[0, [2, 3, 4, 5]]]",
    plateau: "model.num_fields=2",
    outside: "distill.losses.kl=3",
}


def test_every_rule_is_tested():
    assert [spoil.__name__ for spoil in SETTINGS] == list(RULES)


def test_nothing_wrong(tmp_path, capsys):
    assert doctor(RunFolder().write(tmp_path / "run")) == []
    assert "Nothing wrong" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", SETTINGS, ids=lambda spoil: spoil.__name__)
def test_each_failure_is_named_alone_with_its_setting(spoil, tmp_path, capsys):
    run = RunFolder()
    spoil(run)
    found = doctor(run.write(tmp_path / "run"))
    assert [one.setting for one in found] == [SETTINGS[spoil]]
    printed = capsys.readouterr().out
    assert f"change: --set '{SETTINGS[spoil]}'" in printed
    if found[0].curve is not None:
        assert found[0].curve.label in printed


def test_a_run_that_still_comes_nearer_is_told_to_go_on(tmp_path):
    run = RunFolder()
    for record, value in zip(run.monitor, (30.0, 12.0, 4.0), strict=True):
        record["distance_over_radius"]["median"] = value
    assert [one.setting for one in diagnose(run.write(tmp_path / "run"))] == ["optim.epochs=20"]


def test_a_real_run_that_explodes(tmp_path, capsys):
    """Trained with a learning rate a hundred times too high: its own records say so."""
    recipe = tiny_recipe(tmp_path / "run", optim={"lr": 0.3, "steps": 6}, loop={"monitor_every": 6, "log_every": 2})
    with contextlib.suppress(ArithmeticError):  # if it ends in NaN
        train_recipe(recipe)
    found = doctor(tmp_path / "run")
    assert found, capsys.readouterr().out
    assert found[0].failure == "weights leave their bounds"


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe\.yaml"):
        diagnose(tmp_path)
    (tmp_path / "recipe.yaml").write_text("task: train\n")
    with pytest.raises(ValueError, match="nothing was trained"):
        diagnose(tmp_path)
