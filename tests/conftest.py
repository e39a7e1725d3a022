"""Small tests on few cores: one thread per process is fastest, and the same everywhere."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Whole commands, browsers, scripts and killed runs, more than a second each: marked here, the others one by one.
SLOW = (
    "analysis/test_report_browser.py", "analysis/test_robustness.py", "analysis/test_stability.py", "commands", "page",
    "reliability/test_kill.py", "test_benchmarks.py", "test_compatibility.py", "test_experiments.py", "test_readme.py",
    "training/test_loop_distributed.py", "training/test_resume.py", "with_timm",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [Path(__file__).parent / name for name in SLOW]
    for item in items:
        if any(item.path.is_relative_to(place) for place in places):
            item.add_marker(pytest.mark.slow)
