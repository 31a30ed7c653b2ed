"""Parity cases of attention that is restricted to documents, on every parallel axis. In most cases a sequence contains
many short documents."""

from tests.ranks.cases.case import (
    BF16,
    DROPS,
    DUALPIPEV,
    FULL,
    INTERLEAVED_ZB,
    SELECTIVE,
    SGD,
    ULYSSES,
    V3,
    ZBV,
    Case,
    alone,
)
from tests.ranks.cases.over_models import MLA, QWEN3, WINDOW
from tests.ranks.token_shards import SHORT

APART = [*SHORT, "data.separate_documents=true"]
RESET = [*APART, "data.reset_positions=true"]
BYTES = ["data.source=text:layouts/**/*.toml", "data.separate_documents=true"]  # the text has few zero bytes

DOCUMENTS: dict[str, Case] = {
    "documents tp ep drops fp64": Case([*alone("grid.tp=2", "grid.ep=2"), *RESET, *SGD, *DROPS], fp64=True),
    "documents cp ring tp ep fp64": Case(
        [*alone("grid.cp=2", "grid.tp=2", "grid.ep=4"), *APART, *SGD, *SELECTIVE], fp64=True
    ),
    "documents cp 4 ring zero 3 fp64": Case(
        [*alone("grid.cp=4", "train.zero=3"), *RESET, *QWEN3, *SGD, *FULL], fp64=True
    ),
    "documents dp cp ulysses window fp64": Case(
        [*alone("grid.dp_shard=2", "grid.cp=2", *ULYSSES), *RESET, *WINDOW, *SGD], fp64=True
    ),
    "documents pp cp ring mla v3 fp64": Case(
        [*alone("grid.pp=2", "grid.cp=2", "grid.ep=2"), *RESET, *MLA, *V3, *SGD, *FULL], fp64=True
    ),
    "documents zbv tp drops fp64": Case([*alone("grid.tp=2"), *ZBV, *APART, *SGD, *DROPS], fp64=True),
    "documents dualpipev cp ulysses fp64": Case(
        [*alone("grid.cp=2", *ULYSSES), *DUALPIPEV, *RESET, *SGD], fp64=True
    ),
    "documents interleaved zb dp ep fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2"), *INTERLEAVED_ZB, *RESET, *SGD], fp64=True
    ),
    "documents replicas fp64": Case([*alone("grid.dp_replicate=2", "train.zero=0"), *BYTES, *SGD], fp64=True),
    "documents bf16 cp ring tp": Case([*alone("grid.cp=2", "grid.tp=2"), *RESET, *BF16, *SGD]),
}
