"""Trains small random models in PyTorch and in Deepwell and compares, step by step; then exports them.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    cargo build --release -p deepwell-cli
    venv/bin/python scripts/compare_transformers.py target/release/deepwell

Each model is saved as a Hugging Face folder, or exported with torch.export as a .pt2 archive, and
trained for 20 steps in float32 by `deepwell train` and by PyTorch's AdamW on the same batches: the
order of windows is worked out here again from the description in
deepwell-trainer/data/src/loader.rs. Compared are the losses of all steps, the held-out loss, the
weights that `deepwell export hf` writes, and what transformers computes with them once
`from_pretrained` has loaded the folder with nothing missing and nothing unexpected. The tokenizer
of a run on bytes must give AutoTokenizer the same tokens.

Runs on a CPU, without a network. Not a part of CI, which has no Python: run it nightly. Exit code 1
if any model differs by more than the tolerance.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers as hf
from safetensors.torch import load_file

VOCAB, SEQ, BATCH, STEPS, SEED = 96, 16, 2, 20, 5
EVAL_TOKENS = 8 * SEQ
# Relative. Losses of 20 steps of float32 differed by 3.5e-7 at most when this was last measured.
TOLERANCE = 2e-6
# Weights go through 20 updates of AdamW, which divides small gradients by small roots: relative to
# the largest weight of a tensor.
WEIGHT_TOLERANCE = 1e-4
# Gradients below this part of the model's largest are rounding, which AdamW scales up to a whole
# step: nothing determines what such a weight becomes. They are those of the biases of keys where
# positions are not rotated into them: softmax takes away what is added to all scores of a query.
ROUNDING = 1e-6
RATE, WARMUP, FINAL, DECAY = 1e-3, 4, 0.1, 0.1
MASK = (1 << 64) - 1


# --- The batches of deepwell-trainer/data/src/loader.rs ---------------------------------------


def mix(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def permuted(count, seed, index):
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            turn = ((turn >> 8) | (turn << 56)) & MASK
            left, right = right, left ^ (mix(mix(seed ^ turn) ^ right) & mask)
        index = left << half | right
        if index < count:
            return index


def train_batch(tokens, index):
    windows = max(1, (len(tokens) - SEQ) // SEQ)
    offsets = min(len(tokens) - windows * SEQ, SEQ)
    rows = []
    for row in range(BATCH):
        epoch, window = divmod(index * BATCH + row, windows)
        seed = mix((mix(SEED) + epoch) & MASK)
        start = mix(seed ^ 0x6F6666736574) % offsets + permuted(windows, seed, window) * SEQ
        rows.append(tokens[start : start + SEQ + 1])
    return torch.tensor(rows)


def eval_windows(tokens):
    batches = -(-EVAL_TOKENS // (BATCH * SEQ))
    windows, room = batches * BATCH, (len(tokens) - 1) // SEQ
    starts = [at * room // windows * SEQ for at in range(windows)]
    return torch.tensor([tokens[start : start + SEQ + 1] for start in starts])


def write_bin(path, tokens):
    header = torch.zeros(256, dtype=torch.int32)
    header[0], header[1], header[2] = 20240520, 1, len(tokens)
    words = torch.tensor(tokens, dtype=torch.int16)
    path.write_bytes(header.numpy().tobytes() + words.numpy().tobytes())


# --- PyTorch ------------------------------------------------------------------------------------


def loss_of(model, rows):
    logits = model(input_ids=rows[:, :-1], **model.options)
    logits = getattr(logits, "logits", logits)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def rate_at(step):
    if step <= WARMUP:
        return RATE * step / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return RATE * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model, tokens):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss = loss_of(model, train_batch(tokens, step - 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, undetermined(model, optimizer)


def undetermined(model, optimizer):
    """By parameter, which elements had gradients of rounding alone."""
    sizes = {name: optimizer.state[p]["exp_avg_sq"].sqrt() for name, p in model.named_parameters()}
    limit = ROUNDING * max(size.max() for size in sizes.values())
    return {name: size < limit for name, size in sizes.items()}


# --- Deepwell -----------------------------------------------------------------------------------


def deepwell(binary, *args):
    done = subprocess.run([binary, *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"deepwell {' '.join(map(str, args))}: {done.stderr.strip()}")
    return done.stdout


def run_deepwell(binary, folder, model, data):
    out = folder / "run"
    run_file = folder / "run.toml"
    settings = dict(
        model=str(model), data=[str(path) for path in data], cache_dir=str(folder / "cache"),
        out=str(out), precision="f32", steps=STEPS, seq_len=SEQ, batch_size=BATCH, seed=0,
        data_seed=SEED, learning_rate=RATE, warmup_steps=WARMUP, final_learning_rate_ratio=FINAL,
        max_grad_norm=1e9, eval_tokens=EVAL_TOKENS, eval_every=STEPS, checkpoint_every=STEPS,
    )
    run_file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    deepwell(binary, "train", "--run-file", run_file, "--json")
    losses, held_out = [], None
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses.append(record["loss"])
        held_out = record.get("val_loss", held_out)
    return out, losses, held_out


# --- Models -------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    tie_word_embeddings=False,
)
NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)


def of_class(name, **changes):
    config = getattr(hf, f"{name}Config")(**{**SIZES, **changes})
    return getattr(hf, f"{name}ForCausalLM")(config)


def gpt2(**changes):
    sizes = dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **NO_DROPOUT, **changes}))


EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
QWEN_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)


def rope(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


FOLDERS = {
    "llama": lambda: of_class("Llama"),
    "llama tied": lambda: of_class("Llama", tie_word_embeddings=True),
    "llama heads of 16": lambda: of_class("Llama", head_dim=16),
    "llama one kv head": lambda: of_class("Llama", num_key_value_heads=1),
    "llama biases": lambda: of_class("Llama", attention_bias=True, mlp_bias=True),
    "llama linear": lambda: of_class("Llama", **rope("linear", factor=2.0)),
    "llama dynamic": lambda: of_class("Llama", **rope("dynamic", factor=2.0)),
    "llama llama3": lambda: of_class(
        "Llama", **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                        original_max_position_embeddings=32)),
    "llama yarn": lambda: of_class(
        "Llama", **rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "mistral": lambda: of_class("Mistral"),
    "mistral no window": lambda: of_class("Mistral", sliding_window=None),
    "qwen2": lambda: of_class("Qwen2"),
    "qwen2 tied": lambda: of_class("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: of_class("Qwen3", head_dim=16),
    "qwen3 tied": lambda: of_class("Qwen3", head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: of_class("Mixtral", **EXPERTS),
    # Not one expert a token: its gate over the sum of its gates is 1 whatever the router says, so
    # that nothing but rounding determines the router's gradient.
    "mixtral 2 of 3": lambda: of_class("Mixtral", num_local_experts=3, num_experts_per_tok=2),
    "mixtral all": lambda: of_class("Mixtral", num_local_experts=3, num_experts_per_tok=3),
    "qwen3_moe": lambda: of_class("Qwen3Moe", **QWEN_EXPERTS),
    "qwen3_moe normalized": lambda: of_class("Qwen3Moe", norm_topk_prob=True, **QWEN_EXPERTS),
    "qwen3_moe one dense": lambda: of_class("Qwen3Moe", mlp_only_layers=[0], **QWEN_EXPERTS),
    "gpt2": lambda: gpt2(),
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2 n_inner gelu": lambda: gpt2(n_inner=40, activation_function="gelu"),
    "gpt2 unscaled": lambda: gpt2(scale_attn_weights=False),
}


class MaskFill(torch.nn.Module):
    """Attention by hand, as nanoGPT has it where PyTorch has no fused one."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 32)
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
        return self.head(x + self.proj(y.transpose(1, 2).contiguous().view(batch, seq, 32)))


