"""Jets: the memory that they take. Their values are tested wherever they are used (exponents, certificate, options)."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from odevit.dynamics.tangents import push


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest memory that any operation within it made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def test_pushing_through_a_layer_norm_takes_the_memory_of_the_jet_and_not_its_square():
    jet = torch.randn(1 + 200, 2, 5, 8, dtype=torch.float64)
    norm = nn.LayerNorm(8).double()
    with LargestStorage() as seen:
        pushed = push(norm, jet)
    assert seen.bytes <= 4 * jet.untyped_storage().nbytes()
    jacobian = torch.func.jacrev(norm)(jet[0, 0, 0])
    torch.testing.assert_close(pushed[1:, 0, 0], jet[1:, 0, 0] @ jacobian.T)
