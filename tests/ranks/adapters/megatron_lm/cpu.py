"""Makes Megatron-LM train on CPUs over gloo, by replacing the functions that need a GPU."""

import functools
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode


class Idle:
    """A stand-in for a GPU stream or event; its methods do nothing."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Idle

    def __call__(self, *_: object, **__: object) -> "Idle":
        return self


class OnCpu(TorchFunctionMode):
    """Replaces GPU devices with the CPU in the arguments of all torch functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if "cuda" in str(named.get("device", "")):
            named["device"] = "cpu"
        devices = (str, torch.device)
        args = tuple(
            "cpu" if isinstance(one, devices) and str(one).startswith("cuda") else one for one in args
        )
        result = function(*args, **named)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # the clipping of gradients checks it
        return result


@functools.cache
def use_cpu() -> None:
    """Replace the functions of torch and megatron that need a GPU, and import megatron."""
    warnings.filterwarnings("ignore")
    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    # Megatron compiles its index of samples with the Python on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", NO_VCS_VERSION="1")
    cuda: Any = torch.cuda
    nothing = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed")
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    substitutes: dict[str, Any] = {name: _always(None) for name in nothing} | {
        name: _always(0) for name in zero
    }
    substitutes |= dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), Idle)
    substitutes |= {
        "current_device": lambda: "cpu",
        "device_count": _always(8),
        "get_device_capability": _always((8, 0)),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "memory_stats": _always({}),
    }
    for name, substitute in substitutes.items():
        setattr(cuda, name, substitute)
    cuda.random.get_rng_state = cuda.get_rng_state
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    OnCpu().__enter__()

    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.training.arguments as arguments
    import megatron.training.training as training

    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    arguments.get_device_arch_version = _always(8)
    dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


def _always(value: object) -> Any:
    """Create a function that returns `value`. Each use needs its own function object, because torch's compiler keeps a
    table of functions by identity."""
    return lambda *_, **__: value


def _as_numpy(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
    """Convert a tensor to NumPy if `as_numpy` is set. Megatron converts the split sizes of an all-to-all only while it
    copies them from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
