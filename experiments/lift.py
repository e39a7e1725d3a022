"""Is a teacher's last CLS, met through a linear lift, worth anything to a student of another width?

    python experiments/lift.py lift --minutes 8 --set distill.teacher=DIRECTORY --set data.name=DIRECTORY --share 1/2

The student of cifar100/answers learns from the cache of cifar100/frozen-head. With a lift what its head reads is
P · pool(norm(X_T)), as wide as the teacher (`model.projection_size`), and may be drawn to the teacher's normed CLS:
mean ‖difference‖² over the variance of the teacher's. Behind a lift the teacher's own head fits too.
Lives here only: a loss that does not pay is not merged (docs/RESULTS.md).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from studies import print_markdown, run_study, study_parser
from torch import Tensor
from torch.nn.functional import layer_norm

from odevit.commands.train import train_recipe
from odevit.data import Data, derive_seed, load_data
from odevit.distill.answers import AnswerDistillation
from odevit.distill.cache_shards import Cache, cache_of
from odevit.distill.losses import answer_divergence
from odevit.recipe import Recipe, override
from odevit.teachers.teacher import Teacher, load_teacher
from odevit.training.classifiers import build_classifier
from odevit.training.integration import Integration
from odevit.training.objectives import Terms

STUDENT, CACHE = "cifar100/answers", "cifar100/frozen-head"


class Arm(NamedTuple):
    lift: bool = False
    weight: float = 0.0  # of the distance to the teacher's normed CLS
    frozen_head: bool = False


STUDIES = {
    "lift": {
        "answers alone": Arm(),
        "lift": Arm(lift=True),
        "lift, drawn to CLS": Arm(lift=True, weight=1.0),
        "lift, drawn to CLS, teacher's head": Arm(lift=True, weight=1.0, frozen_head=True),
    }
}


class LiftedAnswers(AnswerDistillation):
    """KL to cached answers, and the distance of what the head reads to the teacher's normed CLS."""

    def __init__(self, teacher: Teacher, config: Any, cache: Cache, weight: float):
        super().__init__(teacher, config, cache)  # type: ignore[arg-type]
        self.weight, self.parts = weight, teacher.parts()
        sample = self.read(cache.trace(torch.linspace(0, len(cache.split) - 1, config.sample).long()).states[-1])
        self.variance = float((sample - sample.mean(0)).square().sum(-1).mean())

    def read(self, state: Tensor) -> Tensor:
        """A state of the teacher (b, n, D) → its CLS behind its final norm (b, D)."""
        parts = self.parts
        return layer_norm(state[:, 0], state.shape[-1:], parts.norm_weight, parts.norm_bias, parts.norm_eps)

    def __call__(
        self, model: Any, images: Tensor, targets: Tensor, indices: Tensor, *, progress: float, integration: Integration
    ) -> Terms:
        assert self.cache is not None
        output, trace = model.odevit(images, **integration.options(model.config.horizon)), self.cache.trace(indices)
        features = model.read_out(output.last_hidden_state)
        logits = model.classifier(features)
        assert trace.logits is not None
        losses = {"kl": answer_divergence(logits, trace.logits, self.config.kl_temperature)}
        if self.weight:
            distance = (features.float() - self.read(trace.states[-1])).square().sum(-1).mean()
            losses["lift"] = self.weight * distance / self.variance
        return Terms(losses, logits, max(output.evaluations))


def recipe_of(assignments: list[str]) -> Recipe:
    """The student's model and the cache's distillation as one recipe."""
    values = Recipe.load(CACHE).to_dict() | {"model": Recipe.load(STUDENT).model}
    return Recipe.from_dict(override(values, assignments))


def student_of(arm: Arm, recipe: Recipe, data: Data, teacher: Teacher) -> Any:
    """The recipe's model, with a lift to the teacher's width and the teacher's head where the arm wants them."""
    fields = recipe.model | ({"projection_size": teacher.width} if arm.lift else {})
    torch.manual_seed(derive_seed(recipe.seed, "initial weights"))
    student, parts = build_classifier(fields, data, recipe.data), teacher.parts()
    if arm.frozen_head:
        assert parts.head_weight is not None
        assert parts.head_bias is not None
        student.classifier.weight.data.copy_(parts.head_weight)
        student.classifier.bias.data.copy_(parts.head_bias)
        student.classifier.requires_grad_(False)
    return student


def run_arm(arm: Arm, assignments: list[str], folder: Path) -> dict[str, str]:
    """Train an arm, or go on with it; its row."""
    path = folder / "result.json"
    if not path.exists():
        recipe = recipe_of([*assignments, f"output={folder}"])
        assert recipe.distill is not None
        data, teacher = load_data(recipe.data), load_teacher(recipe.distill.teacher)
        student = student_of(arm, recipe, data, teacher)
        mean, std = teacher.mean or tuple(data.mean), teacher.std or tuple(data.std)
        cache = cache_of(recipe, teacher, data.train, mean, std)
        objective = LiftedAnswers(teacher, recipe.distill, cache, arm.weight)
        train_recipe(recipe, model=student, objective=objective, data=data, resume=True)
    result = json.loads(path.read_text())
    return {
        "parameters": f"{result['parameters']:,}",
        "steps": f"{result['steps']:,}",
        "held-out": f"{result['selected']['top1']:.2%}",
        "test": f"{result['top1']:.2%}",
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", STUDIES, minutes=8, output="runs/lift")
    options = parser.parse_args(arguments)
    rows = run_study(parser, options, STUDIES[options.study], run_arm, title=options.study)
    print_markdown(f"{options.study}, {options.minutes:g} minutes each", rows)
    return rows


if __name__ == "__main__":
    main()
