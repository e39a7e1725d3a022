"""Runs without figures and reports of few images, for tests of anything else: these take most of a small run's time."""

from typing import Any

import pytest

OPTIONS: dict[str, dict[str, Any]] = {
    "robustness": {"max_images": 4, "order_images": 1, "step_counts": (1, 2), "solvers": ["euler"]},
    "stability": {"path_images": 1, "radius_images": 1},
    "error_bound": {"images": 1},
}


def make_brief(patch: pytest.MonkeyPatch) -> None:
    """Reports get empty frames, --quick means OPTIONS, runs draw no curve.png."""
    from odevit.commands.analyze import QUICK

    patch.setattr("odevit.analysis.report.svg", lambda figure, label, prefix: "<svg></svg>")
    patch.setattr("odevit.training.loop.draw_curve", lambda folder: None)
    for name, options in OPTIONS.items():
        patch.setitem(QUICK, name, options)
