"""A small Llama with random weights and random text, so that the examples need no download."""

import torch
import transformers


def small_llama(device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.to(device)


def sequences(count: int, seq: int = 128) -> torch.Tensor:
    """Sequences of tokens that count upwards, which a model can learn."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 1024, (count, 1), generator=generator)
    return (first + torch.arange(seq)) % 1024
