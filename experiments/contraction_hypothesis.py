"""When does label-free distillation fail? A controlled test of the contraction hypothesis, on digits.

    python experiments/contraction_hypothesis.py            # 5 minutes on one core
    python experiments/contraction_hypothesis.py --quick    # seconds: a toy budget, the numbers mean nothing

The hypothesis: a student that only follows its teacher's CLS path, without labels, answers as the teacher does if and
only if its final CLS state lands inside the teacher's contraction region, ‖c_student - c_teacher‖ < r(c_teacher).
One ViT is trained; other teachers are made from it, one family for each way of moving the ratio distance/radius:

    head scale       weights and bias times s: a control, nothing may change
    small features   the head is refitted to read only the principal directions of CLS from the q-th on: r shrinks
    quiet directions the head also reads, β times, random mixtures of the directions from the 9th on, where a teacher of
                     10 classes varies least: r shrinks, the teacher's answers hardly change
    unused direction the head also reads, β times, the one direction that a LayerNorm never produces: r shrinks, and no
                     answer of anybody changes
    expansion        the last block's MLP input times g (head refitted): nearby states are stretched apart
    budget           the student is stopped early: the distance grows, r stays

The first four change the head alone, which the loss never sees: one student serves them all. Each student: frozen
head, CLS path loss, uniform times, same budget. Agreement, distance and radius are those of
`odevit.analysis.contraction`, on test images. Writes results.json and figure.png into --output.
"""

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from contraction_verdict import Row, conclude, draw, print_rows
from torch import Tensor, nn

from odevit.analysis.contraction import agreement
from odevit.data import DataConfig, load_data, prepare
from odevit.distill.meeting import match_steps
from odevit.distill.student import student_of
from odevit.teachers.teacher import Teacher, load_teacher

DEPTH, WIDTH = 6, 64
BATCH = 64
SCALES = (0.01, 1.0, 100.0)
FIRST_DIRECTIONS = (0, 2, 4, 6, 8, 9, 32)
QUIET = (0.3, 1.0, 3.0, 10.0, 30.0)
UNUSED = (0.1, 1.0, 10.0, 100.0)
GAINS = (1.0, 4.0, 16.0, 64.0)
BUDGETS = (0.1, 0.25, 0.4, 0.6, 1.0)  # of the student's steps


@dataclass
class Images:
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load_images(limit: int | None = None) -> Images:
    data = load_data(DataConfig(name="digits", limit=limit))
    assert data.test is not None
    tensors = []
    for split in (data.train, data.test):
        images, labels = split.fetch(torch.arange(len(split)))
        tensors += [prepare(images, None, data.mean, data.std), labels]
    return Images(*tensors)


def minimise(model: nn.Module, loss_of: Any, count: int, steps: int, lr: float, seed: int, snapshots: Any = ()) -> dict:
    """AdamW, one-cycle, random batches of `count` images; copies of the model after the steps in `snapshots`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    copies = {}
    model.train()
    for step in range(1, steps + 1):
        loss = loss_of(torch.randint(count, (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{type(model).__name__}: step {step} of {steps}, loss {float(loss):.4g}", file=sys.stderr)
        if step in snapshots:
            copies[step] = copy.deepcopy(model).eval()
    model.eval()
    return copies


def train_teacher(images: Images, steps: int, seed: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    blocks = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH,
    }
    model = ViTForImageClassification(ViTConfig(**sizes, **blocks))

    def loss_of(rows: Tensor) -> Tensor:
        return nnf.cross_entropy(model(images.train[rows]).logits, images.train_labels[rows], label_smoothing=0.1)

    minimise(model, loss_of, len(images.train), steps, 2e-3, seed)
    return model


def distil(teacher: Teacher, images: Images, steps: int, seed: int, snapshots: Any = ()) -> tuple[Any, dict]:
    """The paper's label-free loss: Σ_l mean ‖X(t_l)[CLS] - h_l[CLS]‖² at uniform times; the head never enters."""
    torch.manual_seed(seed)
    times = [layer / teacher.depth for layer in range(1, teacher.depth + 1)]
    student = student_of(teacher, mlp_ratio=4, meeting_times=times)
    pairs = match_steps(times, student.config.time_grid(student.config.num_steps))
    states = teacher.trace(images.train).states
    targets = torch.stack([states[layer][:, 0] for layer, _ in pairs])  # (L, N, d)

    def loss_of(rows: Tensor) -> Tensor:
        xs = student.odevit.evolve(student.odevit.embed(images.train[rows]), save_at="steps").xs
        cls = torch.stack([xs[step][:, 0] for _, step in pairs])  # (L, b, d)
        return (cls - targets[:, rows]).square().sum(dim=-1).mean(dim=1).sum()

    copies = minimise(student, loss_of, len(images.train), steps, 2e-3, seed, snapshots)
    return student.eval(), copies


def normed_cls(module: nn.Module, images: Tensor) -> Tensor:
    """What the head reads (N, d)."""
    return module.vit.layernorm(load_teacher(module).trace(images).states[-1][:, 0]).detach()  # type: ignore


