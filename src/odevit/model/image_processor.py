"""The image processor: the middle square, normalised as a model expects, in as many channels as it takes."""

from typing import Any

import numpy as np
from PIL import Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil


def square_processor(size: int) -> dict[str, Any]:
    """Options of a transformers image processor: shorter side to `size` (bicubic), then the middle square.

    The same pixels as `odevit.data` decodes, in training and in `odevit eval`.
    """
    square = {"height": size, "width": size}
    return {"size": {"shortest_edge": size}, "do_center_crop": True, "crop_size": square, "resample": 3}


class OdeViTImageProcessor(ViTImageProcessorPil):
    """ViT's, with the middle square, and PIL images become RGB or grey as `image_mean` has three values or one.

    transformers' pipelines turn every image into RGB, which a model of one channel could not read otherwise.
    """

    def __init__(self, **options: Any):
        size = options.get("size") or {}
        if "height" in size:  # saved in format 1, when pipelines squashed what training had cut
            options = {**options, **square_processor(size["height"])}
        super().__init__(**options)

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        mode = {1: "L", 3: "RGB"}.get(len(self.image_mean))
        if mode is not None and isinstance(image, Image.Image):
            image = image.convert(mode)
        return super().process_image(image, *args, **kwargs)
