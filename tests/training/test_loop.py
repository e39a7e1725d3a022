"""The loop: what it does at every step, what it writes, what it never does, and how it stops."""

import dataclasses
import errno
import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as nnf
from tiny_runs import MODEL, tiny_recipe
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odevit import NonFiniteStateError, OdeViTConfig, OdeViTForImageClassification
from odevit.commands.train import train_recipe
from odevit.data import DataConfig, load_data
from odevit.model.solvers import Grid
from odevit.recipe import Recipe, override
from odevit.training import checkpoint, loop
from odevit.training.checkpoint import CheckpointError, CheckpointStore
from odevit.training.config import PenaltyConfig
from odevit.training.evaluation import evaluate, model_input
from odevit.training.integration import Integration
from odevit.training.interruption import TrainingDivergedError
from odevit.training.objectives import Classification, Terms, transport_cost
from odevit.training.optim import learning_rate_factor
from odevit.training.runlog import monitor_seconds, read_metrics


@pytest.fixture(scope="module")
def data():
    return load_data(DataConfig(name="digits", limit=640))


def tiny_model(**fields):
    torch.manual_seed(0)
    values = {**MODEL, "image_size": 8, "num_channels": 1, "num_labels": 10, **fields}
    model = OdeViTForImageClassification(OdeViTConfig(**values))
    model.config.image_mean, model.config.image_std = [0.3], [0.4]
    return model


