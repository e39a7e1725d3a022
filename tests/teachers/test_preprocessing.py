"""Every model sees images in its own frame and normalisation: the oracle is transformers' own image processor."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from problems import tiny_model
from transformers import AutoImageProcessor, pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from odevit.analysis import Study
from odevit.analysis.comparison import compare
from odevit.analysis.contraction import agreement
from odevit.analysis.robustness import _teacher_accuracy
from odevit.commands.evaluate import load_data_for
from odevit.data import Wanted, prepare
from odevit.data.splits import MemorySplit
from odevit.distill.objective import Distillation, DistillConfig, TeacherStatistics
from odevit.distill.student import student_of
from odevit.model.image_processor import OdeViTImageProcessor
from odevit.teachers.preprocessing import (
    Preprocessing,
    carried_preprocessing,
    saved_preprocessing,
    wanted_by,
    wanted_by_saved,
)
from odevit.teachers.teacher import Teacher, load_teacher, tiny_teacher
from odevit.training.classifiers import load_classifier, save_classifier
from odevit.training.evaluation import evaluate, model_input

SETTINGS = {
    "squashed": {"size": {"height": 16, "width": 16}, "resample": 2},
    "middle": {
        "size": {"shortest_edge": 20},
        "do_center_crop": True,
        "crop_size": {"height": 16, "width": 16},
        "resample": 3,
    },
    "squashed, then cut": {
        "size": {"height": 20, "width": 20},
        "do_center_crop": True,
        "crop_size": {"height": 16, "width": 16},
    },
    "not normalised": {"size": {"height": 16, "width": 16}, "do_normalize": False},
    "between -1 and 1": {"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3},
}
PICTURES = [(96, 48), (48, 96), (37, 20), (16, 16), (33, 33)]  # width, height


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", PICTURES)
def test_what_a_processor_says_is_what_we_do(settings, size, tmp_path):
    options = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25], **SETTINGS[settings]}
    ViTImageProcessorPil(**options).save_pretrained(tmp_path)
    mean, std, frame = saved_preprocessing(str(tmp_path))
    ours = prepare(pixels(frame.apply(picture(size))), None, mean, std)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(picture(size), return_tensors="pt").pixel_values
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_that_does_not_say_is_left_alone(tmp_path):
    assert saved_preprocessing(str(tmp_path)) == Preprocessing(None, None, None)
    assert carried_preprocessing(tiny_teacher("vit").module) == Preprocessing(None, None, None)


def class_folders(folder, sizes):
    for seed, label in enumerate(("a", "b", "c")):
        for index in range(4):
            path = folder / "train" / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(sizes[index % len(sizes)], seed=4 * seed + index).save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["odevit", "odevit of format 1", "trained vit", "foreign vit"])
@pytest.mark.parametrize("sizes", [[(96, 48), (48, 96), (40, 37)], [(48, 48)]], ids=["odd", "square"])
def test_pipeline_and_eval_see_the_same_picture(kind, sizes, tmp_path):
    """Photos of 96 × 48 were squashed by the pipeline and cut by `odevit eval`: logits 43 % apart."""
    torch.manual_seed(0)
    folder, statistics = tmp_path / "model", {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    if kind.startswith("odevit"):
        tiny_model(num_labels=3, **statistics).save_pretrained(folder)
        if kind == "odevit of format 1":
            OdeViTImageProcessor(size={"height": 16, "width": 16}, resample=3, **statistics).save_pretrained(folder)
    else:
        module = tiny_teacher("vit", image_size=16, patch_size=4, num_labels=3).module
        for name, value in statistics.items():
            setattr(module.config, name, value)
        save_classifier(module, folder)
        if kind == "foreign vit":
            ViTImageProcessorPil(size={"height": 18, "width": 18}, do_center_crop=True,
                                 crop_size={"height": 16, "width": 16}).save_pretrained(folder)  # fmt: skip
    model = load_classifier(str(folder))
    data = load_data_for(model, str(class_folders(tmp_path / "data", sizes)))
    classify = pipeline("image-classification", model=str(folder), function_to_apply="none")
    files = sorted((tmp_path / "data").rglob("*.png"))
    answers = [{a["label"]: a["score"] for a in classify(str(file), top_k=3)} for file in files]
    expected = torch.tensor([[answer[model_label] for model_label in sorted(answer)] for answer in answers])
    images = torch.cat([split.fetch(torch.arange(len(split)))[0] for split in (data.train, data.val)])
    with torch.no_grad():
        logits = model(model_input(model, images)).logits
    scale = expected.abs().max()
    for row in expected:  # the order of the held-out images is not that of the files
        assert (logits - row).abs().amax(dim=1).min() < 1e-2 * scale  # a byte in 600 is rounded the other way


# --- a teacher and a student with normalisations of their own ---------------------------------------------------------

MEAN_AND_STD = [0.1, 0.2, 0.3], [0.2, 0.1, 0.3]


@pytest.fixture(scope="module")
def pair() -> tuple[Teacher, object]:
    """A teacher whose answers on dark images depend on the normalisation, and a student with another one."""
    torch.manual_seed(0)
    module = tiny_teacher("vit", image_size=16, patch_size=4).module
    module.config.image_mean, module.config.image_std = MEAN_AND_STD
    with torch.no_grad():  # different answers to different colours, not one for all
        flat = torch.rand(64, 3, 1, 1, generator=torch.Generator().manual_seed(1)).expand(-1, 3, 16, 16)
        module.classifier.bias.copy_(-module.eval()(prepare(flat, 16, *MEAN_AND_STD)).logits.mean(dim=0))
    teacher = load_teacher(module)
    return teacher, student_of(teacher, image_mean=[0.7] * 3, image_std=[0.5] * 3).eval()


@pytest.fixture(scope="module")
def split(pair) -> MemorySplit:
    """Labels are the teacher's answers to images in its own normalisation, so its accuracy is 1."""
    draw = torch.Generator().manual_seed(0)
    colors = torch.randint(0, 236, (64, 3, 1, 1), generator=draw)
    images = (colors + torch.randint(0, 20, (64, 3, 16, 16), generator=draw)).to(torch.uint8)
    return MemorySplit(images, pair[0](prepare(images, 16, pair[0].mean, pair[0].std)).argmax(1))


