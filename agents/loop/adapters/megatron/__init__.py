"""The adapter for `pretrain` of Megatron-LM.

    from agents.loop.adapters.megatron import watch
    watch(pretrain)  # in pretrain_gpt.py, before pretrain is called

`pretrain` calls the functions `train`, `train_step`, `update_num_microbatches` and `checkpoint_and_decide_exit` of its
module by name. The adapter replaces them in the module, and reads and changes the values from which each step starts.
"""

from agents.loop.adapters.megatron.training import watch

__all__ = ["watch"]
