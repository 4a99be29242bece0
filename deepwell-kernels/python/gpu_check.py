"""Correctness and speed of the package on a GPU, next to PyTorch, torch.compile, Liger and torchao.

    python3 gpu_check.py [SECTION …] [--out FOLDER] [--steps N] [--only NAME …]

Sections: correctness, overhead, attention, rows, training. Needs PyTorch 2.10 or newer and the
wheel (or DEEPWELL_LIBRARY and PYTHONPATH); `training` needs transformers. Liger and torchao are
measured if they are installed. Each training configuration runs in a process of its own, so that
one that fails or runs out of memory leaves the others. Results are lines of JSON in
FOLDER/gpu_check.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.nn import functional as F

import deepwell
import gpu_train

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
BF16 = torch.bfloat16
#: Shapes of the specification: batch, heads, seq, head_dim.
ATTENTION = [
    (1, 8, 128, 64), (2, 8, 256, 64), (4, 16, 256, 128), (8, 16, 512, 128), (1, 32, 1024, 128),
    (8, 32, 2048, 64), (2, 32, 4096, 128),
]  # fmt: skip


def median_us(call, repeats=30, inner=10) -> float:
    """Median time of a call in a row of calls, by CUDA events, without a CUDA graph."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / inner)
    return statistics.median(times)


def kernel_us(call, repeats=20) -> float:
    """Mean time of the kernels of a call, without the time between them."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / repeats


class Log:
    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu_check.jsonl"
        self.failures = 0

    def write(self, **record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print("  ".join(f"{key}={value}" for key, value in record.items()), flush=True)

    def check(self, name: str, error: float, tolerance: float) -> None:
        passed = error <= tolerance
        self.failures += not passed
        self.write(
            section="correctness", name=name, error=f"{error:.3e}", tolerance=tolerance,
            result="ok" if passed else "FAILED",
        )  # fmt: skip

    def attempt(self, name: str, call) -> None:
        """Runs a part; an exception is a failure and does not end the others."""
        try:
            call()
        except Exception as error:
            self.failures += 1
            traceback.print_exc()
            self.write(section="error", name=name, error=str(error)[:500])


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-20)).item()


def gradients(call, inputs, direction):
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    out = call(*leaves)
    out.backward(direction.to(out.dtype))
    return [out, *(leaf.grad for leaf in leaves)]


def compare(log: Log, name: str, ours, theirs, inputs, tolerance) -> None:
    """Outputs and gradients in BF16 next to PyTorch's in FP32."""
    exact = [i.float() for i in inputs]
    direction = torch.randn_like(theirs(*exact)).to(BF16)
    got = gradients(ours, inputs, direction)
    expected = gradients(theirs, exact, direction.float())
    for index, (a, b) in enumerate(zip(got, expected)):
        log.check(f"{name}[{index}]", relative(a, b), tolerance)


