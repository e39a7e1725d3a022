"""One self-contained HTML file that runs a model in the visitor's browser: no server, no network, no upload.

`make_payload` is everything the page knows (config, weights in half precision, examples, the plane of the class means);
`live` makes of it what another page can take in (the quickstart's report does); `write_page` writes a page of its own.
The forward pass is templates/flow.js on layers.js, in a Worker; the interface is page.js with pictures.js and input.js.
"""

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from odevit.analysis.report.self_contained import Opening, document
from odevit.analysis.trajectory import principal_axes
from odevit.atomic import write_file
from odevit.data import prepare
from odevit.dynamics.cost import count_macs, count_parameters
from odevit.model.config import OdeViTConfig, own_fields
from odevit.model.halting import saved_rule
from odevit.model.solvers import ADAPTIVE, SOLVERS
from odevit.model.spectral import plain_copy
from odevit.training.evaluation import model_input

TEMPLATES = Path(__file__).parent / "templates"
MOST_MACS = 2_000_000_000  # of one run; see docs/RESULTS.md, "In the browser": about two seconds
MOST_STEPS = 48
MOST_EXAMPLES = 10
# What flow.js can do, option by option; a config field in neither table must have its default value.
OPTIONS: dict[str, tuple[str, ...]] = {
    "field": ("softmax", "contractive"),
    "tokenizer": ("patch", "conv", "pooling"),
    "norm": ("center", "layer", "none"),
    "final_norm": ("center", "layer", "none"),
    "embedding_norm": ("none", "center", "layer"),
    "attention": ("softmax", "l2", "sinkhorn"),
    "mixing": ("none", "depthwise"),
    "pool": ("cls", "sequence", "mean", "sqrt_mean", "flatten"),
}
SCHEMES = ("euler", "lie_trotter", "strang", "heun", "midpoint", "rk4")  # those of flow.js
SCORES = ("margin", "confidence", "change", "velocity")  # of stopping early
NUMBERS = (
    *("image_size", "patch_size", "num_channels", "hidden_size", "num_attention_heads", "mlp_ratio", "num_registers"),
    *("damping", "depth", "horizon", "num_steps", "num_fields", "layer_norm_eps", "num_labels"),
    *("projection_size", "unit_features"),
)
WITHOUT_EFFECT = (
    *("bias", "dropout", "drop_path", "spectral_cap", "meeting_times", "image_mean", "image_std"),
    *("solver", "halting", "feature_times", "format_version"),
)


def half_precision(model: Any) -> Any:
    """The model that the page runs: a copy in eval mode whose weights are rounded to half precision, kept as float32.

    Capped weights become plain ones, as they are in use; BatchNorms become part of the convolutions before them.
    """
    rounded = plain_copy(model)
    for module in list(rounded.modules()):
        if isinstance(module, nn.Sequential):
            _fold_batch_norms(module)
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            weight.copy_(weight.half())
            if not bool(weight.isfinite().all()):
                raise ValueError(f"a page holds weights in half precision (at most 65,504); {name} has larger ones")
    return rounded


@torch.no_grad()
def _fold_batch_norms(layers: nn.Sequential) -> None:
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            conv: Any = layers[i - 1]
            mean, variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
            gain = layer.weight / (variance + layer.eps).sqrt()
            conv.weight.mul_(gain.view(-1, 1, 1, 1))
            conv.bias.sub_(mean).mul_(gain).add_(layer.bias)
            layers[i] = nn.Identity()


def check_supported(config: OdeViTConfig) -> None:
    """ValueError for a model that the page's forward pass would compute wrongly."""
    for name, known in OPTIONS.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"a page cannot run {name}={value!r} yet; it knows {', '.join(known)}")
    if config.solver not in (*SCHEMES, *ADAPTIVE):
        raise ValueError(f"a page cannot run the solver {config.solver!r} yet; it knows {', '.join(SCHEMES)}")
    defaults = OdeViTConfig()
    for name in own_fields():
        if name not in (*OPTIONS, *NUMBERS, *WITHOUT_EFFECT) and getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"a page cannot run a model with {name}={getattr(config, name)!r} yet")


