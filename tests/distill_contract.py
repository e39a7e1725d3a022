"""`distill` and `analyze` to their end on any teacher, tiny: 24 random images of 32×32, two steps."""

import json
from pathlib import Path

import pytest
import torch
from brief import OPTIONS
from torch import Tensor

from odevit.analysis import load_analyses
from odevit.commands.analyze import Report
from odevit.commands.distill import distill_recipe
from odevit.data import Data
from odevit.data.splits import MemorySplit
from odevit.recipe import Recipe
from odevit.teachers.teacher import Teacher, load_teacher


def random_data(size: int = 32, labels: int = 5, count: int = 24) -> Data:
    generator = torch.Generator().manual_seed(0)

    def split() -> MemorySplit:
        pixels: Tensor = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        return MemorySplit(pixels, torch.arange(count) % labels)

    names = [f"class {i}" for i in range(labels)]
    return Data(split(), split(), split(), names, [0.5] * 3, [0.25] * 3, 3)


def recipe_for(teacher: Teacher, folder: Path) -> Recipe:
    answers = "kl" if teacher.num_labels else "cross_entropy"
    return Recipe.from_dict(
        {
            "task": "distill",
            "output": str(folder),
            "model": {"mlp_ratio": 1, "num_steps": 2},
            "data": {"name": "given", "image_size": 32},
            "optim": {"steps": 2, "batch_size": 12},
            "distill": {"losses": {"cls_path": 0.01, answers: 1.0}, "sample": 12, "placement": "uniform"},
        }
    )


class DistillContract:
    """For classes with a fixture `model`: whatever the teacher, its student is trained, compared and reported."""

    @pytest.mark.slow
    @pytest.mark.usefixtures("brief")
    def test_distill_and_analyze_run_to_their_end(self, model, tmp_path):
        teacher, data = load_teacher(model), random_data()
        names = [name for name in load_analyses() if name not in ("flow", "stability", "error_bound")]
        assert {name for name, analysis in load_analyses().items() if analysis.needs_teacher} <= set(names)
        report = Report(only=names, max_images=4, options=OPTIONS)  # those left out never look at a teacher
        recipe = recipe_for(teacher, tmp_path / "run")
        distill_recipe(recipe, teacher=teacher, data=data, report=report, progress_bar=False)
        comparison = json.loads((tmp_path / "run/comparison.json").read_text())
        block = sum(p.numel() for p in teacher.anatomy.blocks[0].parameters())
        assert comparison["teacher"]["parameters"] > 3 * block
        matrices = sum(p.numel() for block in teacher.anatomy.blocks for p in block.parameters() if p.dim() == 2)
        tokens = 1 + teacher.num_patches + teacher.extra_tokens
        assert comparison["teacher"]["macs"] > tokens * matrices  # every matrix at every token, attention beside it
        assert comparison["teacher"]["macs"] < 1.5 * tokens * matrices
        assert comparison["teacher"]["milliseconds"] > 0
        values = json.loads((tmp_path / "run/report.json").read_text())["values"]
        assert {name.partition("/")[0] for name in values} == set(names)
        assert "lyapunov/teacher" in values
