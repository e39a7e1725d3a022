"""What was tried and not merged: the scripts that say so do what they say."""

import pytest
import skew
import step_grid
import torch
from problems import tiny_images, tiny_model

from odevit.model import model as model_module
from odevit.model.solvers import SOLVERS


def test_steps_of_unequal_length():
    """They sum to the horizon; without growth they are the library's own steps."""
    assert step_grid.lengths(3, 7.0, 2.0) == pytest.approx([1, 2, 4])
    model, images = tiny_model(num_steps=3), tiny_images(12)
    with torch.no_grad():
        labels = model(images).logits.argmax(dim=1)
    assert step_grid.accuracy(model, images, labels, 3, 1.0) == 1
    assert step_grid.accuracy(model, images, (labels + 1) % model.config.num_labels, 3, 1.0) == 0


def test_the_skew_part_changes_no_distance():
    field = skew.TurningField(16, 2, hidden=24, scale=3.0)
    with torch.no_grad():
        field.skew.normal_()
    field.requires_grad_(False)
    x, y = torch.randn(2, 4, 5, 16)
    before, after = (x - y).norm(), (field.turn(x, 0.7) - field.turn(y, 0.7)).norm()
    assert float(after) == pytest.approx(float(before), rel=1e-5)
    assert not torch.allclose(field.turn(x, 0.7), x, atol=0.1)
    slope = (field.turn(x, 1e-3) - field.turn(x, -1e-3)) / 2e-3
    torch.testing.assert_close(slope, 3 * x @ (field.skew - field.skew.mT).mT, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_skew_runs_and_leaves_the_library_as_it_was(tmp_path, capsys):
    usual, solver = model_module.FIELDS["contractive"], SOLVERS["lie_trotter"]
    rows = skew.main(["--seeds", "0", "--output", str(tmp_path), "--set", "optim.steps=2", "loop.eval_every=2"])
    assert model_module.FIELDS["contractive"] is usual
    assert SOLVERS["lie_trotter"] is solver
    assert rows.keys() == {"without skew part", "with"}
    printed = capsys.readouterr().out
    assert "| with | " in printed
    assert rows == skew.main(["--seeds", "0", "--output", str(tmp_path)])  # finished runs are only read
