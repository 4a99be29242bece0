"""``deepwell.AdamW``, the profiler and experts on a GPU, beside PyTorch's.

    python3 gpu_optimizer.py [--out FOLDER]

Needs the wheel (or DEEPWELL_LIBRARY and PYTHONPATH) and transformers. Results are lines of JSON in
FOLDER/gpu_check.jsonl.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

import deepwell
from gpu_check import BF16, DEVICE, Log, median_us, relative

#: Layers, width, MLP width, key-value width and vocabulary of llama-1.1b.
SHAPE = (22, 2048, 5632, 256, 32000)


def parameters(dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients, of the sizes of llama-1.1b."""
    layers, width, mlp, kv, vocabulary = SHAPE
    layer = [(width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width),
             (width, mlp), (width,), (width,)]  # fmt: skip
    sizes = [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]
    made = []
    for size in sizes:
        parameter = torch.nn.Parameter(0.02 * torch.randn(size, device=DEVICE, dtype=dtype))
        parameter.grad = 0.01 * torch.randn_like(parameter)
        made.append(parameter)
    return made


def optimizer_steps(log: Log) -> None:
    """Ten steps from equal starts, with gradients that move in memory, against PyTorch in FP32."""
    shapes = [(512, 300), (7,), (1025,), (64, 64)]
    start = [torch.randn(shape, device=DEVICE) for shape in shapes]
    for dtype, bound in ((torch.float32, 1e-6), (BF16, 2e-3)):
        own = [torch.nn.Parameter(t.to(dtype, copy=True)) for t in start]
        exact = [torch.nn.Parameter(p.detach().float().clone()) for p in own]
        ours = deepwell.AdamW(own, lr=1e-2, weight_decay=0.1)
        theirs = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.1)
        kept = []
        for _ in range(10):
            for p, q in zip(own, exact):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.float()
                kept.append(p.grad)
            ours.step()
            theirs.step()
        worst = max(relative(p.detach().float(), q.detach()) for p, q in zip(own, exact))
        log.check(f"ten steps of AdamW, {dtype}", worst, bound)
        for p in own:
            if dtype == BF16:
                master = ours.state[p]["master_weight"]
                same = torch.equal(master.bfloat16(), p.detach())
                log.check("BF16 weights are rounded masters", 0.0 if same else 1.0, 0.0)


def optimizer_times(log: Log) -> None:
    """Time of a step of llama-1.1b, on the device and on the host."""
    for dtype in (torch.float32, BF16):
        row = {"section": "optimizer", "dtype": str(dtype)}
        for name, make in {
            "deepwell": lambda p: deepwell.AdamW(p, lr=1e-4),
            "torch_fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
            "torch_foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
        }.items():
            torch.cuda.empty_cache()
            own = parameters(dtype)
            optimizer = make(own)
            optimizer.step()
            before = torch.cuda.memory_allocated()
            row[f"{name}_ms"] = round(median_us(optimizer.step, repeats=10, inner=2) / 1e3, 3)
            row[f"{name}_gib"] = round(before / 2**30, 2)
            del own, optimizer
        log.write(**row)


def profiler(log: Log) -> None:
    """The table of a small training step."""
    x = torch.randn(4, 2048, 16, 128, device=DEVICE, dtype=BF16, requires_grad=True)
    rows = torch.randn(8192, 2048, device=DEVICE, dtype=BF16, requires_grad=True)
    weight = torch.ones(2048, device=DEVICE, dtype=BF16)

    def step():
        o = deepwell.attention(x, x, x)
        o.sum().backward()
        deepwell.rms_norm(rows, weight).sum().backward()

    step()
    with deepwell.KernelProfiler() as seen:
        step()
    print(seen, flush=True)
    for r in seen.records():
        log.write(section="profiler", kernel=r.kernel, calls=r.calls, us=round(r.total_us, 1),
                  tflops=round(r.tflops, 1), occupancy=r.occupancy, registers=r.registers,
                  tensor_pipe_share=r.tensor_pipe_share, tmem_columns=r.tmem_columns)  # fmt: skip
    missing = [r.kernel for r in seen.records() if not r.total_us]
    log.check("every kernel has a time", float(len(missing)), 0.0)


def experts(log: Log) -> None:
    """A layer of experts as in Mixtral's small relatives: 8 of 2048 x 5632, two for each token."""
    import transformers
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from deepwell import experts

    config = transformers.MixtralConfig(
        hidden_size=2048, intermediate_size=5632, num_local_experts=8, num_experts_per_tok=2
    )
    with torch.device(DEVICE):
        module = MixtralExperts(config).to(BF16)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.02)
    x = torch.randn(16384, 2048, device=DEVICE, dtype=BF16, requires_grad=True)
    scores, ids = torch.randn(16384, 8, device=DEVICE).softmax(-1).topk(2)
    direction = torch.randn_like(x)

    def run(forward):
        out = forward(module, x, ids, scores.to(BF16))
        inputs = [x, *module.parameters()]
        return [out, *torch.autograd.grad(out, inputs, direction)]

    got, expected = run(experts.forward), run(grouped_mm_experts_forward)
    worst = max(relative(a.float(), b.float()) for a, b in zip(got, expected))
    log.check("experts, with gradients, against grouped_mm", worst, 2e-2)
    log.write(
        section="experts",
        deepwell_us=round(median_us(lambda: run(experts.forward), 10, 2), 1),
        grouped_mm_us=round(median_us(lambda: run(grouped_mm_experts_forward), 10, 2), 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    log = Log(parser.parse_args().out)
    torch.manual_seed(0)
    for section in (optimizer_steps, optimizer_times, profiler, experts):
        log.attempt(section.__name__, lambda: section(log))  # noqa: B023
    print(f"{log.failures} failed")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
