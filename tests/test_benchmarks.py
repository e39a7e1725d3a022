"""The training benchmark runs, counts what it says it counts, and compares like with like (it asserts that itself)."""

import json
from collections import Counter

import pytest
import suite
import torch
import trained
import training

from odevit.dynamics.calibration import Record


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
    suite.write(bench, curve, tmp_path, suite.machine(1), "make bench", 0.1, quick=True)
    lines = json.loads((tmp_path / "benchmarks.json").read_text())
    assert all({"name", "ours", "peer", "ratio", "target", "met"} <= set(line) for line in lines)
    first = lines[0]
    assert first["met"] == (first["ratio"] >= 0.95)
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert all(line["name"] in text for line in lines)


def test_slopes_of_powers():
    assert suite.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_time_to_accuracy_is_that_of_the_first_validation(tmp_path):
    records = [("train", 5, 0.9), ("val", 10, 0.4), ("val", 20, 0.6), ("val", 30, 0.5)]
    lines = [json.dumps({"kind": kind, "step": step, "top1": top1}) for kind, step, top1 in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "timing.jsonl").write_text("\n".join(json.dumps({"step": s, "seconds": 6 * s}) for s in (10, 20, 30)))
    bench = suite.Bench(rounds=1, seconds=0)
    trained.time_to_accuracy(bench, tmp_path, 0.55, minutes=40)
    assert bench.lines[0]["ours"] == pytest.approx(2)  # minutes
    assert bench.lines[0]["ratio"] == pytest.approx(20)
    trained.time_to_accuracy(bench, tmp_path, 0.7, minutes=40)
    assert len(bench.lines) == 1
    assert "never reached 70.0%" in bench.notes[0]


def test_guarantee_counts_the_splits_that_keep_it():
    """Scores that say when an answer is final keep every split; too few images are told."""
    generator = torch.Generator().manual_seed(0)
    answers = torch.stack([torch.randint(0, 2, (2000,), generator=generator), torch.zeros(2000, dtype=torch.long)])
    rule = {"alpha": 0.05, "delta": 0.05, "score": "margin"}
    honest = torch.stack([(answers[0] == 0).double(), torch.ones(2000, dtype=torch.double)])
    bench = suite.Bench(rounds=1, seconds=0)
    trained.guarantee(bench, "honest", Record(answers, honest), rule)
    assert bench.lines[0]["ours"] == 1
    trained.guarantee(bench, "few", Record(answers[:, :100], honest[:, :100]), rule)
    assert len(bench.lines) == 1
    assert "too few" in bench.notes[0]


@pytest.mark.slow
def test_a_student_beside_itself_is_no_faster():
    bench = suite.Bench(rounds=3, seconds=0)
    trained.trained_pair(bench, "digits", "digits", "digits", quick=True)
    found = {line["name"].split(": ")[1]: line for line in bench.lines}
    assert found["accuracy, 64 images"]["ratio"] == found["parameters"]["ratio"] == 1
    whole = found["batch 64, 3 euler steps"]
    assert whole["target"] == 1.3
    assert 0.3 < whole["ratio"] < 3
    assert any("halting at alpha" in note for note in bench.notes)
