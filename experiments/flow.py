"""From scratch on CIFAR-10 at equal wall-clock: what makes a flow of it, what carries accuracy, and peers beside it.

    python experiments/flow.py ablation --minutes 9 --seeds 0 1 --set data.name=DIRECTORY --share 1/2  # beside it 2/2
    python experiments/flow.py screen --minutes 6 --set data.name=DIRECTORY --share 1/2
    python experiments/flow.py peers --minutes 30 --seeds 0 1 --set data.name=DIRECTORY --share 1/2
    python experiments/flow.py ablation --minutes 9 --seeds 0 1                       # all are done: the table

Each arm adds to the one above it. All numbers are of the held-out training images (10 %), so that recipes are chosen
without the test split; `peers` also prints the test accuracy. Runs resume; finished ones are only read.
"""

import json
from pathlib import Path
from typing import Any

import torch
from cct import CctConfig, CctForImageClassification
from studies import run_study, study_parser
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

from odevit.commands.train import train_recipe
from odevit.data import load_data
from odevit.data.splits import MemorySplit
from odevit.recipe import Recipe, override
from odevit.training.evaluation import evaluate

SETTINGS = {
    "Euler 1": (1, "euler"), "2": (2, "euler"), "3": (3, "euler"), "4": (4, "euler"), "6": (6, "euler"),
    "12": (12, "euler"), "48": (48, "euler"), "midpoint 3": (3, "midpoint"), "exact flow": (16, "rk4"),
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "data": {"name": "uoft-cs/cifar10", "val_fraction": 0.1},
    "augment": {"crop": 4, "flip": True},
    "optim": {
        "name": "muon", "lr": 2e-3, "muon_lr": 4e-3, "weight_decay": 0.05, "muon_weight_decay": 0.2, "batch_size": 128,
        "warmup": 0.05, "ema": 0.998, "label_smoothing": 0.1,
    },
    "loop": {"eval_every": 100000, "checkpoint_minutes": 5, "log_every": 50},
}  # fmt: skip
TODAY: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "tokenizer": "conv", "hidden_size": 64, "num_attention_heads": 4, "mlp_ratio": 2,
    "depth": 6, "num_steps": 6, "norm": "center", "final_norm": "layer",
}  # fmt: skip
LAYER = {**TODAY, "norm": "layer"}
MIXED = {**LAYER, "mixing": "depthwise"}
POOLING = {**MIXED, "tokenizer": "pooling", "num_steps": 4}
OURS = {**POOLING, "pool": "sequence"}
FLOW = {"step_schedule": [[0, [3, 4, 5, 6, 7, 8, 9]]]}
SHORT = {"step_schedule": [[0, [2, 3, 4, 5, 6]]]}
GROWING = {"step_schedule": [[0, [1, 2, 3]], [0.6, [2, 3, 4, 6]]]}  # that of cifar10/scratch
EXACTER = {"step_schedule": [[0, [1, 2, 3]], [0.6, [2, 3, 4, "midpoint 3"]]]}
SPARING = {"step_schedule": [[0, [1, 2]], [0.8, [2, 3, 4, 6]]]}
WIDE = {"hidden_size": 128}
Arm = tuple[dict[str, Any], dict[str, Any]]  # fields of the model, and of the loop
# One change each to the recipe cifar10/scratch (rates go together), chosen on held-out training images.
SCREENED: dict[str, list[str]] = {
    "as it is": [],
    "bfloat16": ["loop.mixed_precision=bf16"],
    "batch 64": ["optim.batch_size=64"],
    "batch 256": ["optim.batch_size=256"],
    "Muon's rate 8e-3": ["optim.muon_lr=8e-3"],
    "Muon's decay 0.1": ["optim.muon_weight_decay=0.1"],
    "Muon's decay 0.5": ["optim.muon_weight_decay=0.5"],
    "AdamW's rate 4e-3": ["optim.lr=4e-3"],
    "half the rates": ["optim.muon_lr=2e-3", "optim.lr=1e-3"],
    "twice the rates": ["optim.muon_lr=8e-3", "optim.lr=4e-3"],
    "depth 3": ["model.depth=3"],
    "depth 12": ["model.depth=12"],
    "MLP of 1": ["model.mlp_ratio=1"],
    "MLP of 3": ["model.mlp_ratio=3"],
    "MLP of 4": ["model.mlp_ratio=4"],
    "tokens of 2 pixels": ["model.patch_size=2"],
    "tokens of 8 pixels": ["model.patch_size=8"],
    "width 96": ["model.hidden_size=96"],
    "width 160": ["model.hidden_size=160"],
    "2 heads": ["model.num_attention_heads=2"],
    "8 heads": ["model.num_attention_heads=8"],
    "4 registers": ["model.num_registers=4"],
    "mean as read-out": ["model.pool=mean"],
    "without mixing": ["model.mixing=none"],
    "two fields": ["model.num_fields=2"],
    "K from 1…4": ["loop.step_schedule=[[0, [1, 2, 3, 4]]]"],
    "K from 2…6": [f"loop.step_schedule={SHORT['step_schedule']}"],
    "K from 1, 2, later 2, 3, 4, 6": [f"loop.step_schedule={SPARING['step_schedule']}"],
    "K from 1…3, late 2, 3, 4": ["loop.step_schedule=[[0, [1, 2, 3]], [0.6, [2, 3, 4]]]"],
    "K from 1, 2, late 2, 3, 4": ["loop.step_schedule=[[0, [1, 2]], [0.8, [2, 3, 4]]]"],
    "no label smoothing": ["optim.label_smoothing=0"],
    "averaging over 0.99": ["optim.ema=0.99"],
    "flip alone": ["augment.crop=0"],
    "cutmix": ["augment.cutmix=1"],
    "mixup": ["augment.mixup=0.2"],
}
STUDIES: dict[str, dict[str, Arm]] = {
    "ablation": {
        "today: strided stem, CenterNorm, CLS, K = 6": (TODAY, {}),
        "LayerNorm": (LAYER, {}),
        "depthwise mixing": (MIXED, {}),
        "K from 3…9": (MIXED, FLOW),
        "pooling stem, K from 2…6": (POOLING, SHORT),
        "sequence pooling": (OURS, SHORT),
        "K from 1…4": (OURS, {"step_schedule": [[0, [1, 2, 3, 4]]]}),
        "K from 2…6 and midpoint 2, 3": (OURS, {"step_schedule": [[0, [2, 3, 4, 5, 6, "midpoint 2", "midpoint 3"]]]}),
        "K from 1…3, late 2, 3, 4, 6": (OURS, GROWING),
        "K from 1, 2, later 2, 3, 4, 6": (OURS, SPARING),
        "K from 1…3, late 2, 3, 4, midpoint 3": (OURS, EXACTER),
        "K = 4 always": (OURS, {}),
        "anytime 0.25": (OURS, {**SHORT, "anytime": 0.25}),
        "CCT-2/3x2": ({"cct": 64}, {}),
    },
    "peers": {
        "ours, width 64": (OURS, GROWING),
        "CCT-2/3x2, width 64": ({"cct": 64}, {}),
        "ours, width 128": ({**OURS, **WIDE}, GROWING),
        "CCT-2/3x2, width 128": ({"cct": 128}, {}),
        "ViT of four layers, width 80": ({"vit": 80}, {}),  # 218,490 parameters; ours at width 128 has 219,467
    },
    "screen": dict.fromkeys(SCREENED, ({**OURS, **WIDE}, GROWING)),
}


