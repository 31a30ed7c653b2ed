"""A rank's role in a Megatron job: its coordinates, its GPU, and whether it counts tokens."""

from collections.abc import Sequence
from typing import Any

from agents.loop.adapters.torch_ranks import device_number

AXES = {"pp": "pipeline_model", "dp": "data", "cp": "context", "tp": "tensor_model", "ep": "expert_model"}


def axes_of(mpu: Any) -> dict[str, int]:
    """The coordinates of this rank on the axes with more than one rank. `ep` is not a further axis: it regroups the
    ranks of `dp`, `cp` and `tp`.
    """
    sizes = {axis: getattr(mpu, f"get_{name}_parallel_world_size")() for axis, name in AXES.items()}
    return {
        axis: int(getattr(mpu, f"get_{name}_parallel_rank")())
        for axis, name in AXES.items()
        if sizes[axis] > 1
    }


def counts_tokens(mpu: Any) -> bool:
    """Whether this rank counts the tokens of its data-parallel replica. All ranks of a pipeline and of a
    tensor-parallel group have the same tokens, so only one of them counts.
    """
    return bool(mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0)


def device_of(model: Sequence[Any]) -> int | None:
    """The CUDA index of the GPU that holds the model; None if the model is not on a GPU."""
    return next((device_number(one.device) for chunk in model for one in chunk.parameters()), None)


def captured(options: Any) -> str:
    """Why settings of the forward pass cannot be changed and its outputs cannot be read; "" if both are possible.
    `options`: an object with Megatron's CUDA-graph options.
    """
    graphs = getattr(options, "cuda_graph_impl", "none") not in (None, "none")
    older = getattr(options, "enable_cuda_graph", False) or getattr(options, "external_cuda_graph", False)
    return "CUDA graphs are on" if graphs or older else ""
