#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets into fuzz/corpus/, from what tests use.

Needs nothing but Python. Inputs that are there stay.
"""

import json
import re
import struct
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fuzz" / "corpus"
# Calls of an exported graph that go into one input, and after how many the next begins. Long inputs
# are slow: most are short, and the others hold whole patterns, attention and norms.
WINDOWS = [(3, 2), (14, 14)]


def write(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(data, str):
        data = data.encode()
    (folder / f"seed-{name}").write_bytes(data)


def texts(pattern, expression):
    """What an expression matches in Rust files."""
    for path in sorted(ROOT.glob(pattern)):
        for match in re.finditer(expression, path.read_text(), re.S):
            yield match.group(1)


def configs():
    number = 0
    for text in texts("deepwell-ir/**/*.rs", r'r#"(\s*\{.*?\})\s*"#'):
        try:
            config = json.loads(text)
        except ValueError:
            continue
        write("config_json", number, json.dumps(config))
        number += 1
    base = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "max_position_embeddings": 128, "head_dim": 8, "hidden_act": "silu"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    deepseek = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
                "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
                "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_scaling": yarn}
    for kind, extra in {
        "llama": {"rope_scaling": llama3},
        "mistral": {"sliding_window": 16},
        "qwen2": {},
        "qwen3": {},
        "mixtral": experts,
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                      "norm_topk_prob": True},
        "deepseek_v3": deepseek,
        "gpt_oss": experts | {"rope_scaling": yarn, "sliding_window": 16, "attention_bias": True,
                              "layer_types": ["sliding_attention", "full_attention"],
                              "quantization_config": {"quant_method": "mxfp4"}},
        "gpt2": None,
    }.items():
        config = {"model_type": kind} | base | (extra or {})
        if kind == "gpt2":
            config = {"model_type": kind, "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4,
                      "n_positions": 64, "n_inner": None, "layer_norm_epsilon": 1e-5,
                      "activation_function": "gelu_new", "initializer_range": 0.02}
        write("config_json", kind, json.dumps(config))


def header(tensors, metadata=None):
    """A safetensors header: name, type, shape and bytes of each tensor."""
    entries, end = {}, 0
    if metadata:
        entries["__metadata__"] = metadata
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries)
    return struct.pack("<H", end) + (text + " " * (-len(text) % 8)).encode()


def safetensors():
    matrices = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer = "model.layers.0."
    model = [("model.embed_tokens.weight", "F32", [4, 2], 32), ("model.norm.weight", "F32", [2], 8)]
    model += [(f"{layer}{name}.weight", "F32", [2, 2], 16) for name in matrices]
    model += [(f"{layer}{name}_layernorm.weight", "F32", [2], 8)
              for name in ["input", "post_attention"]]
    write("safetensors", "llama", header(model, {"format": "pt"}))
    wide = [(f"{layer}mlp.up_proj.weight", dtype, [3, 64], 192 * size)
            for dtype, size in [("BF16", 2)]]
    write("safetensors", "wide", header(wide))
    for name, shape in [("empty", [0, 4]), ("scalar", [])]:
        size = 4 if name == "scalar" else 0
        write("safetensors", name, header([("model.layers.0.mlp.up_proj.weight", "F32", shape, size)]))
    plain = header(wide)[2:]
    write("safetensors", "file", b"\xff\xff" + struct.pack("<Q", len(plain)) + plain + bytes(384))
    for path in sorted(ROOT.glob("deepwell-ir/tests/pt2/sine.safetensors")):
        write("safetensors", "sine", b"\xff\xff" + path.read_bytes())
    name = f"{layer}mlp.up_proj.weight"
    for kind, codes, scales in [("mxfp8", 32, ("U8", 1)), ("mxfp6", 24, ("U8", 1)),
                                ("mxfp4", 16, ("U8", 1)), ("nvfp4", 16, ("F8_E4M3", 2))]:
        for layout in ["plain", "tiled"]:
            count = 2 * scales[1] if layout == "plain" else 512
            parts = [(name, "F8_E4M3" if kind == "mxfp8" else "U8", [2, codes], 2 * codes),
                     (f"{name}_scale", "U8" if layout == "tiled" else scales[0],
                      [2, scales[1]] if layout == "plain" else [1, 512], count)]
            if kind == "nvfp4":
                parts.append((f"{name}_scale_2", "F32", [], 4))
            original = {"dtype": "BF16", "shape": [2, 32]}
            quantized = {"version": 1, "format": kind, "scale_rule": "rceil", "layout": layout,
                         "tensors": {name: original}}
            text = json.dumps(quantized)
            write("safetensors", f"{kind}-{layout}", header(parts, {"deepwell_quantized": text}))


def window(graph, signature, nodes):
    """A graph of a few of another's calls; what they read and do not make is given by the caller."""
    made, read, outputs = set(), {}, []

    def names(value, into):
        if isinstance(value, dict):
            name = value.get("name") if set(value) == {"name"} else None
            if isinstance(name, str):
                into[name] = True
            for item in value.values():
                names(item, into)
        elif isinstance(value, list):
            for item in value:
                names(item, into)

    for node in nodes:
        used, given = {}, {}
        names([item["arg"] for item in node["inputs"]], used)
        names(node["outputs"], given)
        read.update({name: True for name in used if name not in made})
        made.update(given)
        outputs = list(given)
    specs = []
    known = {}
    for spec in signature["input_specs"]:
        kind, body = next(iter(spec.items()))
        arg = body.get("arg", {})
        known[arg.get("name") or arg.get("as_tensor", {}).get("name")] = spec
        if kind == "user_input":
            specs.append(spec)
    for name in read:
        spec = known.get(name) or {"user_input": {"arg": {"as_tensor": {"name": name}}}}
        if spec not in specs:
            specs.append(spec)
    tensors = {name: graph["tensor_values"][name]
               for name in [*read, *made, *[next(iter(spec.values()))["arg"].get("as_tensor", {}).get("name")
                                            for spec in specs]]
               if name in graph["tensor_values"]}
    symbols = {name: value for name, value in graph.get("sym_int_values", {}).items()
               if f'"{name}"' in json.dumps(nodes)}
    output_specs = [{"user_output": {"arg": {"as_tensor": {"name": name}}}} for name in outputs[:1]]
    return {
        "schema_version": {"major": 8},
        "graph_module": {
            "graph": {"nodes": nodes, "tensor_values": tensors, "sym_int_values": symbols},
            "signature": {"input_specs": specs, "output_specs": output_specs},
        },
    }