class Encoder(torch.nn.Module):
    """A language model of PyTorch's own modules."""

    def __init__(self, causal, **options):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCAB, 32), torch.nn.Embedding(32, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, **options)
        last = torch.nn.LayerNorm(32) if options.get("norm_first") else None
        self.encoder = torch.nn.TransformerEncoder(layer, 2, norm=last, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, VOCAB, bias=False)
        self.causal, self.turned = causal, not options.get("batch_first", False)

    def forward(self, input_ids):
        seq = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions(torch.arange(seq))
        x = x.transpose(0, 1) if self.turned else x
        mask = torch.nn.Transformer.generate_square_subsequent_mask(seq) if self.causal else None
        x = self.encoder(x, mask=mask, is_causal=self.causal)
        return self.head(x.transpose(0, 1) if self.turned else x)


class OnAttention(torch.nn.Module):
    """A GPT whose blocks are made of nn.MultiheadAttention."""

    def __init__(self, batch_first, need_weights):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCAB, 32), torch.nn.Embedding(32, 32)
        block = lambda: torch.nn.ModuleDict(dict(
            norm=torch.nn.LayerNorm(32),
            attn=torch.nn.MultiheadAttention(32, 4, batch_first=batch_first),
            mlp=torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 48),
                                    torch.nn.ReLU(), torch.nn.Linear(48, 32))))
        self.blocks = torch.nn.ModuleList(block() for _ in range(2))
        self.head = torch.nn.Linear(32, VOCAB, bias=False)
        self.turned, self.need_weights = not batch_first, need_weights

    def forward(self, input_ids):
        seq = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions(torch.arange(seq))
        mask = torch.triu(torch.ones(seq, seq, dtype=torch.bool), diagonal=1)
        for block in self.blocks:
            h = block["norm"](x)
            h = h.transpose(0, 1) if self.turned else h
            h, _ = block["attn"](h, h, h, attn_mask=mask, need_weights=self.need_weights)
            x = x + (h.transpose(0, 1) if self.turned else h)
            x = x + block["mlp"](x)
        return self.head(x)


