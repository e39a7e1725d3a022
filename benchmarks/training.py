"""What a training step of the 0.5M CIFAR preset costs, as ratios measured in one run.

    python benchmarks/training.py [--threads 1] [--rounds 7] [--compile] [--profile] [--quick]

(a) arithmetic rate of the step (forward, backward, optimiser) against plain matrix multiplies of the same shapes
(b) images per second against the same model written the published way: torch's nn.MultiheadAttention with
    need_weights=True, the map of every step kept in a list, torchdiffeq's Euler; same weights, same outputs
(c) peak memory of a step with gradient checkpointing against the published way
(d) the input pipeline (fetch, crop and flip, resize and normalise) against the step
Beside them: the same step in bfloat16 (`loop.mixed_precision=bf16`), which some processors multiply faster.

All candidates take turns in every round; a ratio is the median over rounds of the ratio within a round, so that a busy
machine favours none of them. On one thread the clock is the CPU time of this process, otherwise it is the wall clock.
Memory is what torch's allocator handed out at its peak during one step, beyond what was held before it (the model, its
gradients and the optimiser's moments): exact and repeatable. The resident size of the process agrees with it when large
blocks go back to the system at once (MALLOC_MMAP_THRESHOLD_=65536); with glibc's defaults its heap keeps 250 MiB of
holes beside that, whatever the model, and the ratio of resident sizes is then nearer to 0.4.
"""

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torchdiffeq import odeint

from odevit.data import batches, prepare
from odevit.data.augment import Augment, AugmentConfig
from odevit.data.splits import MemorySplit
from odevit.model.model import OdeViTForImageClassification
from odevit.training.config import OptimConfig
from odevit.training.optim import build_optimizers
from odevit.training.precision import autocast

aten = torch.ops.aten
SIDE, CLASSES = 32, 10
TARGETS = {"a": (">=", 0.70), "b": (">=", 1.5), "c": ("<=", 1 / 3), "d": ("<=", 0.05)}


# --- the published way ------------------------------------------------------------------------------------------------


AS_PUBLISHED: dict[str, Any] = {
    "num_labels": CLASSES, "tokenizer": "conv", "norm": "center", "mixing": "none", "pool": "cls",
}  # fmt: skip


class PublishedField(nn.Module):
    """s (MLP(CN(X)) + MHSA(CN(X))) as a right-hand side for torchdiffeq that remembers its attention maps."""

    def __init__(self, field: Any, width: int, heads: int):
        super().__init__()
        self.scale, self.norm_f, self.norm_g = field.scale, copy.deepcopy(field.norm_f), copy.deepcopy(field.norm_g)
        self.mlp = nn.Sequential(copy.deepcopy(field.mlp.w1), nn.GELU(), copy.deepcopy(field.mlp.w2))
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        ours = field.attention
        with torch.no_grad():
            self.attention.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
            self.attention.out_proj.weight.copy_(ours.out.weight)
        self.maps: list[Tensor] = []

    def center(self, norm: Any, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return norm.weight * (width / (width - 1)) * (x - x.mean(dim=-1, keepdim=True)) + norm.bias

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        y = self.center(self.norm_g, x)
        attended, attention_map = self.attention(y, y, y, need_weights=True, average_attn_weights=False)
        self.maps.append(attention_map)
        return self.scale * (self.mlp(self.center(self.norm_f, x)) + attended)


class PublishedModel(nn.Module):
    """The same model and weights as an OdeViTForImageClassification, written as the paper's code writes it."""

    def __init__(self, model: Any):
        super().__init__()
        config, base = model.config, model.odevit
        self.tokenizer, self.norm = copy.deepcopy(base.tokenizer), copy.deepcopy(model.norm)
        self.cls_token, self.positions = (nn.Parameter(p.detach().clone()) for p in (base.cls_token, base.positions))
        self.field = PublishedField(base.fields[0], config.hidden_size, config.num_attention_heads)
        self.classifier = copy.deepcopy(model.classifier)
        self.times = torch.linspace(0, float(config.horizon), config.num_steps + 1)

    def forward(self, images: Tensor) -> Tensor:
        self.field.maps = []
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), self.tokenizer(images)], dim=1) + self.positions
        return self.classifier(self.norm(odeint(self.field, x, self.times, method="euler")[-1][:, 0]))


