"""Every claim of speed, side by side in one run: `make bench` writes docs/BENCHMARKS.md and docs/benchmarks.json.

    python benchmarks/suite.py [--quick] [--threads N] [--output docs]
        [--pair STUDENT TEACHER DATA]… [--reached RUN ACCURACY MINUTES]

Ours and the peer take turns; a line is the median over rounds of the ratio within a round, with its 10 % and 90 %
quantiles, so that a busy machine disturbs both alike. Above 1 ours is better, whatever is measured. Weights are random
except for --pair: a trained student (with its calibrated rule, if it has one) beside its teacher on real images.
--reached: how much sooner than MINUTES the run came to ACCURACY on its held-out images.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import training
from peers import CLASSES, PATCH, PEERS, ROOT, SIDE, answer, available, cct, hugging_face_vit
from torch import Tensor, nn
from trained import in_short, time_to_accuracy, trained_pair

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.dynamics.cost import count_parameters
from odevit.model.solvers import solve

Run = Callable[[], Any]
NARROW: dict[str, Any] = {"image_size": SIDE, "patch_size": PATCH, "num_labels": CLASSES, "depth": 6}


def ours(width: int = 192, heads: int = 3, steps: int = 12, side: int = SIDE, **options: Any) -> Any:
    """An ODE-ViT of a ViT-tiny's tokens, width and MLP: 1/12 of its blocks' parameters."""
    config = {**NARROW, "hidden_size": width, "num_attention_heads": heads, "num_steps": steps, "image_size": side}
    return OdeViTForImageClassification(OdeViTConfig(**{**config, **options})).eval()


class Bench:
    """Collects lines; `rounds` and `seconds` bound how long one of them may take."""

    def __init__(self, rounds: int, seconds: float):
        self.rounds, self.seconds, self.lines, self.notes = rounds, seconds, list[dict[str, Any]](), list[str]()

    def add(self, name: str, mine: float, theirs: float, ratio: float, unit: str, target: float | None = None,
            spread: tuple[float, float] | None = None) -> None:  # fmt: skip
        line = {"name": name, "ours": mine, "peer": theirs, "ratio": ratio, "target": target}
        line |= {"met": None if target is None else ratio >= target, "unit": unit, "spread": spread}
        self.lines.append(line)
        print(f"{name:74} {ratio:6.2f}×" + ("" if target is None else f"  target {target:g}"), flush=True)

    @torch.no_grad()
    def faster(self, name: str, mine: Run, theirs: Run, target: float | None = None, per: int = 1) -> None:
        """Milliseconds of both, each divided by `per`; ratio theirs / mine."""
        with torch.no_grad():
            self.steps(name, mine, theirs, target, per)

    def steps(self, name: str, mine: Run, theirs: Run, target: float | None = None, per: int = 1) -> None:
        """As `faster`, with gradients."""
        for run in (mine, theirs):
            run()
        repeats = max(1, math.ceil(0.02 / max(timed(mine, 1), 1e-9)))
        pairs: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(pairs) < self.rounds and (len(pairs) < 3 or time.perf_counter() - began < self.seconds):
            first, second = timed(mine, repeats), timed(theirs, repeats)
            pairs.append((first, second))
        ratios = sorted(theirs / mine for mine, theirs in pairs)
        middle = [1000 / per * statistics.median(column) for column in zip(*pairs, strict=True)]
        low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.1, 0.9))
        self.add(name, middle[0], middle[1], statistics.median(ratios), "ms", target, (low, high))


def timed(run: Run, repeats: int) -> float:
    before = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - before) / repeats


# --- the lines --------------------------------------------------------------------------------------------------------


def against_peers(bench: Bench, quick: bool) -> None:
    """Latency and throughput at equal tokens and width, at the depth of the peer and at four steps."""
    peers, missing = available(PEERS)
    bench.notes += [f"not installed here, left out: {name}" for name in missing]
    models = {steps: ours(steps=steps) for steps in (12, 4)}
    for batch in (1, 4) if quick else (1, 64, 256):
        images = torch.randn(batch, 3, SIDE, SIDE)
        for steps, model in models.items():
            for name, peer in peers.items():
                what = "latency" if batch == 1 else "throughput"
                label = f"{what}, batch {batch}: K = {steps} against {name}, 12 blocks"
                bench.faster(label, lambda m=model, x=images: m(x), lambda p=peer, x=images: answer(p, x), per=batch)
        small = ours(128, 4, 4, tokenizer="pooling", pool="sequence", mlp_ratio=1, mixing="depthwise")
        rival = cct().eval()
        bench.faster(f"batch {batch}: width 128, pooling stem, K = 4 against CCT-2/3x2",
                     lambda m=small, x=images: m(x), lambda p=rival, x=images: answer(p, x), per=batch)  # fmt: skip


def own_loop(bench: Bench, quick: bool) -> None:
    """The solver against the same blocks written out by hand, and against torchdiffeq."""
    from torchdiffeq import odeint

    model = ours(steps=12)
    field, x = model.odevit.fields[0], torch.randn(4 if quick else 64, 65, 192)

    def by_hand() -> Tensor:
        y = x
        for _ in range(12):
            y = y + (1 / 12) * field(y)
        return y

    torch.testing.assert_close(by_hand(), solve(field, x, num_steps=12).xs[-1], rtol=1e-4, atol=1e-4)
    bench.faster(
        "own Euler loop against hand-unrolled tied blocks", lambda: solve(field, x, num_steps=12), by_hand, 0.95
    )

    def theirs(method: str, steps: int) -> Run:
        times = torch.linspace(0, 1, steps + 1) if method != "dopri5" else torch.tensor([0.0, 1.0])
        return lambda: odeint(lambda t, y: field(y), x, times, method=method, rtol=1e-3, atol=1e-3)

    for method, steps in (("euler", 12), ("rk4", 3)):
        bench.faster(
            f"own {method}, {steps} steps, against torchdiffeq's on the same field",
            lambda m=method, k=steps: solve(field, x, num_steps=k, solver=m),
            theirs(method, steps),
        )
    bench.faster("own rk4, 3 steps, against torchdiffeq's dopri5 at 1e-3",
                 lambda: solve(field, x, num_steps=3, solver="rk4"), theirs("dopri5", 0))  # fmt: skip


def arithmetic(bench: Bench, quick: bool) -> None:
    """How near the block comes to plain matrix multiplies of its own shapes."""
    model = ours(steps=1)
    field, x = model.odevit.fields[0], torch.randn(4 if quick else 64, 65, 192)
    with torch.no_grad():
        _, shapes = training.step_flops(lambda: field(x))
    operands = training.MatrixMultiplies(shapes, time.perf_counter, repeats=1).operands
    multiplies = [(a, b, shapes[shape]) for shape, (a, b) in operands.items()]

    def plain() -> None:
        for a, b, times in multiplies:
            for _ in range(times):
                a @ b

    bench.faster("one evaluation of the block against its matrix multiplies alone", lambda: field(x), plain, 0.8)


def training_steps(bench: Bench, quick: bool) -> None:
    """Forward, backward and AdamW: against the published way of writing the model, and against a ViT."""
    torch.manual_seed(0)
    batch = 4 if quick else 64
    model = ours(steps=12, tokenizer="conv", mlp_ratio=2).train()
    images, labels = torch.randn(batch, 3, SIDE, SIDE), torch.randint(0, CLASSES, (batch,))
    published = training.PublishedModel(model).train()
    rivals = {"the published way of writing it": published, "Hugging Face ViT-tiny": hugging_face_vit(mlp=2).train()}
    mine = training.Step(model, images, labels, time.perf_counter)
    for name, rival in rivals.items():
        step = training.Step(rival, images, labels, time.perf_counter)
        bench.steps(f"training step, batch {batch}, K = 12, against {name}", mine, step, per=batch)
        held = training.peak_memory(mine), training.peak_memory(step)
        bench.add(
            f"peak memory of that step against {name}", held[0] / 2**20, held[1] / 2**20, held[1] / held[0], "MiB"
        )


def memory_curve(bench: Bench, quick: bool) -> dict[str, list[Any]]:
    """Peak of a training step against K: plain, recomputing each step, recomputing segments of √K steps."""
    counts = [2, 4] if quick else [3, 6, 12, 24, 48]
    images, labels = torch.randn(2 if quick else 32, 3, SIDE, SIDE), torch.zeros(2 if quick else 32, dtype=torch.long)
    curve: dict[str, list[Any]] = {"K": counts, "plain": [], "steps": [], "segments": []}
    for count in counts:
        for kind in ("plain", "steps", "segments"):
            model = ours(steps=count).train()
            if kind != "plain":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.odevit.recompute = kind if kind != "plain" else "steps"
            peak = training.peak_memory(training.Step(model, images, labels, time.perf_counter))
            curve[kind].append(round(peak / 2**20, 2))
    best = min(curve["steps"][-1], curve["segments"][-1])
    name = f"peak training memory at K = {counts[-1]}: with recomputation against plain"
    bench.add(name, best, curve["plain"][-1], curve["plain"][-1] / best, "MiB", None if quick else 4.0)
    return curve


def growth(bench: Bench, quick: bool) -> None:
    """Log-log slopes of the time of a forward pass, beside those of a ViT (depth for K)."""
    repeats, base = (1, 2) if quick else (7, 32)
    sweeps: dict[str, tuple[Sequence[int], Callable[[int], tuple[nn.Module, nn.Module, Tensor]]]] = {
        "K (depth of the peer)": ([4, 8, 16, 32], lambda v: (ours(steps=v), hugging_face_vit(depth=v), image(base))),
        "tokens": ([16, 32, 64], lambda v: (ours(steps=4, side=v), hugging_face_vit(depth=4, side=v), image(base, v))),
        "batch": ([1, 4, 16, 64], lambda v: (ours(steps=4), hugging_face_vit(depth=4), image(v))),
        "width": ([96, 192, 384], lambda v: (ours(v, v // 32, 4), hugging_face_vit(v, 4, v // 32), image(base))),
    }
    for name, (values, make) in sweeps.items():
        taken: tuple[list[float], list[float]] = ([], [])
        for value in values:
            mine, peer, images = make(value)
            for times, model in zip(taken, (mine, peer.eval()), strict=True):
                with torch.no_grad():
                    model(images)
                    times.append(statistics.median(timed(lambda m=model, x=images: m(x), 1) for _ in range(repeats)))
        sizes = [(v // PATCH) ** 2 + 1 for v in values] if name == "tokens" else values
        slopes = [slope(sizes, times) for times in taken]
        bench.add(f"growth of time with {name}: log-log slope", slopes[0], slopes[1], slopes[1] / slopes[0], "slope")


def image(batch: int, side: int = SIDE) -> Tensor:
    return torch.randn(batch, 3, side, side)


def slope(sizes: Sequence[int], times: Sequence[float]) -> float:
    x, y = [math.log(v) for v in sizes], [math.log(t) for t in times]
    return statistics.linear_regression(x, y).slope


def disk_and_start(bench: Bench, quick: bool) -> None:
    parameters = [count_parameters(model)["total"] for model in (ours(), hugging_face_vit())]
    bench.add("bytes on disk at equal tokens and width against Hugging Face ViT-tiny, 12 blocks", 4 * parameters[0],
              4 * parameters[1], parameters[1] / parameters[0], "bytes")  # fmt: skip
    start = "from odevit import OdeViTForImageClassification as M; M.from_preset('cifar-tiny')"
    peer = "from transformers import ViTConfig, ViTForImageClassification as M; M(ViTConfig())"

    def process(code: str) -> Run:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, capture_output=True)

    bench.steps("start-up: import and build, against Hugging Face ViT", process(start), process(peer))


# --- the report -------------------------------------------------------------------------------------------------------


def machine(threads: int) -> str:
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        name = next((row.split(":")[1].strip() for row in info.read_text().splitlines() if "model name" in row), name)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name}, {os.cpu_count()} cores, {threads} thread(s); {versions}"


def command(options: argparse.Namespace) -> str:
    """As it was called, without the paths of this machine."""
    words = [f"--pair {' '.join(map(in_short, pair))}" for pair in options.pair]
    words += [f"--reached {in_short(run)} {accuracy} {minutes}" for run, accuracy, minutes in options.reached]
    return "make bench" + (f" BENCH='{' '.join(words)}'" if words else "")


def write(
    bench: Bench, curve: dict[str, list[Any]], folder: Path, host: str, called: str, minutes: float, quick: bool
) -> None:
    rows = ["| | ours | peer | unit | ratio | 10–90 % | target | met |", "|---|---:|---:|---|---:|---|---:|---|"]
    for line in bench.lines:
        spread = "" if line["spread"] is None else "{:.2f}–{:.2f}".format(*line["spread"])
        met = {None: "", True: "yes", False: "**no**"}[line["met"]]
        target = "" if line["target"] is None else f"{line['target']:g}"
        numbers = f"{line['ours']:,.4g} | {line['peer']:,.4g} | {line['unit']} | {line['ratio']:.2f}"
        rows.append(f"| {line['name']} | {numbers} | {spread} | {target} | {met} |")
    kinds = {"plain": "plain", "steps": "each step recomputed", "segments": "segments of √K recomputed"}
    memory = ["| K | " + " | ".join(str(k) for k in curve["K"]) + " |", "|---|" + "---:|" * len(curve["K"])]
    memory += [f"| {label}, MiB | " + " | ".join(f"{v:g}" for v in curve[kind]) + " |" for kind, label in kinds.items()]
    text = [
        "# Benchmarks", "",
        f"Written by `{called}` in {minutes:.0f} minutes{' (--quick: no claims)' * quick}. {host}.",
        "Ours and the peer took turns; a ratio is the median over rounds of peer / ours: above 1 ours is better.", "",
        *rows, "", "## Training memory against the number of steps", "", *memory, "",
        *(f"* {note}" for note in bench.notes), "",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "BENCHMARKS.md").write_text("\n".join(text))
    (folder / "benchmarks.json").write_text(json.dumps(bench.lines, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> Bench:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few images and rounds: only to see it run")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pair", nargs=3, action="append", default=[], metavar=("STUDENT", "TEACHER", "DATA"))
    parser.add_argument("--reached", nargs=3, action="append", default=[], metavar=("RUN", "ACCURACY", "MINUTES"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    began = time.perf_counter()
    bench = Bench(rounds=3 if options.quick else 15, seconds=0 if options.quick else 12)
    for part in (own_loop, arithmetic, against_peers, training_steps, growth, disk_and_start):
        part(bench, options.quick)
    curve = memory_curve(bench, options.quick)
    for pair in options.pair:
        trained_pair(bench, *pair, quick=options.quick)
    for run, accuracy, spent in options.reached:
        time_to_accuracy(bench, Path(run), float(accuracy), float(spent))
    minutes = (time.perf_counter() - began) / 60
    write(bench, curve, options.output, machine(options.threads), command(options), minutes, options.quick)
    print(f"written: {options.output / 'BENCHMARKS.md'} and benchmarks.json")
    return bench


if __name__ == "__main__":
    main()
