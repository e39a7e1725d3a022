"""Do a ViT's layers share anything that a field could start from? And does a student that starts there learn faster?

    python experiments/teacher_start.py shares --teacher DIRECTORY                       # seconds
    python experiments/teacher_start.py start --minutes 6 --set distill.teacher=DIRECTORY --set data.name=DIRECTORY

`shares`: how much of a matrix of all layers their mean explains, ΣMean² / ΣW² (1/layers when they have nothing in
common), for the matrices as they are, and for the products that do not depend on how heads and hidden units are
numbered: out·value, queryᵀ·key, W2·W1, with the norms' gains.
`start`: the recipe cifar10/distill, from fresh weights and from singular value decompositions of these mean products.
Lives here only: a start that does not pay is not merged (docs/RESULTS.md).
"""

from pathlib import Path
from typing import Any, cast
from unittest import mock

import distillation
import torch
from studies import print_markdown, run_study, study_parser
from torch import Tensor
from transformers import AutoModelForImageClassification

from odevit.distill import objective
from odevit.model.model import OdeViTForImageClassification

PARTS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")


def matrices(module: Any) -> dict[str, Tensor]:
    """(layers, out, in) of each matrix of a Hugging Face ViT or DeiT."""
    layers = module.base_model.layers
    return {name: torch.stack([layer.get_parameter(f"{name}.weight").detach() for layer in layers]) for name in PARTS}


def products(module: Any) -> dict[str, Tensor]:
    """(layers, d, d) of what attention writes, what it compares, and what the MLP does to small signals, which GELU
    halves."""
    q, k, v, out, w1, w2 = matrices(module).values()
    layers = module.base_model.layers
    before, after = (
        torch.stack([layer.get_parameter(f"layernorm_{name}.weight").detach() for layer in layers])[:, None]
        for name in ("before", "after")
    )
    return {
        "out·value": out @ (v * before),
        "queryᵀ·key": (q * before).mT @ (k * before),
        "W2·W1 / 2": w2 @ (w1 * after) / 2,
    }


def explained(weights: Tensor) -> float:
    """The share of Σ W² that the mean over layers (the first axis) explains."""
    return float(len(weights) * weights.mean(0).square().sum() / weights.square().sum())


def factors(product: Tensor) -> tuple[Tensor, Tensor]:
    """L and R, d × d, with L R = product and singular values divided evenly."""
    left, values, right = torch.linalg.svd(product)
    return left * values.sqrt(), values.sqrt()[:, None] * right


@torch.no_grad()
def start_from_(student: OdeViTForImageClassification, module: Any) -> OdeViTForImageClassification:
    """Field matrices from the means of the teacher's products.

    The MLP starts linear: GELU(a) − GELU(−a) = a, so pairs of hidden units (A, −A) with outputs (B, −B) give B A."""
    mean = {name: weights.mean(0) for name, weights in products(module).items()}
    for field in student.odevit.fields:
        attention, mlp = cast(Any, field).attention, cast(Any, field).mlp
        attention.out.weight[:], attention.value.weight[:] = factors(mean["out·value"])
        left, right = factors(mean["queryᵀ·key"])
        attention.query.weight[:], attention.key.weight[:] = left.mT, right
        left, right = factors(mean["W2·W1 / 2"])
        pairs, width = mlp.w1.out_features // 2, len(left)
        kept = min(pairs, width)
        mlp.w2.weight.zero_()  # hidden units that are left over begin silent, with fresh weights before them
        for sign, start in ((1, 0), (-1, pairs)):
            mlp.w1.weight[start : start + kept] = sign * right[:kept]
            mlp.w2.weight[:, start : start + kept] = sign * left[:, :kept]
    return student


def run_arm(shared: bool, overrides: list[str], folder: Path) -> dict[str, Any]:
    def student_of(teacher: Any, **options: Any) -> OdeViTForImageClassification:
        student = usual(teacher, **options)
        return start_from_(student, teacher.module) if shared else student

    usual = objective.student_of
    with mock.patch.object(objective, "student_of", student_of):
        return distillation.run_arm(distillation.Arm("cifar10/distill"), overrides, folder)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", ["shares", "start"], minutes=6, output="runs/teacher-start")
    parser.add_argument("--teacher", help="of shares: a folder or a name on the hub")
    options = parser.parse_args(arguments)
    if options.study == "shares":
        if not options.teacher:
            parser.error("shares needs --teacher")
        module = AutoModelForImageClassification.from_pretrained(options.teacher)
        every = matrices(module) | products(module)
        layers = len(every["mlp.fc1"])
        rows = {name: {"share of the mean": f"{explained(weights):.1%}"} for name, weights in every.items()}
        print_markdown(f"{layers} layers; nothing in common would be {1 / layers:.1%}", rows)
        return rows
    arms = {"fresh": False, "from what the layers share": True}
    rows = run_study(parser, options, arms, run_arm, title="start")
    print_markdown(f"{options.minutes:g} minutes each, test split", rows)
    return rows


if __name__ == "__main__":
    main()
