"""The training benchmark runs, counts what it says it counts, and compares like with like (it asserts that itself)."""

import json
from collections import Counter

import pytest
import suite
import torch
import training


@pytest.mark.slow
def test_quick_run_prints_every_ratio(capsys):
    threads = torch.get_num_threads()
    try:
        ratios = training.main(["--quick"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert all(f"({name})" in printed for name in training.TARGETS)
    assert ratios.keys() == training.TARGETS.keys()
    assert 0.05 < ratios["a"] < 2
    assert ratios["c"] < 1  # exact, and already so at 2 solver steps


def test_shapes_and_flops_of_a_known_step():
    layer, x = torch.nn.Linear(5, 7, bias=False), torch.randn(3, 5, requires_grad=True)
    flops, shapes = training.step_flops(lambda: layer(x).sum().backward())
    assert shapes == Counter({(1, 3, 5, 7): 1, (1, 3, 7, 5): 1, (1, 7, 3, 5): 1})
    assert flops == 3 * 2 * 3 * 5 * 7


def test_peak_memory_of_known_tensors():
    def step():
        a = torch.ones(1 << 20)  # 4 MiB
        b = a + 1
        del a
        return (b + 1).sum()

    assert training.peak_memory(step) / 2**20 == pytest.approx(8, abs=0.1)


@pytest.mark.slow
def test_lines_are_ratios_and_are_written(tmp_path, capsys):
    bench = suite.Bench(rounds=3, seconds=0)
    suite.own_loop(bench, quick=True)
    curve = suite.memory_curve(bench, quick=True)
    assert curve["plain"][-1] > curve["steps"][-1]
    suite.write(bench, curve, tmp_path, suite.machine(1), 0.1, quick=True)
    lines = json.loads((tmp_path / "benchmarks.json").read_text())
    assert all({"name", "ours", "peer", "ratio", "target", "met"} <= set(line) for line in lines)
    first = lines[0]
    assert first["met"] == (first["ratio"] >= 0.95)
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert all(line["name"] in text for line in lines)


def test_slopes_of_powers():
    assert suite.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
