"""transformers alone: `Trainer` for one epoch on digits, then `pipeline` on the folder it wrote."""

import numpy as np
import pytest
import torch
from PIL import Image
from problems import tiny_model
from transformers import Trainer, TrainingArguments, pipeline

from odevit.data import DataConfig, load_data, prepare


@pytest.mark.slow
def test_trainer_learns_digits_in_one_epoch_and_the_pipeline_reads_them(tmp_path):
    data = load_data(DataConfig(name="digits"))

    def examples(split):
        images, labels = split.fetch(torch.arange(len(split)))
        images = prepare(images, 8, data.mean, data.std)
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]

    model = tiny_model(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, num_registers=0, num_steps=3,
        tokenizer="conv", norm="layer", pool="mean", hidden_size=48, image_mean=data.mean, image_std=data.std,
        id2label={i: f"digit {i}" for i in range(10)},
    )  # fmt: skip
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=8, learning_rate=3e-3, warmup_steps=10,
        weight_decay=0.05, use_cpu=True, report_to=[], seed=0, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = Trainer(
        model, arguments, train_dataset=examples(data.train), eval_dataset=examples(data.test), compute_metrics=accuracy
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    assert found > 0.4  # after one epoch; guessing has 0.1

    trainer.save_model(tmp_path / "model")
    images, labels = data.test.fetch(torch.arange(len(data.test)))
    pictures = [Image.fromarray(np.asarray(image[0])) for image in images]
    answers = pipeline("image-classification", model=str(tmp_path / "model"))(pictures, top_k=1)
    right = [answer[0]["label"] == f"digit {label}" for answer, label in zip(answers, labels, strict=True)]
    assert sum(right) / len(right) == pytest.approx(found, abs=0.01)
