"""The flow gap and the head read along the way, on models whose dynamics are known."""

import pytest
import torch

from odevit import OdeViTConfig, OdeViTForImageClassification
from odevit.analysis import Study
from odevit.analysis.flow import READ_OUTS, accuracy_over_time, flow_gap, run, settles_at


def turning_model(num_steps=1, **changes):
    """Every token starts at e₁ and turns by 3 radians in a plane, dx/dt = 3 J x; the answer is the side where CLS ends.

    Euler with K steps turns by K·atan(3/K): with one step not far enough.
    """
    torch.manual_seed(0)
    config = OdeViTConfig(
        image_size=4, patch_size=2, num_channels=1, hidden_size=4, num_attention_heads=1, mlp_ratio=1, depth=1,
        num_steps=num_steps, norm="none", final_norm="none", num_labels=2, **changes,
    )  # fmt: skip
    model = OdeViTForImageClassification(config).eval()
    field = model.odevit.fields[0]
    turn = torch.zeros(4, 4)
    turn[0, 1], turn[1, 0] = -3.0, 3.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        field.attention.value.weight.copy_(torch.eye(4))  # every token sees the mean of all, which are alike
        field.attention.out.weight.copy_(turn)
        model.odevit.positions[0, :, 0] = 1.0
        model.classifier.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    return model


def test_a_recurrence_has_a_gap_and_a_flow_has_none():
    images, labels = torch.zeros(6, 1, 4, 4), torch.ones(6, dtype=torch.long)
    gap = flow_gap(turning_model(num_steps=1), images, labels)  # one Euler step stays on the side where CLS began
    assert (gap["own"], gap["exact_flow"], gap["gap"], gap["standard_error"]) == (0, 1, -1, 0)
    gap = flow_gap(turning_model(num_steps=48), images, labels)
    assert (gap["own"], gap["exact_flow"], gap["gap"], gap["spread"]) == (1, 1, 0, 0)
    assert list(gap["accuracy_by_steps"]) == [3, 4, 6, 8, 12, 24, 48]


def test_a_contractive_flow_is_not_asked_for_steps_that_could_expand():
    images, labels = torch.randn(3, 1, 8, 8), torch.zeros(3, dtype=torch.long)
    shape = dict(image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_attention_heads=2, field="contractive")
    for depth, expected in ((8, [4, 6, 8, 12, 24, 48]), (100, [50])):
        config = OdeViTConfig(depth=depth, num_steps=depth // 2, solver="lie_trotter", final_norm="none", **shape)
        gap = flow_gap(OdeViTForImageClassification(config).eval(), images, labels)
        assert list(gap["accuracy_by_steps"]) == expected


def test_the_standard_error_is_that_of_paired_differences(monkeypatch):
    model = turning_model()
    answers = {("euler", 1): torch.tensor([0, 0, 1, 1]), ("rk4", 16): torch.tensor([0, 1, 1, 1])}

    class Output:
        def __init__(self, said):
            self.logits = torch.eye(2)[said]

    def forward(images, solver, num_steps):
        return Output(answers.get((solver, num_steps), answers["rk4", 16]))

    monkeypatch.setattr(model, "forward", forward)
    gap = flow_gap(model, torch.zeros(4, 1, 4, 4), torch.tensor([0, 0, 1, 1]))
    assert gap["gap"] == 0.25
    assert gap["standard_error"] == pytest.approx((0.25 * 0.75 / 4) ** 0.5)


def test_the_head_changes_its_mind_when_cls_crosses_the_line():
    path = accuracy_over_time(turning_model(num_steps=48), torch.zeros(3, 1, 4, 4), torch.ones(3, dtype=torch.long))
    assert len(path) == READ_OUTS
    crossing = torch.pi / 2 / 3  # turned by a quarter: t = π/6 = 0.52
    for row in path:
        assert row["accuracy"] == row["final"] == float(row["t"] > crossing), row


@pytest.mark.parametrize("fields", [1, 3])
def test_findings_for_any_number_of_fields(fields):
    model = turning_model(num_steps=4, num_fields=fields)
    study = Study(model, torch.zeros(5, 1, 4, 4), torch.tensor([0, 1, 0, 1, 1]), ["a", "b"])
    gap, anytime = run(study)
    assert "flow gap" in gap.key_numbers
    assert gap.value["images"] == 5
    assert len(anytime.value) == READ_OUTS


@pytest.mark.parametrize(("final", "t"), [([0.2, 0.995, 0.7, 1], 3), ([0.2, 0.995, 1, 1], 1), ([1, 1, 1, 1], 0)])
def test_answers_have_settled_when_none_of_them_turns_again(final, t):
    assert settles_at([{"t": time, "final": share} for time, share in enumerate(final)]) == t
