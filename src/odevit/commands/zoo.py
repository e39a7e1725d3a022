"""`odevit zoo`: the trained models in the package."""

import json
from typing import Any

from odevit.commands.console import print_table
from odevit.shipped import card, names

COLUMNS = ("data", "accuracy", "parameters", "MACs", "steps", "flow gap", "KB")


def zoo(*, as_json: bool = False) -> list[dict[str, Any]]:
    """List the shipped models with what was measured of them."""
    cards = [card(name) for name in names()]
    if as_json:
        print(json.dumps(cards))
        return cards
    rows = {
        entry["name"]: {
            "data": entry["data"],
            "accuracy": f"{entry['accuracy']:.2%}",
            "parameters": f"{entry['parameters']:,}",
            "MACs": f"{entry['macs'] / 1e6:,.1f} M",
            "steps": f"{entry['num_steps']} {entry['solver']}",
            "flow gap": f"{100 * entry['flow']['gap']:+.1f}",
            "KB": f"{entry['bytes'] / 1000:,.0f}",
        }
        for entry in cards
    }
    print_table("Trained models in the package", rows, headers=COLUMNS)
    print('Use one by its name in any command, or: from_pretrained(odevit.zoo("NAME"))')
    return cards
