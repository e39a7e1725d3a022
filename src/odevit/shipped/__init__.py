"""The zoo: trained models in the package, each a folder in Hugging Face's layout with a model card.

    OdeViTForImageClassification.from_pretrained(odevit.zoo("digits"))

Weights are stored in half precision and loaded in single. `card.json` says what a model is and what was measured;
`experiments/ship.py` makes such a folder from a finished run.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The models that are here; what is being written (`.tmp-…`) is not yet."""
    return sorted(path.parent.name for path in FOLDER.glob("[!.]*/card.json"))


def zoo(name: str) -> str:
    """The folder of a shipped model, for `from_pretrained` and for every command."""
    if name not in names():
        raise ValueError(f"unknown model {name!r}; the zoo has: {', '.join(names())}")
    return str(FOLDER / name)


def card(name: str) -> dict[str, Any]:
    """What was measured of a shipped model."""
    return json.loads((Path(zoo(name)) / "card.json").read_text())


def checksum(folder: str | Path) -> str:
    """sha256 of a model's weights file, as its card has it."""
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
