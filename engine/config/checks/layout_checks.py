"""Checks a layout as a whole. Each refusal is one sentence: the key, its value, the reason, the legal values."""

from collections.abc import Callable, Iterator
from math import gcd

from engine.config.assumptions import MODULES
from engine.config.checks.legal_values import can_compile, legal_micro_batches
from engine.config.grid import divisors, listed
from engine.config.layout import Layout, Model, Moe, Train
from engine.config.learning_rate import decay_steps
from engine.config.schedule_traits import (
    SCHEDULES,
    accepts_micro_batches,
    compatible_zero_stages,
    legal_recompute,
    min_micro_batches,
)
from engine.config.sizes import parameter_count

# Larger than any published run, so that a mistyped number is refused here and does not cause a traceback later.
MOST_RANKS = 65_536  # four times the 16,384 GPUs of Llama 3
MOST_PARAMETERS = 10**13  # six times the 1.6 trillion parameters of Switch-C
MOST_TOKENS = 2**30  # per step: sixteen times the 15,360 sequences of 4,096 tokens of DeepSeek-V3

# Number of elements in 16 bytes, because each row must be aligned to 16 bytes.
GEMM_ALIGN = {"fp32": 4, "bf16": 8, "fp16": 8}
MOST_SOURCES = 1024  # folders of token shards; each keeps its files open
BYTES = 256  # vocabulary of the byte tokenizer


def refusals(layout: Layout) -> Iterator[str]:
    """Yield the refusals of the layout; none if it is legal."""
    yield from size_refusals(layout)
    yield from divisor_refusals(layout)
    if refusal := layout.ranks.refusal():
        yield refusal
    if layout.grid.cp > 1:
        yield from context_refusals(layout)
    yield from model_refusals(layout)
    yield from expert_grid_refusals(layout)
    yield from train_refusals(layout)
    yield from learning_rate_refusals(layout.train)
    yield from data_refusals(layout)
    yield from validation_refusals(layout)
    yield from pipeline_refusals(layout)
    yield from plan_refusals(layout)


def advice(layout: Layout) -> Iterator[str]:
    """Yield warnings about legal values that are probably mistakes, one sentence each."""
    train = layout.train
    if train.warmup > train.steps:
        yield (
            f"train.warmup = {train.warmup} is longer than train.steps = {train.steps}: the learning rate does not "
            f"reach train.lr = {train.lr:g}"
        )


def size_refusals(layout: Layout) -> Iterator[str]:
    """Refuse sizes whose product is larger than in any published run. This check runs first, so that later checks stay
    fast."""
    tokens = layout.train.global_batch * layout.model.seq_len
    for what, size, most in (
        ("pp x dp_replicate x dp_shard x cp x tp of [grid]", layout.ranks.world, MOST_RANKS),
        ("train.global_batch x model.seq_len", tokens, MOST_TOKENS),
        ("the number of the model's parameters", parameter_count(layout.model), MOST_PARAMETERS),
    ):
        if size > most:
            yield f"{what} = {size:,} is larger than in any run; legal: up to {most:,}"


def divisor_refusals(layout: Layout) -> Iterator[str]:
    """Refuse sizes that do not divide other sizes. The refusal lists the common divisors as legal values, or asks for a
    multiple as the other size."""
    grid, model = layout.ranks, layout.model
    data_axes = "grid.dp_shard" if grid.dp_replicate == 1 else "grid.dp_replicate x grid.dp_shard"
    heads = ("model.heads", model.heads, {"model.d_model": model.d_model})
    own_head_width = [] if model.head_dim or model.attention == "mla" else [heads]
    rows: list[tuple[str, int, dict[str, int]]] = [
        ("grid.tp", grid.tp, _split_over_tp(layout)),
        *own_head_width,
        ("model.kv_heads", model.kv, {"model.heads": model.heads}),
        (data_axes, grid.dp, {"train.global_batch": layout.train.global_batch}),
    ]
    if model.moe:
        experts = {"model.moe.experts": model.moe.experts}
        rows += [("grid.ep", grid.ep, experts), ("model.moe.groups", model.moe.groups, experts)]
    fits: dict[str, Callable[[int], bool]] = {  # further conditions that a legal value meets
        "model.heads": lambda n: not (n % grid.tp or n % (model.kv_heads or 1) or model.d_model // n % 2),
        "model.kv_heads": lambda n: n % grid.tp == 0,
        "grid.ep": lambda n: grid.fsdp * grid.tp % n == 0,
    }
    for what, n, wholes in rows:
        wrong = [whole for whole, total in wholes.items() if total % n]
        legal = [d for d in divisors(gcd(*wholes.values())) if what not in fits or fits[what](d)]
        for whole in wrong:
            ways = [listed(legal)] if legal else []
            if wrong == [whole] and (not legal or what not in fits or fits[what](n)):
                ways.append(f"{whole} a multiple of {n}")
            yield f"{what} = {n} does not divide {whole} = {wholes[whole]}; legal: {', or '.join(ways)}"


def _split_over_tp(layout: Layout) -> dict[str, int]:
    model = layout.model
    sizes = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv,
        "model.vocab": model.vocab,
        "model.seq_len": model.seq_len,
    }
    dense = any(not model.has_experts(layer) for layer in range(model.layers))
    return sizes | ({"model.d_ff": model.ff} if dense else {})


