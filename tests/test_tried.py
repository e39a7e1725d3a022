"""What was tried and not merged: the scripts that say so do what they say, and leave the library as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distillation as distillation_script
import pytest
import skew
import step_grid
import teacher_start
import torch
import tried as tried_script
from problems import tiny_images, tiny_model
from test_experiments import SMALL
from transformers import ViTConfig, ViTForImageClassification

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.data import Batch, DataConfig, load_data
from odevit.data.augment import AugmentConfig
from odevit.distill import answers
from odevit.distill.student import student_of
from odevit.model import model as model_module
from odevit.model.solvers import SOLVERS, Grid
from odevit.teachers.teacher import load_teacher
from odevit.training.config import OptimConfig
from odevit.training.objectives import Classification


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


@pytest.mark.parametrize("name", tried_script.FIELDS)
def test_a_field_in_time_keeps_the_orders_of_the_solvers(name: str) -> None:
    """With weights away from their start: the field does depend on time, and midpoint is of second order in it."""
    torch.manual_seed(0)
    restore = tried_script.patch(name)
    try:
        config = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "num_attention_heads": 2}
        model = OdeViTForImageClassification(OdeViTConfig(**config, depth=1, num_labels=3)).double()
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        x = torch.randn(1, 5, 8, dtype=torch.float64)
        ends = {k: model.odevit.evolve(x, k, "midpoint").xs[-1] for k in (8, 16, 400)}
        coarse, fine = (torch.linalg.vector_norm(ends[k] - ends[400]) for k in (8, 16))
        assert 3.3 < coarse / fine < 4.7
        field = model.odevit.fields[0]
        tried_script.now[0] = 0.0
        early = field(x)
        tried_script.now[0] = 1.0
        assert not torch.allclose(field(x), early, atol=1e-3)
    finally:
        restore()


def test_a_spectral_stem_starts_with_norm_one_and_no_other_does() -> None:
    def norms() -> list[float]:
        config = OdeViTConfig(image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2, tokenizer="pooling")
        layers = OdeViTForImageClassification(config).odevit.tokenizer.layers
        return [
            float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))
            for layer in layers
            if hasattr(layer, "weight")
        ]

    usual, restore = norms(), tried_script.patch("spectral stem")
    try:
        assert norms() == pytest.approx([1, 1], rel=0.05)
    finally:
        restore()
    assert min(usual) > 1.2
    assert min(norms()) > 1.2


def test_what_is_tried_is_taken_out_again(tmp_path: Path) -> None:
    arguments = ["tried", "--steps", "1", "--only", *tried_script.ARMS[-7:], "--output", str(tmp_path)]
    for assignment in (*SMALL, "optim.batch_size=16", "data.limit=60"):
        arguments += ["--set", assignment]

    def patched() -> tuple[Any, ...]:
        run = tried_script.loop.Run
        stem = tried_script.layers._stage_widths
        return Classification.__call__, Grid.steps, tried_script.loop.build_optimizers, run.prepare, stem

    before = patched()
    assert len(tried_script.main(arguments)) == 7
    assert patched() == before


def test_the_whitening_stem_whitens_and_stays() -> None:
    torch.manual_seed(0)
    images = torch.rand(40, 3, 12, 12).cumsum(-1).cumsum(-2)  # neighbours are alike, as in pictures
    filters = tried_script.whitening_filters(images, 20)
    normalised = (images - images.mean(dim=(0, 2, 3), keepdim=True)) / images.std(dim=(0, 2, 3), keepdim=True)
    answers = torch.nn.functional.conv2d(normalised, filters[:4]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(answers.cov(), torch.eye(4), atol=0.02, rtol=0)
    torch.testing.assert_close(filters[10:], -filters[:10])

    restore = tried_script.patch("whitening stem", images)
    try:
        model = OdeViTForImageClassification(OdeViTConfig.from_preset("cifar-nano"))
    finally:
        restore()
    first, second = (layer.weight for layer in model.odevit.tokenizer.layers if hasattr(layer, "weight"))
    torch.testing.assert_close(first.detach()[0], tried_script.whitening_filters(images, len(first))[0])
    assert not first.requires_grad
    assert second.requires_grad


def test_a_narrow_stem_has_half_the_channels_between_its_stages() -> None:
    restore = tried_script.patch("narrow stem")
    try:
        model = OdeViTForImageClassification(OdeViTConfig.from_preset("cifar-nano"))
    finally:
        restore()
    shapes = [tuple(layer.weight.shape) for layer in model.odevit.tokenizer.layers if hasattr(layer, "weight")]
    assert shapes == [(32, 3, 3, 3), (128, 32, 3, 3)]


def test_two_epochs_of_alternating_flips_show_every_image_both_ways() -> None:
    images = torch.arange(4 * 2).reshape(4, 1, 1, 2)
    batch = Batch(images, torch.zeros(4, dtype=torch.long), torch.tensor([0, 3, 5, 6]), 0, 4)
    prepare = tried_script.alternating(lambda run, batch: batch.images)
    epochs = [prepare(SimpleNamespace(step=step, steps_per_epoch=10), batch) for step in (9, 10, 20)]
    mirrored = torch.tensor([False, True, True, False])
    torch.testing.assert_close(epochs[0][mirrored], images.flip(-1)[mirrored])
    torch.testing.assert_close(epochs[0][~mirrored], images[~mirrored])
    torch.testing.assert_close(epochs[1], epochs[0].flip(-1))
    torch.testing.assert_close(epochs[2], epochs[0])


def test_adamw_for_the_stem_is_how_it_was() -> None:
    model, config = (
        OdeViTForImageClassification(OdeViTConfig.from_preset("cifar-nano")),
        OptimConfig(name="muon", steps=1),
    )
    restore = tried_script.patch("AdamW for the stem")
    try:
        muon, _ = tried_script.loop.build_optimizers(model, config, 3)
    finally:
        restore()
    assert all(p.ndim == 2 for p in muon.param_groups[0]["params"])
    muon, _ = tried_script.loop.build_optimizers(model, config, 3)
    assert sum(p.ndim == 4 for p in muon.param_groups[0]["params"]) == 2


def test_a_start_from_what_the_layers_share() -> None:
    """Equal layers share all, orthogonal ones 1/layers; the student's field has the mean products, its MLP linear."""
    weights = torch.linalg.qr(torch.randn(12, 12)).Q.reshape(3, 4, 12)
    assert teacher_start.explained(weights[:1].repeat(5, 1, 1)) == pytest.approx(1)
    assert teacher_start.explained(torch.eye(9).reshape(3, 3, 9)) == pytest.approx(1 / 3)
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    teacher = load_teacher(ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)))
    student = teacher_start.start_from_(student_of(teacher, mlp_ratio=3, norm="layer"), teacher.module)
    means = {name: value.mean(0) for name, value in teacher_start.products(teacher.module).items()}
    attention, mlp = student.odevit.fields[0].attention, student.odevit.fields[0].mlp
    written, compared = attention.out.weight @ attention.value.weight, attention.query.weight.mT @ attention.key.weight
    torch.testing.assert_close(written, means["out·value"])
    torch.testing.assert_close(compared, means["queryᵀ·key"])
    x = torch.randn(2, 5, teacher.width)
    torch.testing.assert_close(mlp(x), x @ means["W2·W1 / 2"].mT)
    mlp(x).square().sum().backward()
    assert mlp.w2.weight.grad is not None
    assert (mlp.w2.weight.grad.abs().sum(0) > 0).all()  # no hidden unit is dead


