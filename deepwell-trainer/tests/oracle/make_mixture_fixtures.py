"""Writes the outside oracle of mixtures: small models of four families as computed by PyTorch.

Needs Python 3.11 and

    pip install torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 numpy

(the CPU build of PyTorch is enough). Run it in this folder:

    python make_mixture_fixtures.py            # rewrites mixture_00 ... and mxfp4.safetensors
    python make_mixture_fixtures.py --check    # computes all again and compares with the files
    python make_mixture_fixtures.py --from 4   # leaves the files of the first four cases

Each case is a `mixture_NN.config.json`, exactly as transformers saves it, and a
`mixture_NN.safetensors`; README.md says what is in them. Everything is float32 on one thread, with
eager attention and eager experts.
"""

import argparse
import copy
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from make_fixtures import (
    ROUNDING_MAX,
    forward_backward,
    generator,
    random_batch,
    relative_difference,
)
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).resolve().parent

# `batch`, `sequence` and what follows `least` are not of the configuration: changing one of the
# named things must change the logits by that much, or the case could not tell a wrong reading.
CASES = [
    dict(
        what="gpt-oss: windows, sinks, clamps, yarn, a layer of each kind twice",
        model=GptOssForCausalLM, config=GptOssConfig,
        hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=5, swiglu_limit=1.5, max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, beta_slow=1.0,
            original_max_position_embeddings=16, truncate=False,
        ),
        batch=2, sequence=23,
        least=dict(sliding_window=64, swiglu_limit=7.0, swiglu_alpha=1.0),
    ),
    dict(
        what="gpt-oss: square down projections, full layers alone, tied, published constants",
        model=GptOssForCausalLM, config=GptOssConfig,
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, vocab_size=65, num_local_experts=5,
        num_experts_per_tok=4, sliding_window=4, layer_types=["full_attention"],
        max_position_embeddings=64, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=1, sequence=19,
        least=dict(swiglu_alpha=1.0),
    ),
    dict(
        what="DeepSeek-V3: groups, biases of both signs, a dense layer, shared experts, yarn",
        model=DeepseekV3ForCausalLM, config=DeepseekV3Config,
        hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=97, n_routed_experts=12,
        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12,
        max_position_embeddings=64, rms_norm_eps=1e-4,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, beta_slow=1.0,
            original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
        ),
        batch=2, sequence=17,
        least=dict(rope_interleave=False, routed_scaling_factor=1.0, topk_group=4,
                   norm_topk_prob=False),
    ),
    dict(
        what="DeepSeek-V3: queries at once, biases, halves, wide values, no groups, plain gates",
        model=DeepseekV3ForCausalLM, config=DeepseekV3Config,
        hidden_size=48, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=3, vocab_size=89, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=0, routed_scaling_factor=1.5, norm_topk_prob=False,
        q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=16,
        attention_bias=True, rope_interleave=False, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=3, sequence=7,
        least=dict(rope_interleave=True, norm_topk_prob=True),
    ),
    dict(
        what="Mixtral: 2 of 6 experts in each of two layers, gates of a sum of one",
        model=MixtralForCausalLM, config=MixtralConfig,
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, num_local_experts=6, num_experts_per_tok=2,
        sliding_window=None, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=2, sequence=17,
        least=dict(num_experts_per_tok=3),
    ),
    dict(
        what="Qwen3-MoE: plain gates, a dense layer between two of experts, wide heads",
        model=Qwen3MoeForCausalLM, config=Qwen3MoeConfig,
        hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, vocab_size=89, num_experts=7,
        num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1], decoder_sparse_step=1,
        max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        batch=2, sequence=19,
        least=dict(norm_topk_prob=True, num_experts_per_tok=2),
    ),
    dict(
        what="Qwen3-MoE: gates of a sum of one, experts in every other layer, tied",
        model=Qwen3MoeForCausalLM, config=Qwen3MoeConfig,
        hidden_size=32, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=65, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=2,
        max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        batch=3, sequence=11,
        least=dict(norm_topk_prob=False, num_experts_per_tok=1),
    ),
]


