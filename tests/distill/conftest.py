"""A teacher and digits for distillations."""

import pytest
import torch

from odevit.data import DataConfig, load_data
from odevit.teachers.teacher import tiny_teacher


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("teacher")
    teacher = tiny_teacher("vit", image_size=8, patch_size=4, num_channels=1)
    with torch.no_grad():
        for parameter in teacher.parameters():  # away from a path that hardly moves
            parameter.add_(0.1 * torch.randn_like(parameter))
    teacher.module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data():
    return load_data(DataConfig(name="digits", limit=320))
