"""The flow as a backbone: feature maps of the patches at chosen times."""

import copy
from typing import Any

from torch import Tensor
from transformers import AutoBackbone
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput

from odevit.model.config import OdeViTConfig
from odevit.model.model import OdeViTModel, OdeViTPreTrainedModel


class OdeViTBackbone(BackboneMixin, OdeViTPreTrainedModel):
    """Images → feature maps (b, d, H/p, W/p), one for each of `config.out_features`.

    Stages are times: "stem" is t = 0, "t=0.5" the state at half the horizon. `config.feature_times` says which there
    are (default: every step of the solver); `out_features` or `out_indices` choose among them, the last by default.
    Maps are the raw states of the patches, without CLS, registers and final norm.
    """

    def __init__(self, config: OdeViTConfig):
        config = copy.deepcopy(config)
        chosen = config.out_features or ([config.stage_names[i] for i in config.out_indices or [-1]])
        config.set_output_features_output_indices(chosen, None)
        super().__init__(config)
        self.odevit = OdeViTModel(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BackboneOutput | tuple:
        """kwargs: num_steps, solver, interpolate_pos_encoding. hidden_states: whole states (b, n, d) at every stage."""
        if output_attentions:
            raise ValueError("a backbone gives feature maps; for attention use OdeViTModel with output_attentions=True")
        interpolate = kwargs.pop("interpolate_pos_encoding", False)
        tokens = self.odevit.embed(pixel_values, interpolate)
        states = self.odevit.evolve(tokens, save_at=self.config.stage_times, **kwargs).xs  # (stages, b, n, d)
        patch = self.config.patch_size
        grid = pixel_values.shape[-2] // patch, pixel_values.shape[-1] // patch
        maps = tuple(states[index, :, 1 : 1 + grid[0] * grid[1]].mT.unflatten(2, grid) for index in self.out_indices)
        output = BackboneOutput(feature_maps=maps, hidden_states=tuple(states) if output_hidden_states else None)
        return output if return_dict is not False else output.to_tuple()


AutoBackbone.register(OdeViTConfig, OdeViTBackbone)
