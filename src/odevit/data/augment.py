"""Augmentation of whole batches: crop, flip, geometry, colour, erasing (kornia), then mixup and cutmix (ours).

Every random number is drawn for the whole global batch from a generator seeded by the caller, and a process uses its
own rows of them: the result depends neither on the number of processes nor on where a run was resumed. kornia's public
`forward_parameters` / `params=` allow exactly that for what happens to one image. Its mixup and cutmix pair images
across the whole batch, which a process that holds a slice cannot do: these two are written here on neighbouring rows.
`benchmarks/augmentation.py` measures the cost against a training step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from odevit.registry import Registry


@dataclass(kw_only=True)
class AugmentConfig:
    """What is done to a training batch. Everything is off by default."""

    crop: int = 0  # pad by so many pixels, then cut the old size out at a random place
    crop_fill: str = "reflect"  # what the padding holds: "reflect" or "zero"
    flip: bool = False  # mirror left-right, every second image
    geometry: float = 0.0  # 0..1, share of RandAugment's full range of rotation, shear and translation
    color: float = 0.0  # 0..1, brightness, contrast, saturation factors uniform in [1 - color, 1 + color]
    erase: float = 0.0  # probability that a random rectangle is blacked out
    mixup: float = 0.0  # alpha of the Beta(alpha, alpha) share of an image in a mixture of two; 0 is off
    cutmix: float = (
        0.0  # the same for a rectangle pasted from another image; with both on, each image draws one of them
    )

    def __post_init__(self) -> None:
        if self.crop < 0 or self.crop_fill not in CROP_FILLS:
            fills = ", ".join(CROP_FILLS)
            raise ValueError(
                f"crop must be ≥ 0 and crop_fill one of {fills}; got crop={self.crop}, crop_fill={self.crop_fill!r}"
            )
        for name in ("geometry", "color", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 (off) and 1; got {getattr(self, name)}")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is the alpha of a Beta distribution, ≥ 0 (0 is off); got {getattr(self, name)}"
                )


CROP_FILLS = {"reflect": "reflect", "zero": "constant"}  # our word: kornia's padding mode

# RandAugment (arXiv 1909.13719), table 6 of AutoAugment (arXiv 1805.09501): full range of each geometric operation
MAX_ROTATION = 30.0  # degrees
MAX_SHEAR = 17.0  # degrees: arctan 0.3
MAX_TRANSLATION = 0.45  # of the image's side: 150 of 331 pixels


class ImageShape(NamedTuple):
    channels: int
    height: int
    width: int


Operation = Callable[[AugmentConfig, ImageShape], Any]
OPERATIONS: Registry[Operation] = Registry("operation")  # in the order in which they are applied


def register_operation(build: Operation) -> Operation:
    """`build(config, shape)` makes the kornia augmentation of the config field of the same name, if that is not 0."""
    OPERATIONS[build.__name__] = build
    return build


@register_operation
def crop(config: AugmentConfig, shape: ImageShape) -> Any:
    import kornia.augmentation as kornia

    if config.crop_fill == "reflect" and config.crop >= min(shape.height, shape.width):
        raise ValueError(
            f"a reflecting crop must pad by less than the image's side; got crop={config.crop} for "
            f"{shape.height}x{shape.width} images. Lower crop, or set crop_fill to 'zero'."
        )
    return kornia.RandomCrop(
        (shape.height, shape.width), padding=config.crop, padding_mode=CROP_FILLS[config.crop_fill], p=1.0
    )


@register_operation
def flip(config: AugmentConfig, shape: ImageShape) -> Any:
    import kornia.augmentation as kornia

    return kornia.RandomHorizontalFlip(p=0.5)


@register_operation
def geometry(config: AugmentConfig, shape: ImageShape) -> Any:
    import kornia.augmentation as kornia

    shift = MAX_TRANSLATION * config.geometry
    return kornia.RandomAffine(
        degrees=MAX_ROTATION * config.geometry, translate=(shift, shift), shear=MAX_SHEAR * config.geometry, p=1.0
    )


@register_operation
def color(config: AugmentConfig, shape: ImageShape) -> Any:
    import kornia.augmentation as kornia

    saturation = config.color if shape.channels == 3 else 0.0  # a grey image has no saturation
    return kornia.ColorJitter(brightness=config.color, contrast=config.color, saturation=saturation, p=1.0)


@register_operation
def erase(config: AugmentConfig, shape: ImageShape) -> Any:
    import kornia.augmentation as kornia

    return kornia.RandomErasing(p=config.erase)


# A mix is a map of the share (b, 1, H, W) that each pixel of an image keeps; the rest comes from its partner.
Mix = Callable[[Tensor, Tensor, ImageShape], Tensor]
MIXES: Registry[Mix] = Registry("mix")


def register_mix(mix: Mix) -> Mix:
    """`mix(share (b,), center (b, 2) in 0..1, shape)` → map (b, 1, H, W) of the config field of the same name."""
    MIXES[mix.__name__] = mix
    return mix


@register_mix
def mixup(share: Tensor, center: Tensor, shape: ImageShape) -> Tensor:
    """The same share everywhere (arXiv 1710.09412)."""
    return share.view(-1, 1, 1, 1).expand(-1, 1, shape.height, shape.width)


@register_mix
def cutmix(share: Tensor, center: Tensor, shape: ImageShape) -> Tensor:
    """0 in a rectangle of area 1 - share around the centre, cut at the border, 1 outside (arXiv 1905.04899)."""

    def inside(side: int, middle: Tensor) -> Tensor:
        half = (1 - share).sqrt() * side / 2
        low, high = (middle * side - half).round(), (middle * side + half).round()
        position = torch.arange(side, device=share.device)
        return (position >= low[:, None]) & (position < high[:, None])  # (b, side)

    rows, columns = inside(shape.height, center[:, 0]), inside(shape.width, center[:, 1])
    return 1 - (rows[:, None, :, None] & columns[:, None, None, :]).to(share.dtype)


class Augment:
    """Calls `(images, labels, seed=…, start=…, total=…)` → images (b, c, H, W), soft targets (b, num_classes).

    `images` are uint8 in 0..255 or float in 0..1, and come back as float in 0..1 (untouched when everything is off).
    They are rows start … start + b of a global batch of `total`. `seed` should be a function of run seed and step.
    """

    def __init__(self, config: AugmentConfig, num_classes: int):
        self.config = config
        self.num_classes = num_classes
        self.operations = [name for name in OPERATIONS if getattr(config, name)]
        self.mixes = [name for name in MIXES if getattr(config, name)]
        self._built: dict[ImageShape, list[Any]] = {}
        if self.operations:
            try:
                import kornia.augmentation  # noqa: F401
            except ImportError as error:
                wanted = ", ".join(self.operations)
                raise ValueError(f"the augmentations {wanted} need kornia: pip install kornia") from error

    def __call__(
        self, images: Tensor, labels: Tensor, *, seed: int, start: int = 0, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        total = start + len(images) if total is None else total
        if start < 0 or start + len(images) > total:
            raise ValueError(f"rows {start} to {start + len(images)} do not lie in a global batch of {total}")
        targets = nnf.one_hot(labels, self.num_classes).float()
        if len(images) == 0 or not (self.operations or self.mixes):
            return images, targets
        shape = ImageShape(*images.shape[1:])
        rows = slice(start, start + len(images))
        operations = self._operations(shape)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            drawn = [operation.forward_parameters(torch.Size((total, *shape))) for operation in operations]
            kept = self._draw_mix(total, shape, rows) if self.mixes else None
        if not images.is_floating_point():
            images = images.float() / 255
        with torch.no_grad():
            for operation, parameters in zip(operations, drawn, strict=True):
                images = operation(images, params=_take_rows(parameters, rows, images.device))
        if kept is None:
            return images, targets
        return _mix(images, targets, kept.to(images), _partners(start, len(images), total).to(images.device))

    def _operations(self, shape: ImageShape) -> list[Any]:
        if shape not in self._built:
            self._built[shape] = [OPERATIONS[name](self.config, shape) for name in self.operations]
        return self._built[shape]

    def _draw_mix(self, total: int, shape: ImageShape, rows: slice) -> Tensor:
        """The share map (b, 1, H, W) of our rows; every row of the global batch draws one of the mixes that are on."""
        choice = torch.randint(len(self.mixes), (total,))[rows]
        center = torch.rand(total, 2)[rows]
        maps = []
        for name in self.mixes:
            alpha = getattr(self.config, name)
            share = torch.distributions.Beta(alpha, alpha).sample((total,))[rows]
            maps.append(MIXES[name](share, center, shape))
        return torch.stack(maps)[choice, torch.arange(len(choice))]


# kornia parameters that belong to the batch, not to its images
WHOLE_BATCH = {"order", "forward_input_shape"}


def _take_rows(parameters: dict[str, Tensor], rows: slice, device: torch.device) -> dict[str, Tensor]:
    return {
        name: value if name in WHOLE_BATCH or value.ndim == 0 else value[rows].to(device)
        for name, value in parameters.items()
    }


def _partners(start: int, count: int, total: int) -> Tensor:
    """Row 2i mixes with row 2i + 1: batches are shuffled, so neighbours are strangers, and slices hold whole pairs."""
    end = start + count
    if start % 2 or (end % 2 and end != total):
        raise ValueError(
            f"mixup and cutmix pair rows 2i and 2i + 1, so a process must hold whole pairs; got rows {start} to {end} "
            f"of {total}. Choose a batch size that is a multiple of twice the number of processes."
        )
    partners = torch.arange(start, end) ^ 1
    return torch.where(partners < total, partners, partners ^ 1) - start  # the last of an odd batch mixes with itself


def _mix(images: Tensor, targets: Tensor, kept: Tensor, partners: Tensor) -> tuple[Tensor, Tensor]:
    mixed = kept * images + (1 - kept) * images[partners]
    share = kept.mean(dim=(1, 2, 3))[:, None]  # (b, 1): exactly what the pixels kept
    return mixed, share * targets + (1 - share) * targets[partners]
