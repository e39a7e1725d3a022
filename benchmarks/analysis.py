"""Speed and memory of the Lyapunov analysis, side by side with plain forward passes in one run.

    python benchmarks/analysis.py                 # 1000 images
    python benchmarks/analysis.py --images 256    # a quick look

Prints the time of the top exponent, and of the top 4, of the whole flow as a ratio to one forward pass over the same
images (block Lanczos: each Jacobian product costs somewhat less than a forward pass), the number of products, and the
peak memory with 128 and with 512 images (target: flat).
"""

import argparse
import resource
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable

import torch

from odevit.dynamics import exponents
from odevit.dynamics.jacobian import linearise
from odevit.dynamics.lanczos import Map
from odevit.model.model import OdeViTForImageClassification

EXPONENTS = (1, 4)


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


def products_per_image(model: OdeViTForImageClassification, images: torch.Tensor, k: int) -> int:
    """Jacobian products, with Φ and with Φᵀ, that the top k exponents of one batch take for each of its images."""
    count = 0

    def counted(flow: Map, x: torch.Tensor) -> tuple[torch.Tensor, Map, Map]:
        end, push, pull = linearise(flow, x)

        def count_and(product: Map) -> Map:
            def counting(v: torch.Tensor) -> torch.Tensor:
                nonlocal count
                count += 1
                return product(v)

            return counting

        return end, count_and(push), count_and(pull)

    with unittest.mock.patch.object(exponents, "linearise", counted):
        exponents.model_exponents(model, images, k, batch_size=len(images))
    return count


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
        exponents.model_exponents(model, images, max(EXPONENTS), batch_size=options.batch_size)
        size = images.numel() * images.element_size()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - size) / 2**20)
        return

    few, size = images[: options.batch_size], options.batch_size
    forward(model, few, size)  # warm up
    best = {"forward": float("inf"), **dict.fromkeys(EXPONENTS, float("inf"))}
    for _ in range(options.rounds):
        best["forward"] = min(best["forward"], seconds(lambda: forward(model, images, size)))
        for k in EXPONENTS:
            found = seconds(lambda k=k: exponents.model_exponents(model, images, k, batch_size=size))
            best[k] = min(best[k], found)
    parameters, threads = sum(p.numel() for p in model.parameters()) / 1e6, torch.get_num_threads()
    print(f"cifar-tiny ({parameters:.2f}M, K = {model.config.num_steps}), {len(images)} images, {threads} thread(s)")
    print(f"one forward pass             {best['forward']:8.2f} s")
    for k in EXPONENTS:
        ratio, products = best[k] / best["forward"], products_per_image(model, few, k)
        print(f"top {k} exponent(s)            {best[k]:8.2f} s = {ratio:.1f} × one forward pass, {products} products")
    small, large = (peak_megabytes(count, size) for count in (128, 512))
    print(
        f"peak memory without the images: {small:.0f} MB for 128 images, {large:.0f} MB for 512 ({large / small:.2f} ×)"
    )


if __name__ == "__main__":
    main()
