"""Counts, for each feature of the engine (such as latent attention or shared experts), the parity cases that use it.
There are two counts for each feature: the cases whose layout has several ranks on at most one grid axis (pp,
dp_replicate, dp_shard, cp or tp), and the cases whose layout has several ranks on two or more axes.

python -m tests.ranks.parity.parts
"""

from collections.abc import Callable

from engine.config.layout import Layout
from tests.ranks.cases.cases import CASES

MIXES = 6  # smallest number of cases with several axes that a part needs
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

PARTS: dict[str, Callable[[Layout], object]] = {
    "latent attention": lambda of: of.model.attention == "mla",
    "norms of query and key heads": lambda of: of.model.qk_norm,
    "biases of queries, keys and values": lambda of: of.model.biased_qkv,
    "biases of all matrices": lambda of: of.model.bias,
    "sliding window": lambda of: of.model.window,
    "tied embeddings": lambda of: of.model.tie_embeddings,
    "leading dense layers": lambda of: of.model.moe and of.model.moe.dense_layers,
    "scaled routed experts": lambda of: of.model.moe and of.model.moe.route_scale != 1.0,
    "shared experts": lambda of: of.model.moe and of.model.moe.shared_experts,
    "groups of experts": lambda of: of.model.moe and of.model.moe.top_groups,
    "bias on selection": lambda of: of.model.moe and "bias" in of.model.moe.balances,
    "expert choice": lambda of: of.model.moe and of.model.moe.router == "expert_choice",
    "drops by probability": lambda of: (
        of.model.moe and of.model.moe.drop == "probability" and of.knobs.capacity_factor is not None
    ),
    "multi-token prediction": lambda of: of.model.mtp_layers,
    "own model": lambda of: of.model.own,
    "bf16": lambda of: of.train.precision == "bf16",
    "fp16": lambda of: of.train.precision == "fp16",
    "separate documents": lambda of: of.data.separate_documents,
    "token shards": lambda of: of.data.shards,
    "several weighted sources": lambda of: len(of.data.weights or ()) > 1,
    "learning rate schedules": lambda of: of.train.lr_schedule != "constant",
    "averaged weights": lambda of: of.train.ema is not None,
    "measured all-reduces": lambda of: of.run.collectives,
    "hierarchical all-to-all": lambda of: of.grid.ep_method == "hierarchical",
    "compiled parts": lambda of: of.train.compile,
    "ring attention": lambda of: of.ranks.cp > 1 and of.grid.cp_method == "ring",
    "Ulysses": lambda of: of.ranks.cp > 1 and of.grid.cp_method == "ulysses",
    "interleaved zero-bubble": lambda of: of.schedule.name == "interleaved_zb",
    "ZBV": lambda of: of.schedule.name == "zbv",
    "DualPipeV": lambda of: of.schedule.name == "dualpipev",
}


def axes_of(layout: Layout) -> list[str]:
    """The grid axes on which there are several ranks."""
    return [axis for axis in AXES if getattr(layout.ranks, axis) > 1]


def counts() -> dict[str, tuple[int, int]]:
    """Maps each feature of the engine to the number of parity cases that use the feature on at most one grid axis, and
    the number that use it on several axes."""
    found = {}
    layouts = [case.layout for case in CASES.values()]
    for part, has in PARTS.items():
        mixed = [len(axes_of(layout)) > 1 for layout in layouts if has(layout)]
        found[part] = (len(mixed) - sum(mixed), sum(mixed))
    return found


def main() -> None:
    print("| part | cases on one axis or one rank | cases on several axes |\n|---|---|---|")
    for part, (alone, mixed) in counts().items():
        print(f"| {part} | {alone} | {mixed} |")


if __name__ == "__main__":
    main()
