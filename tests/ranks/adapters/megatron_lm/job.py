"""Megatron-LM's own `pretrain_gpt.py` with two added lines for the cockpit, training a small MoE model on CPUs.

torchrun job.py '{"folder": ..., "micro_batches": 2, ...}'. The last rank writes the loss of each step to
FOLDER/losses.json.
"""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.ranks.adapters.jobs import noted_rates
from tests.ranks.adapters.megatron_lm.cpu import use_cpu

SEQUENCE, BATCH, SAMPLES = 16, 2, 3200
MAIN = 'if __name__ == "__main__":'
LINES = "from agents.loop.adapters.megatron import watch\nwatch(pretrain, **JOIN)\n"
OPTIONS = f"""
--distributed-backend gloo --transformer-impl local --num-layers 2 --hidden-size 16 --num-attention-heads 2
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH} --lr 0.01
--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --attention-backend unfused --tokenizer-type
NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 1 --mock-data --num-workers 0 --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
--no-persist-layer-norm --disable-bias-linear --eval-iters 1 --eval-interval 10000 --log-interval 1 --num-experts 4
--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
--moe-token-dispatcher-type alltoall --ckpt-format torch --save-interval 10000 --override-opt-param-scheduler
"""


def main(
    folder: str,
    micro_batches: int,
    options: str = "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.5",
    replicas: int = 2,
    pause_s: float = 0.0,
    load: str | None = None,
    step: int = 0,
    stop: int | None = None,
    cockpit: bool = True,
) -> None:
    torch.set_num_threads(1)
    use_cpu()
    import megatron.training.training as training

    batch = BATCH * micro_batches * replicas
    words = f"{OPTIONS} {options} --save {folder}/checkpoints --global-batch-size {batch}"
    words += f" --train-iters {SAMPLES // batch}"
    if load:
        words += f" --load {load} --ckpt-step {step}"
    if stop:
        words += f" --exit-interval {stop}"
    noted: dict[int, list[Any]] = {}
    rates = noted_rates()
    log = training.training_log

    def note(losses: Any, total: Any, rate: float, iteration: int, *rest: Any, **named: Any) -> Any:
        loss = float(losses["lm loss"]) if losses else None
        noted[iteration] = [loss, float(rest[3]), training.get_num_microbatches(), rates[-1]]
        if (
            torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        ):  # has the loss in a pipeline
            (Path(folder) / "losses.json").write_text(json.dumps(noted))
        time.sleep(pause_s)
        return log(losses, total, rate, iteration, *rest, **named)

    training.training_log = note
    found = find_spec("pretrain_gpt")
    assert found and found.origin
    script = Path(found.origin)
    source = script.read_text()
    assert source.count(MAIN) == 1
    sys.argv = [str(script), *words.split()]
    join = {"run": "tiny", "run_dir": Path(folder) / "runs" / "tiny"}
    added = LINES if cockpit else ""
    program = compile(source.replace(MAIN, added + MAIN), str(script), "exec")
    exec(program, {"__name__": "__main__", "JOIN": join})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
