"""The layouts whose memory is measured, as overrides of the demo's layout."""

from tests.ranks.cases.case import EXPERT_CHOICE, FULL, INTERLEAVED, SELECTIVE, SMALL, ULYSSES, ZBV
from tests.ranks.cases.over_models import MLA, MTP

DENSE = ["model.moe=none", "model.d_ff=96"]
REPLICAS = ["grid.dp_replicate=2", "model.layers=4", "compression.min_elements=300", "compression.ratio=0.05"]
WIDER = ["model.seq_len=64", "model.d_model=64"]
BF16 = ["train.precision=bf16"]

# 1 GiB of fp32 weights over four ranks, in 16 layers; half as much if every rank holds whole weights.
GIB = [
    "model.moe=none",
    "model.layers=16",
    "model.d_model=1024",
    "model.heads=16",
    "model.kv_heads=16",
    "model.d_ff=4096",
    "model.seq_len=128",
    "grid.pp=1",
    "grid.tp=1",
    "grid.ep=1",
    "grid.dp_shard=4",
    "train.global_batch=8",
    "train.warmup=2",
    "train.zero=3",
    "knobs.micro_batches=2",
]
HALF = [*GIB, "model.layers=8"]
LARGE = {
    "1 GiB": GIB,
    "1 GiB full": [*GIB, *FULL],
    "1 GiB selective": [*GIB, *SELECTIVE],
    "1 GiB bf16": [*GIB, *BF16],
    "1 GiB once": [*GIB, "knobs.micro_batches=1"],
    "0.5 GiB zero 2": [*HALF, "train.zero=2"],
    "0.5 GiB zero 1": [*HALF, "train.zero=1"],
}
CASES = {
    "tp": [*SMALL, *WIDER, *DENSE, "grid.tp=2"],
    "tp selective": [*SMALL, *WIDER, *DENSE, "grid.tp=2", *SELECTIVE],
    "tp bf16": [*SMALL, *WIDER, *DENSE, "grid.tp=2", *BF16],
    "tp ep": [*SMALL, *WIDER, "grid.tp=2", "grid.ep=2"],
    "tp ep full": [*SMALL, *WIDER, "grid.tp=2", "grid.ep=2", *FULL],
    "dp ep bf16": [*SMALL, *WIDER, "grid.dp_shard=2", "grid.ep=2", *BF16, "model.moe.shared_experts=1"],
    "cp ring": [*SMALL, *WIDER, *DENSE, "grid.cp=2"],
    "cp ulysses": [*SMALL, *WIDER, *DENSE, "grid.cp=2", *ULYSSES],
    "cp ulysses ep": [*SMALL, *WIDER, "grid.cp=2", "grid.ep=2", *ULYSSES],
    "cp ring documents": [*SMALL, *WIDER, *DENSE, "grid.cp=2", "data.separate_documents=true"],
    "pp documents": [
        *[*SMALL, *WIDER, *DENSE, "grid.pp=2", "knobs.micro_batches=4"],
        *["data.separate_documents=true", "data.reset_positions=true"],
    ],
    "pp": [*SMALL, *WIDER, *DENSE, "grid.pp=2", "knobs.micro_batches=4"],
    "pp full": [*SMALL, *WIDER, *DENSE, "grid.pp=2", "knobs.micro_batches=4", *FULL],
    "pp gpipe": [*SMALL, *WIDER, "grid.pp=2", "knobs.micro_batches=4", "schedule.name=gpipe"],
    "pp interleaved": [*SMALL, *WIDER, *DENSE, *INTERLEAVED],
    "pp zbv": [*SMALL, *WIDER, *DENSE, *ZBV],
    **{
        f"replicas {method}": [*SMALL, *WIDER, *DENSE, *REPLICAS, f"compression.method={method}"]
        for method in ("none", "bf16", "int8", "top_k", "random_k", "threshold", "power_sgd")
    },
    "replicas top_k experts": [*SMALL, *WIDER, *REPLICAS, "compression.method=top_k"],
    "expert choice ep": [
        *SMALL,
        *WIDER,
        *EXPERT_CHOICE,
        "grid.dp_shard=2",
        "grid.ep=2",
        "knobs.capacity_factor=2.0",
    ],
    "expert choice tp": [*SMALL, *WIDER, *EXPERT_CHOICE, "grid.tp=2", "knobs.capacity_factor=1.5"],
    "capacity ep": [*SMALL, *WIDER, "grid.dp_shard=2", "grid.ep=2", "knobs.capacity_factor=1.0"],
    "capacity tp zero 3": [*SMALL, *WIDER, "grid.tp=2", "knobs.capacity_factor=0.6", "train.zero=3"],
    "dp ep zero 3": [*SMALL, *WIDER, "grid.dp_shard=2", "grid.ep=2", "train.zero=3"],
    "mla tp": [*SMALL, *WIDER, *DENSE, *MLA, "grid.tp=2"],
    "mtp pp": [*SMALL, *WIDER, *DENSE, *MTP, "grid.pp=2", "knobs.micro_batches=4"],
    "mtp dp ep averaged": [*SMALL, *WIDER, *MTP, "grid.dp_shard=2", "grid.ep=2", "train.ema=0.9"],
    # The model is so large that a block of initial values (4 MiB) is small in comparison.
    "dp zero 3 wide": [
        *SMALL,
        "model.moe=none",
        "model.layers=5",
        "model.d_model=512",
        "model.d_ff=2048",
        "grid.dp_shard=2",
        "train.zero=3",
        "knobs.micro_batches=4",
    ],
}