class Spy(Classification):
    """Classification that calls `look(model, terms)` after every forward pass, and may change the terms."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __call__(self, model, *args, **kwargs):
        terms = super().__call__(model, *args, **kwargs)
        return self.look(model, terms) or terms


@pytest.mark.slow
def test_run_folder_and_final_model(tmp_path, data):
    result = train_recipe(tiny_recipe(tmp_path / "run", optim={"steps": 60, "lr": 1e-2}), data=data, progress_bar=False)
    assert result.metrics["split"] == "test"
    assert result.metrics["top1"] > 0.6  # chance is 0.1
    names = {path.name for path in result.folder.iterdir()}
    files = {"recipe.yaml", "metrics.jsonl", "timing.jsonl", "result.json", "README.txt", "curve.png"}
    assert names == files | {"checkpoints", "best", "model"}
    assert json.loads((result.folder / "result.json").read_text()) == result.metrics
    records = read_metrics(result.folder)
    assert [r["step"] for r in records if r["kind"] == "val"] == [8, 16, 24, 32, 40, 48, 56, 60]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(3, 61, 3))
    assert max(r["top1"] for r in records if r["kind"] == "val") == result.metrics["selected"]["top1"]

    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(result.folder / "model").eval()
    assert model.config.id2label == {i: str(i) for i in range(10)}
    assert list(AutoImageProcessor.from_pretrained(result.folder / "model").image_mean) == data.mean
    assert evaluate(model, data.test)["top1"] == result.metrics["top1"]


def test_evaluate_counts_exactly_and_gives_modes_back(data):
    model = tiny_model(dropout=0.5).train()
    model.odevit.fields[0].eval()
    scores = evaluate(model, data.val, batch_size=7)
    assert model.training
    assert not model.odevit.fields[0].training
    with torch.no_grad():
        logits = model.eval()(model_input(model, data.val.images)).logits
    order = logits.argsort(dim=1, descending=True)
    for k in (1, 3, 5):
        right = sum(int(label in row[:k]) for row, label in zip(order.tolist(), data.val.labels.tolist(), strict=True))
        assert scores[f"top{k}"] == right / len(data.val)
    assert scores["count"] == len(data.val)
    assert scores["loss"] == pytest.approx(nnf.cross_entropy(logits, data.val.labels).item(), rel=1e-5)
    assert evaluate(model, data.val, num_steps=1)["loss"] != scores["loss"]


@pytest.mark.slow
def test_test_split_is_read_once_and_only_at_the_end(tmp_path, data):
    steps, reads = [], []

    class Watched:
        labels, skipped = data.test.labels, []

        def __len__(self):
            return len(data.test)

        def fetch(self, indices):
            reads.append((len(steps), indices))
            return data.test.fetch(indices)

        def stream(self, batches):
            return (self.fetch(indices) for indices in batches)

    watched = dataclasses.replace(data, test=Watched())
    train_recipe(tiny_recipe(tmp_path), data=watched, objective=Spy(lambda *_: steps.append(1)), progress_bar=False)
    assert {step for step, _ in reads} == {24}
    assert torch.cat([indices for _, indices in reads]).sort().values.equal(torch.arange(len(data.test)))


@pytest.mark.slow
def test_without_test_split_the_numbers_say_so(tmp_path, data):
    result = train_recipe(
        tiny_recipe(tmp_path, optim={"steps": 4}), data=dataclasses.replace(data, test=None), progress_bar=False
    )
    assert result.metrics["split"] == "val"
    assert "no test split" in result.metrics["note"]
    assert result.metrics["top1"] == result.metrics["selected"]["top1"]


@pytest.mark.slow
def test_dropout_is_active_after_validation(tmp_path, data):
    active = []
    spy = Spy(lambda model, _: active.append(all(m.training for m in model.modules())))
    recipe = tiny_recipe(tmp_path, model={"dropout": 0.1}, optim={"steps": 6}, loop={"eval_every": 1})
    train_recipe(recipe, data=data, objective=spy, progress_bar=False)
    assert active == [True] * 6


@pytest.mark.slow
def test_clipping_clips(tmp_path, data):
    norms = []

    def look(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])).item())

    handle = register_optimizer_step_pre_hook(look)
    try:
        recipe = tiny_recipe(tmp_path, optim={"steps": 5, "clip": 1e-3}, loop={"log_every": 1})
        train_recipe(recipe, data=data, progress_bar=False)
    finally:
        handle.remove()
    reported = [r["gradient_norm"] for r in read_metrics(tmp_path) if r["kind"] == "train"]
    assert len(norms) == 5
    assert all(norm == pytest.approx(1e-3, rel=1e-2) for norm in norms)
    assert all(norm > 0.01 for norm in reported)  # before clipping


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory, data):
    recipe = tiny_recipe(tmp_path_factory.mktemp("plain"), optim={"steps": 8})
    return train_recipe(recipe, data=data, progress_bar=False).model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["optim.accumulate=3", "loop.recompute=true", "loop.compile=true"])
def test_saving_memory_and_time_does_not_change_the_numbers(change, tmp_path, data, plain_weights):
    values = override(tiny_recipe(tmp_path, optim={"steps": 8}).to_dict(), [change])
    other = train_recipe(Recipe.from_dict(values), data=data, progress_bar=False).model
    for name, value in plain_weights.items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_step_schedule_and_its_evaluations(tmp_path, data):
    recipe = tiny_recipe(tmp_path, optim={"steps": 4}, loop={"log_every": 1, "step_schedule": [[0, 1], [0.5, 3]]})
    train_recipe(recipe, data=data, progress_bar=False)
    assert [r["evaluations"] for r in read_metrics(tmp_path) if r["kind"] == "train"] == [1, 1, 3, 3]


@pytest.mark.slow
def test_averaged_weights_are_what_is_evaluated_and_saved(tmp_path, data):
    recipe = tiny_recipe(tmp_path, optim={"steps": 8, "ema": 0.99}, loop={"checkpoint_every": 8})
    result = train_recipe(recipe, data=data, progress_bar=False)
    state, _ = CheckpointStore(tmp_path / "checkpoints", 2).load()
    for name, value in state["average"].items():
        assert torch.equal(result.model.state_dict()[name], value)
    assert not torch.equal(state["average"]["classifier.weight"], state["model"]["classifier.weight"])


@pytest.mark.slow
def test_minutes_are_kept(tmp_path, data, monkeypatch):
    clock = [100.0]  # a quarter of a second passes in every step, and none elsewhere
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(*_):
        clock[0] += 0.25

    recipe = tiny_recipe(tmp_path, optim={"minutes": 0.05}, loop={"log_every": 1})
    result = train_recipe(recipe, data=data, objective=Spy(tick), progress_bar=False)
    assert (result.metrics["steps"], result.metrics["seconds"]) == (12, 3.0)
    rates = [r["lr"] for r in read_metrics(tmp_path) if r["kind"] == "train"]
    assert rates[-1] == pytest.approx(3e-3 * learning_rate_factor(2.75 / 3, recipe.optim.warmup, recipe.optim.cycles))
    assert rates[-1] < 0.2 * max(rates)  # the cosine has come down


@pytest.mark.slow
def test_compile_is_asked_of_each_field(tmp_path, data, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    recipe = tiny_recipe(tmp_path, model={"num_fields": 2}, optim={"steps": 1}, loop={"compile": True})
    train_recipe(recipe, data=data, progress_bar=False)
    assert compiled == ["VectorField", "VectorField"]


@pytest.mark.slow
def test_monitors_and_tensorboard(tmp_path, data, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_recipe(
        tiny_recipe(tmp_path / "a", optim={"steps": 4}, loop={"monitor_every": 2, "tensorboard": True}),
        data=data,
        progress_bar=False,
    )
    train_recipe(tiny_recipe(tmp_path / "b", optim={"steps": 4}), data=data, progress_bar=False)
    records = read_metrics(tmp_path / "a")
    monitored = [r for r in records if r["kind"] == "monitor"]
    assert [r["step"] for r in monitored] == [2, 4]
    assert len(monitored[0]["lyapunov"]) == 4
    assert 0 < monitored[0]["g1"]["median"] <= monitored[0]["g1"]["largest"] <= 1
    assert monitored[0]["map_norm"]["median"] >= 1 - 1e-5  # rows sum to one
    assert monitored[0]["field_norm"]["largest"] <= monitored[0]["field_bound"]["largest"]
    assert monitored[0]["sigma_max"]["largest"] >= 1 - 1e-3
    assert monitored[0]["spectral_norms"]["odevit.fields.0.mlp.w1"] == pytest.approx(1, abs=0.1)  # spectral init
    assert [r for r in records if r["kind"] != "monitor"] == read_metrics(tmp_path / "b")  # looking changes nothing
    costs = monitor_seconds(tmp_path / "a")
    assert len(costs) == 2
    assert min(costs) > 0
    timing = tmp_path / "a" / "timing.jsonl"
    with timing.open("a") as file:
        file.write('{"step": 5, "moni{"step": 6, "monitor_seconds": 0.5}\n{"step": 7, "monitor_seconds": 0.25}\n')
    assert monitor_seconds(tmp_path / "a") == [*costs, 0.25]  # half a line of a crash, and what was written behind it
    told = capsys.readouterr().err
    assert f"monitors: 2 looks, {sum(costs):.1f} s of" in told
    assert f"σ_max {monitored[0]['sigma_max']['median']:.2g}" in told
    accumulated = event_accumulator.EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    for name in ("g1", "map_norm", "field_bound", "field_norm", "sigma_max"):
        for kind in ("median", "largest"):
            events = accumulated.Scalars(f"monitor/{name}/{kind}")
            assert [event.step for event in events] == [2, 4]
            assert [event.value for event in events] == pytest.approx([r[name][kind] for r in monitored])
    assert "monitor/spectral_norms/odevit.fields.0.mlp.w1" in accumulated.Tags()["scalars"]


# --- when it goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["loss", "gradient", "state"])
def test_divergence_stops_within_the_step(fault, tmp_path, data):
    steps, weights = [], []

    def look(model, terms):
        steps.append(1)
        if len(steps) != 8:
            return None
        weights.append(model.classifier.weight.detach().clone())
        if fault == "state":
            raise NonFiniteStateError(2, 0.5)
        bad = model.classifier.weight.sum() * (math.nan if fault == "loss" else 0.0)
        if fault == "gradient":
            bad = (model.classifier.weight - model.classifier.weight.detach()).square().sum().sqrt()  # 0, slope NaN
        return Terms({**terms.losses, "bad": bad}, terms.logits)

    model = tiny_model()
    with pytest.raises(TrainingDivergedError, match=r"step 7.*step-00000005.*optim\.lr") as caught:
        train_recipe(tiny_recipe(tmp_path), data=data, model=model, objective=Spy(look), progress_bar=False)
    assert caught.value.step == 7
    assert len(steps) == 8
    assert torch.equal(model.classifier.weight, weights[0])
    state, _ = CheckpointStore(tmp_path / "checkpoints", 2).load()
    assert all(value.isfinite().all() for value in state["model"].values())


@pytest.mark.slow
def test_full_disk_leaves_the_last_checkpoint(tmp_path, data, monkeypatch):
    original, calls = checkpoint.save_state, []

    def save(state, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(state, path)

    monkeypatch.setattr(checkpoint, "save_state", save)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-00000005.*Free some space"):
        train_recipe(tiny_recipe(tmp_path), data=data, progress_bar=False)
    _, meta = CheckpointStore(tmp_path / "checkpoints", 2).load()
    assert meta["step"] == 5
    assert not list(tmp_path.rglob(".tmp-*"))
    train_recipe(tiny_recipe(tmp_path), data=data, resume=True, progress_bar=False)


@pytest.mark.slow
def test_a_taken_folder_is_refused(tmp_path, data):
    train_recipe(tiny_recipe(tmp_path, optim={"steps": 1}), data=data, progress_bar=False)
    with pytest.raises(ValueError, match=r"already holds a run.*--resume"):
        train_recipe(tiny_recipe(tmp_path, optim={"steps": 1}), data=data, progress_bar=False)
    result = train_recipe(tiny_recipe(tmp_path, optim={"steps": 2}), data=data, overwrite=True, progress_bar=False)
    assert result.metrics["steps"] == 2


def test_a_batch_larger_than_the_split_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="5000 is more than the 640 training images"):
        train_recipe(tiny_recipe(tmp_path, optim={"batch_size": 5000}), data=data, progress_bar=False)


# --- objectives -------------------------------------------------------------------------------------------------------


def test_transport_cost_of_a_straight_path():
    grid = Grid(4, horizon=2.0)
    velocity = torch.randn(3, 5, 8)
    states = tuple(velocity * t for t in grid.times())
    torch.testing.assert_close(transport_cost(states, grid), 2.0 * velocity.square().mean())


@pytest.mark.parametrize("penalty", ["jasmin", "transport"])
def test_penalties_reach_the_field(penalty):
    model = tiny_model()
    images, targets = torch.randn(4, 1, 8, 8), torch.eye(10)[:4]
    objective = Classification(PenaltyConfig(**{penalty: 0.5}))
    terms = objective(model, images, targets, torch.arange(4), progress=0.0, integration=Integration())
    assert set(terms.losses) == {"cross_entropy", penalty}
    terms.losses[penalty].backward()
    attention = model.odevit.fields[0].attention
    for weight in (attention.query.weight, attention.key.weight):
        assert weight.grad.isfinite().all()
        assert weight.grad.abs().max() > 0