def random_weight(case_index, name, shape, tied):
    """Large enough that attention is far from uniform, clamps are reached and experts differ."""
    g = generator(1000 + case_index, name)
    if name.endswith("e_score_correction_bias"):
        # Of both signs: a mask by zeros would let experts of other groups in.
        return torch.linspace(-0.6, 0.3, shape[0])[torch.randperm(shape[0], generator=g)]
    if "norm" in name:
        return 0.5 + torch.rand(shape, generator=g)
    if name.endswith("bias") or name.endswith("sinks"):
        return 0.5 * torch.randn(shape, generator=g)
    if "embed_tokens" in name:
        return (0.3 if tied else 1.0) * torch.randn(shape, generator=g)
    # Experts of gpt-oss have their inputs before their outputs.
    fan_in = shape[-2] if "experts." in name and len(shape) == 3 and "gpt" in name else shape[-1]
    gain = 1.6 if any(part in name for part in ["q_proj", "k_proj", "q_b_proj", "kv_a"]) else 1.0
    gain = 2.0 if "router" in name or "gate.weight" in name else gain
    return gain * torch.randn(shape, generator=g) / fan_in**0.5


def tensors_of_model(model):
    """Parameters and saved buffers by name, with those that the model does not train."""
    tensors = {name: parameter for name, parameter in model.named_parameters()}
    kept = model.state_dict().keys()
    tensors.update((name, b) for name, b in model.named_buffers() if name in kept)
    return tensors


def stored(name, tensor):
    """The tensors of the weight files that hold a tensor of the model, by name."""
    is_mixtral = tensor.family == "mixtral"
    gate_name, up_name, down_name = (
        ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    )
    one_by_one = tensor.family != "gpt_oss"
    own = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
    if name.endswith("mlp.experts.gate_up_proj") and one_by_one:
        gate, up = tensor.values.chunk(2, dim=1)
        parts = {gate_name: gate, up_name: up}
    elif name.endswith("mlp.experts.down_proj") and one_by_one:
        parts = {down_name: tensor.values}
    else:
        return {own: tensor.values}
    block = own.rsplit(".", 1)[0]
    return {
        f"{block}.{expert}.{part}.weight": values[expert].contiguous()
        for part, values in parts.items()
        for expert in range(values.shape[0])
    }


class Stored:
    def __init__(self, values, family):
        self.values = values.detach().clone()
        self.family = family


def build(case, **changes):
    other = ("what", "model", "config", "batch", "sequence", "least")
    fields = {k: v for k, v in case.items() if k not in other}
    config = case["config"](
        **{**fields, **changes}, attn_implementation="eager", experts_implementation="eager",
        dtype="float32", bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )
    return case["model"](config).float().train()


def fill(case_index, model):
    with torch.no_grad():
        for name, tensor in tensors_of_model(model).items():
            tied = model.config.tie_word_embeddings
            full = f"gpt.{name}" if model.config.model_type == "gpt_oss" else name
            tensor.copy_(random_weight(case_index, full, tensor.shape, tied))
    return model


def check_case(label, case_index, case, model, batch, results):
    """Refuses a fixture that could not tell a right implementation from a wrong one."""
    logits, loss, gradients = results
    for name, gradient in gradients.items():
        if not torch.isfinite(gradient).all() or gradient.abs().max() < 1e-6:
            sys.exit(f"{label}: gradient of {name} is degenerate")
    double = copy.deepcopy(model).double()
    logits64, loss64, gradients64 = forward_backward(double, *batch)
    rounding = max(
        [relative_difference(logits, logits64), relative_difference(loss, loss64)]
        + [relative_difference(gradients[n], gradients64[n]) for n in gradients]
    )
    if rounding > ROUNDING_MAX:
        sys.exit(f"{label}: float32 is {rounding:.1e} from float64, more than {ROUNDING_MAX}")
    least = 1.0
    for key, value in case["least"].items():
        wrong, _, _ = forward_backward(fill(case_index, build(case, **{key: value})), *batch)
        difference = relative_difference(wrong, logits)
        if difference < 1e-2:
            sys.exit(f"{label}: {key} = {value} changes the logits by {difference:.1e} only")
        least = min(least, difference)
    return rounding, least


