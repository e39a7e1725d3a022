"""Distillation: what is measured on the teacher, in closed form; then a recipe, its student and its objective."""

import dataclasses

import pytest
import torch
from tiny_distillations import PHASES, recipe_of

from odevit import OdeViTForImageClassification
from odevit.distill.meeting import meeting_times
from odevit.distill.objective import (
    Distillation,
    DistillConfig,
    TeacherStatistics,
    build,
    layer_weights,
    measure_teacher,
)
from odevit.recipe import Recipe
from odevit.teachers.teacher import TeacherTrace, load_teacher, tiny_teacher
from odevit.training.evaluation import model_input
from odevit.training.integration import Integration
from odevit.training.objectives import LossModule

# --- what is measured on the teacher ----------------------------------------------------------------------------------


def test_statistics_in_closed_form_over_uneven_batches():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(7, 6, 8, generator=generator) + 100 for _ in range(4)]  # D = 3, M = 4, E = 1
    batches = [TeacherTrace([state[rows] for state in states], None, None) for rows in (slice(0, 5), slice(5, 7))]
    measured = measure_teacher(batches)
    for layer in range(3):
        before, after = states[layer].double(), states[layer + 1].double()
        assert float(measured.distances[layer]) == pytest.approx(float((after - before)[:, 0].norm(dim=-1).mean()))
        for token in range(6):
            variance = after[:, token].var(dim=0, unbiased=False).sum()
            assert float(measured.variances[layer, token]) == pytest.approx(float(variance), rel=1e-8)


