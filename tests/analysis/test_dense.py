"""Which time of the flow is best for dense features."""

import numpy as np
import pytest
import torch
from problems import tiny_model
from sklearn.linear_model import Ridge

from odevit.analysis import Study, run_analyses
from odevit.analysis.dense import linear_cka, mosaics, probe_accuracy
from odevit.teachers.teacher import tiny_teacher


def test_mosaics_join_halves_where_they_were_and_label_every_patch():
    labels = torch.arange(6) % 3
    images = torch.arange(6.0)[:, None, None, None] + torch.linspace(0, 0.5, 64).reshape(1, 1, 8, 8)
    joined, classes = mosaics(images, labels, patch=2, seed=0)
    grid = classes.unflatten(1, (4, 4))
    for i in range(6):
        for row in range(8):
            for column in range(8):
                pixel = joined[i, 0, row, column]
                source = int(pixel - images[0, 0, row, column] + 0.5)
                assert pixel == images[source, 0, row, column]  # each pixel where it was
                assert grid[i, row // 2, column // 2] == labels[source]
        sources = {int(p + 1e-4) for p in (joined[i] - images[0]).flatten()}
        assert len(sources) == 2
        assert i in sources


def test_the_probe_is_ridge_regression():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 6, generator=generator), torch.randint(0, 3, (200,), generator=generator)
    x[:, 0] += 2.0 * y
    accuracy = probe_accuracy(x[:100], y[:100], x[100:], y[100:], 3)
    variance = x[:100].double().var(dim=0, unbiased=False).mean().item()
    reference = Ridge(alpha=1e-3 * variance * 100).fit(x[:100].numpy(), np.eye(3)[y[:100].numpy()])
    assert accuracy == (reference.predict(x[100:].numpy()).argmax(1) == y[100:].numpy()).mean()
    assert accuracy > 0.5


def test_cka_ignores_rotation_and_scale_and_sees_independence():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 5, generator=generator)
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=generator))[0]
    assert linear_cka(x, 3 * x @ rotation + 1) == pytest.approx(1)
    assert linear_cka(x, torch.randn(500, 5, generator=generator)) < 0.05


def coloured(count):
    """Class c is a colour, darker and lighter from patch to patch: any single patch tells it."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (count,), generator=generator)
    images = torch.nn.functional.one_hot(labels, 3)[:, :, None, None] * torch.ones(1, 1, 16, 16)
    return images + 0.1 * torch.randn(images.shape, generator=generator), labels


@pytest.mark.parametrize("with_teacher", [False, True])
def test_findings_name_the_best_time_and_layer(with_teacher):
    torch.manual_seed(0)
    images, labels = coloured(40)
    teacher = tiny_teacher("vit", image_size=16, patch_size=4, num_labels=3) if with_teacher else None
    model = tiny_model(num_labels=3, pool="mean", mixing="depthwise")
    study = Study(model=model, images=images, labels=labels, class_names=["r", "g", "b"], teacher=teacher)
    findings = {finding.name: finding for finding in run_analyses(["dense"], study)}
    value = findings["dense/probe"].value
    assert value["times"] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert value["student"][0] > 0.9  # colours can be read from the tokens
    assert value["best"] == max(value["student"])
    assert value["constant_answer"] < 0.6
    assert ("dense/similarity" in findings) == with_teacher
    if teacher is not None:
        table = torch.tensor(findings["dense/similarity"].value["cka"])
        assert table.shape == (teacher.depth + 1, 5)
        assert ((table >= 0) & (table <= 1 + 1e-9)).all()
        assert len(value["teacher"]) == teacher.depth + 1


def test_too_few_images_are_said():
    images, labels = coloured(10)
    study = Study(model=tiny_model(num_labels=3), images=images, labels=labels, class_names=["r", "g", "b"])
    [finding] = run_analyses(["dense"], study)
    assert finding.name == "dense/skipped"
    assert "at least 16" in finding.text
