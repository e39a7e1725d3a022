"""Small tests on few cores: one thread per process is fastest, and the same everywhere."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from brief import make_brief
from browsers import running_browser

torch.set_num_threads(1)

TESTS = Path(__file__).parent
# Whole commands, browsers, scripts and killed runs, more than a second each: marked here, the others one by one.
SLOW = (
    "analysis/test_report_browser.py", "analysis/test_robustness.py", "analysis/test_stability.py", "commands",
    "export", "page", "reliability/test_kill.py", "test_benchmarks.py", "test_compatibility.py", "test_experiments.py",
    "test_readme.py",
    "training/test_loop_distributed.py", "training/test_resume.py", "with_timm",
)  # fmt: skip
FIRST = "test_readme.py"  # the longest: the other worker takes what follows it
FAST = "not slow"  # the marks that `make fast` asks for
MOST_SECONDS = 5  # of CPU time in a fast test: a second on a quiet core, first imports and a busy machine included


def is_slow(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make fast` does not even import files without a fast test."""
    return True if config.option.markexpr == FAST and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {path for path in {item.path for item in items} if is_slow(path)}
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random numbers without a seed of their own do not depend on the tests before."""
    torch.manual_seed(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that has become slow says so in `make fast`."""
    torch.manual_seed(2)
    began = time.process_time()
    yield
    seconds = time.process_time() - began
    if item.config.option.markexpr == FAST and seconds > MOST_SECONDS:
        pytest.fail(f"{seconds:.1f} s is no fast test: make it smaller or mark it @pytest.mark.slow")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    make_brief(monkeypatch)