def context_refusals(layout: Layout) -> Iterator[str]:
    """Refuse sizes that context parallelism cannot split: a sequence has 2 cp chunks (zigzag); Ulysses distributes
    heads over cp ranks."""
    grid, model = layout.ranks, layout.model
    pieces = 2 * grid.cp * grid.tp
    if model.seq_len % pieces:
        yield (
            f"grid.cp = {grid.cp} cuts a sequence into 2 x cp x tp = {pieces} pieces, which do not divide "
            f"model.seq_len = {model.seq_len}; legal: a multiple of {pieces}"
        )
    if layout.grid.cp_method == "ring" and model.window:
        yield (
            f"model.window = {model.window} does not go with grid.cp = {grid.cp} and cp_method = ring, which has "
            "no window; legal: grid.cp_method = ulysses, or grid.cp = 1"
        )
    if layout.grid.cp_method == "ulysses":
        heads, kv = model.heads // grid.tp, model.kv // grid.tp
        fitting = [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]
        if grid.cp not in fitting:
            yield (
                f"grid.cp = {grid.cp} does not distribute the {heads} heads and {kv} kv_heads of a tp rank evenly; "
                f"legal: {listed(fitting)}, or cp_method = ring"
            )


def model_refusals(layout: Layout) -> Iterator[str]:
    model, precision = layout.model, layout.train.precision
    if model.moe:
        for name, width in (("model.d_model", model.d_model), ("model.moe.d_expert", model.moe.d_expert)):
            align = GEMM_ALIGN.get(precision, 1)
            if width % align:
                yield (
                    f"{name} = {width} is not aligned for the grouped GEMM of experts in {precision}; "
                    f"legal: a multiple of {align}"
                )
    yield from attention_refusals(model)
    if model.vocab < BYTES and layout.data.source != "shards":
        yield f"model.vocab = {model.vocab} is too small for byte tokens; legal: at least {BYTES}"
    if model.moe:
        if model.moe.dense_layers >= model.layers:
            yield (
                f"model.moe.dense_layers = {model.moe.dense_layers} leaves no layer of model.layers = {model.layers} "
                f"for experts; legal: {_up_to(model.layers - 1, 0)}, or model.moe = none"
            )
        yield from routing_refusals(model.moe)


LATENT = {
    "q_rank": False,
    "kv_rank": True,
    "nope_dim": True,
    "rope_dim": True,
    "v_dim": True,
}  # key: whether required


def attention_refusals(model: Model) -> Iterator[str]:
    if model.attention == "mla":
        for key, required in LATENT.items():
            if required and getattr(model, key) is None:
                needed = ", ".join(name for name in LATENT if LATENT[name])
                yield f"model.{key} is missing; model.attention = mla requires {needed}"
        for key, neutral in (
            ("head_dim", None),
            ("kv_heads", None),
            ("window", None),
            ("qk_norm", False),
            ("qkv_bias", False),
            ("bias", False),
        ):
            if getattr(model, key) != neutral:
                shown = str(getattr(model, key)).lower()
                yield f"model.{key} = {shown} does not go with model.attention = mla; legal: omit it, or gqa"
    else:
        for key in LATENT:
            if getattr(model, key) is not None:
                yield f"model.{key} = {getattr(model, key)} requires model.attention = mla; legal: that, or none"
    if model.positions == "learned":
        return
    name, width = (
        ("model.rope_dim", model.rope_dim)
        if model.attention == "mla"
        else ("model.head_dim", model.head_dim)
        if model.head_dim
        else ("model.d_model / model.heads", model.head_width)
    )
    if width and width % 2:
        yield f"{name} = {width} is odd; RoPE rotates pairs; legal: an even number"


