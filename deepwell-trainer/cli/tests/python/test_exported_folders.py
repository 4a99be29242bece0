"""Folders of `deepwell export hf --quantize`, read by compressed-tensors and transformers.

`.ci/run python` runs this file with the command that `cargo test` has built. compressed-tensors is
the reference for bytes: what it dequantizes must equal `deepwell quantize --dequantize` to the bit.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert import (
    CompressedTensorsDequantizer,
    ModelOptNvfp4Converter,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[4]
DEEPWELL = ROOT / "target" / "debug" / "deepwell"
SEQ = 64
# Losses of one model in one format. The bar of exported folders; measured: 1.6e-4 with activations
# quantized by compressed-tensors, 6e-8 in FP32.
LOSS_TOLERANCE = 1e-3
F32_TOLERANCE = 1e-6
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rope_parameters": ROPE,
}
ROWS = [
    (model, quantize, convention)
    for model in ("dense", "mixture")
    for quantize in ("nvfp4", "mxfp8")
    for convention in ("compressed-tensors", "modelopt")
]


def deepwell(*args):
    args = [str(arg) for arg in args]
    done = subprocess.run([DEEPWELL, *args], capture_output=True, text=True)
    assert done.returncode == 0, f"{args}: {done.stderr}"
    return done.stdout


class Runs:
    """Runs and their exports, each made once."""

    def __init__(self, folder):
        self.folder = folder
        self.made = {}
        text = (ROOT / "ARCHITECTURE.md").read_bytes()
        self.text = folder / "text.txt"
        self.text.write_bytes(text)
        self.eval_text = folder / "eval.txt"
        self.eval_text.write_bytes(text[: 32 * SEQ + 1])

    def make(self, *key, make):
        if key not in self.made:
            path = self.folder / "-".join(key)
            make(path)
            self.made[key] = path
        return self.made[key]

    def run(self, model):
        def train(path):
            name = "llama-micro"
            if model == "mixture":
                name = self.folder / "mixture.json"
                name.write_text(json.dumps(MIXTURE))
            sizes = ["--steps", 20, "--seq-len", SEQ, "--batch-size", 4, "--eval-tokens", 512]
            options = ["--model", name, "--data", self.text, "--precision", "nvfp4", "--out", path]
            deepwell("train", *options, *sizes, "--cache-dir", self.folder / "cache")

        return self.make(model, make=train)

    def exported(self, model, quantize, convention):
        run = self.run(model)

        def export(path):
            options = ["--to", path, "--quantize", quantize, "--format", convention]
            deepwell("export", "hf", run, *options)

        return self.make(model, quantize, convention, make=export)

    def dequantized(self, model, quantize, convention):
        folder = self.exported(model, quantize, convention)
        back = lambda path: deepwell("quantize", folder, path, "--dequantize")  # noqa: E731
        return self.make(model, quantize, convention, "back", make=back)

    def loss(self, model, *options):
        cache = ["--cache-dir", self.folder / "cache"]
        args = ["--data", self.eval_text, "--seq-len", SEQ, *cache, "--json", *options]
        return json.loads(deepwell("eval", model, *args))["loss"]

    def loss_of_transformers(self, folder, dtype):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        tokens = torch.tensor(list(self.eval_text.read_bytes()))
        with torch.no_grad():
            logits = model(tokens[:-1].view(-1, SEQ)).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    if not DEEPWELL.exists():
        pytest.fail(f"{DEEPWELL} is missing: `cargo test --workspace --no-run` builds it")
    return Runs(tmp_path_factory.mktemp("exported"))


def quantization(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def dequantized_by_compressed_tensors(folder, tensors):
    # Its names of an NVFP4 module leave out the input scale, so it would stay.
    inputs = [name for name in tensors if name.endswith(".input_global_scale")]
    for name in inputs:
        assert tensors[name].shape == (1,) and 0 < tensors.pop(name).item() < math.inf
    tensors = CompressedTensorsDequantizer(folder).validate(dict(tensors))
    return tensors, len(inputs)


def dequantized_of_modelopt(folder, tensors):
    """ModelOpt's arithmetic: the element, times the block scale, times the tensor scale."""
    packed = [name for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    nvfp4 = [name.removesuffix(".weight") for name in packed if name.endswith(".weight")]
    # The converter of compressed-tensors finds all names, and inverts both scales.
    converted = ModelOptNvfp4Converter(targets=nvfp4).process(dict(tensors))
    values = {}
    for module in nvfp4:
        scale = tensors.pop(f"{module}.weight_scale_2")
        assert scale.shape == ()
        assert converted[f"{module}.weight_global_scale"] == 1 / scale
        assert converted[f"{module}.input_global_scale"] == 1 / tensors.pop(f"{module}.input_scale")
        data = tensors.pop(f"{module}.weight")
        blocks = tensors.pop(f"{module}.weight_scale").float().repeat_interleave(16, dim=1)
        rows, cols = data.shape
        elements = unpack_fp4_from_uint8(data, rows, 2 * cols, torch.float32)
        values[f"{module}.weight"] = (elements * blocks * scale).bfloat16()
    mxfp8 = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    for name in mxfp8:
        exponents = tensors.pop(f"{name}_scale").int() - 127
        factors = torch.exp2(exponents.float()).repeat_interleave(32, dim=1)
        values[name] = (tensors.pop(name).float() * factors).bfloat16()
    return {**tensors, **values}, len(nvfp4)


@pytest.mark.parametrize("model, quantize, convention", ROWS)
def test_weights_are_dequantized_to_the_same_bits(runs, model, quantize, convention):
    folder = runs.exported(model, quantize, convention)
    ours = load_file(runs.dequantized(model, quantize, convention) / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    if convention == "modelopt":
        theirs, count = dequantized_of_modelopt(folder, stored)
    else:
        theirs, count = dequantized_by_compressed_tensors(folder, stored)
    assert (count > 0) == (quantize == "nvfp4")
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype, name
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("quantize", ["nvfp4", "mxfp8"])
def test_transformers_computes_the_loss_of_the_run(runs, quantize):
    """With quantized activations, as compressed-tensors rounds them."""
    folder = runs.exported("dense", quantize, "compressed-tensors")
    theirs = runs.loss_of_transformers(folder, torch.bfloat16)
    ours = runs.loss(runs.run("dense"), "--precision", quantize)
    assert abs(theirs / ours - 1) < LOSS_TOLERANCE, (theirs, ours)


@pytest.mark.parametrize("quantize", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_dequantized_folders_have_one_loss(runs, model, quantize):
    folder = runs.dequantized(model, quantize, "modelopt")
    ours = runs.loss(folder, "--precision", "f32")
    theirs = runs.loss_of_transformers(folder, torch.float32)
    assert abs(theirs / ours - 1) < F32_TOLERANCE, (theirs, ours)
    in_format = runs.loss(runs.run(model), "--precision", quantize)
    assert abs(ours / in_format - 1) < LOSS_TOLERANCE, (ours, in_format)


def test_logits_of_quantized_weights_are_those_of_dequantized_ones(runs):
    """Weights alone are quantized: a folder knows no activations."""
    source = runs.dequantized("dense", "mxfp8", "modelopt")
    folder = runs.folder / "weights-only"
    deepwell("export", "hf", source, "--to", folder, "--quantize", "nvfp4")
    assert "input_activations" not in quantization(folder)["config_groups"]["group_0"]
    back = runs.folder / "weights-only-back"
    deepwell("quantize", folder, back, "--dequantize")
    tokens = torch.tensor(list(runs.eval_text.read_bytes()))[: 2 * SEQ].view(2, SEQ)
    logits = []
    for path in (folder, back):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
