"""Each rule on a run that shows its failure, and on the healthy run that it was made from."""

import contextlib
import json
import math

import pytest
import torch
import yaml
from tiny_runs import tiny_recipe

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.analysis.doctor import RULES, diagnose
from odevit.commands.audit import audit
from odevit.commands.distill import distill_recipe
from odevit.commands.doctor import doctor
from odevit.commands.train import train_recipe
from odevit.recipe import Recipe, override

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


def test_advice_that_was_already_followed_is_not_given_again(tmp_path):
    run = RunFolder()
    flow_gap(run)
    run.recipe["loop"] = {"step_schedule": [[0, [3, 4, "midpoint 3"]]]}
    assert [one.setting for one in diagnose(run.write(tmp_path / "drawn"))] == [
        'loop.step_schedule=[[0, [3, 4, "midpoint 3", 8]]]'
    ]
    run = RunFolder()
    plateau(run)
    for record in run.train:
        record["losses"]["cls_path"] = 2.0
    assert [one.setting for one in diagnose(run.write(tmp_path / "short"))] == ["optim.epochs=40"]


# --- runs made to fail in each way: tiny, but really trained ----------------------------------------------------------

SIZES = {"patch_size": 4, "hidden_size": 16, "num_attention_heads": 2}
QUIET = {"eval_every": 1000, "checkpoint_every": 1000, "log_every": 1}


def recipe_of(folder, **changes):
    values = tiny_recipe(folder, data={"limit": 320}, optim={"batch_size": 32, "steps": 12}, loop=QUIET).to_dict()
    for group, replaced in changes.items():
        values[group] = {**values[group], **replaced} if group in ("optim", "loop") else replaced
    return Recipe.from_dict(values)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    vit = {"type": "vit", **SIZES, "num_hidden_layers": 4, "intermediate_size": 32, "initializer_range": 0.1}
    recipe = recipe_of(tmp_path_factory.mktemp("teacher"), model=vit, optim={"steps": 80, "lr": 1e-2})
    return train_recipe(recipe, overwrite=True, progress_bar=False).folder / "model"


def student(folder, teacher, *, model, losses=None, optim=None, loop=None):
    recipe = recipe_of(
        folder,
        task="distill",
        model={"mlp_ratio": 2, **model},
        optim={"name": "muon", "lr": 3e-3, "muon_lr": 1e-2, **(optim or {})},
        loop=loop or {},
        distill={"teacher": str(teacher), "losses": losses or {"cls_path": 0.01, "kl": 1.0}, "sample": 32},
    )
    distill_recipe(recipe, report=None, progress_bar=False)


def scaled_field(change, **fields):
    """A model whose field starts wrongly."""
    torch.manual_seed(0)
    sizes = {**SIZES, "image_size": 8, "num_channels": 1, "mlp_ratio": 1, "depth": 4, "num_steps": 4, "num_labels": 10}
    model = OdeViTForImageClassification(OdeViTConfig(**sizes, **fields))
    with torch.no_grad():
        change(model.odevit.fields[0])
    return model


def make_weights(folder, teacher):
    """A learning rate a hundred times too high."""
    train_recipe(recipe_of(folder, optim={"lr": 0.3, "steps": 6}, loop={"monitor_every": 6}), progress_bar=False)


def make_diverged(folder, teacher):
    """The same where the field is held: the head blows up."""
    model = {**SIZES, "mlp_ratio": 1, "depth": 4, "num_steps": 4, "spectral_cap": 1.5}
    train_recipe(recipe_of(folder, model=model, optim={"lr": 10.0, "clip": 0, "steps": 8}), progress_bar=False)


def make_attention(folder, teacher):
    """All queries are the same, and large."""

    def change(field):
        field.attention.query.weight.zero_()
        field.attention.query.bias.fill_(20.0)

    recipe = recipe_of(folder, optim={"steps": 2}, loop={"monitor_every": 2})
    train_recipe(recipe, model=scaled_field(change, bias=True), progress_bar=False)


def make_exponents(folder, teacher):
    """Weights that start near zero and grow too fast."""

    def change(field):
        for parameter in field.parameters():
            parameter.mul_(0.1 if parameter.ndim > 1 else 1)

    recipe = recipe_of(folder, optim={"lr": 0.1, "warmup": 0.3}, loop={"monitor_every": 3})
    train_recipe(recipe, model=scaled_field(change), progress_bar=False)


def make_hard_teacher(folder, teacher):
    """Four layers that do four different things, as the audit finds."""
    student(folder, teacher, model={"num_steps": 4}, optim={"steps": 2})
    audit(str(teacher), "digits", max_images=32, output=folder / "audit")


def make_too_few_steps(folder, teacher):
    """Trained with six steps, used with one."""
    student(folder, teacher, model={"num_steps": 1}, optim={"steps": 40}, loop={"step_schedule": [[0, 6]]})


def make_flow_gap(folder, teacher):
    """Trained with two steps only."""
    student(folder, teacher, model={"num_steps": 2}, optim={"steps": 40, "muon_lr": 0.03})


def make_plateau(folder, teacher):
    """A field held so weak that it cannot follow the path, and nothing but the path to follow."""
    model = {"num_steps": 4, "spectral_cap": 0.2}
    optim = {"steps": 36, "muon_lr": 0.1, "batch_size": 64}
    student(folder, teacher, model=model, losses={"cls_path": 1.0}, optim=optim, loop={"log_every": 4})


def make_outside(folder, teacher):
    """Twelve steps are not enough to come near."""
    student(folder, teacher, model={"num_steps": 4}, loop={"monitor_every": 6})


FAILURES = {
    "weights": "weights leave their bounds", "diverged": "training diverged",
    "attention": "attention leaves its bounds", "exponents": "exponents rise", "hard_teacher": "a hard teacher",
    "too_few_steps": "too few steps", "flow_gap": "flow gap", "plateau": "path loss on a plateau",
    "outside": "outside the contraction region",
}  # fmt: skip
BESIDE = {
    "weights": {"attention leaves its bounds"}, "outside": {"path loss on a plateau"},
    "hard_teacher": {"path loss on a plateau", "too few steps"}, "plateau": {"outside the contraction region"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_run_made_to_fail_is_diagnosed(rule, teacher, tmp_path, capsys):
    with contextlib.suppress(ArithmeticError):  # one that ends in NaN has been recorded all the same
        globals()[f"make_{rule}"](tmp_path / "run", teacher)
    found = {one.failure: one for one in doctor(tmp_path / "run")}
    printed = capsys.readouterr().out
    assert FAILURES[rule] in found, printed
    assert set(found) <= {FAILURES[rule]} | BESIDE.get(rule, set()), printed
    setting = found[FAILURES[rule]].setting
    Recipe.from_dict(override(Recipe.load(tmp_path / "run/recipe.yaml").to_dict(), [setting]))  # it exists


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe\.yaml"):
        diagnose(tmp_path)
    (tmp_path / "recipe.yaml").write_text("task: train\n")
    with pytest.raises(ValueError, match="nothing was trained"):
        diagnose(tmp_path)


def test_a_run_that_ended_is_told_from_its_first_steps_on(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", optim={"steps": 40, "lr": 1e6, "clip": 0.0, "warmup": 0.0})
    with pytest.raises(ArithmeticError, match="diverged"):
        train_recipe(recipe, progress_bar=False)
    found = {diagnosis.failure: diagnosis for diagnosis in diagnose(tmp_path / "run")}
    assert "diverged at step" in found["training diverged"].words