def expert_grid_refusals(layout: Layout) -> Iterator[str]:
    ep, inner = layout.grid.ep, layout.ep_inner
    if not layout.model.moe and ep > 1:
        yield f"grid.ep = {ep} without experts; legal: 1, or a section [model.moe]"
    levels = [n for n in divisors(ep) if 1 < n < ep]
    if inner is not None and not levels:
        yield f"grid.ep_method = hierarchical needs two levels, which grid.ep = {ep} does not have; legal: direct"
    elif inner is None and layout.grid.ep_inner is not None:
        yield f"grid.ep_inner = {layout.grid.ep_inner} requires grid.ep_method = hierarchical; legal: that, or none"
    elif inner is not None and inner not in levels:
        yield f"grid.ep_inner = {inner} does not split grid.ep = {ep} into two levels; legal: {listed(levels)}"


def train_refusals(layout: Layout) -> Iterator[str]:
    grid, train, source = layout.ranks, layout.train, layout.data.source
    if train.zero == 0 and grid.dp_shard > 1:
        yield (
            f"train.zero = 0 shards nothing, but grid.dp_shard = {grid.dp_shard}; legal: 1, 2, 3, or "
            f"grid.dp_shard = 1 with grid.dp_replicate = {grid.dp} for replicas"
        )
    if train.zero == 0 and grid.cp > 1:
        yield f"train.zero = 0 shards nothing, but grid.cp = {grid.cp} shards like dp_shard; legal: 1, 2, 3"
    if layout.compression.method != "none" and grid.dp_replicate == 1:
        yield (
            f"compression.method = {layout.compression.method} compresses gradients between replicas, but "
            "grid.dp_replicate = 1; legal: none, or grid.dp_replicate at least 2"
        )
    if not (source in ("stdlib", "shards") or source.startswith("text:")):
        yield f"data.source = {source!r} is not legal; legal: stdlib, text:GLOB, shards"


def learning_rate_refusals(train: Train) -> Iterator[str]:
    if train.decay is not None and train.lr_schedule != "wsd":
        yield f"train.decay = {train.decay} goes with train.lr_schedule = wsd; legal: that, or none"
    if train.lr_schedule == "wsd" and train.warmup + decay_steps(train) > train.steps:
        yield (
            f"train.decay = {decay_steps(train)} after train.warmup = {train.warmup} is longer than train.steps = "
            f"{train.steps}; legal: at most {train.steps} together"
        )


def data_refusals(layout: Layout) -> Iterator[str]:
    data = layout.data
    if data.source == "shards" and not data.shards:
        yield "data.source = shards needs data.shards; legal: a list of folders that engine tokenize wrote"
    if data.source != "shards":
        for key in ("shards", "weights", "epochs"):
            if getattr(data, key) is not None:
                yield f"data.{key} is given, but data.source = {data.source!r}; legal: shards, or no {key}"
    if data.weights is not None and len(data.weights) != len(data.shards or ()):
        yield (
            f"data.weights has {len(data.weights)} numbers for {len(data.shards or ())} folders of data.shards; "
            "legal: one for each folder"
        )
    if len(data.shards or ()) > MOST_SOURCES:
        yield f"data.shards has {len(data.shards or ())} folders; legal: up to {MOST_SOURCES}"


def validation_refusals(layout: Layout) -> Iterator[str]:
    wanted, dp = layout.validation, layout.ranks.dp
    if wanted.every and wanted.source == "shards" and not wanted.shards:
        yield "validation.every needs validation.shards; legal: folders, another validation.source, or every = 0"
    if wanted.source != "shards" and not (wanted.source == "stdlib" or wanted.source.startswith("text:")):
        yield f"validation.source = {wanted.source!r} is not legal; legal: stdlib, text:GLOB, shards"
    if wanted.every and wanted.sequences % dp:
        yield (
            f"validation.sequences = {wanted.sequences} is not a multiple of {dp} data ranks; legal: a multiple of {dp}"
        )


def plan_refusals(layout: Layout) -> Iterator[str]:
    """Refuses assumptions of the planner that do not go together."""
    machine, plan = layout.hardware, layout.plan
    if machine.name and machine.path:
        yield f"hardware.name = {machine.name} and hardware.path = {machine.path} are both given; legal: one of them"
    if plan.split is not None and (len(plan.split), sum(plan.split)) != (layout.stages, layout.model.layers):
        yield (
            f"plan.split has {len(plan.split)} numbers with the sum {sum(plan.split)}; legal: one for each of "
            f"{layout.stages} stages, with the sum model.layers = {layout.model.layers}"
        )
    if plan.recomputed and {*plan.recomputed.split("+")} - {*MODULES}:
        yield (
            f"plan.recomputed = {plan.recomputed} is not legal; legal: {', '.join(MODULES)}, several joined by +, or "
            "none"
        )
    if plan.recomputed and (plan.framework != "megatron" or layout.knobs.recompute != "none"):
        yield (
            f"plan.recomputed = {plan.recomputed} requires plan.framework = megatron and knobs.recompute = none; "
            "legal: those, or none"
        )


