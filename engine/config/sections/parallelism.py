"""Layout sections for the parallel axes and the pipeline schedule. Torch-free."""

from typing import Annotated, Literal

from msgspec import Struct

from engine.config.sections.bounds import Positive, VirtualStages


class GridSizes(Struct, frozen=True):
    """Sizes of the parallel axes; the run has pp x dp_replicate x dp_shard x cp x tp ranks."""

    pp: Annotated[Positive, "pipeline parallel size"] = 1
    dp_replicate: Annotated[Positive, "number of replicas of the sharded model (HSDP)"] = 1
    dp_shard: Annotated[Positive, "sharded data parallel size (ZeRO)"] = 1
    cp: Annotated[Positive, "context parallel size: ranks that share each sequence"] = 1
    tp: Annotated[Positive, "tensor parallel size, with sequence parallelism"] = 1
    ep: Annotated[Positive, "expert parallel size, over the dp_shard x cp x tp ranks of a stage"] = 1
    ep_method: Annotated[
        Literal["direct", "hierarchical"], "one all-to-all, or one within nodes and then one across nodes"
    ] = "direct"
    ep_inner: Annotated[
        Positive | None,
        "with hierarchical: ep ranks per node; absent: the divisor nearest to the square root of ep",
    ] = None
    cp_method: Annotated[
        Literal["ulysses", "ring"],
        "attention over cp: all-to-all from tokens to heads (Ulysses), or keys and values passed around a ring",
    ] = "ring"


class Schedule(Struct, frozen=True):
    """The order of the forward and backward passes of a pipeline."""

    name: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"],
        "the last four have several stages per rank",
    ] = "1f1b"
    virtual_stages: Annotated[
        VirtualStages | None, "stages per rank; absent: the smallest number that the schedule allows"
    ] = None