# --- flops and the shapes that make them ------------------------------------------------------------------------------

Shape = tuple[int, int, int, int]  # (count, m, k) @ (count, k, n)


class MatrixShapes(TorchDispatchMode):
    """Counts the shapes of all matrix multiplies: those of linear layers, of attention, and convolutions as such."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts.update(self.shapes(func.overloadpacket, args, out))
        return out

    def shapes(self, op: Any, args: Any, out: Any) -> Iterator[Shape]:
        if op in (aten.mm, aten.addmm):
            a, b = args[-2:] if op is aten.mm else args[1:3]
            yield 1, a.shape[0], a.shape[1], b.shape[1]
        elif op is aten.bmm:
            yield *args[0].shape, args[1].shape[2]
        elif op is aten._scaled_dot_product_flash_attention_for_cpu:
            b, h, n, e = args[0].shape
            yield from [(b * h, n, e, n), (b * h, n, n, e)]  # Q Kᵀ, P V
        elif op is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            b, h, n, e = args[1].shape
            yield from [(b * h, n, e, n)] * 2 + [(b * h, n, n, e)] * 3  # Q Kᵀ again, dP; dQ, dK, dV
        elif op is aten.convolution:
            pixels, patch = out.numel() // out.shape[1], args[1][0].numel()
            yield 1, pixels, patch, out.shape[1]
        elif op is aten.convolution_backward:
            outputs, patch = args[0].shape[1], args[2][0].numel()
            pixels = args[0].numel() // outputs
            if out[0] is not None:
                yield 1, pixels, outputs, patch
            yield 1, outputs, pixels, patch


def step_flops(step: Callable[[], Any]) -> tuple[int, Counter[Shape]]:
    """Floating-point operations of a step as torch counts them, and the matrix multiplies they consist of."""
    fused = {  # torch counts the fused attention of GPUs only
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        step()
    with MatrixShapes() as shapes:
        step()
    flops = sum(2 * times * b * m * k * n for (b, m, k, n), times in shapes.counts.items())
    assert flops == counter.get_total_flops(), (flops, counter.get_total_flops())
    return flops, shapes.counts


class MatrixMultiplies:
    """Plain multiplies of given shapes. Called, it gives the seconds of all of them."""

    def __init__(self, counts: Counter[Shape], clock: Callable[[], float], repeats: int):
        self.counts, self.clock, self.repeats = counts, clock, repeats
        self.operands = {
            (b, m, k, n): (torch.randn(b, m, k).squeeze(0), torch.randn(b, k, n).squeeze(0)) for b, m, k, n in counts
        }

    def __call__(self) -> float:
        total = 0.0
        for shape, (a, b) in self.operands.items():
            before = self.clock()
            for _ in range(self.repeats):
                a @ b
            total += self.counts[shape] * (self.clock() - before) / self.repeats
        return total


# --- the candidates ---------------------------------------------------------------------------------------------------


class Step:
    """A training step of a model: forward, backward, AdamW."""

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, clock: Callable[[], float], precision: str = "no"
    ):
        self.model, self.images, self.labels, self.clock, self.precision = model, images, labels, clock, precision
        self.optimizers = build_optimizers(model, OptimConfig(steps=1, lr=1e-4))

    def __call__(self) -> float:
        before = self.clock()
        with autocast(self.precision, "cpu"):
            output = self.model(self.images)
            loss = nnf.cross_entropy(output if isinstance(output, Tensor) else output.logits, self.labels)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return self.clock() - before


class InputPipeline:
    """Batches as the loop makes them: fetch, crop and flip, normalise."""

    def __init__(self, batch_size: int, clock: Callable[[], float]):
        images = torch.randint(0, 256, (200 * batch_size, 3, SIDE, SIDE), dtype=torch.uint8)
        split = MemorySplit(images, torch.randint(0, CLASSES, (len(images),)))
        self.supply = batches(split, batch_size, seed=0, epoch=0)
        self.augment, self.clock = Augment(AugmentConfig(crop=4, flip=True), CLASSES), clock

    def __call__(self) -> float:
        before = self.clock()
        batch = next(self.supply)
        images, _ = self.augment(batch.images, batch.labels, seed=0, start=batch.start, total=batch.total)
        prepare(images, SIDE, [0.5] * 3, [0.25] * 3)
        return self.clock() - before


def peak_memory(step: Callable[[], Any]) -> int:
    """Most bytes that torch's allocator held at once during a step, beyond those held before it."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def candidates(options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Step]:
    torch.manual_seed(0)
    steps = 2 if options.quick else 12
    model = OdeViTForImageClassification.from_preset("cifar-tiny", **AS_PUBLISHED, num_steps=steps).train()
    images = torch.randn(options.batch_size, 3, SIDE, SIDE)
    labels = torch.randint(0, CLASSES, (options.batch_size,))
    published, frugal = PublishedModel(model).train(), copy.deepcopy(model)
    torch.testing.assert_close(published(images), model(images).logits, rtol=1e-4, atol=1e-4)
    frugal.gradient_checkpointing_enable({"use_reentrant": False})
    models = {"ours": model, "published": published, "checkpointed": frugal, "bfloat16": copy.deepcopy(model)}
    if options.compile:
        models["compiled"] = copy.deepcopy(model)
        for field in models["compiled"].odevit.fields:  # type: ignore[union-attr]
            field.compile()
    return {name: Step(m, images, labels, clock, "bf16" if name == "bfloat16" else "no") for name, m in models.items()}