# What nothing reads, or what stands for the same when it is not there.
UNREAD = {"device", "layout", "requires_grad", "metadata", "kind", "is_hop_single_tensor_return",
          "expr_str", "range_constraints"}


def shorter(value):
    """The same graph in fewer bytes: sizes as plain numbers, without what is not read."""
    if isinstance(value, list):
        return [shorter(item) for item in value]
    if not isinstance(value, dict):
        return value
    size = value.get("as_expr", {}).get("hint", {}).get("as_int") if set(value) == {"as_expr"} else None
    if size is not None:
        return {"as_int": size}
    is_node = "target" in value
    return {key: shorter(item) for key, item in value.items()
            if key not in UNREAD and not (is_node and key == "name")}


def short_names(model):
    """With `a`, `b` and so on for the names of tensors."""
    graph = model["graph_module"]["graph"]
    given = {name: chr(97 + at % 26) + (str(at // 26) if at > 25 else "")
             for at, name in enumerate(graph["tensor_values"])}

    def renamed(value):
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {key: given.get(item, item) if key == "name" and isinstance(item, str) else renamed(item)
                for key, item in value.items()}

    model = renamed(model)
    graph = model["graph_module"]["graph"]
    graph["tensor_values"] = {given[name]: item for name, item in graph["tensor_values"].items()}
    return model


def pt2():
    for path in sorted(ROOT.glob("deepwell-ir/tests/pt2/*.pt2")):
        archive = zipfile.ZipFile(path)
        root = path.stem
        model = json.loads(archive.read(f"{root}/models/model.json"))
        tables = {name.removeprefix(f"{root}/"): json.loads(archive.read(name))
                  for name in archive.namelist() if name.endswith("_config.json")}
        sizes = {entry.filename.removeprefix(f"{root}/"): entry.file_size
                 for entry in archive.infolist()}
        graph, signature = model["graph_module"]["graph"], model["graph_module"]["signature"]
        nodes = graph["nodes"]
        windows = [(start, length) for length, step in WINDOWS
                   for start in range(0, len(nodes), step)]
        for start, length in windows:
            small = window(graph, signature, nodes[start:start + length])
            # One of each archive as PyTorch writes it.
            small = short_names(shorter(small)) if start else small
            text = json.dumps(small)
            entries = {"m/archive_format": "pt2", "m/byteorder": "little",
                       "m/models/model.json": small}
            for name, table in tables.items():
                # Only what the window reads, with small files.
                kept = {key: shorter(item) for key, item in table["config"].items()
                        if f'"{key}"' in text}
                for item in kept.values():
                    file = name.rsplit("/", 1)[0] + "/" + item["path_name"]
                    entries[f"m/{file}"] = sizes[file]
                entries[f"m/{name}"] = {"config": kept}
            write("pt2", f"{root}-{length}-{start}", json.dumps(entries, separators=(",", ":")))


def tokenizers():
    vocabulary = {chr(code): code - 33 for code in range(33, 127)} | {"\u0120": 94, "he": 95,
                                                                     "ll": 96, "<eos>": 97}
    added = [{"id": 97, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
            "decoder": byte_level}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
           "ignore_merges": False, "vocab": vocabulary, "merges": [["h", "e"], ["l", "l"]]}
    words = {"type": "WordLevel", "vocab": {"Hello": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    pieces = {"type": "WordPiece", "vocab": {"he": 0, "##llo": 1, "[UNK]": 2, "[CLS]": 3, "[SEP]": 4},
              "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100}
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
               "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["H", -2.0], ["ello", -3.0]]}
    split = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\s+|\\d"}, "behavior": "Isolated",
         "invert": False}, {"type": "Digits", "individual_digits": True}, byte_level]}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always",
                 "split": True}
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [3], "tokens": ["[CLS]"]}}}
    normal = {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Strip", "strip_left": True,
         "strip_right": True}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
        {"type": "Prepend", "prepend": "_"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
         "strip_accents": None, "lowercase": True}]}
    small = dict(list(vocabulary.items())[60:])
    for name, change in {
        "bpe": {"model": bpe | {"vocab": small}},
        "bpe-split": {"model": bpe | {"vocab": small, "byte_fallback": True}, "pre_tokenizer": split},
        "words": {"model": words, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []},
        "pieces": {"model": pieces, "pre_tokenizer": {"type": "BertPreTokenizer"},
                   "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
                   "post_processor": template, "normalizer": normal, "added_tokens": []},
        "unigram": {"model": unigram, "pre_tokenizer": metaspace, "decoder": metaspace,
                    "added_tokens": []},
        "padded": {"model": words, "added_tokens": [],
                   "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                                  "stride": 1},
                   "padding": {"strategy": "BatchLongest", "direction": "Right",
                               "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0,
                               "pad_token": "[PAD]"}},
    }.items():
        write("tokenizer_json", name, json.dumps(base | change))


