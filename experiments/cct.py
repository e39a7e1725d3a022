"""CCT-2/3x2 (Hassani et al., arXiv 2104.05704) as a peer: two convolutional stages, two blocks, sequence pooling.

Written from the paper for side-by-side runs; 283,723 parameters at width 128, as its authors count. It speaks enough of
Hugging Face's way (config, logits, save_pretrained) for `odevit.training.loop.fit` to train it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from odevit.model.layers import Attention, Mlp, PoolingTokenizer
from odevit.model.pools import SequencePool


class CctConfig(PreTrainedConfig):
    model_type = "cct-peer"

    def __init__(self, width: int = 128, heads: int = 2, depth: int = 2, mlp_ratio: float = 1, **kwargs: Any):
        self.width, self.heads, self.depth, self.mlp_ratio = width, heads, depth, mlp_ratio
        self.image_size, self.num_channels, self.image_mean, self.image_std = 32, 3, None, None
        super().__init__(**kwargs)


class Block(nn.Module):
    """Pre-norm attention (no biases in query, key and value) and MLP, one after the other."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.attention.out = nn.Linear(width, width)
        self.mlp = Mlp(width, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CctForImageClassification(PreTrainedModel):
    config_class = CctConfig

    def __init__(self, config: CctConfig):
        super().__init__(config)
        width = config.width
        self.tokenizer = PoolingTokenizer(3, width, 4)
        self.positions = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(
            Block(width, config.heads, int(width * config.mlp_ratio)) for _ in range(config.depth)
        )
        self.norm, self.pool = nn.LayerNorm(width), SequencePool(width, 64)
        self.classifier = nn.Linear(width, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, CctForImageClassification):
            nn.init.trunc_normal_(module.positions, std=0.2)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> ImageClassifierOutput:
        x = self.tokenizer(pixel_values) + self.positions  # (b, 64, d)
        for block in self.blocks:
            x = block(x)
        return ImageClassifierOutput(logits=self.classifier(self.pool(self.norm(x))))


AutoConfig.register(CctConfig.model_type, CctConfig)
AutoModelForImageClassification.register(CctConfig, CctForImageClassification)
