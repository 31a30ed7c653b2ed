"""Restores a run from a checkpoint. The layout may differ from that of the saved run: each rank reads the parts of the
saved shards that it needs."""

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from engine.checkpoint.layout_independent_state import State
from engine.checkpoint.manifest import Checkpoint
from engine.checkpoint.storage import Planner, Reader, first_line
from engine.config.refusal import RefusedError


def restore(checkpoint: Checkpoint, state: State) -> None:
    """Load the state in `checkpoint`, which may have been saved in another layout. Collective over all ranks.

    Raises RefusedError on all ranks if the checkpoint cannot be read or has another model.
    """
    group = dist.new_group(backend="gloo")
    reader = Reader(checkpoint.folder, checkpoint.manifest.files)
    try:
        load(state.tensors(), storage_reader=reader, planner=Planner(), process_group=group)
    except CheckpointException as error:
        raise RefusedError(f"cannot resume from {checkpoint.folder}: {first_line(error)}") from None
    state.update_tied_copies()
