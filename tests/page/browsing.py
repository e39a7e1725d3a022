"""Opening pages in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from browsers import opened
from torch import Tensor

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.page import half_precision

DESKTOP, PHONE = (1280, 800), (375, 812)

RUN = """([images, options, maps]) =>
  Promise.all(images.map((pixels) => document.querySelector(".live").run(pixels, options)))
  .then((results) => results.map(({ frames, evaluations, stopped }) => ({
    logits: frames.map((frame) => Array.from(frame.logits)), times: frames.map((frame) => frame.t),
    attention: maps && frames.map((frame) => frame.attention.map((map) => Array.from(map))),
    points: frames.map((frame) => frame.point), evaluations, stopped })))"""

SMALL = dict(
    image_size=8, patch_size=2, num_channels=1, hidden_size=16, num_attention_heads=2, mlp_ratio=2, depth=4,
    num_steps=6, num_labels=10, image_mean=[0.3], image_std=[0.37],
)  # fmt: skip


def small_model(seed: int = 0, **changes: Any) -> OdeViTForImageClassification:
    """Every parameter is random, so that none can be forgotten unseen."""
    model = OdeViTForImageClassification(OdeViTConfig(**(SMALL | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.ndim < 2 or parameter.shape[0] == 1 else 0.1))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
    return model


@contextmanager
def visited(browser: Any, path: Path, *, size: tuple[int, int] = DESKTOP, **options: Any) -> Iterator[Any]:
    """The page once its first answer is there."""
    with opened(browser, path.as_uri(), size, **options) as page:
        page.locator(".live .status:not(:empty)").wait_for(state="attached")
        yield page


def run_in_page(
    page: Any, pixels: Tensor, *, solver: str, steps: int, maps: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """What flow.js says of images (b, c, S, S) of 0…255."""
    return page.evaluate(RUN, [pixels.flatten(1).tolist(), {"solver": solver, "steps": steps, **options}, maps])


@torch.no_grad()
def run_in_torch(model: Any, pixels: Tensor, *, solver: str, steps: int) -> dict[str, Any]:
    """The same in PyTorch, with the weights that the page holds: logits (K + 1, b, classes), maps (K, b, h, n, n)."""
    from odevit.training.evaluation import model_input

    rounded = half_precision(model)
    output = rounded(
        model_input(rounded, pixels), num_steps=steps, solver=solver, output_hidden_states=True, output_attentions=True
    )
    return {
        "logits": torch.stack([rounded.classify(state) for state in output.hidden_states]),
        "states": output.hidden_states,
        "maps": torch.stack(output.attentions),
        "evaluations": output.evaluations,
    }