def check_size(model: Any) -> int:
    """Multiply-accumulates of one Euler step; ValueError for a model that a browser would take too long for."""
    config, steps = model.config, max(model.config.num_steps, model.config.least_steps("euler"))
    macs = count_macs(model, num_steps=steps, solver="euler")
    if macs.total > MOST_MACS:
        raise ValueError(
            f"a page runs at most {MOST_MACS / 1e9:g} G multiply-accumulates an image (seconds in a browser); this "
            f"model takes {macs.total / 1e9:.2f} G at K = {config.num_steps}. Take fewer steps, or a smaller student."
        )
    return macs.flow // steps


@torch.no_grad()
def make_payload(
    model: Any,
    *,
    title: str,
    class_names: Sequence[str],
    images: Tensor | None = None,
    labels: Tensor | None = None,
    teacher: Any = None,
) -> dict[str, Any]:
    """Everything the page knows, as JSON can hold it.

    images: (N, c, H, W), uint8 or float in 0…1, with labels (N,): their class means span the plane in which CLS is seen
    to move, and the first of each class is an example. Without images the rows of the head span it.
    teacher: its CLS path is shown beside the student's on the examples, when it has the student's width.
    """
    check_supported(model.config)
    step_macs, rule = check_size(model), _rule(model)
    model, config = half_precision(model), model.config
    neutral = [0.5] * config.num_channels  # as the model's image processor has it
    model.config.image_mean, model.config.image_std = config.image_mean or neutral, config.image_std or neutral
    weights = {name.removeprefix("odevit."): weight for name, weight in model.state_dict().items()}
    starts = np.cumsum([0, *(weight.numel() for weight in weights.values())]).tolist()
    blob = torch.cat([weight.flatten() for weight in weights.values()]).half().numpy().astype("<f2").tobytes()
    values = {name: getattr(config, name) for name in OPTIONS}
    solver = "rk4" if config.solver in ADAPTIVE else config.solver
    payload: dict[str, Any] = {
        "title": title,
        "config": values | {name: getattr(config, name) for name in NUMBERS} | {"solver": solver},
        "classes": [str(name) for name in class_names],
        "mean": model.config.image_mean,
        "std": model.config.image_std,
        "parameters": count_parameters(model)["total"],
        "solvers": {
            name: {**s.evaluations._asdict(), "order": s.order, "least": config.least_steps(name)}
            for name, s in SOLVERS.items()
            if name in SCHEMES
        },
        "limits": {"steps": MOST_STEPS, "macs": MOST_MACS, "step_macs": step_macs},
        "drawable": config.num_channels == 1 and config.image_size <= 32,
        "halting": rule,
        "weights": {
            name: [start, weight.numel()] for (name, weight), start in zip(weights.items(), starts, strict=False)
        },
        "data": base64.b64encode(blob).decode(),
    }
    return payload | _pictures(model, images, labels, teacher)


def _rule(model: Any) -> dict[str, Any] | None:
    """The calibrated rule for stopping early, and what it promises; ValueError when it is that of other weights."""
    saved = model.config.halting
    if not saved:
        return None
    rule = saved_rule(model)
    if rule.score not in SCORES:
        raise ValueError(f"a page cannot stop by {rule.score!r} yet; it knows {', '.join(SCORES)}")
    promise = {key: saved.get(key) for key in ("alpha", "delta", "solver", "num_steps")}
    return {"score": rule.score, "threshold": rule.threshold, **promise}


