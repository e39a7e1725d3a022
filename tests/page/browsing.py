"""Opening pages in a real browser; skips where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import ARGUMENTS, BROWSER
from torch import Tensor

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.page import half_precision

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
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
def running_browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS.split(), timeout=120_000)
        yield browser
        browser.close()


@contextmanager
def visited(browser: Any, path: Path, *, size: tuple[int, int] = DESKTOP, **options: Any) -> Iterator[Any]:
    """The page once its first answer is there. An error on its console or a request that leaves the disk fails."""
    troubles: list[str] = []
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
    page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or troubles.append(f"request: {r.url}"))
    page.set_default_timeout(60_000)  # a busy machine is slow, not wrong
    page.goto(path.as_uri())
    page.locator(".live .status:not(:empty)").wait_for(state="attached")
    yield page
    page.close()
    assert troubles == []


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
