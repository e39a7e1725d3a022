"""A folder for the Hugging Face hub: weights, image processor, model card, and the model's code itself.

The code is not written twice: the files of `odevit.model` are copied with their imports made relative, so that
`trust_remote_code=True` is enough in a process that has never heard of odevit.
"""

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

from odevit.atomic import filled_folder
from odevit.export.graphs import label_names
from odevit.model.model import OdeViTForImageClassification

CONFIGURATION, MODELING, PROCESSING = "configuration_odevit", "modeling_odevit", "image_processing_odevit"
BACKBONE = "backbone_odevit"
RENAMED = {"odevit.model.config": CONFIGURATION, "odevit.model.model": MODELING}
RENAMED |= {"odevit.model.image_processor": PROCESSING, "odevit.model.backbone": BACKBONE}
OURS = re.compile(r"^([ \t]*)from (odevit(?:\.\w+)+) import", re.MULTILINE)

CARD = """---
library_name: transformers
pipeline_tag: image-classification
license: {license}
tags: [odevit, vision-transformer, neural-ode]
---

# {title}

A Vision Transformer as an ordinary differential equation: one shared attention + MLP block is the right-hand side,
depth is time. {parameters:,} parameters; {solver} with {steps} steps (both can be changed without retraining).

```python
from transformers import pipeline

classify = pipeline("image-classification", model="PATH_OR_NAME_OF_THIS_FOLDER", trust_remote_code=True)
print(classify("image.png"))
```

| | |
|---|---|
| input | {channels} channel(s), {size}×{size}, mean {mean}, std {std} |
| classes | {classes} |
| width, heads | {width}, {heads} |
| fields, depth, horizon | {fields}, {depth}, {horizon} |

Method: [ODE-ViT](https://arxiv.org/abs/2511.16501) (Boned Riera, Romero Sanchez, Ramos Terrades, 2025).

Not told here, because the file does not know: training data, accuracy, intended use. Add them before publishing.
"""


def write_hub_folder(model: OdeViTForImageClassification, folder: Path, license: str = "apache-2.0") -> list[Path]:
    """Everything that a repository on the hub needs; the files of the folder. config.json comes last."""
    with filled_folder(folder, last="config.json") as temporary:
        _write(model, temporary, model_card(model, folder.resolve().name, license))
    return sorted(file for file in folder.iterdir() if file.is_file())


def _write(model: OdeViTForImageClassification, folder: Path, card: str) -> None:
    model.save_pretrained(folder)
    for name, source in remote_code().items():
        (folder / f"{name}.py").write_text(source)
    classes = {
        "AutoConfig": f"{CONFIGURATION}.OdeViTConfig",
        "AutoModel": f"{MODELING}.OdeViTModel",
        "AutoBackbone": f"{BACKBONE}.OdeViTBackbone",
        "AutoModelForImageClassification": f"{MODELING}.OdeViTForImageClassification",
    }
    _add(folder / "config.json", auto_map=classes)
    _add(
        folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": f"{PROCESSING}.OdeViTImageProcessor"}
    )  # fmt: skip
    (folder / "README.md").write_text(card)


def remote_code() -> dict[str, str]:
    """Module name → source, for every module that the model and its image processor need."""
    wanted, found = [*RENAMED], {}
    while wanted:
        module = wanted.pop()
        name = _renamed(module)
        if name not in found:
            source = _without_odevit(Path(importlib.import_module(module).__file__).read_text())  # type: ignore[arg-type]
            found[name] = OURS.sub(lambda match: f"{match[1]}from .{_renamed(match[2])} import", source)
            wanted += [match[2] for match in OURS.finditer(source)]
    return found


def model_card(model: Any, title: str, license: str) -> str:
    config, names = model.config, label_names(model)
    shown = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return CARD.format(
        license=license, title=title, parameters=model.num_parameters(), solver=config.solver, steps=config.num_steps,
        channels=config.num_channels, size=config.image_size, mean=config.image_mean, std=config.image_std,
        classes=shown, width=config.hidden_size, heads=config.num_attention_heads, fields=config.num_fields,
        depth=config.depth, horizon=config.horizon,
    )  # fmt: skip


def _renamed(module: str) -> str:
    return RENAMED.get(module, f"{module.rsplit('.', 1)[1]}_odevit")


def _without_odevit(source: str) -> str:
    """Without functions that import from odevit (they need more than the model) and without registrations.

    A registration of remote code would collide with an installed odevit; `auto_map` takes its place.
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(tree))):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.ImportFrom) and (part.module or "").startswith("odevit") for part in ast.walk(node)
        ):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)  # type: ignore[operator]
        if isinstance(node, ast.Expr) and re.match(r"Auto\w+\.register\(", ast.unparse(node)):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).rstrip() + "\n"


def _add(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}, indent=2, sort_keys=True) + "\n")
