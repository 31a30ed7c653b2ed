"""Parity cases in which all-reduces run over point-to-point messages, with a different algorithm for each size."""

from tests.ranks.cases.case import BIAS, DROPS, SGD, TIED, Case, alone

# Naive, tree, doubling, hierarchical, halving-doubling and ring, from small buffers to large ones. The path is relative
# to the repository's folder, in which the harness runs.
MEASURED = "run.collectives=tests/ranks/collectives/measured.toml"

COLLECTIVES: dict[str, Case] = {
    "measured replicas tp biased fp64": Case(
        [*alone(MEASURED, "grid.dp_replicate=2", "grid.tp=2"), *SGD, *BIAS], fp64=True
    ),
    # With three ranks, one rank first sends its buffer to another, and two ranks run the algorithm.
    "measured 3 replicas drops fp64": Case(
        [*alone(MEASURED, "grid.dp_replicate=3", "train.global_batch=12"), *SGD, *DROPS], fp64=True
    ),
    "measured hsdp tied pp fp64": Case(
        [*alone(MEASURED, "grid.pp=2", "grid.dp_replicate=2", "grid.dp_shard=2", *TIED), *SGD], fp64=True
    ),
    "measured replicas 4": Case([*alone(MEASURED, "grid.dp_replicate=4", "knobs.micro_batches=1"), *SGD]),
}