def test_layer_weights():
    variances = torch.tensor([[0.01, 2, 4, 6, 8, 7], [1.0, 1, 1, 2, 4, 0.5]], dtype=torch.float64)
    assert torch.equal(layer_weights("none", variances, 4), torch.ones(2, 6))
    assert torch.equal(layer_weights("last", variances, 4), torch.tensor([[0.0] * 6, [1.0] * 6]))
    weights = layer_weights("variance", variances, 4)
    expected = [[50, 0.1, 0.1, 0.1, 0.1, 1 / 14], [0.5, 0.25, 0.25, 0.25, 0.25, 1]]
    torch.testing.assert_close(weights, torch.tensor(expected))
    # predicting the mean state costs 1 for CLS and 1 for the patches
    assert float((weights * variances)[:, 0].sum()) == pytest.approx(1)
    assert float((weights * variances)[:, 1:5].mean(1).sum()) == pytest.approx(1)
    assert layer_weights("variance", variances[:, :1], 4).tolist() == [[50.0], [0.5]]  # only CLS is cached
    constant = layer_weights("variance", torch.tensor([[0.0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), 4)
    assert torch.isfinite(constant).all()


def objective_with(**changes):
    teacher = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1, num_labels=5)
    return Distillation(teacher, DistillConfig(**changes), TeacherStatistics(torch.ones(3), torch.ones(3, 5)))


def test_phases_and_the_schedule_of_forcing():
    objective = objective_with(collocation=0.2, forcing=0.4)
    assert [objective.stage(p) for p in (0, 0.19, 0.2, 0.59, 0.61, 1)] == [
        "collocation", "collocation", "teacher forcing", "teacher forcing", "unrolled", "unrolled",
    ]  # fmt: skip
    assert [objective.forced(p) for p in (0.2, 0.3, 0.4, 0.6, 1.0)] == pytest.approx([1, 0.75, 0.5, 0, 0])
    free = objective_with()
    assert [free.forced(p) for p in (0, 0.5, 1)] == [0, 0, 0]
    assert free.stage(0) == "unrolled"


# --- a recipe, its student and its objective --------------------------------------------------------------------------


@pytest.mark.slow
def test_build_measures_the_times_and_they_survive_saving(teacher_folder, data, tmp_path):
    recipe = recipe_of(tmp_path, teacher_folder, model={"horizon": 2.0}, sample=100)
    student, objective = build(recipe, data)
    rows = torch.linspace(0, 319, 100).round().long()
    trace = objective.teacher.trace(model_input(student, data.train.images[rows]))
    path = torch.stack([state[:, 0] for state in trace.states])
    expected = meeting_times(path.diff(dim=0).norm(dim=-1).mean(dim=1), horizon=2.0)
    assert student.config.meeting_times == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx([2 / 3, 4 / 3, 2])
    assert student.config.image_mean == data.mean  # a teacher saved without its own
    student.save_pretrained(tmp_path / "student")
    again = OdeViTForImageClassification.from_pretrained(tmp_path / "student")
    assert again.config.meeting_times == student.config.meeting_times
    uniform, _ = build(
        dataclasses.replace(recipe, distill=dataclasses.replace(recipe.distill, placement="uniform")), data
    )
    assert uniform.config.meeting_times == pytest.approx([2 / 3, 4 / 3, 2])


def test_the_objective_keeps_its_teacher_out_of_what_is_trained_and_saved(teacher_folder, data, tmp_path):
    student, objective = build(recipe_of(tmp_path, teacher_folder), data)
    module = LossModule(student, objective)
    assert {name.removeprefix("model.") for name in module.state_dict()} == set(student.state_dict())
    assert {id(p) for p in module.parameters()} == {id(p) for p in student.parameters()}
    assert not any(part is objective.teacher.module for part in module.modules())


def test_attention_is_traced_only_when_it_is_compared(teacher_folder, data, tmp_path):
    wanted = {"losses": {"attention": 1.0, "cls_path": 1.0}, "collocation": 0.5}
    student, objective = build(recipe_of(tmp_path, teacher_folder, **wanted), data)
    asked, trace = [], objective.teacher.trace
    objective.teacher.trace = lambda images, attention=False: asked.append(attention) or trace(images, attention)
    images = model_input(student, data.train.images[:4])
    options = {"targets": torch.eye(10)[:4], "indices": torch.arange(4), "integration": Integration()}
    early = objective(student, images, progress=0.1, **options)
    late = objective(student, images, progress=0.9, **options)
    assert asked == [False, True]
    assert (set(early.losses), early.logits, early.evaluations) == ({"collocation"}, None, 1)
    assert set(late.losses) == {"attention", "cls_path"}
    assert (late.logits.shape, late.evaluations) == ((4, 10), 3)
    fewer = objective(student, images, progress=0.9, **{**options, "integration": Integration(2)})
    assert fewer.evaluations == 2


@pytest.mark.parametrize("solver", ["heun", "dopri5"])
def test_any_solver_unrolls(solver, teacher_folder, data, tmp_path):
    student, objective = build(recipe_of(tmp_path, teacher_folder, model={"solver": solver}), data)
    terms = objective(
        student, model_input(student, data.train.images[:4]), torch.eye(10)[:4], torch.arange(4),
        progress=0.5, integration=Integration(),
    )  # fmt: skip
    assert float(terms.losses["cls_path"].detach()) > 0
    assert terms.evaluations >= 6


def test_student_in_place_of_the_teacher_has_no_loss(teacher_folder, data, tmp_path):
    """End to end through the objective: a teacher whose states are the student's own path."""
    losses = {"cls_path": 1.0, "patch_path": 1.0, "kl": 1.0}
    student, objective = build(recipe_of(tmp_path, teacher_folder, placement="uniform", losses=losses), data)

    def trace(images, attention=False):
        path = student(images, output_hidden_states=True)
        return TeacherTrace([state.detach() for state in path.hidden_states], None, path.logits.detach())

    images = model_input(student, data.train.images[:4])
    objective.teacher.trace = trace
    terms = objective(student, images, torch.eye(10)[:4], torch.arange(4), progress=0.5, integration=Integration(3))
    assert float(sum(terms.losses.values()).detach()) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@torch.no_grad()
def test_the_monitor_is_told_how_near_the_teacher_is(teacher_folder, data, tmp_path):
    """Against the teacher's own logits and head, one decision plane at a time."""
    student, objective = build(recipe_of(tmp_path, teacher_folder), data)
    images = model_input(student.eval(), data.val.images[:5])
    trace, head = objective.teacher.trace(images), objective.teacher.module.classifier.weight
    ends = [
        student.norm(x[:, 0]) for x in (student(images, output_hidden_states=True).hidden_states[-1], trace.states[-1])
    ]
    ratios = []
    for mine, theirs, logits in zip(*ends, trace.logits, strict=True):
        answer = int(logits.argmax())
        planes = [(logits[answer] - logits[j]) / (head[answer] - head[j]).norm() for j in range(10) if j != answer]
        ratios.append(float((mine - theirs).norm() / min(planes)))
    seen = objective.watch(student, images)["distance_over_radius"]
    assert (seen["median"], seen["largest"]) == pytest.approx((sorted(ratios)[2], max(ratios)), rel=1e-3)
    objective.teacher.trace = lambda images: TeacherTrace(
        student(images, output_hidden_states=True).hidden_states, None, None
    )
    assert objective.watch(student, images)["distance_over_radius"]["largest"] < 1e-5
    student.config.pool = "mean"
    assert objective.watch(student, images) == {}  # the teacher's head reads CLS


def test_a_rebuilt_student_starts_from_the_same_weights(teacher_folder, data, tmp_path):
    recipe = recipe_of(tmp_path, teacher_folder)
    first, _ = build(recipe, data)
    torch.rand(5)
    second, _ = build(recipe, data, load_teacher(str(teacher_folder)))
    other, _ = build(dataclasses.replace(recipe, seed=1), data)
    weights = [model.odevit.fields[0].mlp.state_dict() for model in (first, second, other)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
        assert not torch.equal(value, weights[2][name])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"losses": {"cls_paht": 1.0}}, r"\['cls_paht'\]; give weights to some of cls_path, .*cross_entropy"),
        ({"losses": {"kl": 0.0}}, "nothing; give weights"),
        ({"losses": {"kl": "much"}}, "distill.losses must be numbers"),
        ({"placement": "random"}, "distill.placement must be one of distance, uniform, got 'random'"),
        ({"layer_weights": "first"}, "none, variance, last"),
        ({"cache": "patches"}, "none, logits, cls, all"),
        ({"collocation": 1.5}, "between 0 and 1; got 1.5"),
        ({"sample": 0}, "distill.sample must be positive"),
        ({"kl_temperature": 0.0}, "distill.kl_temperature must be positive"),
        ({"cache": "cls", "collocation": 0.5}, "collocation needs all tokens"),
        ({"cache": "cls", "forcing": 0.5}, "forcing needs all tokens"),
        ({"cache": "cls", "losses": {"patch_path": 1.0}}, "patch_path needs all tokens"),
        ({"cache": "all", "losses": {"attention": 1.0}}, "attention is not cached"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)


