"""Writes the outside oracle: ten small llama models as computed by PyTorch and transformers.

Needs Python 3.11 and

    pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 numpy

(the CPU build of PyTorch is enough). Run it in this folder:

    python make_fixtures.py            # rewrites case_00 ... case_09
    python make_fixtures.py --check    # computes all again and compares with the files

Each case is a `case_NN.config.json`, exactly as transformers saves it, and a `case_NN.safetensors`;
README.md says what is in them. Everything is float32 on one thread, with eager attention.
"""

import argparse
import copy
import pathlib
import shutil
import sys
import tempfile
import zlib

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

HERE = pathlib.Path(__file__).resolve().parent
IGNORED_TARGET = -100

# Largest share of a tensor's greatest magnitude by which float32 may differ from float64. The tests
# in Rust allow 1e-4, so a fixture that is itself uncertain by more than a fifth of that is refused.
ROUNDING_MAX = 2e-5

# Fields of LlamaConfig, then `batch` and `sequence`. Between them the ten cases cover
# grouped-query, multi-head and multi-query attention, head sizes that are not hidden / heads, tied
# and untied heads, both kinds of bias, every kind of RoPE scaling that capture reads, and sizes
# that no tile divides.
CASES = [
    dict(
        what="grouped-query attention, untied, odd vocabulary",
        hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, rms_norm_eps=1e-5, max_position_embeddings=64,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=2, sequence=17,
    ),
    dict(
        what="multi-head attention, tied head, large theta",
        hidden_size=48, intermediate_size=100, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, vocab_size=131, rms_norm_eps=1e-6, max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
        batch=1, sequence=33,
    ),
    dict(
        what="multi-query attention with attention biases",
        hidden_size=64, intermediate_size=72, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=64, rms_norm_eps=1e-5, max_position_embeddings=32,
        attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=3, sequence=5,
    ),
    dict(
        what="head size larger than hidden / heads, three layers",
        hidden_size=32, intermediate_size=50, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24, vocab_size=101, rms_norm_eps=1e-5,
        max_position_embeddings=64, initializer_range=0.05,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=2, sequence=9,
    ),
    dict(
        what="biases everywhere, tied head, large epsilon",
        hidden_size=40, intermediate_size=60, num_hidden_layers=2, num_attention_heads=5,
        num_key_value_heads=5, vocab_size=89, rms_norm_eps=1e-3, max_position_embeddings=64,
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=2, sequence=13,
    ),
    dict(
        what="llama3 RoPE scaling with all three frequency bands in use",
        hidden_size=64, intermediate_size=56, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=97, rms_norm_eps=1e-5, max_position_embeddings=512,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=64,
        ),
        batch=1, sequence=33,
    ),
    dict(
        what="linear RoPE scaling",
        hidden_size=32, intermediate_size=70, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=65, rms_norm_eps=1e-6, max_position_embeddings=64,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.5),
        batch=2, sequence=21,
    ),
    dict(
        what="dynamic RoPE scaling, sequence longer than the trained positions",
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=97, rms_norm_eps=1e-5, max_position_embeddings=16,
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
        batch=1, sequence=29,
    ),
    dict(
        what="yarn RoPE scaling, whose attention factor is not 1",
        hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=97, rms_norm_eps=1e-5, max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, beta_slow=1.0,
            original_max_position_embeddings=16,
        ),
        batch=1, sequence=31,
    ),
    dict(
        what="all of it: small head size, tied, biases, llama3, three layers",
        hidden_size=48, intermediate_size=33, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, head_dim=6, vocab_size=103, rms_norm_eps=1e-5,
        max_position_embeddings=256, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=32,
        ),
        batch=3, sequence=23,
    ),
]


def generator(case_index, name):
    """One generator per tensor, so that adding a tensor leaves the others as they are."""
    seed = zlib.crc32(f"deepwell-oracle/{case_index}/{name}".encode())
    return torch.Generator().manual_seed(seed)


def random_weight(case_index, name, shape, tied):
    """Large enough that attention is far from uniform: else a wrong rotation would hardly show."""
    g = generator(case_index, name)
    if "norm" in name:
        return 0.5 + torch.rand(shape, generator=g)
    if name.endswith(".bias"):
        return 0.3 * torch.randn(shape, generator=g)
    if "embed_tokens" in name:
        # A tied table is the output head as well, where rows this long would saturate the softmax.
        return (0.3 if tied else 1.0) * torch.randn(shape, generator=g)
    gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * torch.randn(shape, generator=g) / shape[-1] ** 0.5


