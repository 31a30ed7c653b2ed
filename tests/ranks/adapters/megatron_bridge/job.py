"""Megatron-Bridge's own `pretrain` with the cockpit's callback, training a small MoE model on CPUs.

torchrun job.py '{"folder": ..., "micro_batches": 2, ...}'. The last rank writes the loss of each step to
FOLDER/losses.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.ranks.adapters.jobs import noted_rates
from tests.ranks.adapters.megatron_bridge.cpu import use_bridge_on_cpu

SEQUENCE, BATCH, SAMPLES = 16, 2, 3200


def configuration(folder: str, micro_batches: int, replicas: int, **options: Any) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as kinds
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    batch = BATCH * micro_batches * replicas
    model = GPTModelProvider(
        transformer_layer_spec=lambda config, vp_stage=None: get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage
        ),
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=2,
        seq_length=SEQUENCE,
        vocab_size=64,
        make_vocab_size_divisible_by=1,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
        moe_token_dispatcher_type="alltoall",
        transformer_impl="local",
        attention_backend=_unfused(),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )
    return kinds.ConfigContainer(
        model=model,
        train=kinds.TrainingConfig(
            train_iters=SAMPLES // batch, global_batch_size=batch, micro_batch_size=BATCH
        ),
        validation=kinds.ValidationConfig(eval_interval=10000, eval_iters=1),
        optimizer=kinds.OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.01, clip_grad=1.0),
        scheduler=kinds.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            override_opt_param_scheduler=True,
        ),
        ddp=kinds.DistributedDataParallelConfig(),
        dataset=kinds.MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=SEQUENCE,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=kinds.LoggerConfig(log_interval=1),
        tokenizer=kinds.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=kinds.CheckpointConfig(
            save=f"{folder}/checkpoints", save_interval=10000, ckpt_format="torch_dist"
        ),
        rng=kinds.RNGConfig(seed=1234),
        dist=kinds.DistributedInitConfig(distributed_backend="gloo"),
    )


def _unfused() -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend.unfused


def main(
    folder: str,
    micro_batches: int,
    options: dict[str, Any] | None = None,
    replicas: int = 2,
    pause_s: float = 0.0,
    load: str | None = None,
    step: int = 0,
    stop: int | None = None,
    cockpit: bool = True,
) -> None:
    torch.set_num_threads(1)
    use_bridge_on_cpu()
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    chosen = (
        {"expert_model_parallel_size": 2, "moe_expert_capacity_factor": 1.5} if options is None else options
    )
    config = configuration(folder, micro_batches, replicas, **chosen)
    if load:
        config.checkpoint.load, config.checkpoint.ckpt_step = load, step
    noted: dict[int, list[Any]] = {}
    rates = noted_rates()

    def note(context: Any) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        loss = float(context.loss_dict["lm loss"]) if context.loss_dict else None
        noted[context.state.train_state.step + 1] = [
            loss,
            float(context.grad_norm),
            get_num_microbatches(),
            rates[-1],
        ]
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            (Path(folder) / "losses.json").write_text(json.dumps(noted))
        if context.state.train_state.step + 1 == stop:
            context.state.cfg.train.train_iters = stop
        time.sleep(pause_s)

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", note)
    if cockpit:
        from agents.loop.adapters.megatron.bridge import CockpitCallback

        callbacks.add(CockpitCallback(run="tiny", run_dir=Path(folder) / "runs" / "tiny"))
    pretrain(config, forward_step, callbacks)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
