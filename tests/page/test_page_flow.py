"""The forward pass in JavaScript against PyTorch: every solver, every option of the model, in a real browser."""

import numpy as np
import pytest
import torch
from page.browsing import run_in_page, run_in_torch, small_model, visited

from odevit import OdeViTForImageClassification
from odevit.data import DataConfig, load_data
from odevit.page import SCHEMES, SCORES, check_size, half_precision, make_payload, write_page
from odevit.training.evaluation import model_input


@pytest.fixture(scope="module")
def digits():
    split = load_data(DataConfig(name="digits", image_size=8)).test
    return split.fetch(torch.arange(50))


def open_model(browser, folder, model, **content):
    names = [str(k) for k in range(model.config.num_labels)]
    path = write_page(make_payload(model, title="A model", class_names=names, **content), folder / "page.html")
    return visited(browser, path, reduced_motion="reduce")


def test_every_solver_gives_the_numbers_of_pytorch(browser, digits, tmp_path):
    images, labels = digits
    model = small_model(num_registers=2, final_norm="layer")
    with open_model(browser, tmp_path, model, images=images, labels=labels) as page:
        for solver in SCHEMES:
            for steps, count in ((1, 4), (6, 50)):
                ours = run_in_page(page, images[:count], solver=solver, steps=steps)
                theirs = run_in_torch(model, images[:count], solver=solver, steps=steps)
                logits = torch.tensor([one["logits"] for one in ours]).transpose(0, 1)  # (K + 1, b, classes)
                assert logits.shape == theirs["logits"].shape
                assert float((logits - theirs["logits"]).abs().max()) < 1e-4, solver
                assert all(one["evaluations"] == theirs["evaluations"]._asdict() for one in ours), solver
    spread = theirs["logits"][-1].std(dim=0).max()
    assert spread > 0.02  # the images are told apart, so that agreement means something


VARIANTS: dict[str, dict] = {
    "layer norm, biases": {"norm": "layer", "bias": True, "final_norm": "center"},
    "no norm": {"norm": "none", "final_norm": "none", "depth": 1},
    "l2 attention": {"attention": "l2", "num_registers": 1},
    "sinkhorn attention": {"attention": "sinkhorn", "bias": True},
    "three fields, unequal steps": {"num_fields": 3, "num_steps": 7, "horizon": 2.0},
    "convolutional stem": {"tokenizer": "conv", "image_size": 16, "patch_size": 4, "num_channels": 3},
    "one convolution": {"tokenizer": "conv"},
    "pooling stem": {"tokenizer": "pooling", "image_size": 16, "patch_size": 4, "num_channels": 3},
    "sequence pooling": {"pool": "sequence", "num_registers": 2, "final_norm": "layer"},
    "mean pooling": {"pool": "mean", "num_registers": 2, "final_norm": "none"},
    "root mean pooling": {"pool": "sqrt_mean", "num_registers": 1},
    "all tokens": {"pool": "flatten", "num_registers": 1},
    "damping": {"damping": 0.3},
    "depthwise mixing": {"mixing": "depthwise", "num_registers": 2},
    "spectral cap": {"spectral_cap": 0.7},
    "contractive": {"field": "contractive", "num_registers": 1, "num_steps": 6},
    "contractive, mixing": {"field": "contractive", "mixing": "depthwise", "pool": "sqrt_mean", "num_fields": 2},
    "image tower": {"embedding_norm": "layer", "projection_size": 12, "unit_features": True, "final_norm": "layer"},
    "one head, wide": {"num_attention_heads": 1, "hidden_size": 18, "mlp_ratio": 1.5},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_gives_the_numbers_of_pytorch(browser, tmp_path, name):
    changes = VARIANTS[name]
    channels = changes.get("num_channels", 1)
    model = small_model(image_mean=[0.4] * channels, image_std=[0.25] * channels, **changes)
    side, steps = model.config.image_size, model.config.num_steps
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, channels, side, side), dtype=np.uint8))
    with open_model(browser, tmp_path, model, images=images, labels=torch.arange(4)) as page:
        ours = run_in_page(page, images, solver="strang", steps=steps, maps=True)
    theirs = run_in_torch(model, images, solver="strang", steps=steps)
    logits = torch.tensor([one["logits"] for one in ours]).transpose(0, 1)
    assert float((logits - theirs["logits"]).abs().max()) < 1e-4
    registers = model.config.num_registers
    maps = torch.tensor([one["attention"][:-1] for one in ours]).transpose(0, 1)  # (K, b, h, patches)
    wanted = theirs["maps"][:, :, :, 0, 1 : theirs["maps"].shape[-1] - registers]
    assert float((maps - wanted).abs().max()) < 1e-5
    before = {"three fields, unequal steps": [0, 2 / 9, 4 / 9, 2 / 3, 1, 4 / 3, 5 / 3, 2]}.get(name)
    assert before is None or ours[0]["times"] == pytest.approx(before)