def make_case(case_index, case):
    """The tensors of one case, its config.json as text, and the two figures of `check_case`."""
    model = fill(case_index, build(case))
    batch = random_batch(1000 + case_index, case)
    logits, loss, gradients = forward_backward(model, *batch)
    label = f"mixture_{case_index:02}"
    figures = check_case(label, case_index, case, model, batch, (logits, loss, gradients))
    tensors = {
        "input_ids": batch[0],
        "targets": batch[1],
        "logits": logits,
        "loss": loss.reshape(1),
    }
    family = model.config.model_type
    weights = {}
    for name, tensor in tensors_of_model(model).items():
        weights.update(stored(name, Stored(tensor, family)))
        if name in gradients:
            parts = stored(name, Stored(gradients[name], family))
            tensors.update((f"grad.{part}", values) for part, values in parts.items())
    tensors.update((f"weight.{name}", values) for name, values in weights.items())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config_text = pathlib.Path(folder, "config.json").read_text()
        written = load_file(pathlib.Path(folder, "model.safetensors"))
    # The names here are those that transformers itself writes, and so are the numbers.
    if written.keys() != weights.keys():
        sys.exit(f"{label}: transformers writes other names: {written.keys() ^ weights.keys()}")
    for name, values in written.items():
        if not torch.equal(values, weights[name]):
            sys.exit(f"{label}: transformers writes other values of {name}")
    return tensors, config_text, figures


def make_packed():
    """Expert weights in MXFP4 with what transformers makes of them, in bfloat16 and turned."""
    g = generator(2000, "mxfp4")
    experts, rows, columns = 3, 6, 64
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=g).byte()
    scales = torch.randint(110, 140, (experts, rows, columns // 32), generator=g).byte()
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"blocks": blocks, "scales": scales, "values": values.contiguous()}


def write(tensors, path, description):
    # One entry only: safetensors writes several in an order that changes from run to run.
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder, "case.safetensors")
        save_file(tensors, written, metadata={"description": f"{description}; {versions}"})
        shutil.copyfile(written, path)


def compare(label, tensors, path):
    kept = load_file(path)
    if kept.keys() != tensors.keys():
        sys.exit(f"{label}: the set of tensors differs from the file")
    worst = max(relative_difference(tensors[n].float(), kept[n].float()) for n in tensors)
    if worst > ROUNDING_MAX:
        sys.exit(f"{label}: differs from the file by {worst:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first case")
    arguments = parser.parse_args()
    check = arguments.check
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for case_index, case in list(enumerate(CASES))[arguments.first :]:
        tensors, config_text, (rounding, least) = make_case(case_index, case)
        stem = HERE / f"mixture_{case_index:02}"
        if check:
            compare(stem.name, tensors, stem.with_suffix(".safetensors"))
            if stem.with_suffix(".config.json").read_text() != config_text:
                sys.exit(f"{stem.name}: the config differs from the file")
        else:
            write(tensors, stem.with_suffix(".safetensors"), case["what"])
            stem.with_suffix(".config.json").write_text(config_text)
        print(
            f"{stem.name}  loss {tensors['loss'].item():.6f}  f32 vs f64 {rounding:.1e}  "
            f"least change {least:.2f}  {case['what']}"
        )
    if arguments.first > 0:
        return
    packed = make_packed()
    path = HERE / "mxfp4.safetensors"
    compare("mxfp4", packed, path) if check else write(packed, path, "MXFP4 expert weights")


if __name__ == "__main__":
    main()