def _pictures(model: Any, images: Tensor | None, labels: Tensor | None, teacher: Any) -> dict[str, Any]:
    """The plane, the class means in it, the examples and the teacher's paths."""
    config = model.config
    if images is None or labels is None:
        rows = model.classifier.weight @ model.projection.weight if config.projection_size else model.classifier.weight
        axes = principal_axes(rows.double(), 2)  # in the space of CLS
        return {"plane": _plane(axes, None, []), "examples": [], "teacher": None}
    neutral = [0.0] * config.num_channels, [1.0] * config.num_channels
    pixels = (prepare(images, config.image_size, *neutral) * 255).round().to(torch.uint8)
    ends = torch.cat([_ends(model, part) for part in pixels.split(64)]).double()
    present = labels.unique()
    means = torch.stack([ends[labels == label].mean(dim=0) for label in present])
    axes = principal_axes(means if len(means) > 2 else ends, 2)
    chosen = torch.tensor([int((labels == label).nonzero()[0]) for label in present[:MOST_EXAMPLES]])
    examples = [
        {"label": int(labels[i]), "pixels": base64.b64encode(pixels[i].contiguous().numpy().tobytes()).decode()}
        for i in chosen.tolist()
    ]
    plane = _plane(axes, means, present.tolist())
    return {"plane": plane, "examples": examples, "teacher": _teacher_paths(teacher, model, pixels[chosen], axes)}


def _ends(model: Any, pixels: Tensor) -> Tensor:
    """Where the flow ends (b, d): CLS as it is, or what another pool makes of the tokens."""
    state = model.odevit.evolve(model.odevit.embed(model_input(model, pixels))).xs[-1]
    return state[:, 0] if model.config.pool == "cls" else model.features(state)


def _plane(axes: Any, means: Tensor | None, labels: list[int]) -> dict[str, Any]:
    points = [] if means is None else axes.project(means).tolist()
    return {
        "mean": _rounded(axes.mean),
        "axes": _rounded(axes.components),
        "classes": [[label, *_rounded(point)] for label, point in zip(labels, points, strict=True)],
    }


def _teacher_paths(teacher: Any, model: Any, pixels: Tensor, axes: Any) -> dict[str, Any] | None:
    """The teacher's CLS after every block in the same plane, (examples, D + 1, 2), its times and its answers."""
    config = model.config
    if teacher is None or teacher.width != config.hidden_size or config.pool != "cls":
        return None
    device = next(teacher.parameters()).device
    trace = teacher.trace(teacher.renormalise(model_input(model, pixels).to(device), config))
    paths = axes.project(torch.stack([state[:, 0] for state in trace.states], dim=1).double().cpu())
    times = config.meeting_times
    if times is None or len(times) != teacher.depth:
        times = [config.horizon * (layer + 1) / teacher.depth for layer in range(teacher.depth)]
    answers = None if trace.logits is None else trace.logits.argmax(dim=1).tolist()
    return {"times": [0.0, *times], "paths": _rounded(paths), "answers": answers}


def _rounded(values: Any) -> Any:
    """Lists of six significant digits: half the text, and more than a screen can show."""
    if isinstance(values, Tensor):
        values = values.tolist()
    return [_rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.6g}")


def live(payload: dict[str, Any]) -> Opening:
    """The running model as a part of another page. Texts of the payload reach the page as text, never as markup."""
    content = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    flow = _template("layers.js") + _template("flow.js")
    html = Template(_template("live.html")).substitute(payload=content, flow=flow)
    script = "".join(_template(name) for name in ("pictures.js", "input.js", "page.js"))
    return Opening(html=html, css=_template("page.css"), script=f'(() => {{\n"use strict";\n{script}}})();\n')


def write_page(payload: dict[str, Any], path: str | Path) -> Path:
    """Write the page, whole or not at all; returns its path."""
    parts, path = live(payload), Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"the page's folder must exist, {path.parent} does not")
    parameters, fields = payload["parameters"], payload["config"]["num_fields"]
    body = Template(_template("page.html")).substitute(
        title=escape(payload["title"]),
        parameters=f"{parameters:,}" if parameters < 1e5 else f"{parameters / 1e6:.2g} million",
        blocks="one block" if fields == 1 else f"{fields} blocks",
        live=parts.html,
    )
    write_file(path, document("page", title=payload["title"], css=parts.css, body=body, scripts=[parts.script]))
    return path


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
