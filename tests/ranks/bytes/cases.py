"""The layouts for which the metered bytes of a step are compared with the formulas, as overrides of the demo's
layout."""

from tests.ranks.cases.case import (
    BF16,
    DEEPSEEK,
    DROPS,
    EXPERT_CHOICE,
    FULL,
    INTERLEAVED,
    SELECTIVE,
    SMALL,
    SURE,
    TIED,
    TWO_HOPS,
    ULYSSES,
    V3,
    ZBV,
)
from tests.ranks.cases.over_models import MLA, QWEN3


def packed(method: str) -> list[str]:
    """Overrides that compress all gradients except the smallest ones."""
    return [
        f"compression.method={method}",
        "compression.ratio=0.03",
        "compression.rank=3",
        "compression.min_elements=300",
    ]


CASES = {
    "demo": ["train.steps=1"],
    "demo drops full": [*DROPS, *FULL],
    "demo selective gpipe": [*SELECTIVE, "schedule.name=gpipe", "knobs.micro_batches=8"],
    "tp dense full": [*SMALL, "grid.tp=2", "model.moe=none", *FULL],
    "tp mixed": [*SMALL, "grid.tp=2", "grid.ep=2", "model.moe.every=2", *SELECTIVE],
    "dp ep": [*SMALL, "grid.dp_shard=4", "grid.ep=2", "knobs.micro_batches=1"],
    "hsdp": [*SMALL, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"],
    "hsdp top_k": [*SMALL, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2", *packed("top_k")],
    "replicas int8 pp": [*SMALL, "grid.dp_replicate=2", "grid.pp=2", *packed("int8"), "model.vocab=257"],
    "replicas power tp": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", *packed("power_sgd")],
    "replicas 4 bf16": [*SMALL, "grid.dp_replicate=4", *packed("bf16"), "knobs.micro_batches=1", *TIED],
    "replicas 4 random": [*SMALL, "grid.dp_replicate=4", *packed("random_k"), "knobs.micro_batches=1"],
    "replicas tp": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", "train.zero=0"],
    "two hops": [
        *SMALL,
        "grid.dp_shard=2",
        "grid.tp=2",
        "grid.ep=4",
        *TWO_HOPS,
        *FULL,
    ],
    "placed": [*SMALL, "grid.dp_shard=4", "grid.ep=2"],
    "bf16": [*BF16, *SELECTIVE],
    "bf16 hsdp cp": [*SMALL, *BF16, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.cp=2", "train.zero=3"],
    "compiled": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", "train.compile=true", *DROPS, *FULL],
    "tied": [*SMALL, "grid.dp_shard=2", "grid.tp=2", *TIED],
    "tied pp zero 3": [
        *SMALL,
        "grid.pp=3",
        "grid.dp_shard=2",
        "model.layers=3",
        "model.vocab=257",  # an odd number, so two data-parallel ranks have shards of different sizes
        "train.zero=3",
        "knobs.micro_batches=4",
        *TIED,
    ],
    "tied zbv": [*SMALL, *ZBV, *TIED],
    "zero 1": [*SMALL, "grid.dp_shard=2", "train.zero=1", "knobs.micro_batches=4"],
    "zero 3 full": [*SMALL, "grid.dp_shard=2", "grid.ep=2", "train.zero=3", *FULL],
    "pp zero 3": [
        *SMALL,
        "grid.pp=2",
        "grid.dp_shard=2",
        "model.layers=3",
        "train.zero=3",
        "knobs.micro_batches=4",
    ],
    "pp": [*SMALL, "grid.pp=2", "model.layers=3"],
    "pp cp tp ring": [*SMALL, "grid.pp=2", "grid.cp=2", "grid.tp=2", "grid.ep=4", *SELECTIVE],
    "qwen3 biases": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", *QWEN3, "model.bias=true", *FULL],
    "mla tp ring": [*SMALL, "grid.cp=2", "grid.tp=2", "grid.ep=2", *MLA, *SELECTIVE],
    "mla ulysses": [
        *SMALL,
        "grid.cp=2",
        "grid.tp=2",
        "model.moe=none",
        *MLA,
        "model.q_rank=none",
        *ULYSSES,
        *FULL,
    ],
    "cp ulysses": [*SMALL, "grid.cp=4", "grid.ep=2", *ULYSSES, *FULL],
    "dp cp ring": [*SMALL, "grid.dp_shard=2", "grid.cp=2", "grid.ep=4"],
    "pp tp ep zbv": [*SMALL, *ZBV, "grid.tp=2", "grid.ep=2", "model.layers=5"],
    "pp dp interleaved": [*SMALL, *INTERLEAVED, "grid.dp_shard=2", "grid.ep=2", "model.layers=5"],
    "deepseek": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", *DEEPSEEK, *FULL],
    "v3": [*SMALL, "model.layers=3", "grid.cp=2", "grid.tp=2", "grid.ep=2", *V3, *DROPS],
    "deepseek surest": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", *DEEPSEEK, *SURE],
    "expert choice cp": [*SMALL, "grid.cp=2", "grid.tp=2", "grid.ep=2", *EXPERT_CHOICE, *SELECTIVE],
}
