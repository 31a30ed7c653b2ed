"""The command `engine` with a pause before each step, so that its ranks leave CPU cores free for a test's commands.

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