def test_views_are_shaken_for_the_student_alone() -> None:
    data = load_data(DataConfig(name="digits", limit=8))
    cache: Any = SimpleNamespace(split=data.val)

    def seen() -> Any:
        return answers.AnswerDistillation(None, None, cache).training_data(data)  # type: ignore[arg-type]

    with distillation_script.shaken(2):
        assert seen().augment == AugmentConfig(crop=2, flip=True)
        assert seen().train is data.val  # the rows that the teacher has answered
    assert seen().augment == AugmentConfig()


def test_mixtures_are_of_strangers_and_have_no_label() -> None:
    train = load_data(DataConfig(name="digits", limit=64)).train
    with distillation_script.mixing(True):
        made = answers.extra_images(train, "mixtures")
        again = answers.extra_images(train, "mixtures")
    images, originals = made.images.float(), train.fetch(torch.arange(len(train)))[0].float()
    assert made.images.shape == originals.shape
    assert made.images.dtype == torch.uint8
    assert torch.equal(made.images, again.images)
    assert not made.labels.any()
    nearest = torch.cdist(images.flatten(1), originals.flatten(1)).min(dim=1).values
    assert (nearest > 1).float().mean() > 0.8  # few are left as they were
    # pixel by pixel, a mixture lies between the two strangers it is of
    strangers = originals[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
    partners = strangers[torch.arange(len(train) // 2 * 2) ^ 1]
    pairs = torch.stack([strangers[: len(partners)], partners])
    mixed = images[: len(partners)]
    assert ((mixed >= pairs.amin(0) - 1) & (mixed <= pairs.amax(0) + 1)).all()
    assert answers.extra_images is not distillation_script.mixtures_of
