"""Runs without figures, for tests of numbers: drawing takes most of a small run's time."""

import pytest


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Reports get empty frames, runs no curve.png."""
    patch.setattr("odevit.analysis.report.svg", lambda figure, label, prefix: "<svg></svg>")
    patch.setattr("odevit.training.loop.draw_curve", lambda folder: None)
