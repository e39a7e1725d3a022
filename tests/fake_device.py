"""A second device without the hardware: tensors that say they are on `fake:0` while the CPU computes with them.

PyTorch keeps a place for backends of others (PrivateUse1) that can be filled from Python. `FakeTensor` wraps a CPU
tensor there; every operation, also those of backward passes and of function transforms, comes by and is refused where a
real accelerator would refuse it:
- tensors of both devices in one operation (numbers, that is 0-dimensional CPU tensors, and CPU indices are allowed);
- a CPU generator that fills a tensor of the device;
- `.numpy()` and with it matplotlib (`tolist()` and `item()` copy, as on a real one).

It shows whether everything that meets is on one device. It cannot show speed, memory, kernels that a device lacks
(float64 on MPS, uint8 interpolation on CUDA), other rounding, asynchronous errors, mixed precision, `.cuda()` calls,
several devices, or what accelerate and DDP do there: accelerate does not know this backend, so a run is given an
accelerator that says `fake:0` (`claim_on_device`).

The backend stays registered until the process ends: use it in a child process only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "fake"
MOVES = (aten._to_copy, aten.copy_, aten.copy, aten.set_)  # may see both devices
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)  # take indices of the CPU


class FakeTensor(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "FakeTensor":
        wrapper: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        wrapper.inner = inner
        return wrapper

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:  # files hold CPU tensors, as `map_location="cpu"` reads them
        return self.cpu().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return self.cpu().__format__(spec)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Intercept(TorchDispatchMode):
    """Also sees what has no FakeTensor among its arguments: factories, and CPU tensors on their way to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Construct(TorchFunctionMode):
    """What goes behind the dispatcher's back: `torch.tensor([…], device=…)` and indices in a list are made on the CPU;
    a parameter that is given other data (`module.double()`) holds them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], **{"dtype": args[0].dtype, "device": args[0].device, **kwargs})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        if func == Tensor.data.__set__ and isinstance(args[0], FakeTensor):  # type: ignore[attr-defined]
            args[0].inner = args[1].inner
        return func(*args, **kwargs)


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the CPU; the result is on the device that was asked for, or on that of the arguments."""
    target = kwargs.get("device")
    leaves = tree_leaves((args, kwargs))
    there = any(isinstance(leaf, FakeTensor) for leaf in leaves) if target is None else target.type == NAME
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, FakeTensor) else x, (args, kwargs))
    if target is not None and target.type == NAME:
        inner_kwargs["device"] = torch.device("cpu")
    if there:
        check_together(func, args, leaves)
    if func is aten._efficientzerotensor.default:  # a zero without memory, which CPU kernels do not take by themselves
        func = aten.zeros.default
    result = func(*inner_args, **inner_kwargs)
    if func.overloadpacket is aten._local_scalar_dense or not there:
        return result
    result = tree_map(lambda x: FakeTensor(x) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if func._schema.is_mutable else result


def check_together(func: Any, args: Any, leaves: list[Any]) -> None:
    operation = func.overloadpacket
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({func})")
    if operation in MOVES:
        return
    compared = [args[0], *args[2:]] if operation in INDEXING else leaves
    left_behind = [
        x for x in tree_leaves(compared) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.ndim
    ]
    if left_behind:
        shapes = ", ".join(str(tuple(x.shape)) for x in left_behind)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
            f"({func}; on the CPU: {shapes})"
        )


class Backend(_DummyBackendModule):
    """`torch.fake`; random numbers of the device come from the CPU's generator."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Within it, tensors can be sent to the device that it gives; `torch.accelerator` says that there is one."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, Backend())
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    with Intercept(), Construct():
        yield torch.device(NAME, 0)
