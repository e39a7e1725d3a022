"""`odevit zoo`: the trained models in the package."""

import json
from typing import Any

from odevit.commands.console import print_table
from odevit.shipped import card, names

COLUMNS = ("data", "accuracy", "parameters", "MACs", "flow gap")  # what 80 characters hold


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
            "flow gap": f"{100 * entry['flow']['gap']:+.1f}",
        }
        for entry in cards
    }
    print_table("Trained models in the package", rows, headers=COLUMNS)
    print('Use one by its name in any command, or: from_pretrained(odevit.zoo("NAME"))')
    return cards
