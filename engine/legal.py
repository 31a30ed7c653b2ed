"""Why the parts of a layout do not go together, one sentence each: what, where, and what would be legal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.grid import divisors, listed
from engine.planner.size import parameters
from engine.planner.stages import SCHEDULES, accepts, fewest, partners, recomputes, zeros

if TYPE_CHECKING:  # a layout is read by asking these
    from engine.layout import Layout, Moe

# Beyond what anyone has published, so that a slip of the finger is refused here and not by a traceback much later.
MOST_RANKS = 65_536  # four times Llama 3's 16,384 GPUs
MOST_PARAMETERS = 10**13  # six times Switch-C's 1.6 trillion
MOST_TOKENS = 2**30  # of one step: sixteen times DeepSeek-V3's 15,360 sequences of 4,096


def size_refusals(layout: "Layout") -> Iterator[str]:
    """Sizes that are legal one by one, and together larger than any run. Asked first: what follows may then count."""
    tokens = layout.train.global_batch * layout.model.seq_len
    for what, size, most in (
        ("pp x dp_replicate x dp_shard x cp x tp of [grid]", layout.ranks.world, MOST_RANKS),
        ("train.global_batch x model.seq_len", tokens, MOST_TOKENS),
        ("the number of the model's parameters", parameters(layout.model), MOST_PARAMETERS),
    ):
        if size > most:
            yield f"{what} = {size:,} is more than any run has; legal: up to {most:,}"


def context_refusals(layout: "Layout") -> Iterator[str]:
    """Over cp a sequence is cut head and tail, so each slice has two halves; Ulysses deals heads out to cp ranks."""
    grid, model = layout.ranks, layout.model
    pieces = 2 * grid.cp * grid.tp
    if model.seq_len % pieces:
        yield (
            f"grid.cp = {grid.cp} cuts a sequence into 2 x cp x tp = {pieces} pieces, which do not divide "
            f"model.seq_len = {model.seq_len}; legal: a multiple of {pieces}"
        )
    if layout.grid.cp_method == "ulysses":
        heads, kv = model.heads // grid.tp, model.kv // grid.tp
        fitting = [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]
        if grid.cp not in fitting:
            yield (
                f"grid.cp = {grid.cp} does not deal out the {heads} heads and {kv} kv_heads of a tensor rank evenly; "
                f"legal: {listed(fitting)}, or cp_method = ring"
            )


def pipeline_refusals(layout: "Layout") -> Iterator[str]:
    pp, name, layers = layout.grid.pp, layout.schedule.name, layout.model.layers
    kind, given = SCHEDULES[name], layout.schedule.virtual_stages
    if given and (given < 2 if kind.virtual_stages is None else given != kind.virtual_stages):
        legal = kind.virtual_stages or "from 2 on"
        yield f"schedule.virtual_stages = {given} does not suit schedule.name = {name}; legal: {legal}"
    if pp == 1 and kind.virtual_stages != 1:
        yield f"schedule.name = {name} needs a pipeline, but grid.pp = 1; legal: gpipe, 1f1b, or grid.pp from 2 on"
    if pp > layers:
        yield f"grid.pp = {pp} is more stages than model.layers = {layers}; legal: 1 to {layers}"
    elif layout.stages > layers:
        yield (
            f"grid.pp = {pp} x {layout.virtual_stages} virtual stages of schedule.name = {name} are more stages than "
            f"model.layers = {layers}; legal: a product of at most {layers}"
        )
    if layout.train.zero not in zeros(name):
        yield (
            f"train.zero = {layout.train.zero} reshards weights that the two-part backward of schedule.name = {name} "
            f"comes back for; legal: {listed([n for n in zeros(name) if n or layout.ranks.fsdp == 1])}"
        )
    if layout.knobs.recompute not in recomputes(name):
        yield (
            f"knobs.recompute = {layout.knobs.recompute} would compute a layer again for each of its weights under "
            f"the two-part backward of schedule.name = {name}; legal: {', '.join(recomputes(name))}"
        )
    if not compiles(layout, name):
        whole = ", ".join(other for other, its in SCHEDULES.items() if not its.split_backward)
        yield (
            f"train.compile = true makes backwards that the two-part backward of schedule.name = {name} cannot go "
            f"through twice; legal: false, or schedule.name = {whole}"
        )
    micro_batches = legal_micro_batches(layout, name)
    if not micro_batches:
        dp, least = layout.ranks.dp, fewest(name, pp, layout.virtual_stages)
        yield (
            f"train.global_batch = {layout.train.global_batch} gives each of {dp} data ranks {layout.local_batch} "
            f"sequences, too few for {layout.stages} stages; legal: a multiple of {dp * least}"
        )
    elif layout.knobs.micro_batches not in micro_batches:
        yield f"knobs.micro_batches = {layout.knobs.micro_batches} is not legal; legal: {listed(micro_batches)}"


def routing_refusals(moe: "Moe") -> Iterator[str]:
    top_groups = moe.top_groups or moe.groups
    within = top_groups * moe.experts // moe.groups
    if moe.top_k > moe.experts:
        yield f"model.moe.top_k = {moe.top_k} is more than experts; legal: 1 to {moe.experts}"
    if top_groups > moe.groups:
        yield f"model.moe.top_groups = {top_groups} is more than groups = {moe.groups}; legal: 1 to {moe.groups}"
    elif moe.top_k > within:
        yield f"model.moe.top_k = {moe.top_k} is more than {top_groups} groups have experts; legal: 1 to {within}"
    if moe.router == "expert_choice":
        unlike = {"balance": "none", "drop": "position", "groups": 1}  # what only a choice by tokens can have
        for key, legal in unlike.items():
            if getattr(moe, key) != legal:
                yield (
                    f"model.moe.{key} = {getattr(moe, key)} does not go with model.moe.router = expert_choice, "
                    f"where each expert takes an even share; legal: {legal}"
                )


def legal_micro_batches(layout: "Layout", schedule: str) -> list[int]:
    """Divisors of the local batch that `schedule` accepts over the layout's partition."""
    pp, virtual = layout.grid.pp, layout.virtual_stages
    ways = divisors(layout.local_batch) if layout.local_batch else []
    return [m for m in ways if accepts(schedule, pp, virtual, m)]


def compiles(layout: "Layout", schedule: str) -> bool:
    """Whether `schedule` can run what the layout compiles: a compiled backward frees as it goes what it was given, so
    one that comes in two parts, input first, would not find it again for the weights."""
    return not (layout.train.compile and SCHEDULES[schedule].split_backward)


def by_block(layout: "Layout") -> bool:
    """Whether blocks are gathered and reduced one by one: to hide it behind computation, or to let go of them."""
    return layout.grid.pp == 1 or layout.train.zero == 3


def legal_zeros(layout: "Layout", schedule: str) -> list[int]:
    """The ZeRO stages that a sharded run may turn to under `schedule`; 3 needs blocks that can be let go of."""
    return [zero for zero in zeros(schedule) if zero > 0 and (zero < 3 or by_block(layout))]


def legal_schedules(layout: "Layout", zero: int) -> list[str]:
    """The schedules that run over the layout's partition, ZeRO stage and batch."""
    names = partners(layout.schedule.name)
    fitting = [name for name in names if zero in zeros(name) and compiles(layout, name)]
    return [name for name in fitting if legal_micro_batches(layout, name)]
