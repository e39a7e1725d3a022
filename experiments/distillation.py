"""Distillation on CIFAR-10 with a DeiT-tiny teacher: the two claims and the ablation, one run after another.

    odevit train cifar10/teacher                                             # the teacher, once
    python experiments/distillation.py claims --minutes 40 --seeds 0 1 --share 1/2        # over two hours; beside it
    python experiments/distillation.py claims --minutes 40 --seeds 0 1 --share 2/2
    python experiments/distillation.py claims --minutes 40 --seeds 0 1                    # all are done: the table

Every arm is a recipe with overrides and has the same wall-clock budget, on one core: `--share I/N` takes every N-th run
and keeps to core I, with one thread, so that runs beside each other do not slow each other (docs/LOG.md). Runs resume:
start the same command again and it goes on where it was; finished arms are only read.
`--set data.name=…` gives local data to all arms. Nothing else may run on the machine meanwhile.
"""

import dataclasses
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from studies import run_study, study_parser

from odevit.commands.console import print_table
from odevit.commands.distill import distill
from odevit.commands.train import train
from odevit.data import Data
from odevit.data.augment import Augment, AugmentConfig
from odevit.data.splits import MemorySplit, Split
from odevit.distill import answers
from odevit.distill.answers import AnswerDistillation
from odevit.distill.cache import as_bytes
from odevit.recipe import Recipe


class Arm(NamedTuple):
    recipe: str
    overrides: tuple[str, ...] = ()
    shake: int = 0  # pixels by which the student sees a cached view moved, and mirrored or not; lives here only
    mixtures: bool = False  # the extra images are mixtures of the training images; lives here only


OURS = "cifar10/distill"
FIXED = (  # the recipe as it was when claims and ablation were run: six steps always, which is no flow
    "model.norm=center", "model.mixing=none", "model.num_registers=4", "model.num_steps=6", "loop.step_schedule=[]",
    "loop.anytime=0",
)  # fmt: skip
PAPERS_LOSSES = tuple(f"distill.losses.{loss}" for loss in ("cls_path=1", "jasmin=0.1", "patch_path=0", "kl=0"))
ALONE = "distill.extra_images=''"
FEW_VIEWS = (ALONE, "distill.cache_views=1", "data.val_fraction=0.1", "loop.eval_every=100000")
LAYER, FOUR, SHORT = "model.norm=layer", "model.num_steps=4", "loop.step_schedule=[[0, [2, 3, 4, 5]]]"


def before(*overrides: str) -> Arm:
    """Our recipe as it was, with changes."""
    return Arm(OURS, (*FIXED, *overrides))


STUDIES: dict[str, dict[str, Arm]] = {
    "claims": {
        "scratch, with labels": Arm("cifar10/scratch-96px"),
        "paper's recipe": Arm("cifar10/paper"),
        "ours": before(),
    },
    "ablation": {
        "ours": before(),
        "distance times": before("distill.placement=distance"),
        "with JaSMin": before("distill.losses.jasmin=0.1"),
        "LayerNorm field": before("model.norm=layer"),
        "without patches": before("distill.losses.patch_path=0"),
        "without KL": before("distill.losses.kl=0"),
        "with collocation": before("distill.collocation=0.3", "distill.layer_weights=variance"),
        "2 fields": before("model.num_fields=2"),
        "3 fields": before("model.num_fields=3"),
        "AdamW": before("optim.name=adamw"),
        "12 steps": before("model.num_steps=12"),
        "paper's losses and times": before(*PAPERS_LOSSES, "distill.placement=distance"),
    },
    "answers": {  # what each option of the CIFAR-size student is worth; two views are enough for a few minutes
        name: Arm("cifar10/answers", (ALONE, "distill.cache_views=2", *overrides))
        for name, overrides in {
            "as it is": (),
            "strided stem": ("model.tokenizer=conv",),
            "without mixing": ("model.mixing=none",),
            "CLS as read-out": ("model.pool=cls",),
            "CenterNorm": ("model.norm=center",),
            "K = 4 always": ("loop.step_schedule=[]",),
            "K from 2…6": ("loop.step_schedule=[[0, [2, 3, 4, 5, 6]]]",),
            "temperature 1": ("distill.kl_temperature=1",),
            "temperature 4": ("distill.kl_temperature=4",),
        }.items()
    },
    "views": {  # what keeps a student from learning its views by heart; few of them, so that minutes show it
        "one view": Arm("cifar10/answers", FEW_VIEWS),
        "one view, shaken by 1": Arm("cifar10/answers", FEW_VIEWS, shake=1),
        "one view, shaken by 2": Arm("cifar10/answers", FEW_VIEWS, shake=2),
        "two views": Arm("cifar10/answers", (*FEW_VIEWS, "distill.cache_views=2")),
    },
    "transfer": {  # what other images are worth, at as many rows of the teacher's answers: --set distill.cache_seed=0
        "twelve views": Arm("cifar10/answers", (ALONE, "distill.cache_views=12")),
        "six views": Arm("cifar10/answers", (ALONE,)),
        "six views, and of CIFAR-100's images": Arm("cifar10/answers"),
        "six views, and of mixtures": Arm("cifar10/answers", ("distill.extra_images=mixtures",), mixtures=True),
    },
    "transfer100": {  # the other way round: a local folder of the other images is --set distill.extra_images=DIRECTORY
        "CIFAR-100's images": Arm("cifar100/answers"),
        "and CIFAR-10's": Arm("cifar100/answers", ("distill.extra_images=uoft-cs/cifar10",)),
    },
    "flow": {"ours, a flow": Arm(OURS), "ours, K = 6 always": before()},
    "schedules": {  # which K to draw, and what else to put on top of it
        "K = 6 always": before(LAYER),
        "K from 3…8": before(LAYER, "loop.step_schedule=[[0, [3, 4, 5, 6, 7, 8]]]"),
        "K = 6, from the middle 3…8": before(LAYER, "loop.step_schedule=[[0, 6], [0.5, [3, 4, 5, 6, 7, 8]]]"),
        "K from 2…5": before(LAYER, SHORT, FOUR),
        "K from 2…5, mixing": before(LAYER, SHORT, FOUR, "model.mixing=depthwise"),
        "K from 2…5, mixing, no KL": before(LAYER, SHORT, FOUR, "model.mixing=depthwise", "distill.losses.kl=0"),
    },
}


