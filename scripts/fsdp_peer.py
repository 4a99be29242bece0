"""Times a training step of PyTorch's FSDP2 with torch.compile, to stand beside `deepwell train --zero 3`.

    torchrun --nproc-per-node 2 scripts/fsdp_peer.py --model llama-1.1b --batch 8 --seq 2048

FP32 parameters and AdamW moments are sharded over the ranks; layers are gathered and computed in
BF16, gradients reduced in FP32 (`--reduce bf16` halves those bytes). Each decoder layer is compiled
and sharded by itself, as torchtitan does. `--batch` is of one rank. Tokens are random, as nothing
depends on them. Rank 0 prints one JSON line: tokens/s of all ranks (median of the steps), peak
memory of rank 0.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = {
    # hidden, intermediate, layers, heads, key-value heads
    "llama-134m": (768, 2048, 12, 12, 12),
    "llama-1.1b": (2048, 5632, 22, 32, 4),
    "llama-7b": (4096, 11008, 32, 32, 32),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-1.1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)

    hidden, intermediate, layers, heads, kv_heads = MODELS[args.model]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32000,
        max_position_embeddings=args.seq,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.reduce]
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq), device=device)

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    step_ms = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    if rank == 0:
        row = {
            "peer": f"torch {torch.__version__} FSDP2, torch.compile of layers, BF16",
            "model": args.model,
            "ranks": world,
            "reduce": args.reduce,
            "tokens_of_a_rank": args.batch * args.seq,
            "step_ms": round(step_ms, 2),
            "tokens_per_s": round(world * args.batch * args.seq / (step_ms * 1e-3)),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


main()