def test_the_path_in_the_plane_is_that_of_cls(browser, digits, tmp_path):
    images, labels = digits
    model = small_model()
    names = [str(k) for k in range(10)]
    payload = make_payload(model, title="A model", class_names=names, images=images, labels=labels)
    with visited(browser, write_page(payload, tmp_path / "page.html"), reduced_motion="reduce") as page:
        points = run_in_page(page, images[:3], solver="heun", steps=4)[0]["points"]
    states = run_in_torch(model, images[:3], solver="heun", steps=4)["states"]
    axes, mean = (torch.tensor(payload["plane"][key]) for key in ("axes", "mean"))
    wanted = torch.stack([(state[0, 0] - mean) @ axes.T for state in states])
    assert torch.allclose(torch.tensor(points), wanted, atol=1e-4)


def test_half_precision_hardly_changes_the_answers(digits):
    model = small_model(tokenizer="conv", patch_size=4, spectral_cap=1.5)
    with torch.no_grad():
        pixels = model_input(model, digits[0])
        exact, rounded = model(pixels).logits, half_precision(model)(pixels).logits
        assert torch.equal(model(pixels).logits, exact)  # the model itself is as it was
    assert 0 < float((exact - rounded).abs().max()) < 0.02


def scores_of(whole: dict, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """The four scores at steps 1 … K, by their definitions, from logits (K + 1, 10) and states (K + 1, n, d)."""
    logits = torch.tensor(whole["logits"], dtype=torch.float64)
    top = logits.softmax(-1).sort(-1).values
    return {
        "margin": (top[:, -1] - top[:, -2])[1:],
        "confidence": top[1:, -1],
        "change": -logits.diff(dim=0).abs().amax(-1),
        "velocity": -states.diff(dim=0).flatten(1).norm(dim=1) / states[1:].flatten(1).norm(dim=1),
    }


@pytest.mark.parametrize("score", SCORES)
def test_stopping_early_is_the_same_flow_cut_short(browser, digits, tmp_path, score):
    model, images = small_model(), digits[0][:8]
    with open_model(browser, tmp_path, model) as page:  # a page without examples works too
        whole = run_in_page(page, images, solver="midpoint", steps=6)
        states = torch.stack(run_in_torch(model, images, solver="midpoint", steps=6)["states"])  # (K + 1, b, n, d)
        scores = [scores_of(one, states[:, i])[score] for i, one in enumerate(whole)]
        tops = torch.stack([one[:5].max() for one in scores]).sort().values
        threshold = float(tops[3:5].mean())  # four of eight images reach it before the end
        cut = run_in_page(page, images, solver="midpoint", steps=6, stop={"score": score, "threshold": threshold})
    assert {one["stopped"] is None for one in cut} == {True, False}
    for values, one, full in zip(scores, cut, whole, strict=True):
        reached = [i for i in range(1, 6) if values[i - 1] >= threshold]
        stop = reached[0] if reached else 6
        assert one["logits"] == full["logits"][: stop + 1]
        assert one["evaluations"] == {"F": 2 * stop, "G": 2 * stop}
        assert one["stopped"] == (pytest.approx(stop / 6) if reached else None)


def test_too_large_a_model_is_told_so():
    with pytest.raises(ValueError, match=r"at most 2 G multiply-accumulates.*this model takes"):
        check_size(OdeViTForImageClassification.from_preset("paper-small", mlp_ratio=1))


def test_options_that_the_page_does_not_know_are_refused(monkeypatch):
    model = small_model()
    model.config.attention = "linear"
    with pytest.raises(ValueError, match=r"cannot run attention='linear' yet; it knows softmax, l2, sinkhorn"):
        make_payload(model, title="t", class_names=[str(k) for k in range(10)])
    model = small_model()
    monkeypatch.setattr("odevit.page.NUMBERS", ("depth",))
    with pytest.raises(ValueError, match="cannot run a model with image_size=8 yet"):
        make_payload(model, title="t", class_names=[str(k) for k in range(10)])


def test_a_scheme_that_only_pytorch_knows_is_not_offered(monkeypatch):
    """A stranger's new solver: the page does without it, and refuses a model whose own it is."""
    monkeypatch.setattr("odevit.page.SCHEMES", ("euler", "heun"))
    names = [str(k) for k in range(10)]
    assert set(make_payload(small_model(), title="t", class_names=names)["solvers"]) == {"euler", "heun"}
    with pytest.raises(ValueError, match="cannot run the solver 'rk4' yet; it knows euler, heun"):
        make_payload(small_model(solver="rk4"), title="t", class_names=names)


def test_weights_beyond_half_precision_are_refused():
    model = small_model()
    with torch.no_grad():
        model.classifier.bias[0] = 1e5
    with pytest.raises(ValueError, match=r"half precision \(at most 65,504\); classifier.bias"):
        half_precision(model)
