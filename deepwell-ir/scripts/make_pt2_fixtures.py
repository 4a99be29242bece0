"""Makes the exported models in tests/pt2, with what PyTorch computes for them.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python scripts/make_pt2_fixtures.py tests/pt2

Written with torch 2.15.0 and transformers 5.23.0 on a CPU. Models are tiny and their weights random;
each NAME.pt2 is what torch.export.save writes, and NAME.safetensors holds `input_ids` and `logits`.
Notes on where calls were made in Python (stack traces and the like) are taken out before saving:
they are most of such a file, and no reader needs them.
"""

import math
import pathlib
import sys

import torch
from safetensors.torch import save_file
from torch.export import Dim
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BATCH, SEQ, VOCAB = 2, 12, 96
NOTES = ["stack_trace", "torch_fn", "from_node", "source_fn_stack", "custom"]


def with_random_weights(model, seed):
    """Weights large enough for attention to be far from uniform, gains around one."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        is_gain = parameter.ndim == 1 and bool((parameter == 1).all())
        parameter.data = 1 + 0.2 * noise if is_gain else 0.2 * noise
    return model.eval()


SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def llama(layers, **more):
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES, **more))


def gpt2(layers, **more):
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=layers, n_head=4, **more
    )
    return GPT2LMHeadModel(config)


class Sine(torch.nn.Module):
    """A feed-forward block with an activation that Deepwell does not know, and a top-k."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.up = torch.nn.Linear(32, 64)
        self.down = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.table(input_ids)
        y = torch.sin(self.up(self.norm(x)))
        best, _ = torch.topk(y, 8, dim=-1)
        return self.head(x + self.down(y) * best.sum(-1, keepdim=True))


class MaskFill(torch.nn.Module):
    """Attention by hand as nanoGPT has it where PyTorch has no fused one, and a padding row."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 32, padding_idx=3)
        self.positions = torch.nn.Embedding(32, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.attn = torch.nn.Linear(32, 96)
        self.proj = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, VOCAB, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, input_ids):
        batch, seq = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(seq))
        parts = self.attn(self.norm(x)).split(32, dim=2)
        q, k, v = [part.view(batch, seq, 4, 8).transpose(1, 2) for part in parts]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(8))
        scores = scores.masked_fill(self.mask[:, :, :seq, :seq] == 0, float("-inf"))
        y = torch.nn.functional.softmax(scores, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(batch, seq, 32)
        return self.head(x + self.proj(y))


class Encoder(torch.nn.Module):
    """What PyTorch's own modules make of a language model."""

    def __init__(self, causal, **options):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 16)
        self.positions = torch.nn.Embedding(32, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, **options)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.causal, self.turned = causal, not options.get("batch_first", False)

    def forward(self, input_ids):
        seq = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions(torch.arange(seq))
        x = x.transpose(0, 1) if self.turned else x
        mask = torch.nn.Transformer.generate_square_subsequent_mask(seq) if self.causal else None
        x = self.encoder(x, mask=mask, is_causal=self.causal)
        return self.head(x.transpose(0, 1) if self.turned else x)


class WithWeights(torch.nn.Module):
    """A block on nn.MultiheadAttention, asked for its weights, with its mask as booleans."""

    def __init__(self, batch_first, head_bias=False):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.attn = torch.nn.MultiheadAttention(16, 2, batch_first=batch_first)
        self.head = torch.nn.Linear(16, 32, bias=head_bias)
        self.turned = not batch_first

    def forward(self, input_ids):
        seq = input_ids.shape[1]
        x = self.tokens(input_ids)
        h = self.norm(x)
        h = h.transpose(0, 1) if self.turned else h
        mask = torch.triu(torch.ones(seq, seq, dtype=torch.bool), diagonal=1)
        h, _ = self.attn(h, h, h, attn_mask=mask, need_weights=True)
        return self.head(x + (h.transpose(0, 1) if self.turned else h))


def save(folder, name, model, seed, decompose=False, dynamic=False, options=None):
    model = with_random_weights(model, seed)
    torch.manual_seed(seed + 1)
    own = isinstance(model, (Encoder, WithWeights))
    vocab = model.tokens.num_embeddings if own else VOCAB
    input_ids = torch.randint(0, vocab, (BATCH, SEQ))
    shapes = {"input_ids": {0: Dim("batch", max=64), 1: Dim("seq", min=2, max=32)}}
    if options is not None:
        shapes.update({key: None for key in options})
    exported = torch.export.export(
        model, (), {"input_ids": input_ids, **(options or {})},
        dynamic_shapes=shapes if dynamic else None,
    )
    if decompose:
        exported = exported.run_decompositions()
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for note in NOTES:
                    node.meta.pop(note, None)
    torch.export.save(exported, folder / f"{name}.pt2")
    with torch.no_grad():
        result = model(input_ids=input_ids, **(options or {}))
    logits = getattr(result, "logits", result).float().contiguous()
    save_file({"input_ids": input_ids, "logits": logits}, folder / f"{name}.safetensors")
    size = (folder / f"{name}.pt2").stat().st_size
    print(f"{name}: {size} bytes, largest logit {logits.abs().max():.2f}")


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"use_cache": False}
    save(folder, "llama", llama(2), 1, options=plain)
    save(folder, "llama_core", llama(1), 2, decompose=True, options=plain)
    eager = {"attn_implementation": "eager"}
    save(folder, "llama_eager", llama(1, **eager), 3, dynamic=True, options=plain)
    scaled = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }
    biased = llama(1, rope_parameters=scaled, attention_bias=True, mlp_bias=True)
    save(folder, "llama_scaled", biased, 4, options=plain)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1, head_dim=16, **SIZES))
    save(folder, "qwen3", qwen3, 5, options=plain)
    window = MistralForCausalLM(MistralConfig(num_hidden_layers=1, sliding_window=5, **SIZES))
    save(folder, "mistral", window, 6, options=plain)
    save(folder, "gpt2", gpt2(2), 7, options=plain)
    save(folder, "gpt2_core", gpt2(1, **eager), 8, decompose=True, dynamic=True, options=plain)
    save(folder, "sine", Sine(), 9)
    # With a name of eight letters the first line of the zip's list of entries has 76 bytes.
    save(folder, "maskfill", MaskFill(), 10)
    frozen = MaskFill()
    frozen.positions.weight.requires_grad_(False)
    save(folder, "maskcore", frozen, 10, decompose=True)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    phi3 = Phi3ForCausalLM(Phi3Config(num_hidden_layers=1, **special, **SIZES))
    save(folder, "phi3", phi3, 11, options=plain)
    save(folder, "encoder", Encoder(causal=True, batch_first=True), 12)
    last = Encoder(causal=False, norm_first=True, activation="gelu")
    save(folder, "encoder_both_ways", last, 13, dynamic=True)
    save(folder, "mha", WithWeights(batch_first=False), 14)
    save(folder, "mha_core", WithWeights(batch_first=True), 15, decompose=True)
    save(folder, "head_bias", WithWeights(batch_first=True, head_bias=True), 16)


if __name__ == "__main__":
    main()
