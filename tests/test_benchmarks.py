"""The training benchmark runs, counts what it says it counts, and compares like with like (it asserts that itself)."""

from collections import Counter

import pytest
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