def correctness(log: Log) -> None:
    from deepwell import attention_ops, functional, mxfp8
    from deepwell.hf_attention import dense_mask

    def refuses(q, k, v) -> bool:
        """Whether a call that needs gradients fails at once, and one without them works."""
        functional.attention(q, k, v)
        try:
            functional.attention(q.clone().requires_grad_(), k, v)
        except deepwell.UnsupportedError:
            return True
        return False

    # One rounding to BF16 is at most 2^-9 of an element; P and dS are rounded in attention, too.
    rows, attention = 4e-3, 8e-3
    x, y = (torch.randn(3, 333, 2048, device=DEVICE, dtype=BF16) for _ in range(2))
    w = torch.rand(2048, device=DEVICE, dtype=BF16)
    wide = (2048,)
    compare(
        log,
        "rms_norm",
        functional.rms_norm,
        lambda x, w: F.rms_norm(x, wide, w, 1e-6),
        [x, w],
        rows,
    )
    compare(log, "swiglu", functional.swiglu, lambda g, u: F.silu(g) * u, [x, y], rows)
    compare(
        log, "gelu_tanh", functional.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [x], rows
    )
    compare(
        log, "layer_norm", functional.layer_norm,
        lambda x, w, b: F.layer_norm(x, wide, w, b), [x, w, w], rows,
    )  # fmt: skip

    def reference(q, k, v, window=0, documents=None, causal=True, sinks=None):
        batch, seq, heads, width = q.shape
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * width**-0.5
        if documents is None:
            documents = torch.tensor([0, seq], device=DEVICE).expand(batch, seq, 2)
        if causal:
            scores = scores.masked_fill(~dense_mask(documents, window), -torch.inf)
        if sinks is not None:
            column = sinks.view(1, heads, 1, 1).expand(batch, heads, seq, 1)
            scores = torch.cat([scores, column], -1)
        return (scores.softmax(-1)[..., :seq] @ v).transpose(1, 2)

    ranges = [[0, 100]] * 100 + [[100, 101]] + [[101, 333]] * 232
    documents = (
        torch.tensor(ranges, dtype=torch.int32, device=DEVICE).expand(2, 333, 2).contiguous()
    )
    for heads, kv_heads, width in [(8, 8, 64), (8, 2, 128), (4, 4, 96), (4, 1, 256)]:
        for settings in [
            {}, dict(causal=False), dict(window=50), dict(documents=documents),
            dict(documents=documents, window=20),
        ]:  # fmt: skip
            shape = (heads, kv_heads, kv_heads)
            q, k, v = (torch.randn(2, 333, h, width, device=DEVICE, dtype=BF16) for h in shape)
            name = f"attention {heads}/{kv_heads}x{width} {sorted(settings)}"
            if attention_ops.missing_attention(heads, kv_heads, width, q):
                log.check(f"{name} is refused", 0.0 if refuses(q, k, v) else 1.0, 0.0)
                continue
            ours = lambda q, k, v: functional.attention(q, k, v, **settings)  # noqa: B023, E731
            theirs = lambda q, k, v: reference(q, k, v, **settings)  # noqa: B023, E731
            log.attempt(name, lambda: compare(log, name, ours, theirs, [q, k, v], attention))  # noqa: B023
    q, k, v = (torch.randn(2, 333, h, 64, device=DEVICE, dtype=BF16) for h in (8, 2, 2))
    sinks = torch.randn(8, device=DEVICE)
    ours = lambda q, k, v, s: functional.attention(q, k, v, sinks=s)  # noqa: E731
    theirs = lambda q, k, v, s: reference(q, k, v, sinks=s)  # noqa: E731
    log.attempt("sinks", lambda: compare(log, "sinks", ours, theirs, [q, k, v, sinks], attention))

    def linear():
        x = torch.randn(4, 512, 2048, device=DEVICE, dtype=BF16)
        w = torch.randn(5632, 2048, device=DEVICE, dtype=BF16)
        # Two operands in E4M3, each 0.0264 in the root mean square.
        compare(log, "mxfp8 linear", mxfp8.linear, F.linear, [x, w], 0.045)

    def rope(q):
        angles = torch.arange(512.0, device=DEVICE)[:, None] * torch.rand(32, device=DEVICE)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        turned = torch.cat([-q[..., 32:], q[..., :32]], -1)
        table = functional.rope_table(cos, sin)
        return functional.rope(q, table) if q.dtype == BF16 else (
            q * cos[:, None] + turned * sin[:, None]
        )  # fmt: skip

    def same_angles(q):
        torch.manual_seed(1)
        return rope(q)

    q = torch.randn(2, 512, 5, 64, device=DEVICE, dtype=BF16)
    log.attempt("rope", lambda: compare(log, "rope", same_angles, same_angles, [q], rows))
    log.attempt("mxfp8", linear)
    log.attempt("graph", lambda: graph(log))
    log.attempt("streams", lambda: streams(log))


