"""Tiny random models of transformers' families, one layer shape each."""

import torch
import transformers

COMMON = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)

#: Class, settings, and the modules that a swap must find: norms, MLPs, attention.
FAMILIES = {
    "llama": ("LlamaConfig", {}, (5, 2, 1)),
    "qwen2": ("Qwen2Config", dict(use_sliding_window=False), (5, 2, 1)),
    "qwen3": ("Qwen3Config", {}, (9, 2, 1)),
    "mistral": ("MistralConfig", dict(sliding_window=8), (5, 2, 1)),
    "mixtral": ("MixtralConfig", MOE, (5, 0, 1)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        (9, 0, 1),
    ),
    "gpt2": (
        "GPT2Config",
        dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, attn_pdrop=0.0,
             embd_pdrop=0.0),
        (5, 0, 1),
    ),  # fmt: skip
    "gemma2": ("Gemma2Config", dict(sliding_window=8, query_pre_attn_scalar=16), (9, 0, 0)),
    "gemma3": (
        "Gemma3TextConfig",
        dict(sliding_window=8, query_pre_attn_scalar=16, sliding_window_pattern=2),
        (13, 0, 1),
    ),
    "phi3": ("Phi3Config", {}, (5, 2, 1)),
    "gpt_oss": (
        "GptOssConfig",
        dict(**MOE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        (5, 0, 1),
    ),
}  # fmt: skip


def model(family: str, dtype=torch.float32, **settings) -> torch.nn.Module:
    """A model with random weights, norms included, equal for equal arguments."""
    name, own, _ = FAMILIES[family]
    base = {k: v for k, v in COMMON.items() if family != "gpt2" or k in ("vocab_size",)}
    config = getattr(transformers, name)(**{**base, **own, **settings})
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def batch(batch_size=2, seq=24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 96, (batch_size, seq), generator=generator)
