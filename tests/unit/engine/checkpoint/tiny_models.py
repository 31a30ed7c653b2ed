"""Tiny, randomly initialised Hugging Face models, one or more for each architecture that the engine imports and
exports."""

from pathlib import Path
from typing import Any

import torch

VOCAB, LENGTH = 300, 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,  # ten times the usual value, so that attention and routing are far from uniform
    "rope_theta": 5000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral windowed": {"sliding_window": 7},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3 without q_lora": {"q_lora_rank": None, "rms_norm_eps": 1e-3},
}
MODELS["deepseek_v3 without q_lora"] = MODELS["deepseek_v3"] | MODELS["deepseek_v3 without q_lora"]


def saved_model(name: str, folder: Path, seed: int = 0, **more: Any) -> Any:
    """A randomly initialised model of the architecture `name`, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.split()[0], **{**COMMON, **MODELS[name], **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # norms start at 1 and biases at 0, which would hide a mistake
            if key.endswith(("norm.weight", "bias")):
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model
