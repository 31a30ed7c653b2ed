"""The command `engine`, with a pause before each step: its ranks leave the cores to the commands of a test.

python -m tests.ranks.launch.paced run LAYOUT ...
"""

import time

from engine.cli.main import main
from engine.train.trainer import Trainer

PAUSE_S = 0.15


def pace() -> None:
    train_step = Trainer.train_step

    def paced(trainer: Trainer, step: int) -> bool:
        time.sleep(PAUSE_S)
        return train_step(trainer, step)

    Trainer.train_step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    pace()
    main()
