"""Speed and memory of the Lyapunov analysis, side by side with plain forward passes in one run.

    python benchmarks/analysis.py                 # 1000 images
    python benchmarks/analysis.py --images 256    # a quick look

Prints the time of the top 4 exponents as a ratio to one forward pass per tangent over the same images (target: at most
6), for comparison the same with torch.func.jvp, and the peak memory with 128 and with 512 images (target: flat).
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from odevit.dynamics.exponents import lyapunov_spectrum, model_exponents
from odevit.model.model import OdeViTForImageClassification
from odevit.model.solvers import SOLVERS, Grid

TANGENTS = 4
TARGET = 6.0


def model_and_images(count: int) -> tuple[OdeViTForImageClassification, torch.Tensor]:
    torch.manual_seed(0)
    model = OdeViTForImageClassification.from_preset("cifar-tiny").eval().requires_grad_(False)
    return model, torch.randn(count, 3, 32, 32)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def forward(model: OdeViTForImageClassification, images: torch.Tensor, batch_size: int) -> None:
    with torch.no_grad():
        for batch in images.split(batch_size):
            model(batch)


def with_torch_jvp(model: OdeViTForImageClassification, images: torch.Tensor, batch_size: int) -> None:
    """The same exponents with automatic tangents of the model's own step."""
    config, step = model.config, SOLVERS[model.config.solver].step
    for batch in images.split(batch_size):
        grid = Grid(config.num_steps, config.horizon, config.num_fields)
        maps = (partial(step, model.odevit.fields[phase], h=h) for phase, h in grid.steps())
        with torch.no_grad():
            tokens = model.odevit.embed(batch)
        lyapunov_spectrum(maps, tokens, TANGENTS, total_time=config.depth)


def peak_megabytes(count: int, batch_size: int) -> float:
    """Peak memory of a fresh process that computes the exponents of `count` images, images themselves excluded."""
    command = [sys.executable, __file__, "--memory", "--images", str(count), "--batch-size", str(batch_size)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="measurements taken in turn; the best of each counts")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, images = model_and_images(options.images)
    if options.memory:
        model_exponents(model, images, TANGENTS, batch_size=options.batch_size)
        size = images.numel() * images.element_size()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - size) / 2**20)
        return

    few, size = images[: options.batch_size], options.batch_size
    forward(model, few, size)  # warm up
    best = {"forward": float("inf"), "ours": float("inf"), "jvp": float("inf")}
    for _ in range(options.rounds):
        best["forward"] = min(best["forward"], seconds(lambda: forward(model, images, size)))
        best["ours"] = min(best["ours"], seconds(lambda: model_exponents(model, images, TANGENTS, batch_size=size)))
        best["jvp"] = min(best["jvp"], seconds(lambda: with_torch_jvp(model, few, size)) * len(images) / len(few))
    parameters, threads = sum(p.numel() for p in model.parameters()) / 1e6, torch.get_num_threads()
    print(f"cifar-tiny ({parameters:.2f}M, K = {model.config.num_steps}), {len(images)} images, {threads} thread(s)")
    print(f"one forward pass             {best['forward']:8.2f} s")
    for name, label in (("ours", f"top {TANGENTS} exponents"), ("jvp", "the same by torch.func.jvp")):
        ratio = best[name] / (TANGENTS * best["forward"])
        print(f"{label:28} {best[name]:8.2f} s = {ratio:.2f} × one forward pass per tangent")
    ratio = best["ours"] / (TANGENTS * best["forward"])
    print(f"target ≤ {TARGET:g}: {'met' if ratio <= TARGET else 'MISSED'}")
    small, large = (peak_megabytes(count, size) for count in (128, 512))
    print(
        f"peak memory without the images: {small:.0f} MB for 128 images, {large:.0f} MB for 512 ({large / small:.2f} ×)"
    )


if __name__ == "__main__":
    main()