@pytest.mark.slow
def test_a_teacher_gets_its_own_normalisation_in_every_analysis(pair, split):
    teacher, student = pair
    assert evaluate(teacher.module, split)["top1"] == 1
    images = model_input(student, split.images)
    assert (teacher(images).argmax(1) == split.labels).float().mean() < 0.9  # what it was
    assert compare(student, teacher, split)["teacher"]["accuracy"] == 1
    assert agreement(student, teacher, images, split.labels)["teacher_right"].all()
    study = Study(student, images, split.labels, [str(i) for i in range(10)], teacher=teacher)
    assert _teacher_accuracy(study, torch.arange(64)) == 1
    own = prepare(split.images, 16, teacher.mean, teacher.std)
    torch.testing.assert_close(study.for_teacher(images), own, rtol=1e-5, atol=1e-5)


def test_a_teacher_gets_its_own_normalisation_while_it_teaches(pair, split):
    teacher, student = pair
    statistics = TeacherStatistics(torch.zeros(teacher.depth), torch.ones(teacher.depth, 1 + teacher.num_patches))
    objective = Distillation(teacher, DistillConfig(losses={"kl": 1.0}), statistics)
    seen = objective.observe(student, model_input(student, split.images), torch.arange(64))
    assert (seen.logits.argmax(1) == split.labels).all()


def test_equal_normalisations_change_no_bit(pair):
    teacher, _ = pair
    images = torch.randn(2, 3, 16, 16)
    assert teacher.renormalise(images, student_of(teacher).config) is images


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"image_size": 32, "num_channels": 1, "id2label": {"1": "b", "0": "a", "10": "k"}}, (32, 1, ["a", "b", "k"])),
        ({"image_size": [96, 96], "id2label": {"0": "LABEL_0"}}, (96, 3, None)),
        ({"image_size": [96, 64]}, (None, 3, None)),
        ({"vision_config": {"image_size": 224}}, (224, 3, None)),
        ({"architecture": "vit_tiny", "pretrained_cfg": {"input_size": [3, 224, 224]}}, (224, 3, None)),
        ({"image_size": "many", "num_channels": None, "id2label": 3}, (None, None, None)),
    ],
)
def test_what_a_saved_model_takes_stands_in_its_config(values, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert tuple(wanted_by_saved(str(tmp_path))) == expected


def test_what_is_not_there_wants_nothing(tmp_path):
    assert wanted_by_saved(str(tmp_path)) == wanted_by_saved("no/such/folder") == wanted_by(object()) == Wanted()


def test_models_of_two_towers_keep_it_in_another_file(tmp_path):
    settings = {"image_processor": {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.2], "do_normalize": True}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    assert saved_preprocessing(str(tmp_path)).mean == (0.4, 0.5, 0.6)


@pytest.mark.parametrize("key", ["do_flip_channel_order", "include_top"])
def test_pixels_that_would_arrive_otherwise_are_refused(key, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: True, "image_mean": [0.5], "image_std": [0.5]}))
    with pytest.raises(ValueError, match=f"{key} is not supported"):
        saved_preprocessing(str(tmp_path))
