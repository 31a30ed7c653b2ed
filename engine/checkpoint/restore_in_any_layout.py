"""Restores a run from a checkpoint. The layout may differ from the layout of the saved run, because each rank reads the
parts of the saved shards that it needs.

With gradient compression, several ranks (the *holders*) each keep a residual of a parameter, and training depends only
on the sum of these residuals. So holder h of the H holders in the new layout adds up the residuals that the holders h,
h + H, h + 2 H, ... saved. If the layout is unchanged, each holder restores the residual that it saved.
"""

import re
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from engine.checkpoint.manifest import Checkpoint
from engine.checkpoint.state_tensors import State
from engine.checkpoint.storage import FILES_TIMEOUT, Planner, Reader, first_line
from engine.config.refusal import RefusedError
from engine.parallel.local_shards import local_shard

_RESIDUAL = re.compile(r"residual\.(\d+)\.(.+)")


def restore(checkpoint: Checkpoint, state: State, without: str | None = None) -> None:
    """Load the state in `checkpoint`, which may have been saved in another layout. Collective over all ranks. If the
    checkpoint has only weights, the optimizer starts with a new state. Tensors whose name begins with `without` are not
    loaded.

    Raises RefusedError on all ranks if the checkpoint cannot be read or belongs to another model.
    """
    group = dist.new_group(backend="gloo", timeout=FILES_TIMEOUT)
    reader = Reader(checkpoint.folder, checkpoint.manifest.files)
    tensors = {
        name: tensor
        for name, tensor in state.tensors().items()
        if without is None or not name.startswith(without)
    }
    if checkpoint.manifest.weights_only:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    try:
        load(tensors, storage_reader=reader, planner=Planner(), process_group=group)
        shapes = {name: stored.shape for name, stored in reader.index.items()}
        if state.compression:
            for wanted in _compression(shapes, state):
                load(wanted, storage_reader=reader, planner=Planner(), process_group=group)
    except CheckpointException as error:
        raise RefusedError(f"cannot resume from {checkpoint.folder}: {first_line(error)}") from None
    state.update_tied_copies()


def _compression(shapes: Mapping[str, tuple[int, ...]], state: State) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of the tensors to load for the state of gradient compression, that is, its residuals and PowerSGD's
    factors. The tensors of one dict are loaded together. All ranks yield the same number of dicts. The first dict has
    PowerSGD's factors, and each further dict has one saved residual of each parameter. Loaded factors replace the
    current factors; the residuals loaded for one parameter are summed.
    """
    compression = state.compression
    assert compression
    saved: dict[str, int] = {}  # name -> number of holders
    for holder, name in (found.groups() for found in map(_RESIDUAL.fullmatch, shapes) if found):
        saved[name] = max(saved.get(name, 0), int(holder) + 1)
    if not saved:
        return
    parameters = state.named_parameters()
    factors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        stored = shapes.get(factor := state.factor_name(name, parameter))
        if stored is not None:
            factors[factor] = compression.factors[parameter] = local_shard(parameter.detach()).new_zeros(
                stored
            )
    yield factors
    for number in range(max(saved.values())):
        wanted: dict[str, Tensor] = {}
        earlier: dict[nn.Parameter, Tensor] = {}
        for name, parameter in parameters:
            own, holders = state.holder(name, parameter)
            tensors = dict(state.residual(name, parameter, own + number * holders))
            known = {key: value for key, value in tensors.items() if key in shapes}
            if known:
                residual = compression.residual(parameter)
                earlier[parameter] = residual.clone()
                wanted |= known
        yield wanted
        for parameter, sum_so_far in earlier.items():
            compression.residual(parameter).add_(sum_so_far)