EAGER = dict(attn_implementation="eager")
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
# Name: model, and whether it is decomposed to Core ATen first.
ARCHIVES = {
    "llama": (lambda: of_class("Llama"), False),
    "llama core": (lambda: of_class("Llama"), True),
    "llama eager": (lambda: of_class("Llama", **EAGER), False),
    "llama tied": (lambda: of_class("Llama", tie_word_embeddings=True), False),
    "llama biases": (lambda: of_class("Llama", attention_bias=True, mlp_bias=True), False),
    "qwen2": (lambda: of_class("Qwen2"), False),
    "qwen3": (lambda: of_class("Qwen3", head_dim=16), False),
    "phi3": (lambda: of_class("Phi3", **SPECIAL), False),
    "phi3 core": (lambda: of_class("Phi3", **SPECIAL), True),
    "gpt2": (lambda: gpt2(), False),
    "gpt2 core": (lambda: gpt2(**EAGER), True),
    # With eight letters the first line of the zip's list of entries has 76 bytes.
    "maskfill": (MaskFill, False),
    "maskfill core": (MaskFill, True),
    "encoder": (lambda: Encoder(causal=True, batch_first=True), False),
    # With these weights a ReLU stands within rounding of its kink, and losses differ by 2.3e-6.
    "encoder core": (lambda: Encoder(causal=True, batch_first=True, norm_first=True,
                                     activation="gelu"), True),
    "encoder seq first": (lambda: Encoder(causal=True, norm_first=True, activation="gelu"), False),
    "encoder both ways": (lambda: Encoder(causal=False), False),
    "mha": (lambda: OnAttention(batch_first=True, need_weights=False), False),
    "mha seq first": (lambda: OnAttention(batch_first=False, need_weights=False), False),
    "mha weights": (lambda: OnAttention(batch_first=True, need_weights=True), False),
    "mha weights core": (lambda: OnAttention(batch_first=False, need_weights=True), True),
}