def settings():
    write("run_toml", "all", """\
model = "parity-3m"
data = ["a.txt", "b/"]
tokenizer = "tokenizer.json"
cache_dir = "cache"
out = "out"
device = "cpu"
precision = "mxfp8"
policy = "policy.toml"
steps = 100
seq_len = 128
batch_size = 8
micro_batch = 4
recompute = "selective"
seed = 1
data_seed = 2
learning_rate = 3e-4
warmup_steps = 10
final_learning_rate_ratio = 0.1
max_grad_norm = 1.0
eval_every = 10
eval_tokens = 4096
checkpoint_every = 50
keep_last = 2
audit = true
[optimizer]
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
""")
    write("policy_toml", "all", """\
precision = "mxfp8"
granularity = 32
scale_rule = "rceil"
weight_block = "1d"
fallback = "strict"
keep_first_last_bf16 = false
[[rule]]
tensors = "layers.{0,31}.*"
format = "bf16"
[[rule]]
tensors = "*.mlp.[gu]*"
format = "nvfp4"
""")


def manifests():
    entry = {"name": "w", "section": "weights", "dtype": "f32", "global_shape": [2, 4],
             "global_offset": [0, 0], "shape": [2, 4], "file": "a", "begin": 32, "bytes": 32,
             "blake3": "0" * 64}
    sections = ["plan", "policy", "guards", "rng", "data_position", "run"]
    manifest = {"format_version": 1, "step": 3} | {name: None for name in sections} | {
        "files": [{"name": "a", "bytes": 64, "blake3": "0" * 64},
                  {"name": "b", "bytes": 4096, "blake3": "0" * 64}],
        "tensors": [entry, entry | {"name": "v", "file": "b", "begin": 0, "shape": [8],
                                    "global_shape": [8], "global_offset": [0]}]}
    for number, dtype in enumerate(["F32", "f32", "BF16", "bf16", "U8", "u8"]):
        manifest["tensors"][1] |= {"dtype": dtype}
        for section in ["weights", "Weights", "master"]:
            manifest["tensors"][0] |= {"dtype": dtype, "section": section}
            manifest["tensors"][1] |= {"section": section}
            size = {"F": 32, "f": 32, "B": 16, "b": 16, "U": 8, "u": 8}[dtype[0]]
            for tensor in manifest["tensors"]:
                tensor["bytes"] = size
            write("manifest", f"{number}-{section}", json.dumps(manifest))


def tokens():
    for name, magic, body in [("2", 20240520, bytes(4)), ("4", 20240801, bytes(8))]:
        width = int(name)
        fields = struct.pack("<iii", magic, 1, len(body) // width)
        write("token_bin", name, fields + body)
        start = struct.pack("<8sIIQII", b"DWTOKENS", 1, width, len(body) // width, 0, 0)
        write("token_cache", name, b"\x01" + start.ljust(96, b"\0") + struct.pack("<Q", 1)
              + bytes(24) + body)


def ptx():
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n"
    for path in sorted(ROOT.glob("deepwell-kernels/emulator/tests/fixtures/*.ptx")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        parts = re.split(r"(?=\.visible \.entry)", text)
        for number, part in enumerate(parts[1:]):
            write("ptx", f"{path.stem}-{number}", head + re.sub(r"\n\s*\n+", "\n", part))
    for number, text in enumerate(texts("deepwell-kernels/emulator/**/*.rs", r'"(\s*\.version.*?)"')):
        write("ptx", f"text-{number}", text.replace("\\n", "\n"))


for function in [configs, safetensors, pt2, tokenizers, settings, manifests, tokens, ptx]:
    function()
for folder in sorted(CORPUS.iterdir()):
    print(f"{folder.name}: {len(list(folder.glob('seed-*')))} seeds")
