"""The command `engine` on ranks of torchrun, of which rank 1 reads its data and its share of a checkpoint slowly. The
other ranks wait at most `TIMEOUT_S` in the store.

python -m torch.distributed.run ... -m tests.ranks.launch.delayed run LAYOUT ...
"""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine import rendezvous
from engine.checkpoint import reading
from engine.cli.main import main
from engine.train.batches import corpus

SLOW_RANK, TIMEOUT_S, DELAY_S = os.environ.get("SLOW_RANK", "1"), 5, 8


def delay() -> None:
    rendezvous.STORE_TIMEOUT = timedelta(seconds=TIMEOUT_S)
    checksum, read_corpus = reading.checksum, corpus.read_corpus

    def slow_checksum(path: Path) -> int:
        time.sleep(DELAY_S)
        return checksum(path)

    def slow_read(*arguments: Any) -> Any:
        time.sleep(DELAY_S)
        return read_corpus(*arguments)

    if os.environ["RANK"] == SLOW_RANK:
        reading.checksum, corpus.read_corpus = slow_checksum, slow_read


if __name__ == "__main__":
    delay()
    main()
