"""Numbers as a person writes them, on the terminal and in reports."""

import math
from typing import Any

SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def readable(value: Any) -> str:
    """A single value as a person writes it: 12,800 · 0.8312 · 2.3 × 10⁻⁵ · −0.41."""
    if value is None:
        return "not available"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
        mantissa, exponent, power = text.partition("e")
        return mantissa.replace("-", "−") + (f" × 10{str(int(power)).translate(SUPERSCRIPT)}" if exponent else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(readable(item) for item in value)
    return {"Infinity": "∞", "-Infinity": "−∞"}.get(value, str(value))


def si(value: float) -> str:
    """With an SI prefix, to be followed by its unit: 1.2 k · 29.9 M · 25.8 G."""
    power = min(5, max(0, math.floor(math.log10(max(value, 1)) / 3)))
    return f"{value / 1000**power:,.1f} {' kMGTP'[power].strip()}"