def pipeline_refusals(layout: Layout) -> Iterator[str]:
    pp, name, layers = layout.grid.pp, layout.schedule.name, layout.model.layers
    traits, given = SCHEDULES[name], layout.schedule.virtual_stages
    if given and (given < 2 if traits.virtual_stages is None else given != traits.virtual_stages):
        legal = traits.virtual_stages or "at least 2"
        yield f"schedule.virtual_stages = {given} does not suit schedule.name = {name}; legal: {legal}"
    if pp == 1 and traits.virtual_stages != 1:
        yield f"schedule.name = {name} needs a pipeline, but grid.pp = 1; legal: gpipe, 1f1b, or grid.pp at least 2"
    if pp > layers:
        yield (
            f"grid.pp = {pp} is more stages than model.layers = {layers}; legal: {_up_to(layers)}, or "
            f"model.layers at least {pp}"
        )
    elif layout.stages > layers:
        yield (
            f"grid.pp = {pp} x {layout.virtual_stages} virtual stages of schedule.name = {name} are more stages than "
            f"model.layers = {layers}; legal: a product of at most {layers}, or model.layers at least {layout.stages}"
        )
    if layout.train.zero not in compatible_zero_stages(name):
        yield (
            f"train.zero = {layout.train.zero} reshards weights that the split backward of schedule.name = {name} "
            f"needs again; legal: {listed([n for n in compatible_zero_stages(name) if n or layout.ranks.fsdp == 1])}"
        )
    if layout.knobs.recompute not in legal_recompute(name):
        yield (
            f"knobs.recompute = {layout.knobs.recompute} would recompute a layer for each of its weights under "
            f"the split backward of schedule.name = {name}; legal: {', '.join(legal_recompute(name))}"
        )
    if not can_compile(layout, name):
        whole = ", ".join(other for other, traits in SCHEDULES.items() if not traits.split_backward)
        yield (
            f"train.compile = true does not work with the split backward of schedule.name = {name}, which runs "
            f"twice over a layer; legal: false, or schedule.name = {whole}"
        )
    micro_batches = legal_micro_batches(layout, name)
    if not micro_batches:
        dp, least = layout.ranks.dp, min_micro_batches(name, pp, layout.virtual_stages)
        yield (
            f"train.global_batch = {layout.train.global_batch} gives each of {dp} data ranks {layout.local_batch} "
            f"sequences, too few for {layout.stages} stages; legal: a multiple of {dp * least}"
        )
    elif layout.knobs.micro_batches not in micro_batches:
        yield _micro_batches_refusal(layout, micro_batches)


def _micro_batches_refusal(layout: Layout, legal: list[int]) -> str:
    """The refusal of knobs.micro_batches. It names the global batch too, because either of the two numbers may be
    wrong."""
    given, batch, dp = layout.knobs.micro_batches, layout.train.global_batch, layout.ranks.dp
    if not accepts_micro_batches(layout.schedule.name, layout.grid.pp, layout.virtual_stages, given):
        return (
            f"knobs.micro_batches = {given} does not suit schedule.name = {layout.schedule.name} over "
            f"{layout.stages} stages; legal: {listed(legal)}"
        )
    ranks = f"each of {dp} data ranks" if dp > 1 else "a step"
    return (
        f"knobs.micro_batches = {given} does not divide the {layout.local_batch} sequences that train.global_batch = "
        f"{batch} gives {ranks}; legal: {listed(legal)}, or train.global_batch a multiple of {dp * given}"
    )


def routing_refusals(moe: Moe) -> Iterator[str]:
    top_groups = moe.top_groups or moe.groups
    within = top_groups * moe.experts // moe.groups
    if moe.top_k > moe.experts:
        yield f"model.moe.top_k = {moe.top_k} is more than experts; legal: {_up_to(moe.experts)}"
    if top_groups > moe.groups:
        yield f"model.moe.top_groups = {top_groups} is more than groups = {moe.groups}; legal: {_up_to(moe.groups)}"
    elif moe.top_k > within:
        yield f"model.moe.top_k = {moe.top_k} is more than the experts of {top_groups} groups; legal: {_up_to(within)}"
    if moe.router == "expert_choice":
        unlike = {
            "balance": "none",
            "drop": "position",
            "groups": 1,
        }  # keys that apply to token choice only, with their neutral values
        for key, legal in unlike.items():
            if getattr(moe, key) != legal:
                yield (
                    f"model.moe.{key} = {getattr(moe, key)} does not go with model.moe.router = expert_choice, "
                    f"where each expert takes an even share; legal: {legal}"
                )


def _up_to(most: int, least: int = 1) -> str:
    return str(least) if most == least else f"{least} to {most}"