class ShakenViews(AnswerDistillation):
    shake = 0

    def training_data(self, data: Data) -> Data:
        return dataclasses.replace(super().training_data(data), augment=AugmentConfig(crop=self.shake, flip=True))


def shaken(pixels: int) -> AbstractContextManager[Any]:
    """Distillations of answers inside show the student its cached views shaken."""
    kind = type("Shaken", (ShakenViews,), {"shake": pixels})
    return mock.patch.object(answers, "AnswerDistillation", kind) if pixels else nullcontext()


def mixtures_of(train: Split, name: str) -> MemorySplit:
    """As many images as there are: pairs of strangers, mixed (mixup) or with a rectangle exchanged (cutmix)."""
    strangers = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    images, labels = train.fetch(strangers)
    mixed, _ = Augment(AugmentConfig(mixup=1, cutmix=1), int(labels.max()) + 1)(images, labels, seed=0)
    return MemorySplit(as_bytes(mixed), torch.zeros_like(labels), [])


def mixing(wanted: bool) -> AbstractContextManager[Any]:
    """Distillations of answers inside have mixtures for extra images."""
    return mock.patch.object(answers, "extra_images", mixtures_of) if wanted else nullcontext()


def run_arm(arm: Arm, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run an arm to its end, or read it when it has ended; its row of the table."""
    recipe = arm.recipe
    distilled = Recipe.load(recipe).task == "distill"
    finished = (folder / "result.json").exists() and (not distilled or (folder / "comparison.json").exists())
    if not finished and distilled:
        with shaken(arm.shake), mixing(arm.mixtures):
            distill(recipe=recipe, overrides=[*arm.overrides, *overrides], output=folder, resume=True, report=False)
    elif not finished:
        assignments = [*arm.overrides, *(o for o in overrides if not o.startswith("distill.")), f"output={folder}"]
        train(recipe, assignments, resume=True)
    result = json.loads((folder / "result.json").read_text())
    comparison = json.loads((folder / "comparison.json").read_text()) if distilled else {}
    certified = comparison.get("certified_agreement")
    return {
        "held-out": f"{result['selected']['top1']:.2%}",
        "top-1": f"{result['top1']:.2%}",
        "agreement": f"{comparison['agreement']:.2%}" if comparison else "",
        "certified": "" if certified is None else f"{certified:.1%}",
        "flow gap": f"{100 * comparison['flow']['gap']:+.1f}" if comparison else "",
        "parameters": f"{result['parameters']:,}",
        "steps": f"{result['steps']:,}",
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", STUDIES, minutes=40, output="runs/distillation")
    options = parser.parse_args(arguments)
    rows = run_study(parser, options, STUDIES[options.study], run_arm, title=options.study)
    columns = ("held-out", "top-1", "agreement", "certified", "flow gap", "parameters", "steps")
    print_table(
        f"{options.study}, {options.minutes:g} minutes each, held-out images and test split", rows, headers=columns
    )
    return rows


if __name__ == "__main__":
    main()
