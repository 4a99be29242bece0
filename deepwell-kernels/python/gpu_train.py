"""Trains a model from random weights in one configuration, and times the steps.

    python3 gpu_train.py MODEL CONFIGURATION [--steps N] [--seed N] [--profile]

Prints one line of JSON. `gpu_check.py` starts one process for each configuration.
"""

import argparse
import json
import os
import statistics
import time

import torch

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
BF16 = torch.bfloat16
#: Layers, width, MLP width, heads, key-value heads, batch, seq.
MODELS = {
    "llama-134m": (12, 768, 2048, 12, 12, 16, 1024),
    "llama-1.1b": (22, 2048, 5632, 32, 4, 8, 2048),
}
CONFIGURATIONS = [
    "eager", "compile", "deepwell", "deepwell+compile", "deepwell-mxfp8", "deepwell-mxfp8+compile",
    "deepwell+loss", "deepwell+loss+compile", "deepwell-mxfp8+loss+compile",
    "liger", "liger+compile", "torchao-float8+compile",
]  # fmt: skip


def kernels_of(step, rows: int = 25) -> str:
    """Kernels of one step by their time on the device, and the time in which none runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        step_ms = 1e3 * (time.perf_counter() - begin)
    events = profiler.key_averages()
    events = sorted(events, key=lambda event: -event.self_device_time_total)
    busy_ms = sum(event.self_device_time_total for event in events) / 1e3
    lines = [f"step {step_ms:.1f} ms, kernels {busy_ms:.1f} ms, none {step_ms - busy_ms:.1f} ms"]
    for event in events[:rows]:
        total_ms = event.self_device_time_total / 1e3
        lines.append(f"{total_ms:8.2f} ms {event.count:5} x  {event.key[:90]}")
    return "\n".join(lines)


def train(
    model_name: str,
    configuration: str,
    steps: int,
    profiled: bool = False,
    seed: int = 0,
    warmed_up=None,
) -> dict:
    """Trains on sequences of random tokens that repeat, so that there is something to learn.
    ``warmed_up`` is called after three steps, which compile everything."""
    import transformers

    import deepwell

    layers, width, mlp, heads, kv_heads, batch, seq = MODELS[model_name]
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=seq,
        attn_implementation="sdpa",
    )  # fmt: skip
    if configuration.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).train()
    if configuration.startswith("deepwell"):
        precision = "mxfp8" if "mxfp8" in configuration else "bf16"
        fused_loss = "+loss" in configuration
        deepwell.optimize(net, precision=precision, fused_loss=fused_loss, verbose=True)
    if configuration.startswith("torchao"):
        from torchao.float8 import convert_to_float8_training

        last = "lm_head"
        convert_to_float8_training(net, module_filter_fn=lambda module, name: name != last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    call = torch.compile(net) if configuration.endswith("compile") else net
    generator = torch.Generator(device=DEVICE).manual_seed(seed + 1)
    base = torch.randint(0, 32000, (64, seq), device=DEVICE, generator=generator)
    losses, times = [], []

    def step():
        index = torch.randint(0, 64, (batch,), device=DEVICE, generator=generator)
        ids = base[index]
        loss = call(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(steps):
        torch.cuda.synchronize()
        if number == 3 and warmed_up:
            warmed_up()
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    if profiled:
        print(kernels_of(step), flush=True)
    step_s = statistics.median(times[len(times) // 2 :])
    record = {
        "section": "training", "model": model_name, "configuration": configuration, "steps": steps,
        "seed": seed,
        "step_ms": round(1e3 * step_s, 2), "tokens_per_s": round(batch * seq / step_s),
        "memory_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss_first": round(losses[0], 4), "loss_last": round(statistics.mean(losses[-5:]), 4),
        "losses": [round(x, 4) for x in losses],
    }  # fmt: skip
    if configuration.startswith("deepwell"):
        fallbacks = deepwell.report(net).fallbacks
        record["fallbacks"] = {": ".join(key): count for key, count in fallbacks.items()}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more step")
    arguments = parser.parse_args()
    record = train(
        arguments.model, arguments.configuration, arguments.steps, arguments.profile, arguments.seed
    )
    print(json.dumps(record))


if __name__ == "__main__":
    main()
