"""Times PyTorch on the shapes of `deepwell bench`.

Reads one JSON object per line from standard input:
    {"id": 3, "device": "cuda:0", "samples": 20, "task": {"kind": "gemm", ...}}
and prints one JSON object per line and peer:
    {"id": 3, "peer": "torch eager", "time_s": 1.2e-4, "note": null}
`time_s` is null, and `note` says why, where something does not run.

Kernels are timed as Deepwell times its own: random data, as many copies of the operands as pass
the last-level cache twice, calls over all copies in one CUDA graph, the graph replayed, the median
of samples of 10 ms. Where PyTorch cannot capture something, events around plain calls are used and
the note says so. A first line with id -1 describes the environment.
"""

import json
import math
import statistics
import sys
import time


def emit(identity, peer, time_s=None, note=None):
    print(json.dumps({"id": identity, "peer": peer, "time_s": time_s, "note": note}), flush=True)


def reason(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


try:
    import torch
    import torch.nn.functional as F
except Exception as error:  # whatever keeps it from loading is the answer
    emit(-1, "environment", note=f"no torch: {reason(error)}")
    sys.exit(0)

SAMPLE_S = 0.010
CALLS_MIN = 32
COPIES_MAX = 512


class Bench:
    def __init__(self, device, samples):
        self.device = torch.device(device)
        self.samples = samples
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            self.stream = torch.cuda.Stream()
            self.cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        else:
            self.cache = 32 << 20

    def uniform(self, *shape, dtype=torch.bfloat16, low=-1.0, high=1.0):
        x = torch.empty(*shape, device=self.device, dtype=torch.float32).uniform_(low, high)
        return x.to(dtype)

    def fp8(self, *shape):
        return self.uniform(*shape).to(torch.float8_e4m3fn)

    def copies(self, byte_count):
        if byte_count >= 8 * self.cache:
            return 1
        wanted = -(-2 * self.cache // max(int(byte_count), 1))
        return min(max(wanted, 2), COPIES_MAX)

    def report(self, identity, peer, make, byte_count):
        """`make()` gives a callable over operands of its own; one per copy is made."""
        torch._dynamo.reset()
        try:
            if self.is_gpu:
                self.stream.wait_stream(torch.cuda.default_stream(self.device))
                with torch.cuda.stream(self.stream):
                    calls = [make() for _ in range(self.copies(byte_count))]
                    for call in calls[:3]:
                        call()
                torch.cuda.synchronize()
                time_s, note = self.time_gpu(calls)
            else:
                calls = [make() for _ in range(min(2, self.copies(byte_count)))]
                time_s, note = self.time_cpu(calls), None
            emit(identity, peer, time_s, note)
        except Exception as error:
            emit(identity, peer, None, reason(error))

    def time_gpu(self, calls):
        rotated = calls * -(-CALLS_MIN // len(calls))
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for call in rotated:
                    call()
        except Exception as error:
            torch.cuda.synchronize()
            return self.time_events(calls), f"events, not a graph: {reason(error)}"

        def replay(times):
            begin = time.perf_counter()
            with torch.cuda.stream(self.stream):
                for _ in range(times):
                    graph.replay()
            self.stream.synchronize()
            return time.perf_counter() - begin

        once, warm_up = replay(1), time.perf_counter()
        while time.perf_counter() - warm_up < 0.1:
            once = replay(1)
        times = max(1, math.ceil(SAMPLE_S / once))
        samples = [replay(times) / (times * len(rotated)) for _ in range(self.samples)]
        return statistics.median(samples), None

    def time_events(self, calls):
        samples = []
        with torch.cuda.stream(self.stream):
            for index in range(3 * self.samples):
                begin = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                begin.record()
                calls[index % len(calls)]()
                end.record()
                samples.append((begin, end))
        self.stream.synchronize()
        return statistics.median(a.elapsed_time(b) * 1e-3 for a, b in samples[self.samples:])

    def time_cpu(self, calls):
        for call in calls:
            call()
        samples = []
        for index in range(self.samples):
            begin = time.perf_counter()
            calls[index % len(calls)]()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)


def both(bench, identity, function, operands, byte_count):
    """`function` over fresh `operands()`, eager and compiled."""
    for peer in ["torch eager", "torch.compile"]:
        compiled = function if peer == "torch eager" else torch.compile(function, dynamic=False)

        def make(compiled=compiled):
            given = operands()
            return lambda: compiled(*given)

        with torch.no_grad():
            bench.report(identity, peer, make, byte_count)


def gradients(bench, identity, forward, operands, byte_count):
    """Gradients of `forward` for all its operands, eager and compiled."""
    for peer in ["torch eager", "torch.compile"]:
        compiled = forward if peer == "torch eager" else torch.compile(forward, dynamic=False)

        def make(compiled=compiled):
            given = [x.requires_grad_() for x in operands()]
            out = compiled(*given)
            outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
            upstream = [torch.randn_like(x) for x in outs]
            return lambda: torch.autograd.grad(outs, given, upstream, retain_graph=True)

        bench.report(identity, peer, make, byte_count)


def gemm(bench, identity, task):
    m, n, k = task["m"], task["n"], task["k"]
    byte_count = 2 * (m * k + n * k + m * n)
    if not task["fp8"]:
        product = {
            "fprop": (lambda a, b: a @ b.t(), (m, k), (n, k)),
            "dgrad": (lambda a, b: a @ b, (m, k), (k, n)),
            "wgrad": (lambda a, b: a.t() @ b, (k, m), (k, n)),
        }[task["product"]]
        operands = lambda: (bench.uniform(*product[1]), bench.uniform(*product[2]))
        both(bench, identity, product[0], operands, byte_count)
        return

    def scaled(scale_a, scale_b):
        def make():
            a, b = bench.fp8(m, k), bench.fp8(n, k).t()
            of_a, of_b = scale_a(), scale_b()
            return lambda: torch._scaled_mm(
                a, b, scale_a=of_a, scale_b=of_b, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return make

    def blocks():
        from torch.nn.functional import ScalingType, scaled_mm

        a, b = bench.fp8(m, k), bench.fp8(n, k).t()
        of_a = torch.ones(k // 128, m, device=bench.device).t()
        of_b = torch.ones(n // 128, k // 128, device=bench.device).t()
        kinds = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        return lambda: scaled_mm(
            a, b, of_a, kinds[0], of_b, kinds[1], output_dtype=torch.bfloat16
        )

    one = lambda: torch.ones((), device=bench.device)
    rows = lambda: torch.ones(m, 1, device=bench.device)
    columns = lambda: torch.ones(1, n, device=bench.device)
    byte_count = m * k + n * k + 2 * m * n
    with torch.no_grad():
        bench.report(identity, "torch FP8 tensor", scaled(one, one), byte_count)
        bench.report(identity, "torch FP8 row", scaled(rows, columns), byte_count)
        bench.report(identity, "torch FP8 1x128", blocks, byte_count)


def mx(x, axis, block):
    """Codes and exponents of blocks along rows, columns or both."""

    def along_rows(x):
        b = x.reshape(x.shape[0], -1, block).float()
        amax = b.abs().amax(-1)
        e = torch.clamp(torch.floor(torch.log2(amax)) - 8, -127, 127)
        q = (b * torch.exp2(-e)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q.view(x.shape), (e + 127).to(torch.uint8)

    outputs = ()
    if axis != "column":
        outputs += along_rows(x)
    if axis != "row":
        outputs += along_rows(x.t().contiguous())
    return outputs


def quantize(bench, identity, task):
    rows, columns = task["rows"], task["columns"]
    function = lambda x: mx(x, task["axis"], task["block"])
    both(bench, identity, function, lambda: (bench.uniform(rows, columns),), 3 * rows * columns)


def attention(bench, identity, task):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, h, kv = task["batch"], task["heads"], task["kv_heads"]
    s, d, causal, backward = task["seq"], task["head_dim"], task["causal"], task["backward"]
    byte_count = 2 * b * s * d * (2 * h + 2 * kv) * (2 if backward else 1)

    def operands():
        shapes = [(b, h, s, d), (b, kv, s, d), (b, kv, s, d)]
        return [bench.uniform(*shape) for shape in shapes]

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != kv)

    def make_of(function, backend):
        def make():
            given = operands()
            with sdpa_kernel(backend) if backend is not None else torch.enable_grad():
                if not backward:
                    def call():
                        with torch.no_grad():
                            if backend is None:
                                return function(*given)
                            with sdpa_kernel(backend):
                                return function(*given)

                    return call
                with torch.enable_grad():
                    given = [x.requires_grad_() for x in given]
                    out = function(*given)
                upstream = torch.randn_like(out)
                return lambda: torch.autograd.grad(out, given, upstream, retain_graph=True)

        return make

    peers = [("torch eager", plain, None)]
    if bench.is_gpu:
        peers = [
            ("torch flash", plain, SDPBackend.FLASH_ATTENTION),
            ("torch cuDNN", plain, SDPBackend.CUDNN_ATTENTION),
        ]
    peers.append(("torch.compile", torch.compile(plain, dynamic=False), None))
    for peer, function, backend in peers:
        bench.report(identity, peer, make_of(function, backend), byte_count)


def rms_norm(x, w):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def add_rms_norm(x, delta, w):
    total = x + delta
    return total, rms_norm(total, w)


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def add_layer_norm(x, delta, w, b):
    total = x + delta
    return total, layer_norm(total, w, b)


def swiglu(gate, up):
    return F.silu(gate) * up


FORWARDS = {
    "rms_norm": (rms_norm, "mv"),
    "add_rms_norm": (add_rms_norm, "mmv"),
    "layer_norm": (layer_norm, "mvv"),
    "add_layer_norm": (add_layer_norm, "mmvv"),
    "swiglu": (swiglu, "mm"),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), "m"),
    "add": (lambda x, y: x + y, "mm"),
}


def pointwise(bench, identity, task):
    """A norm or an activation, forward or backward, with block quantization of its outputs."""
    name, rows, columns = task["op"], task["rows"], task["columns"]
    is_backward = name.endswith("_backward")
    known = FORWARDS.get(name.removesuffix("_backward"))
    if known is None:
        emit(identity, "torch", None, f"no counterpart of `{name}`")
        return
    forward, kinds = known

    def operands():
        matrix = lambda: bench.uniform(rows, columns)
        vector = lambda: bench.uniform(columns, low=0.5, high=1.5)
        return [matrix() if kind == "m" else vector() for kind in kinds]

    byte_count = 2 * rows * columns * (len(kinds) + 1)
    if not is_backward:
        function = forward
        if task["quantized"]:

            def function(*given):
                out = forward(*given)
                outs = out if isinstance(out, tuple) else (out,)
                codes = [
                    mx(outs[min(index, len(outs) - 1)], axis, task["block"])
                    for index, axis in task["quantized"]
                ]
                return outs, codes

        both(bench, identity, function, operands, byte_count)
    elif task["quantized"]:
        # What autograd gives is quantized by calls behind it.
        for peer in ["torch eager", "torch.compile"]:
            compiles = (lambda f: f) if peer == "torch eager" else torch.compile
            compiled = compiles(forward)
            quantized = compiles(lambda x, axis: mx(x, axis, task["block"]))

            def make(compiled=compiled, quantized=quantized):
                given = [x.requires_grad_() for x in operands()]
                out = compiled(*given)
                upstream = torch.randn_like(out)

                def call():
                    found = torch.autograd.grad(out, given, upstream, retain_graph=True)
                    return [quantized(found[index], axis) for index, axis in task["quantized"]]

                return call

            bench.report(identity, peer, make, byte_count)
    else:
        gradients(bench, identity, forward, operands, byte_count)


def adamw(bench, identity, task):
    lengths = task["lengths"]

    def make():
        f32 = torch.float32
        parameters = [torch.nn.Parameter(bench.uniform(n, dtype=f32)) for n in lengths]
        for parameter in parameters:
            parameter.grad = bench.uniform(parameter.numel(), dtype=f32)
        kwargs = {"fused": True, "capturable": True} if bench.is_gpu else {"foreach": True}
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **kwargs)
        return optimizer.step

    bench.report(identity, "torch fused", make, 16 * sum(lengths))


def grad_norm(bench, identity, task):
    lengths = task["lengths"]

    def make():
        tensors = [bench.uniform(n, dtype=torch.float32) for n in lengths]
        return lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

    with torch.no_grad():
        bench.report(identity, "torch foreach", make, 4 * sum(lengths))


def train(bench, identity, task):
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except Exception as error:
        emit(identity, "torch", None, f"no transformers: {reason(error)}")
        return
    batch, seq = task["batch"], task["seq"]
    config = LlamaConfig(
        hidden_size=task["hidden"],
        intermediate_size=task["intermediate"],
        num_hidden_layers=task["layers"],
        num_attention_heads=task["heads"],
        num_key_value_heads=task["kv_heads"],
        vocab_size=task["vocab"],
        max_position_embeddings=seq,
        use_cache=False,
        attn_implementation="sdpa",
    )
    wait = torch.cuda.synchronize if bench.is_gpu else (lambda: None)
    for peer in ["torch eager", "torch.compile"]:
        torch._dynamo.reset()
        model = optimizer = step_model = None
        try:
            with torch.device(bench.device):
                model = LlamaForCausalLM(config).to(torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.is_gpu)
            step_model = model if peer == "torch eager" else torch.compile(model)
            tokens = torch.randint(0, task["vocab"], (batch, seq), device=bench.device)
            if bench.is_gpu:
                torch.cuda.reset_peak_memory_stats()

            def step():
                step_model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            for _ in range(4 if bench.is_gpu else 1):
                step()
            wait()
            samples = []
            for _ in range(bench.samples):
                begin = time.perf_counter()
                step()
                wait()
                samples.append(time.perf_counter() - begin)
            note = "bf16 weights and moments"
            if bench.is_gpu:
                note += f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
            emit(identity, peer, statistics.median(samples), note)
        except Exception as error:
            emit(identity, peer, None, reason(error))
        finally:
            del model, optimizer, step_model
            if bench.is_gpu:
                torch.cuda.empty_cache()


KINDS = {
    "gemm": gemm,
    "quantize": quantize,
    "attention": attention,
    "pointwise": pointwise,
    "adamw": adamw,
    "grad_norm": grad_norm,
    "train": train,
}


def main():
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        versions += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    emit(-1, "environment", note=versions)
    for line in sys.stdin:
        if not line.strip():
            continue
        request = json.loads(line)
        try:
            bench = Bench(request["device"], request["samples"])
            KINDS[request["task"]["kind"]](bench, request["id"], request["task"])
        except Exception as error:
            emit(request["id"], "torch", None, reason(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


main()