def with_head(module: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    """A copy of a ViT or of a student, with another head."""
    other: Any = copy.deepcopy(module)
    with torch.no_grad():
        other.classifier.weight.copy_(weight)
        other.classifier.bias.copy_(bias)
    return other


def refitted_head(cls: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Logistic regression on the principal directions of cls (N, d) from number `first` (0: the largest) on."""
    center = cls.mean(dim=0)
    _, sizes, directions = torch.linalg.svd((cls - center).double(), full_matrices=False)
    keep = (torch.arange(len(sizes)) >= first) & (sizes > 1e-4 * sizes[0])  # the rest is what LayerNorm never produces
    basis = directions[keep].T / sizes[keep].max() * len(cls) ** 0.5  # (d, kept): the largest has variance one
    inputs = (cls - center).double() @ basis
    head = nn.Linear(int(keep.sum()), 10).double()
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nnf.cross_entropy(head(inputs), labels) + 1e-3 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    weight = (head.weight @ basis.T).detach()
    return weight.float(), (head.bias.detach() - weight @ center.double()).float()


def quiet_head(module: Any, cls: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The head plus β ‖W‖/√C in a random direction per class among the principal directions of cls (N, d) from the 9th.

    The mean state keeps its logits.
    """
    weight, bias = module.classifier.weight.detach(), module.classifier.bias.detach()
    center = cls.mean(dim=0)
    _, sizes, directions = torch.linalg.svd((cls - center).double(), full_matrices=False)
    quiet = directions[9:][sizes[9:] > 1e-4 * sizes[0]].float()
    mixture = torch.randn(len(weight), len(quiet), generator=torch.Generator().manual_seed(0))
    added = beta * weight.norm() / len(weight) ** 0.5 * nnf.normalize(mixture, dim=1) @ quiet
    return weight + added, bias - added @ center


def unused_head(module: Any, beta: float) -> tuple[Tensor, Tensor]:
    """The head plus β ‖W‖/√C along 1/γ, where LayerNorm's output is constant: the same logits everywhere."""
    weight, bias, norm = module.classifier.weight.detach(), module.classifier.bias.detach(), module.vit.layernorm
    unused = nnf.normalize(1 / norm.weight.detach().double(), dim=0)
    amount = torch.linspace(-1, 1, len(weight), dtype=torch.float64) * beta * weight.norm() / len(weight) ** 0.5
    offset = amount * (unused @ norm.bias.detach().double())
    return (weight + amount[:, None] * unused).float(), (bias - offset).float()


def measure(family: str, level: str, module: nn.Module, student: Any, images: Images) -> tuple[Row, dict[str, Tensor]]:
    result = agreement(student, load_teacher(module), images.test, images.test_labels, batch_size=512)
    assert result["certified"] is not None, result["note"]
    frequency = [
        result[key].bincount(minlength=10) / len(images.test) for key in ("student_answers", "teacher_answers")
    ]
    ratio = result["distances"] / result["radii"]
    row = Row(
        family,
        level,
        result["teacher_right"].double().mean().item(),
        result["radii"].median().item(),
        result["distances"].median().item(),
        ratio.median().item(),
        result["certified"],
        result["observed"],
        float(frequency[0] @ frequency[1]),
    )
    same = result["student_answers"] == result["teacher_answers"]
    return row, {"ratio": ratio, "same": same}


def head_variants(module: Any, images: Images) -> list[tuple[str, str, tuple[Tensor, Tensor]]]:
    weight, bias = module.classifier.weight.detach(), module.classifier.bias.detach()
    cls = normed_cls(module, images.train)
    variants = [("head scale", f"s = {scale:g}", (scale * weight, scale * bias)) for scale in SCALES]
    variants += [
        ("small features", f"q = {first}", refitted_head(cls, images.train_labels, first)) for first in FIRST_DIRECTIONS
    ]
    variants += [("quiet directions", f"β = {beta:g}", quiet_head(module, cls, beta)) for beta in QUIET]
    return variants + [("unused direction", f"β = {beta:g}", unused_head(module, beta)) for beta in UNUSED]


def expanded(module: Any, gain: float, images: Images) -> Any:
    """The last block's MLP input times `gain`, and a head that knows about it."""
    other: Any = copy.deepcopy(module)
    with torch.no_grad():
        other.vit.layers[-1].mlp.fc1.weight.mul_(gain)
        other.vit.layers[-1].mlp.fc1.bias.mul_(gain)
    return with_head(other, *refitted_head(normed_cls(other, images.train), images.train_labels, 0))


def run(
    images: Images, teacher_steps: int, student_steps: int, gains: tuple[float, ...], seed: int
) -> list[tuple[Row, dict[str, Tensor]]]:
    module = train_teacher(images, teacher_steps, seed)
    snapshots = {max(1, round(share * student_steps)) for share in BUDGETS}
    student, copies = distil(load_teacher(module), images, student_steps, seed, snapshots)
    results = []
    for family, level, head in head_variants(module, images):
        results.append(measure(family, level, with_head(module, *head), with_head(student, *head), images))
    for gain in gains:
        stretched = expanded(module, gain, images)
        if gain == 1:  # the same states, so the same student
            pupil = with_head(student, stretched.classifier.weight, stretched.classifier.bias)
        else:
            pupil, _ = distil(load_teacher(stretched), images, student_steps, seed)
        results.append(measure("expansion", f"g = {gain:g}", stretched, pupil, images))
    for step, early in sorted(copies.items()):
        results.append(measure("budget", f"{step} steps", module, early, images))
    return results


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy budget that only shows that the script runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/contraction_hypothesis"))
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    teacher_steps, student_steps = (20, 16) if options.quick else (600, 400)
    gains = GAINS[::3] if options.quick else GAINS
    results = run(load_images(200 if options.quick else None), teacher_steps, student_steps, gains, options.seed)
    rows, conclusion = [row for row, _ in results], conclude(results)
    print_rows(rows, conclusion)
    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        "quick": options.quick,
        "seed": options.seed,
        "teacher_steps": teacher_steps,
        "student_steps": student_steps,
    }
    report |= {"rows": [asdict(row) for row in rows], **conclusion, "seconds": time.perf_counter() - started}
    (options.output / "results.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    draw(rows, conclusion, options.output / "figure.png")
    print(f"\n{report['seconds']:.0f} s; {options.output / 'results.json'}, {options.output / 'figure.png'}")
    return report


if __name__ == "__main__":
    main()
