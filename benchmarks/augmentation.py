"""What input costs beside a training step, for 64 CIFAR-sized images: one run, one table of ratios.

    python benchmarks/augmentation.py

Compared: kornia's own augmentations with random numbers drawn per process (crop, flip, RandAugment, erasing, mixup),
ours (the same kornia operations with numbers drawn for the global batch, mixup and cutmix our own), the whole input
pipeline (fetch, augment, prepare), and a training step (forward and backward) of the cifar-tiny preset. Times are CPU
seconds of this process on one thread, the median of rounds in which all candidates take turns, so that a busy machine
does not favour one of them.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from odevit.data import batches, prepare
from odevit.data.augment import Augment, AugmentConfig
from odevit.data.splits import MemorySplit
from odevit.model.model import OdeViTForImageClassification

BATCH, SIDE, CLASSES = 64, 32, 10
ROUNDS = 7
USUAL = AugmentConfig(crop=4, flip=True, erase=0.25, mixup=0.8, cutmix=1.0)
EVERYTHING = AugmentConfig(crop=4, flip=True, geometry=0.3, color=0.3, erase=0.25, mixup=0.8, cutmix=1.0)


def kornia_pipeline() -> Callable[[Tensor, Tensor], None]:
    """kornia as its documentation uses it."""
    try:
        import kornia.augmentation as kornia
        from kornia.augmentation.auto import RandAugment
    except ImportError:
        sys.exit("this benchmark compares with kornia: pip install kornia")
    operations = [
        kornia.RandomCrop((SIDE, SIDE), padding=4, padding_mode="reflect"),
        kornia.RandomHorizontalFlip(),
        RandAugment(n=2, m=10),
        kornia.RandomErasing(p=0.25),
    ]
    mixup = kornia.RandomMixUpV2(data_keys=["input", "class"])

    def run(images: Tensor, labels: Tensor) -> None:
        images = images.float() / 255
        for operation in operations:
            images = operation(images)
        mixup(images, labels)

    return run


def input_pipeline(split: MemorySplit, augment: Augment) -> Callable[[], None]:
    def run() -> None:
        batch = next(batches(split, BATCH, seed=0, epoch=0))
        images, _ = augment(batch.images, batch.labels, seed=0, start=batch.start, total=batch.total)
        prepare(images, SIDE, [0.5] * 3, [0.25] * 3)

    return run


def training_step() -> Callable[[], None]:
    torch.manual_seed(0)
    model = OdeViTForImageClassification.from_preset("cifar-tiny", num_labels=CLASSES).train()
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(0, CLASSES, (BATCH,))

    def run() -> None:
        model.zero_grad()
        model(images, labels=labels).loss.backward()

    return run


def measure(candidates: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median CPU seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(ROUNDS + 1):  # the first warms up
        for name, run in candidates.items():
            before = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - before)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (BATCH * 4, 3, SIDE, SIDE), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (BATCH * 4,))
    kornia_run = kornia_pipeline()
    usual, everything = Augment(USUAL, CLASSES), Augment(EVERYTHING, CLASSES)
    split = MemorySplit(images, labels)
    step = "training step, cifar-tiny"
    times = measure(
        {
            "kornia alone: crop flip RandAugment erase mixup": lambda: kornia_run(images[:BATCH], labels[:BATCH]),
            "ours: crop flip erase mixup cutmix": lambda: usual(images[:BATCH], labels[:BATCH], seed=0) and None,
            "ours: the same and geometry, colour": lambda: everything(images[:BATCH], labels[:BATCH], seed=0) and None,
            "input pipeline, usual (fetch augment prepare)": input_pipeline(split, usual),
            "input pipeline, everything on": input_pipeline(split, everything),
            step: training_step(),
        }
    )
    print(f"{BATCH} images of {SIDE} pixels, torch {torch.__version__}, one thread, median of {ROUNDS} rounds")
    print(f"{'':50} {'ms':>8}  share of a step")
    for name, seconds in times.items():
        print(f"{name:50} {1e3 * seconds:8.1f}  {100 * seconds / times[step]:6.2f} %")


if __name__ == "__main__":
    main()
