"""Parity cases of schedules that have several stages per rank or a split backward, and of schedules that change while
the run trains."""

from tests.ranks.cases.case import (
    ADAMW,
    BF16,
    CLIPPED,
    DROPS,
    DUALPIPEV,
    FULL,
    INTERLEAVED,
    INTERLEAVED_ZB,
    REORDERED,
    REORDERED_LOOP,
    REORDERED_V,
    SELECTIVE,
    SGD,
    TIED,
    ZBV,
    ZEROED,
    Case,
    alone,
)

PIPELINES: dict[str, Case] = {
    "interleaved fp64": Case([*alone(*INTERLEAVED), *SGD], fp64=True),
    "interleaved dp drops fp64": Case([*alone(*INTERLEAVED, "grid.dp_shard=2"), *SGD, *DROPS], fp64=True),
    "interleaved zero 3 fp64": Case(
        [*alone(*INTERLEAVED, "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True
    ),
    "interleaved tp ep uneven fp64": Case(
        [
            *alone(*INTERLEAVED, "model.layers=7", "schedule.virtual_stages=3", "grid.tp=2", "grid.ep=2"),
            *ADAMW,
            *SELECTIVE,
        ],
        fp64=True,
    ),
    "interleaved zb fp64": Case([*alone(*INTERLEAVED_ZB), *SGD], fp64=True),
    "interleaved zb dp drops fp64": Case(
        [
            *alone(
                *INTERLEAVED_ZB, "grid.dp_shard=2", "grid.ep=2", "model.layers=7", "schedule.virtual_stages=3"
            ),
            *ADAMW,
            *DROPS,
        ],
        fp64=True,
    ),
    "zbv fp64": Case([*alone(*ZBV, "train.zero=1"), *SGD], fp64=True),
    "zbv dp drops fp64": Case([*alone(*ZBV, "grid.dp_shard=2", "model.layers=5"), *SGD, *DROPS], fp64=True),
    "zbv few micro-batches fp64": Case([*alone(*ZBV, "knobs.micro_batches=1"), *SGD], fp64=True),
    "zbv 4 ranks fp64": Case(
        [*alone(*ZBV, "grid.pp=4", "model.layers=8", "knobs.micro_batches=8"), *SGD],
        fp64=True,
    ),
    "dualpipev fp64": Case([*alone(*DUALPIPEV, "knobs.micro_batches=8"), *SGD], fp64=True),
    "dualpipev tp ep drops fp64": Case(
        [*alone(*DUALPIPEV, "grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True
    ),
    "dualpipev dp fp64": Case([*alone(*DUALPIPEV, "grid.dp_shard=2"), *SGD], fp64=True),
    "dualpipev 3 ranks dense fp64": Case(
        [*alone(*DUALPIPEV, "grid.pp=3", "model.layers=6", "model.moe=none", "knobs.micro_batches=8"), *SGD],
        fp64=True,
    ),
    "pp reordered fp64": Case([*alone("grid.pp=2"), *SGD, *DROPS], fp64=True, script=REORDERED),
    "interleaved reordered fp64": Case([*alone(*INTERLEAVED), *SGD], fp64=True, script=REORDERED_LOOP),
    "v reordered dp drops fp64": Case(
        [*alone(*ZBV, "grid.dp_shard=2"), *SGD, *DROPS], fp64=True, script=REORDERED_V
    ),
    "tied pp fp64": Case([*alone("grid.pp=2", *TIED), *ADAMW], fp64=True, script=CLIPPED),
    "tied pp dp zero switched fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3", *TIED), *SGD], fp64=True, script=ZEROED
    ),
    "tied pp tp ep drops fp64": Case(
        [*alone("grid.pp=2", "grid.tp=2", "grid.ep=2", *TIED), *ADAMW, *DROPS], fp64=True
    ),
    "tied 3 ranks cp gpipe fp64": Case(
        [*alone("grid.pp=3", "grid.cp=2", "model.layers=3", "schedule.name=gpipe", *TIED), *SGD, *FULL],
        fp64=True,
    ),
    "tied interleaved hsdp fp64": Case(
        [
            *alone(*INTERLEAVED, "grid.dp_replicate=2", "grid.dp_shard=2", "train.global_batch=16", *TIED),
            *SGD,
        ],
        fp64=True,
        script=REORDERED_LOOP,
    ),
    "tied zbv reordered fp64": Case([*alone(*ZBV, *TIED), *ADAMW], fp64=True, script=REORDERED_V),
    "tied dualpipev dp tp drops fp64": Case(
        [*alone(*DUALPIPEV, "grid.dp_shard=2", "grid.tp=2", *TIED), *SGD, *DROPS], fp64=True
    ),
    "tied bf16 pp dense": Case([*alone(*BF16, "grid.pp=2", "model.moe=none", *TIED), *SGD]),
    "bf16 zbv ep": Case([*alone(*BF16, *ZBV, "grid.dp_shard=2", "grid.ep=2"), *SGD]),
    "zbv heavy head dp drops fp64": Case(
        [*alone(*ZBV, "grid.dp_shard=2", "model.layers=9", "model.vocab=1024"), *SGD, *DROPS],
        fp64=True,
    ),
}
