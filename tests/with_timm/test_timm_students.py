"""Students of timm's and torchvision's models keep the same contract as all others."""

import pytest
from test_student import (
    random_teacher,
    test_every_part_is_copied_by_name_and_none_is_shared,
    test_head_is_frozen_unless_asked_or_fresh,
    test_head_of_the_last_state_gives_the_teachers_logits,
    test_tokens_equal_the_teachers_bit_for_bit,
    test_training_a_student_leaves_the_teacher_as_it_is,
)

pytest.importorskip("timm.models", reason="timm is an optional extra")
pytest.importorskip("torchvision.models", reason="torchvision is needed by timm")

__all__ = [
    "test_every_part_is_copied_by_name_and_none_is_shared",
    "test_head_is_frozen_unless_asked_or_fresh",
    "test_head_of_the_last_state_gives_the_teachers_logits",
    "test_tokens_equal_the_teachers_bit_for_bit",
    "test_training_a_student_leaves_the_teacher_as_it_is",
]


@pytest.fixture(scope="module", params=["timm", "torchvision"])
def teacher(request):
    return random_teacher(request.param)
