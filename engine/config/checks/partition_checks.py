"""Checks that the parallel axes divide the sizes of the model and the batch."""

from collections.abc import Callable, Iterator
from math import gcd

from engine.config.grid import divisors, listed
from engine.config.layout import Layout


def divisor_refusals(layout: Layout) -> Iterator[str]:
    """Refuse sizes that do not divide other sizes as required. The message suggests two corrections: change the divisor
    to a legal one, or change the other size to a multiple of the divisor."""
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
    fits: dict[str, Callable[[int], bool]] = {  # further conditions on a legal value
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
    """Refuse sizes that context parallelism cannot split. On a cp axis of n ranks, the zigzag split divides a sequence
    into 2 x n chunks, and Ulysses distributes the attention heads over the n ranks."""
    grid, model = layout.ranks, layout.model
    pieces = 2 * grid.cp * grid.tp
    if model.seq_len % pieces:
        yield (
            f"grid.cp = {grid.cp} cuts a sequence into 2 x cp x tp = {pieces} pieces, which do not divide "
            f"model.seq_len = {model.seq_len}; legal: a multiple of {pieces}"
        )
    if layout.grid.cp_method == "ring" and model.window:
        yield (
            f"model.window = {model.window} cannot be combined with grid.cp = {grid.cp} and cp_method = "
            f"ring, which supports no window; legal: grid.cp_method = ulysses, or grid.cp = 1"
        )
    if layout.grid.cp_method == "ulysses":
        heads, kv = model.heads // grid.tp, model.kv // grid.tp
        fitting = [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]
        if grid.cp not in fitting:
            yield (
                f"grid.cp = {grid.cp} does not distribute the {heads} heads and {kv} kv_heads of a tp rank evenly; "
                f"legal: {listed(fitting)}, or cp_method = ring"
            )


def expert_grid_refusals(layout: Layout) -> Iterator[str]:
    ep, inner = layout.grid.ep, layout.ep_inner
    if not layout.model.moe and ep > 1:
        yield f"grid.ep = {ep} requires experts; legal: 1, or a section [model.moe]"
    levels = [n for n in divisors(ep) if 1 < n < ep]
    if inner is not None and not levels:
        yield f"grid.ep_method = hierarchical cannot split grid.ep = {ep} into two levels; legal: direct"
    elif inner is None and layout.grid.ep_inner is not None:
        yield f"grid.ep_inner = {layout.grid.ep_inner} requires grid.ep_method = hierarchical; legal: that or none"
    elif inner is not None and inner not in levels:
        yield f"grid.ep_inner = {inner} does not split grid.ep = {ep} into two levels; legal: {listed(levels)}"