def recipe_of(fields: dict[str, Any], loop: dict[str, Any], assignments: list[str]) -> Recipe:
    values = {**RECIPE, "loop": {**RECIPE["loop"], **loop}, "model": fields}
    return Recipe.from_dict(override(values, assignments))


def build_peer(fields: dict[str, int], classes: int) -> PreTrainedModel:
    """CCT-2/3x2 of a width, or a plain ViT of four layers with patches of 4 pixels."""
    if "cct" in fields:
        return CctForImageClassification(CctConfig(width=fields["cct"], num_labels=classes))
    width = fields["vit"]
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=32,
            patch_size=4,
            num_labels=classes,
            attn_implementation="eager",  # trains as fast in float32, and faster in bfloat16 on a CPU
        )
    )


def run_arm(arm_and_changes: tuple[Arm, list[str]], assignments: list[str], folder: Path) -> dict[str, Any]:
    """Train an arm, or go on with it, and measure it at all settings; read what is there already."""
    path = folder / "settings.json"
    if path.exists():
        return json.loads(path.read_text())
    (fields, loop), changes = arm_and_changes
    is_peer = "cct" in fields or "vit" in fields
    recipe = recipe_of({} if is_peer else fields, loop, [*changes, f"output={folder}", *assignments])
    data = load_data(recipe.data)
    model = build_peer(fields, len(data.class_names)) if is_peer else None
    result = train_recipe(recipe, model=model, data=data, resume=True)
    settings = {"model": (None, None), **({} if is_peer else SETTINGS)}
    held_out = MemorySplit(*data.val.fetch(torch.arange(min(2000, len(data.val)))), [])
    row = {
        name: evaluate(result.model, held_out, num_steps=steps, solver=solver)["top1"]
        for name, (steps, solver) in settings.items()
    }
    keys = ("parameters", "epochs", "steps", "seconds")
    row |= {key: result.metrics[key] for key in keys} | {"test": result.metrics["top1"]}
    path.write_text(json.dumps(row, indent=1) + "\n")
    return row


def print_rows(rows: dict[str, Any], columns: list[str], title: str) -> None:
    print(f"{title}, 2,000 held-out images, top-1 in %\n")
    print(f"| | parameters | epochs | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    for name, row in rows.items():
        cells = [f"{100 * row[column]:.1f}" if column in row else "" for column in columns]
        print(f"| {name} | {row['parameters']:,} | {row['epochs']:.1f} | {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__ or "", STUDIES, minutes=9, output="runs/flow")
    options = parser.parse_args(arguments)
    changes = SCREENED if options.study == "screen" else {}
    arms = {name: (arm, changes.get(name, [])) for name, arm in STUDIES[options.study].items()}
    rows = run_study(parser, options, arms, run_arm, title=options.study)
    columns = ["model", *SETTINGS, *(["test"] if options.study == "peers" else [])]
    print_rows(rows, columns, f"{options.study}, {options.minutes:g} minutes each")
    return rows


if __name__ == "__main__":
    main()
