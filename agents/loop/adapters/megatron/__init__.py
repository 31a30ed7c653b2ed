"""The adapter for Megatron-LM's `pretrain`.

    from agents.loop.adapters.megatron import watch
    watch(pretrain)  # in pretrain_gpt.py, before pretrain is called

`pretrain` calls the functions `train`, `train_step`, `update_num_microbatches` and `checkpoint_and_decide_exit` of its
module by name, so the adapter replaces these four functions in the module. Between two steps, the adapter reads and
changes the values that the next step uses.
"""

from agents.loop.adapters.megatron.training import watch

__all__ = ["watch"]