def graph(log: Log) -> None:
    """A captured graph computes new results from new inputs, 100 times."""
    from deepwell import functional

    x = torch.randn(512, 1024, device=DEVICE, dtype=BF16)
    w = torch.rand(1024, device=DEVICE, dtype=BF16)
    q = torch.randn(2, 256, 4, 64, device=DEVICE, dtype=BF16)

    def step():
        leaves = [t.detach().requires_grad_() for t in (x, w, q)]
        y, o = functional.rms_norm(leaves[0], leaves[1]), functional.attention(*[leaves[2]] * 3)
        (y.float().square().sum() + o.float().square().sum()).backward()
        return [y.detach(), o.detach(), *(leaf.grad for leaf in leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step()
    worst = 0.0
    for _ in range(100):
        for tensor in (x, q):
            tensor.copy_(torch.randn_like(tensor))
        captured.replay()
        worst = max(worst, *(relative(a, b) for a, b in zip(results, step())))
    log.check("100 replays of a CUDA graph", worst, 1e-3)


def streams(log: Log) -> None:
    """Equal calls in two streams at the same time do not disturb each other."""
    from deepwell import functional

    inputs = [torch.randn(2, 2048, 8, 64, device=DEVICE, dtype=BF16) for _ in range(2)]
    expected = [gradients(functional.attention, [i] * 3, i) for i in inputs]
    torch.cuda.synchronize()
    worst = 0.0
    for _ in range(20):
        got = []
        for tensor in inputs:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                got.append(gradients(functional.attention, [tensor] * 3, tensor))
        torch.cuda.synchronize()
        for mine, theirs in zip(got, expected):
            worst = max(worst, *(relative(a, b) for a, b in zip(mine, theirs)))
    log.check("two streams", worst, 1e-3)


def overhead(log: Log) -> None:
    """Host time of a call, on tensors so small that the device is never behind."""
    from deepwell import functional

    x = torch.randn(8, 64, device=DEVICE, dtype=BF16)
    w = torch.rand(64, device=DEVICE, dtype=BF16)
    q = torch.randn(1, 64, 1, 64, device=DEVICE, dtype=BF16)
    heads = q.transpose(1, 2)
    trained = x.detach().clone().requires_grad_()
    calls = {
        "operator rms_norm": lambda: torch.ops.deepwell.rms_norm(x, w, 1e-6),
        "function rms_norm": lambda: functional.rms_norm(x, w),
        "function rms_norm with a gradient": lambda: functional.rms_norm(trained, w),
        "torch rms_norm with a gradient": lambda: F.rms_norm(trained, (64,), w),
        "operator swiglu": lambda: torch.ops.deepwell.swiglu(x, x),
        "function swiglu": lambda: functional.swiglu(x, x),
        "torch rms_norm": lambda: F.rms_norm(x, (64,), w),
        "function attention": lambda: functional.attention(q, q, q),
        "torch attention": lambda: F.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        ),
    }
    for name, call in calls.items():
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        rounds = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(50):
                call()
            rounds.append(1e6 * (time.perf_counter() - begin) / 50)
            torch.cuda.synchronize()
        log.write(section="overhead", name=name, host_us=round(statistics.median(rounds), 2))


def attention(log: Log) -> None:
    """Forward, and forward with backward, next to the best backend of PyTorch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = deepwell.BlackwellFlashAttention()
    for shape in ATTENTION:
        for causal in (False, True):
            q, k, v = (
                torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
            )
            direction = torch.randn(shape, device=DEVICE, dtype=BF16)
            sdpa = F.scaled_dot_product_attention

            def both(call):
                def run():
                    torch.autograd.grad(call(), (q, k, v), direction)  # noqa: B023

                return run

            row = {"section": "attention", "shape": shape, "causal": causal}
            ours = lambda: attend(q, k, v, causal=causal)  # noqa: B023, E731
            row["deepwell_us"] = round(median_us(ours), 1)
            row["deepwell_both_us"] = round(median_us(both(ours)), 1)
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                name = backend.name.split("_")[0].lower()
                theirs = lambda: sdpa(q, k, v, is_causal=causal)  # noqa: B023, E731
                try:
                    with sdpa_kernel(backend):
                        row[f"{name}_us"] = round(median_us(theirs), 1)
                        row[f"{name}_both_us"] = round(median_us(both(theirs)), 1)
                except RuntimeError as error:
                    row[f"{name}_error"] = str(error)[:80]
            log.write(**row)


def rows(log: Log) -> None:
    """Norm and SwiGLU of 16384 tokens, forward with backward."""
    from deepwell import functional

    x, up = (
        torch.randn(16384, 4096, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2)
    )
    w = torch.rand(4096, device=DEVICE, dtype=BF16, requires_grad=True)
    direction = torch.randn_like(x)

    def theirs_norm(x, w):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * y.to(x.dtype)

    def theirs_swiglu(g, u):
        return F.silu(g) * u

    cases = {
        "rms_norm": (functional.rms_norm, theirs_norm, (x, w)),
        "swiglu": (functional.swiglu, theirs_swiglu, (x, up)),
    }
    for name, (ours, theirs, inputs) in cases.items():
        calls = {"deepwell": ours, "eager": theirs, "compile": torch.compile(theirs)}
        if name == "rms_norm":
            calls["torch"] = lambda x, w: F.rms_norm(x, (4096,), w, 1e-6)
        try:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            liger = {
                "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6),
                "swiglu": LigerSiLUMulFunction.apply,
            }
            calls["liger"] = liger[name]
        except ImportError:
            pass
        row = {"section": "rows", "name": name}
        for who, call in calls.items():

            def run():
                torch.autograd.grad(call(*inputs), inputs, direction)  # noqa: B023

            row[f"{who}_us"] = round(median_us(run), 1)
            row[f"{who}_kernels_us"] = round(kernel_us(run), 1)
        log.write(**row)


def training(log: Log, steps: int, only: list[str]) -> None:
    script = Path(__file__).with_name("gpu_train.py")
    models = [name for name in gpu_train.MODELS if name in only] or gpu_train.MODELS
    asked = [name for name in gpu_train.CONFIGURATIONS if name in only]
    for model in models:
        for configuration in asked or gpu_train.CONFIGURATIONS:
            command = [sys.executable, script, model, configuration, "--steps", str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
            last = (done.stdout.strip().splitlines() or [""])[-1]
            if done.returncode == 0 and last.startswith("{"):
                log.write(**json.loads(last))
                continue
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]
            log.write(section="training", model=model, configuration=configuration, error=said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ["correctness", "overhead", "attention", "rows", "training"]
    parser.add_argument("sections", nargs="*", default=sections, metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--steps", type=int, default=30, help="training steps of a configuration")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="models and configurations to train"
    )
    arguments = parser.parse_args()
    if strange := set(arguments.only) - {*gpu_train.MODELS, *gpu_train.CONFIGURATIONS}:
        names = [*gpu_train.MODELS, *gpu_train.CONFIGURATIONS]
        parser.error(f"--only: expected names among {names}, got {sorted(strange)}")
    if unknown := set(arguments.sections) - set(sections):
        parser.error(f"expected sections among {sections}, got {sorted(unknown)}")
    available, reason = deepwell.is_available()
    if not available:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    log = Log(arguments.out)
    log.write(
        section="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__,
        cuda=torch.version.cuda, deepwell=deepwell.__version__, python=sys.version.split()[0],
    )  # fmt: skip
    torch.manual_seed(0)
    calls = {
        "correctness": lambda: correctness(log),
        "overhead": lambda: overhead(log),
        "attention": lambda: attention(log),
        "rows": lambda: rows(log),
        "training": lambda: training(log, arguments.steps, arguments.only),
    }
    for section in arguments.sections:
        log.attempt(section, calls[section])
    print(f"{log.failures} failed")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
