"""The image processor: resizes and normalises as a model expects, and gives it as many channels as it takes."""

from typing import Any

import numpy as np
from PIL import Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil


class OdeViTImageProcessor(ViTImageProcessorPil):
    """ViT's, and PIL images become RGB or grey as `image_mean` has three values or one.

    transformers' pipelines turn every image into RGB, which a model of one channel could not read otherwise.
    """

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        mode = {1: "L", 3: "RGB"}.get(len(self.image_mean))
        if mode is not None and isinstance(image, Image.Image):
            image = image.convert(mode)
        return super().process_image(image, *args, **kwargs)