# --- the report -------------------------------------------------------------------------------------------------------


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every candidate in every round; the first round, not kept, warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            took = run()
            if turn:
                seconds[name].append(took)
    return seconds


def ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="also torch.compile each field")
    parser.add_argument("--profile", action="store_true", help="print the most expensive operators of our step")
    parser.add_argument("--quick", action="store_true", help="2 solver steps, 4 images, 1 round: only to see it run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.batch_size = 1, 4
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter

    steps = candidates(options, clock)
    flops, shapes = step_flops(steps["ours"])
    multiplies = MatrixMultiplies(shapes, clock, repeats=1 if options.quick else 4)
    pipeline = InputPipeline(options.batch_size, clock)
    seconds = measure({**steps, "multiplies": multiplies, "input": pipeline}, options.rounds)
    memory = {name: peak_memory(steps[name]) for name in ("ours", "published", "checkpointed")}
    ratios = {
        "a": ratio(seconds, "multiplies", "ours"),  # the same flops in both, so rates are as the inverse of times
        "b": ratio(seconds, "published", "ours"),
        "c": memory["checkpointed"] / memory["published"],
        "d": ratio(seconds, "input", "ours"),
    }
    report(options, seconds, memory, flops, ratios)
    if options.profile:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            steps["ours"]()
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=50))
    return ratios


def report(
    options: argparse.Namespace,
    seconds: dict[str, list[float]],
    memory: dict[str, int],
    flops: int,
    ratios: dict[str, float],
) -> None:
    clock = "CPU time" if options.threads == 1 else "wall clock"
    print(
        f"cifar-tiny with the paper's field, batches of {options.batch_size}, torch {torch.__version__}, "
        f"{options.threads} thread(s), {clock}"
    )
    print(f"medians of {options.rounds} rounds; {flops / 1e9:.1f} Gflop a step\n")
    for name, values in seconds.items():
        middle = statistics.median(values)
        rate = f"{flops / middle / 1e9:7.1f} Gflop/s" if name in ("ours", "multiplies", "compiled") else ""
        peak = f"{memory[name] / 2**20:7.1f} MiB at the peak" if name in memory else ""
        print(f"{name:14} {1e3 * middle:8.1f} ms  {rate:16} {peak}")
    for name in ("checkpointed", "bfloat16", "compiled"):
        if name in seconds:
            print(f"{name} against ours: {ratio(seconds, 'ours', name):.2f}× the images per second")
    ceiling = ratio(seconds, "published", "multiplies")
    print(f"a step at the full rate of the multiplies would be {ceiling:.2f}× the published way: the ceiling of (b)")
    texts = {
        "a": "arithmetic rate against plain matrix multiplies",
        "b": "images per second against the published way",
        "c": "peak memory with checkpointing against the published way",
        "d": "input pipeline against a step",
    }
    print()
    for name, text in texts.items():
        sign, target = TARGETS[name]
        met = ratios[name] >= target if sign == ">=" else ratios[name] <= target
        print(f"({name}) {text:58} {ratios[name]:6.3f}   target {sign} {target:.3f}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
