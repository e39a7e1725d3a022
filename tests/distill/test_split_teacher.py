"""A teacher split among processes. That it gives the same student as a whole one: tests/commands/test_distill.py."""

import pytest
import torch

from odevit.data.decode import Frame
from odevit.distill import split_teacher as splitting
from odevit.distill.objective import DistillConfig
from odevit.distill.split_teacher import Lockstep, gather_teacher_, shard_teacher_
from odevit.teachers.teacher import tiny_teacher
from odevit.training.sharding import Processes


@pytest.fixture
def teacher():
    torch.manual_seed(0)
    return tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)


def test_who_is_done_waits_for_the_others_with_black_images(teacher, monkeypatch):
    """Two processes, the other with three questions more: this one joins in three times, and stops when nobody asks."""
    others, asked = iter([1, 1, 1, 0]), []
    monkeypatch.setattr(splitting, "summed", lambda tensor, device: tensor + next(others))
    answer = teacher.answer
    monkeypatch.setattr(teacher, "answer", lambda images: asked.append(float(images.abs().sum())) or answer(images))
    Lockstep(teacher).finish()
    assert asked == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "monitor", "message"),
    [({}, 5, "monitor_every"), ({"losses": {"attention": 1.0}}, 0, "attention"), ({"cache": "cls"}, 0, "cache_shards")],
)
def test_a_split_teacher_is_asked_by_all_or_not_at_all(fields, monitor, message, teacher, monkeypatch):
    monkeypatch.setattr(splitting, "processes", lambda: Processes(0, 2))
    with pytest.raises(ValueError, match=message):
        shard_teacher_(DistillConfig(**fields), monitor, teacher)


def test_what_is_gathered_is_the_teacher_that_was_split(teacher, monkeypatch):
    """The weights come back from the split module, the rest from its copy; both are the teacher's."""
    images, before = torch.randn(2, 1, 8, 8), teacher.checksum()
    expected, original = teacher.answer(images), teacher.module
    monkeypatch.setattr(splitting, "processes", lambda: Processes(0, 2))
    monkeypatch.setattr(splitting, "shard_", lambda module: None)
    shard_teacher_(DistillConfig(), 0, teacher)
    assert len(list(teacher.parameters())) == len(list(original.parameters()))  # the copy is no part of it
    gather_teacher_(teacher)
    assert teacher.module is not original
    assert teacher.checksum() == before
    assert torch.equal(teacher.answer(images), expected)
    assert not any(p.requires_grad for p in teacher.parameters())
    gather_teacher_(teacher)  # whole already


def test_one_process_keeps_it_whole(teacher):
    module = teacher.module
    shard_teacher_(DistillConfig(), 100, teacher)
    gather_teacher_(teacher)
    assert teacher.module is module


def test_a_whole_teacher_stays_as_it_is(teacher):
    """Also one that says how its pictures are cut."""
    module, teacher.frame = teacher.module, Frame.middle(8)
    gather_teacher_(teacher)
    assert teacher.module is module
    assert teacher.frame == Frame.middle(8)