def random_batch(case_index, case):
    """Token ids `[batch, sequence]` and the tokens that follow them, some of which do not count."""
    g = generator(case_index, "tokens")
    shape = (case["batch"], case["sequence"] + 1)
    tokens = torch.randint(0, case["vocab_size"], shape, generator=g)
    input_ids = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].clone()
    ignored = torch.randperm(targets.numel(), generator=g)[: max(1, targets.numel() // 8)]
    targets.view(-1)[ignored] = IGNORED_TARGET
    return input_ids, targets


def forward_backward(model, input_ids, targets):
    """Logits, mean cross-entropy over the targets that count, and each parameter's gradient."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORED_TARGET,
        reduction="mean",
    )
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    return logits.detach().clone(), loss.detach().clone(), gradients


def relative_difference(got, expected):
    """Greatest difference as a share of the expected tensor's greatest magnitude."""
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def interleaved_rotation(x):
    """The other RoPE convention, pairs (0, 1), (2, 3), …, which llama weights do not use."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def check_case(label, model, input_ids, targets, logits, loss, gradients):
    """Refuses a fixture that could not tell a right implementation from a wrong one."""
    for name, gradient in gradients.items():
        if not torch.isfinite(gradient).all() or gradient.abs().max() < 1e-6:
            sys.exit(f"{label}: gradient of {name} is degenerate")

    double = copy.deepcopy(model).double()
    logits64, loss64, gradients64 = forward_backward(double, input_ids, targets)
    rounding = max(
        [relative_difference(logits, logits64), relative_difference(loss, loss64)]
        + [relative_difference(gradients[n], gradients64[n]) for n in gradients]
    )
    if rounding > ROUNDING_MAX:
        sys.exit(f"{label}: float32 is {rounding:.1e} from float64, more than {ROUNDING_MAX}")

    kept = modeling_llama.rotate_half
    modeling_llama.rotate_half = interleaved_rotation
    wrong, _, _ = forward_backward(copy.deepcopy(model), input_ids, targets)
    modeling_llama.rotate_half = kept
    rotation = relative_difference(wrong, logits)
    if rotation < 1e-2:
        sys.exit(f"{label}: the other RoPE convention changes the logits by {rotation:.1e} only")
    return rounding, rotation


def make_case(case_index, case):
    """The tensors of one case, its config.json as text, and the two figures of `check_case`."""
    case = dict(case)
    fields = {k: v for k, v in case.items() if k not in ("what", "batch", "sequence")}
    config = LlamaConfig(
        **fields, attn_implementation="eager", dtype="float32", bos_token_id=1, eos_token_id=2
    )
    model = LlamaForCausalLM(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tied = config.tie_word_embeddings
            parameter.copy_(random_weight(case_index, name, parameter.shape, tied))
    input_ids, targets = random_batch(case_index, case)
    logits, loss, gradients = forward_backward(model, input_ids, targets)
    label = f"case_{case_index:02}"
    figures = check_case(label, model, input_ids, targets, logits, loss, gradients)

    rotary = model.model.rotary_emb
    tensors = {
        "input_ids": input_ids,
        "targets": targets,
        "logits": logits,
        "loss": loss.reshape(1),
        # As used in the forward pass: dynamic scaling depends on the length of the sequence.
        "rope.inverse_frequencies": rotary.inv_freq.detach().clone(),
        "rope.attention_factor": torch.tensor([rotary.attention_scaling], dtype=torch.float32),
    }
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().clone()
        tensors[f"grad.{name}"] = gradients[name]

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config_text = pathlib.Path(folder, "config.json").read_text()
    return tensors, config_text, figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    # One thread and no fused paths: the sums are then taken in one order on every run.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")

    bytes_total = 0
    for case_index, case in enumerate(CASES):
        tensors, config_text, (rounding, rotation) = make_case(case_index, case)
        stem = HERE / f"case_{case_index:02}"
        weights_path = stem.with_suffix(".safetensors")
        config_path = stem.with_suffix(".config.json")
        if check:
            stored = load_file(weights_path)
            if stored.keys() != tensors.keys() or config_path.read_text() != config_text:
                sys.exit(f"{stem.name}: the config or the set of tensors differs from the files")
            worst = max(
                relative_difference(tensors[n].float(), stored[n].float()) for n in tensors
            )
            if worst > ROUNDING_MAX:
                sys.exit(f"{stem.name}: differs from the file by {worst:.1e}")
        else:
            # One entry only: safetensors writes several in an order that changes from run to run.
            versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
            metadata = {"description": f"{case['what']}; {versions}"}
            with tempfile.TemporaryDirectory() as folder:
                written = pathlib.Path(folder, "case.safetensors")
                save_file(tensors, written, metadata=metadata)
                shutil.copyfile(written, weights_path)
            config_path.write_text(config_text)
        bytes_total += weights_path.stat().st_size
        print(
            f"{stem.name}  loss {tensors['loss'].item():.6f}  "
            f"f32 vs f64 {rounding:.1e}  other rotation {rotation:.2f}  {case['what']}"
        )
    print(f"{bytes_total} bytes")


if __name__ == "__main__":
    main()