def fresh(make, number):
    """A model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(number)
    model = make().eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        is_gain = parameter.ndim == 1 and bool((parameter == 1).all())
        parameter.data = 1 + 0.2 * noise if is_gain else 0.2 * noise
    model.options = dict(use_cache=False) if hasattr(model, "config") else {}
    return model


# --- Comparisons --------------------------------------------------------------------------------


def relative(got, expected):
    pairs = list(zip(got, expected, strict=True))
    return max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)


def tensors_of(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def weight_difference(folder, model, left_out):
    """Largest difference to PyTorch's weights, over the largest weight of the tensor, and how many
    weights were not compared. Of those that `left_out` has only the biases of keys may be there."""
    written = tensors_of(folder)
    # As it saves them, experts one by one.
    with tempfile.TemporaryDirectory() as own:
        state = model.state_dict()
        if any(".experts." in name for name in state):
            model.save_pretrained(own)
            state = tensors_of(pathlib.Path(own))
    worst, count = 0.0, 0
    for name, tensor in written.items():
        scale = state[name].abs().max().clamp(min=1e-3)
        difference = (tensor.float() - state[name]).abs() / scale
        if name in left_out and "attn" in name and name.endswith("bias"):
            count += int(left_out[name].sum())
            difference = difference[~left_out[name]]
        worst = max(worst, difference.max().item())
    return worst, count


def loaded(folder, dtype=torch.float32):
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise RuntimeError(f"from_pretrained: {wrong}")
    model.options = dict(use_cache=False)
    return model.eval()


def compare(binary, name, make, number, data, tokens, kind, decompose=False):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = fresh(make, number)
        stem = name.replace(" ", "_")
        source = folder / (f"{stem}.pt2" if kind == "pt2" else stem)
        if kind == "pt2":
            exported = torch.export.export(
                model, (), dict(input_ids=torch.zeros(BATCH, SEQ, dtype=torch.long), **model.options))
            torch.export.save(exported.run_decompositions() if decompose else exported, source)
        else:
            model.save_pretrained(source, max_shard_size="20KB" if number % 2 else "5GB")
        out, losses, held_out = run_deepwell(binary, folder, source, data)
        expected, left_out = train(model, tokens["train"])
        held = eval_windows(tokens["val"])
        result = dict(kind=kind, name=name, losses=relative(losses, expected))
        with torch.no_grad():
            result["held_out"] = relative([held_out], [loss_of(model, held).item()])
        # Export: in float32 whole, and in bfloat16 in shards.
        whole, half = folder / "whole", folder / "half"
        extra = []
        if kind == "pt2" and hasattr(model, "config"):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder / "config")
            extra = ["--config", folder / "config" / "config.json"]
        deepwell(binary, "export", "hf", out, "--to", whole, *extra)
        deepwell(binary, "export", "hf", out, "--to", half, *extra,
                 "--dtype", "bf16", "--shard-size", "20KB")
        result["weights"], result["left_out"] = weight_difference(whole, model, left_out)
        if hasattr(model, "config"):
            again = loaded(whole)
        else:
            again = fresh(make, number)
            again.load_state_dict(load_file(whole / "model.safetensors"))
        with torch.no_grad():
            result["export"] = relative([loss_of(again, held).item()], [held_out])
        if hasattr(model, "config"):
            rounded = loaded(half, torch.bfloat16).state_dict()
            for key, tensor in again.state_dict().items():
                if not torch.equal(tensor.bfloat16(), rounded[key]):
                    raise RuntimeError(f"`{key}` in bfloat16 is not the rounded tensor")
        return result


def preset(binary, name, text):
    """A preset on bytes: what the run evaluated is what transformers computes from its export."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        out, whole = folder / "run", folder / "whole"
        run_file = folder / "run.toml"
        run_file.write_text(
            f"data = [{json.dumps(str(text))}]\ncache_dir = {json.dumps(str(folder / 'cache'))}\n"
            f"out = {json.dumps(str(out))}\nmodel = {json.dumps(name)}\nprecision = 'f32'\n"
            f"steps = 2\nseq_len = 32\nbatch_size = 2\neval_tokens = 256\neval_every = 2\n")
        deepwell(binary, "train", "--run-file", run_file, "--json")
        deepwell(binary, "export", "hf", out, "--to", whole)
        model = loaded(whole)
        tokenizer = hf.AutoTokenizer.from_pretrained(whole)
        sample = "let x = 'é';\r\n\t  don't \u0100\u2028 \U0001F30A\x00 end "
        ids = tokenizer(sample)["input_ids"]
        if ids != list(sample.encode()):
            raise RuntimeError(f"AutoTokenizer: {ids}")
        if tokenizer.decode(ids) != sample:
            raise RuntimeError(f"AutoTokenizer: {tokenizer.decode(ids)!r}")
        prompt = torch.tensor([ids[:20]])
        with torch.no_grad():
            row = model(prompt, use_cache=False).logits[0, -1, :256]
        report = json.loads(deepwell(
            binary, "generate", out, "--prompt", bytes(ids[:20]).decode(), "--max-tokens", 1,
            "--greedy", "--ignore-end", "--json"))
        if report["tokens"] != [row.argmax().item()]:
            raise RuntimeError(f"greedy token {report['tokens']}, transformers {row.argmax()}")
        return dict(kind="preset", name=name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary", help="the deepwell command")
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--presets", nargs="*", default=["llama-micro", "parity-3m", "moe-micro", "gpt2-micro"])
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    # Tokens that no family treats as special.
    draw = lambda count: torch.randint(3, VOCAB, (count,)).tolist()
    tokens = dict(train=draw(400), val=draw(EVAL_TOKENS + 40))
    failed, rows = 0, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        data = [folder / "tokens_train_000.bin", folder / "tokens_val_000.bin"]
        write_bin(data[0], tokens["train"])
        write_bin(data[1], tokens["val"])
        text = folder / "text.txt"
        text.write_text("".join(f"{at * 2654435761 % 2**32} " for at in range(6000)))
        work = [("folder", name, make, False) for name, make in FOLDERS.items()]
        work += [("pt2", name, make, core) for name, (make, core) in ARCHIVES.items()]
        work += [("preset", name, None, False) for name in options.presets]
        for number, (kind, name, make, core) in enumerate(work):
            if options.only not in f"{kind} {name}":
                continue
            try:
                if kind == "preset":
                    row = preset(options.binary, name, text)
                else:
                    row = compare(options.binary, name, make, number, data, tokens, kind, core)
                worst = max(row.get(key, 0.0) for key in ("losses", "held_out", "export"))
                is_off = worst > TOLERANCE or row.get("weights", 0.0) > WEIGHT_TOLERANCE
                row["verdict"] = "differs" if is_off else "agrees"
            except Exception as error:  # One model that fails does not hide the others.
                row = dict(kind=kind, name=name, verdict=f"failed: {error}")
            failed += row["verdict"] != "agrees"
            rows.append(row)
            numbers = [f"{row[key]:.1e}" if key in row else "" for key in
                       ("losses", "held_out", "weights", "export")]
            numbers.append(str(row.get("left_out", "")))
            print(f"| {kind} | {name} | {' | '.join(numbers)} | {row['verdict']} |", flush=True)
    print(f"\n{len(rows) - failed} of {len(rows)} agree; torch {torch.__version__}, "
          f"transformers {hf.__version__}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
