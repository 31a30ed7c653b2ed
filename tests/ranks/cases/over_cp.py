"""Parity cases with context parallelism (cp), as overrides of the small layout: each method alone, then combinations.
All cases run in fp64 with SGD. If ep is larger than dp_shard, experts are also distributed over cp and tp ranks.
"""

OVER_CP = {
    "cp ring": "grid.cp=2 knobs.recompute=selective",
    "cp ulysses": "grid.cp=2 grid.cp_method=ulysses knobs.recompute=full",
    "cp 4 ring drops": "grid.cp=4 knobs.capacity_factor=1.0 knobs.recompute=full",
    "cp 4 ulysses drops": "grid.cp=4 grid.cp_method=ulysses knobs.capacity_factor=1.0",
    "mix pp cp tp ep drops": (
        "grid.pp=2 grid.cp=2 grid.tp=2 grid.ep=4 knobs.capacity_factor=1.0 knobs.recompute=selective"
    ),
    "mix cp tp ep drops": "grid.cp=2 grid.tp=2 grid.ep=4 knobs.capacity_factor=1.0",
    "mix cp tp ulysses dense": (
        "grid.cp=2 grid.tp=2 grid.cp_method=ulysses model.moe=none knobs.recompute=full"
    ),
    "mix cp 4 tp ep 8 drops": "grid.cp=4 grid.tp=2 grid.ep=8 knobs.capacity_factor=1.0 knobs.recompute=full",
    "mix cp tp 3 straddling drops": (
        "grid.cp=2 grid.tp=3 grid.ep=2 model.heads=6 model.kv_heads=3 model.d_model=48 "
        "model.vocab=258 model.seq_len=36 knobs.capacity_factor=1.0"
    ),
    "mix cp tp every second layer": (
        "grid.cp=2 grid.tp=2 grid.ep=2 model.moe.every=2 knobs.recompute=selective"
    ),
    "mix dp cp ep zero 3 drops": (
        "grid.dp_shard=2 grid.cp=2 grid.ep=4 train.zero=3 knobs.capacity_factor=1.0 knobs.recompute=full"
    ),
    "mix dp cp 4 ep 8 ulysses": "grid.dp_shard=2 grid.cp=4 grid.ep=8 grid.cp_method=ulysses train.zero=1",
    "mix dp cp tp ep 8 drops": (
        "grid.dp_shard=2 grid.cp=2 grid.tp=2 grid.ep=8 knobs.capacity_factor=1.0 knobs.recompute=selective"
    ),
    "mix dp cp tp ulysses zero 3 drops": (
        "grid.dp_shard=2 grid.cp=2 grid.tp=2 grid.ep=2 grid.cp_method=ulysses train.zero=3 "
        "knobs.capacity_factor=1.0"
    ),
    "mix pp cp ep ulysses uneven drops": (
        "grid.pp=2 grid.cp=2 grid.ep=2 grid.cp_method=ulysses model.layers=3 "
        "knobs.capacity_factor=1.0 knobs.recompute=full"
    ),
    "mix pp cp 4 two hops drops": (
        "grid.pp=2 grid.cp=4 grid.ep=4 grid.ep_method=hierarchical knobs.capacity_factor=1.0"
    ),
    "mix pp cp tp ulysses gpipe": "grid.pp=2 grid.cp=2 grid.tp=2 grid.cp_method=ulysses schedule.name=gpipe",
    "mix pp dp cp": "grid.pp=2 grid.dp_shard=2 grid.cp=2 train.zero=1 knobs.recompute=selective",
    "mix pp dp cp ep ulysses drops": (
        "grid.pp=2 grid.dp_shard=2 grid.cp=2 grid.ep=4 grid.cp_method=ulysses "
        "knobs.capacity_factor=1.0 knobs.recompute=full"
    ),
    "mix replicas cp tp ep drops": (
        "grid.dp_replicate=2 grid.cp=2 grid.tp=2 grid.ep=4 knobs.capacity_factor=1.0"
    ),
    "mix replicas dp cp ep zero 3": (
        "grid.dp_replicate=2 grid.dp_shard=2 grid.cp=2 grid.ep=4 train.zero=3 knobs.recompute=full"
    ),
    "mix interleaved cp ep drops": (
        "grid.cp=2 grid.ep=2 grid.pp=2 model.layers=4 knobs.micro_batches=4 "
        "schedule.name=interleaved knobs.capacity_factor=1.0 knobs.recompute=selective"
    ),
    "mix zbv cp ep ring drops": (
        "grid.pp=2 grid.cp=2 grid.ep=2 model.layers=4 knobs.micro_batches=4 schedule.name=zbv "
        "knobs.capacity_factor=1.0"
    ),
    "mix dualpipev cp tp ulysses": (
        "grid.pp=2 grid.cp=2 grid.tp=2 grid.cp_method=ulysses model.layers=4 knobs.micro_batches=4 "
        "schedule.name=dualpipev"
    ),
    "mix pp cp tp expert choice": (
        "grid.pp=2 grid.cp=2 grid.tp=2 grid.ep=2 model.moe.router=expert_choice "
        "model.moe.balance=none knobs.recompute=full"
    ),
    "mix dp cp ep deepseek drops": (
        "grid.dp_shard=2 grid.cp=2 grid.ep=4 model.moe.balance=bias knobs.bias_rate=0.02 "
        "model.moe.groups=4 model.moe.top_groups=2 model.moe.top_k=3 "
        "model.moe.shared_experts=2 model.moe.score=sigmoid knobs.z_loss_coef=0.1 "
        "knobs.capacity_factor=1.0"
    ),
    "mix cp tp ulysses surest drops": (
        "grid.cp=2 grid.tp=2 grid.ep=4 grid.cp_method=ulysses knobs.capacity_factor=1.0 "
        "model.moe.drop=probability"
    ),
    "cp 4 multi-query ulysses": "grid.cp=4 grid.cp_method=ulysses model.kv_heads=1 knobs.recompute=selective",
    "cp 8 ring drops": "grid.cp=8 grid.ep=8 knobs.capacity_factor=1.0",
}