def test_plans_that_cannot_work(teacher_folder, data, tmp_path):
    def refuse(message, teacher=None, augment=None, model=None, **distill):
        recipe = recipe_of(tmp_path, teacher_folder, augment=augment, model=model, **distill)
        with pytest.raises(ValueError, match=message):
            build(recipe, data, teacher)

    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    refuse("fixed steps", forcing=0.5, model={"solver": "dopri5"})
    refuse("as many: 2 registers, 0 extra", losses={"register_path": 1.0}, model={"num_registers": 2})
    own = {"patch_size": 2}
    refuse("patch_path compares patches, and this student has its own", losses={"patch_path": 1.0}, model=own)
    refuse("collocation, forcing compares patches", collocation=0.2, forcing=0.2, model=own)
    refuse("kl loss needs a teacher with a classification head", tiny_teacher("dino", **sizes), losses={"kl": 1.0})
    refuse("nothing would train the student's head", tiny_teacher("dinov2", **sizes))
    refuse("mixup cannot be cached", augment={"mixup": 0.2}, cache="cls")
    with pytest.raises(ValueError, match=r"needs a teacher: --teacher DIRECTORY_OR_HUB_NAME, or distill\.teacher"):
        build(recipe_of(tmp_path, ""), data)


def test_registers_are_compared_when_the_teacher_has_as_many_extra_tokens(teacher_folder, data, tmp_path):
    teacher = tiny_teacher("dinov2-registers", image_size=8, patch_size=4, num_channels=1)
    losses = {"register_path": 1.0, "patch_path": 1.0, "kl": 1.0}
    recipe = recipe_of(tmp_path, teacher_folder, losses=losses, layer_weights="variance", collocation=0.5)
    student, objective = build(recipe, data, teacher)
    assert student.config.num_registers == teacher.extra_tokens > 0
    images = model_input(student, data.train.images[:8])
    for progress, names in ((0.1, {"collocation"}), (0.9, set(losses))):
        options = {"progress": progress, "integration": Integration()}
        terms = objective(student, images, torch.eye(10)[:8], torch.arange(8), **options)
        assert set(terms.losses) == names
        assert all(torch.isfinite(loss) and loss > 0 for loss in terms.losses.values())


def test_a_recipe_survives_its_file(teacher_folder, tmp_path):
    recipe = recipe_of(tmp_path, teacher_folder, cache="all", **PHASES)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe
    changed = Recipe.load(tmp_path / "recipe.yaml", ["distill.losses.kl=3e-1", "distill.cache=none"])
    assert (changed.distill.losses["kl"], changed.distill.cache) == (0.3, "none")
