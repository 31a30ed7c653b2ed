"""A user's fine-tuning script with transformers' `Trainer`: a tiny Mixtral with random weights, and two added lines for
the cockpit.

torchrun trainer_job.py '{"folder": ..., "accumulation": 2, "max_steps": 40, ...}'. Rank 0 writes the loss of each
step, averaged over all ranks, to FOLDER/losses.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from tests.ranks.adapters.jobs import noted_rates

SEQUENCE, VOCABULARY = 16, 64


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """`count` random sequences from a fixed seed, starting at number `start`."""

    def __init__(self, count: int, start: int, pause_s: float) -> None:
        random = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (count, SEQUENCE), generator=random)[start:]
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.pause_s)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)


class Losses(TrainerCallback):
    """Writes loss, gradient norm and learning rate of each step, and stops the training after step `steps`."""

    def __init__(self, file: Path, steps: int | None) -> None:
        self.file, self.steps = file, steps
        self.losses: dict[int, list[float]] = {}
        self.rates = noted_rates()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        control.should_training_stop |= state.global_step == self.steps

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: object) -> None:
        if "loss" in logs and state.is_world_process_zero:
            self.losses[state.global_step] = [logs["loss"], logs["grad_norm"], self.rates[-1]]
            self.file.write_text(json.dumps(self.losses))


def model(checkpoint: str | None) -> MixtralForCausalLM:
    torch.manual_seed(1)
    if checkpoint:
        # Trainer 5.23.0 does not load the experts of Mixtral, because they have different names in a checkpoint and in
        # the module.
        return MixtralForCausalLM.from_pretrained(checkpoint)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config)


def main(
    folder: str,
    accumulation: int,
    max_steps: int = -1,
    count: int = 1600,
    start: int = 0,
    epochs: int = 1,
    pause_s: float = 0.0,
    resume: str | None = None,
    cockpit: bool = True,
    steps: int | None = None,
    evaluation_s: float = 0.0,
) -> None:
    """`evaluation_s`: if not 0, the trainer evaluates and saves after every fourth step; an evaluation takes this long
    on each rank."""
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(Path(folder) / "checkpoints"),
        run_name="tiny",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ignore_data_skip=True,
        seed=1,
    )
    held_out = Sequences(16, 0, evaluation_s / 8)  # eight of them for each of two ranks
    if evaluation_s:
        arguments.eval_strategy, arguments.eval_steps = IntervalStrategy.STEPS, 4
        arguments.save_strategy, arguments.save_steps = SaveStrategy.STEPS, 4
    trainer = InOrder(
        model=model(resume),
        args=arguments,
        train_dataset=Sequences(count, start, pause_s),
        eval_dataset=held_out if evaluation_s else None,
    )
    trainer.add_callback(Losses(Path(folder) / "losses.json", steps))
    if cockpit:
        from agents.loop.adapters.huggingface import CockpitCallback

        trainer.add_callback(CockpitCallback(trainer, run_dir=Path(folder) / "runs" / "tiny"))
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
