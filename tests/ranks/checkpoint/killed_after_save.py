"""The command `engine`, whose rank 1 is killed once, in the step that follows the first checkpoint, after this
checkpoint is complete.

python -m tests.ranks.checkpoint.killed_after_save CHECKPOINTS_DIR run LAYOUT ...
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from engine.checkpoint.reading import complete_checkpoints
from engine.cli.main import main
from engine.train.computation import Computation


def kill_after_save(checkpoints_dir: Path) -> None:
    forward_backward, killed = Computation.forward_backward, checkpoints_dir.with_name("killed")

    def deadly(computation: Computation, step: int) -> object:
        result = forward_backward(computation, step)
        if dist.get_rank() == 1 and not killed.exists() and step == 3:
            while not complete_checkpoints(checkpoints_dir):
                time.sleep(0.01)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Computation.forward_backward = deadly  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    kill_after_save(Path(sys.argv.pop(1)))
    main()
