"""Times PyTorch on the shapes of `deepwell bench`.

Reads one JSON object per line from standard input:
    {"id": 3, "device": "cuda:0", "samples": 20, "task": {"kind": "gemm", ...}}
and prints one JSON object per line and peer:
    {"id": 3, "peer": "torch eager", "time_s": 1.2e-4, "note": null}
`time_s` is null, and `note` says why, where something does not run. Training adds `bytes`, the peak
of what PyTorch allocated. After a task comes a line with its id and `"done": true`.
With `"compile_only": true` nothing is timed: what is compiled is compiled into PyTorch's cache on
disk, so that several processes can do so at once before one of them measures.

Kernels are timed as Deepwell times its own: random data, as many copies of the operands as pass
the last-level cache twice, calls over all copies in one CUDA graph, the graph replayed between two
events, the median of samples of 10 ms. Where PyTorch cannot capture something, events around plain calls are used and
the note says so. A first line with id -1 describes the environment.
"""

import collections
import json
import math
import statistics
import sys
import time


def emit(identity, peer, time_s=None, note=None, byte_count=None):
    answer = {"id": identity, "peer": peer, "time_s": time_s, "note": note, "bytes": byte_count}
    print(json.dumps(answer), flush=True)


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
CALLS_WANTED = 32
COPIES_MAX = 512


class Bench:
    def __init__(self, device, samples, compile_only):
        self.device = torch.device(device)
        self.samples = samples
        self.compile_only = compile_only
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
        return self.uniform(*shape, dtype=torch.float32, low=-448.0, high=448.0).to(
            torch.float8_e4m3fn
        )

    def copies(self, byte_count):
        if byte_count >= 8 * self.cache:
            return 1
        wanted = -(-2 * self.cache // max(int(byte_count), 1))
        return min(max(wanted, 2), COPIES_MAX)

    def report(self, identity, peer, make, byte_count, copies_max=COPIES_MAX):
        """`make()` gives a callable over operands of its own; one per copy is made."""
        if self.compile_only and not peer.startswith("torch.compile"):
            return
        torch._dynamo.reset()
        try:
            if self.compile_only:
                make()()
                return
            if self.is_gpu:
                self.stream.wait_stream(torch.cuda.default_stream(self.device))
                with torch.cuda.stream(self.stream):
                    copies = min(self.copies(byte_count), copies_max)
                    calls = [make() for _ in range(copies)]
                    # Each of a few: every one of them may have to be compiled.
                    for call in calls[: max(3, min(copies_max, 8))]:
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
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                begin = time.perf_counter()
                calls[0]()
                self.stream.synchronize()
                once = time.perf_counter() - begin
        wanted = min(CALLS_WANTED, max(1, math.ceil(SAMPLE_S / once)))
        rotated = calls * -(-wanted // len(calls))
        # As long as a result is kept the next one is written elsewhere: past the cache too.
        results = collections.deque(maxlen=len(calls))
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for call in rotated:
                    results.append(call())
        except Exception as error:
            torch.cuda.synchronize()
            return self.time_events(calls), f"events, not a graph: {reason(error)}"

        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)

        def replay(times):
            with torch.cuda.stream(self.stream):
                begin.record()
                for _ in range(times):
                    graph.replay()
                end.record()
            self.stream.synchronize()
            return begin.elapsed_time(end) * 1e-3

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
        gemm = {
            "fprop": (lambda a, b: a @ b.t(), (m, k), (n, k)),
            "dgrad": (lambda a, b: a @ b, (m, k), (k, n)),
            "wgrad": (lambda a, b: a.t() @ b, (k, m), (k, n)),
        }[task["gemm"]]
        operands = lambda: (bench.uniform(*gemm[1]), bench.uniform(*gemm[2]))
        both(bench, identity, gemm[0], operands, byte_count)
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


def grouped_gemm(bench, identity, task):
    """GEMMs of experts. Groups have a multiple of 16 rows here, as kernels in FP8 want."""
    n, k, fp8 = task["n"], task["k"], task["fp8"]
    counts = torch.tensor([-(-rows // 16) * 16 for rows in task["rows"]])
    rows, groups = int(counts.sum()), len(counts)
    ends = counts.cumsum(0).to(bench.device, torch.int32)
    of_rows = bench.fp8 if fp8 else bench.uniform
    if task["gemm"] == "dgrad":
        n, k = k, n  # of the result and of the contraction

    def make():
        if task["gemm"] == "wgrad":
            if not fp8:
                a, b = of_rows(rows, n).t(), of_rows(rows, k)
                return lambda: torch._grouped_mm(a, b, offs=ends)
            a, b = of_rows(n, rows), of_rows(k, rows).t()
            of_a, of_b = (torch.ones(size * groups, device=bench.device) for size in (n, k))
        else:
            a = of_rows(rows, k)
            if not fp8:
                dgrad = task["gemm"] == "dgrad"
                b = of_rows(groups, k, n) if dgrad else of_rows(groups, n, k).transpose(1, 2)
                return lambda: torch._grouped_mm(a, b, offs=ends)
            b = of_rows(groups, n, k).transpose(1, 2)
            of_a = torch.ones(rows, device=bench.device)
            of_b = torch.ones(groups, n, device=bench.device)
        return lambda: torch._scaled_grouped_mm(
            a, b, of_a, of_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    weights = groups * n * k
    byte_count = (1 if fp8 else 2) * (rows * (n + k) + weights)
    peer = "torch grouped FP8 row" if fp8 else "torch grouped"
    with torch.no_grad():
        bench.report(identity, peer, make, byte_count)


def choices(pairs, tokens, top_k):
    """Experts `[tokens, top_k]`, so many pairs for each: as `bench moe` deals them."""
    slots = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(pairs))
    step = next(step for step in range(max(1, tokens * 5 // 8), 2 * tokens + 2)
                if math.gcd(step, tokens) == 1)
    slot = torch.arange(tokens * top_k)
    chosen = torch.empty(tokens, top_k, dtype=torch.long)
    chosen[slot % tokens * step % tokens, slot // tokens] = slots
    return chosen


class RowwiseGroupedGemm(torch.autograd.Function):
    """FP8 with a scale for each row of an operand; the weights' gradient in BF16."""

    @staticmethod
    def quantized(x, dim):
        scale = 448.0 / x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
        return (x.float() * scale).to(torch.float8_e4m3fn), 1.0 / scale.squeeze(dim)

    @staticmethod
    def gemm(a, b, ends):
        """Rows of `a` `[R, K]` times `b` `[E, N, K]`."""
        (a, of_a), (b, of_b) = (RowwiseGroupedGemm.quantized(x, -1) for x in (a, b))
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), of_a, of_b, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    @staticmethod
    def forward(context, x, w, ends):
        context.save_for_backward(x, w, ends)
        return RowwiseGroupedGemm.gemm(x, w, ends)

    @staticmethod
    def backward(context, dy):
        x, w, ends = context.saved_tensors
        dx = RowwiseGroupedGemm.gemm(dy, w.transpose(1, 2).contiguous(), ends)
        return dx, torch._grouped_mm(dy.t(), x, offs=ends), None


def moe_layer(bench, identity, task):
    """Forward and backward of router and experts: rows sorted by expert, grouped GEMMs with gate and
    up projection in one, gates on the experts' outputs. In FP8 groups are padded to 16 rows."""
    tokens, hidden, width = task["tokens"], task["hidden"], task["width"]
    top_k, pairs, fp8 = task["top_k"], task["pairs"], task["fp8"]
    experts, align = len(pairs), 16 if fp8 else 1
    rows = tokens * top_k + (experts * (align - 1) + align - 1) // align * align

    def gemm(x, w, ends):
        if fp8:
            return RowwiseGroupedGemm.apply(x, w, ends)
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)

    def layer(x, router, w_in, w_out):
        scores = torch.softmax(x.float() @ router.t(), -1)
        gates, chosen = torch.topk(scores, top_k, dim=-1)
        gates = (gates / gates.sum(-1, keepdim=True)).reshape(-1)
        chosen = chosen.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.histc(chosen.float(), experts, 0, experts - 1).to(torch.int32)
        ends = counts.cumsum(0, dtype=torch.int32)
        token = order // top_k
        if align == 1:
            given = x[token]
        else:
            padded = (counts + align - 1) // align * align
            starts = padded.cumsum(0, dtype=torch.int32) - padded
            of_row = chosen[order]
            behind = torch.arange(tokens * top_k, device=x.device) - (ends - counts)[of_row]
            place = (starts[of_row] + behind).long()
            ends = padded.cumsum(0, dtype=torch.int32)
            source = torch.full((rows,), tokens, device=x.device, dtype=torch.long)
            source = source.scatter(0, place, token)
            given = torch.cat([x, x.new_zeros(1, hidden)])[source]
        gate, up = gemm(given, w_in, ends).chunk(2, -1)
        out = gemm(F.silu(gate) * up, w_out, ends)
        out = out if align == 1 else out[place]
        out = (out * gates[order].unsqueeze(-1)).to(x.dtype)
        # The rows of a token one behind the other again, so that no sum needs atomics.
        back = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
        return out[back].view(tokens, top_k, hidden).sum(1)

    def operands():
        x = bench.uniform(tokens, hidden)
        x[:, :experts] *= 0.5
        x.scatter_(1, choices(pairs, tokens, top_k).to(bench.device), 1.5)
        router = torch.eye(experts, hidden, device=bench.device)
        scale = hidden**-0.5
        w_in = bench.uniform(experts, 2 * width, hidden, low=-scale, high=scale)
        w_out = bench.uniform(experts, hidden, width, low=-scale, high=scale)
        return [x, router, w_in, w_out]

    byte_count = 2 * (tokens * top_k * (2 * hidden + 4 * width) + 3 * experts * width * hidden)
    for peer in ["torch eager", "torch.compile"]:
        name = f"{peer} FP8 row" if fp8 else peer
        compiled = layer if peer == "torch eager" else torch.compile(layer, dynamic=False)

        def make(compiled=compiled):
            given = [x.requires_grad_() for x in operands()]
            upstream = bench.uniform(tokens, hidden)
            return lambda: torch.autograd.grad(compiled(*given), given, upstream)

        bench.report(identity, name, make, byte_count, copies_max=1)


def mx(x, axis, block, square=False):
    """Codes and exponents of blocks along rows, columns or both, or of square blocks."""

    def exponents(amax):
        return torch.clamp(torch.floor(torch.log2(amax)) - 8, -127, 127)

    def codes(x, e):
        return (x * torch.exp2(-e)).clamp(-448, 448).to(torch.float8_e4m3fn)

    if square:
        # The same blocks along both axes: one copy is the other's transpose.
        b = x.reshape(x.shape[0] // block, block, -1, block).float()
        e = exponents(b.abs().amax((1, 3), keepdim=True))
        q, s = codes(b, e).view(x.shape), (e + 127).to(torch.uint8)[:, 0, :, 0]
        outputs = () if axis == "column" else (q, s)
        return outputs if axis == "row" else (*outputs, q.t().contiguous(), s.t().contiguous())

    def along_rows(x):
        b = x.reshape(x.shape[0], -1, block).float()
        e = exponents(b.abs().amax(-1))
        return codes(b, e[..., None]).view(x.shape), (e + 127).to(torch.uint8)

    outputs = ()
    if axis != "column":
        outputs += along_rows(x)
    if axis != "row":
        outputs += along_rows(x.t().contiguous())
    return outputs


def quantize(bench, identity, task):
    rows, columns = task["rows"], task["columns"]
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[task["dtype"]]
    function = lambda x: mx(x, task["axis"], task["block"], task["square"])
    copies = 2 if task["axis"] == "both" else 1
    byte_count = rows * columns * (dtype.itemsize + copies)
    both(bench, identity, function, lambda: (bench.uniform(rows, columns, dtype=dtype),), byte_count)


def attention(bench, identity, task):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, h, kv = task["batch"], task["heads"], task["kv_heads"]
    s, d, causal, backward = task["seq"], task["head_dim"], task["causal"], task["backward"]
    dv = task["value_dim"]
    byte_count = 2 * b * s * (d + dv) * (h + kv) * (2 if backward else 1)

    def operands():
        shapes = [(b, h, s, d), (b, kv, s, d), (b, kv, s, dv)]
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
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


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


def rope(bench, identity, task):
    """As Hugging Face's llama turns queries; sines and cosines are there already."""
    batch, seq, heads, width = task["batch"], task["seq"], task["heads"], task["head_dim"]

    def turn(x, cos, sin):
        x = x.view(batch, seq, heads, width)
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        return (x * cos + half * sin).view(batch * seq, heads * width)

    def operands():
        angles = bench.uniform(seq, 1, width, dtype=torch.float32, high=100.0)
        x = bench.uniform(batch * seq, heads * width)
        return [x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)]

    byte_count = 4 * batch * seq * heads * width
    if not task["backward"]:
        both(bench, identity, turn, operands, byte_count)
        return
    for peer in ["torch eager", "torch.compile"]:
        compiled = turn if peer == "torch eager" else torch.compile(turn, dynamic=False)

        def make(compiled=compiled):
            x, cos, sin = operands()
            out = compiled(x.requires_grad_(), cos, sin)
            upstream = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, x, upstream, retain_graph=True)

        bench.report(identity, peer, make, byte_count)


def adamw(bench, identity, task):
    lengths = task["lengths"]
    for peer in ["torch eager", "torch.compile"]:

        def make(is_compiled=peer == "torch.compile"):
            f32 = torch.float32
            parameters = [torch.nn.Parameter(bench.uniform(n, dtype=f32)) for n in lengths]
            for parameter in parameters:
                parameter.grad = bench.uniform(parameter.numel(), dtype=f32)
            kind = "foreach" if is_compiled or not bench.is_gpu else "fused"
            kwargs = {kind: True, "capturable": bench.is_gpu}
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, **kwargs)
            return torch.compile(optimizer.step) if is_compiled else optimizer.step

        # Each instance is compiled by itself, and only so many.
        bench.report(identity, peer, make, 16 * sum(lengths), copies_max=4)


def grad_norm(bench, identity, task):
    lengths = task["lengths"]

    def norm(tensors):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

    def operands():
        return ([bench.uniform(n, dtype=torch.float32) for n in lengths],)

    both(bench, identity, norm, operands, 4 * sum(lengths))


def time_steps(bench, step):
    """Seconds of each step; a GPU is never waited for between two of them."""
    if not bench.is_gpu:
        samples = []
        for _ in range(bench.samples):
            begin = time.perf_counter()
            step()
            samples.append(time.perf_counter() - begin)
        return samples
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(bench.samples + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in zip(marks, marks[1:])]


def llama_config(task):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=task["hidden"],
        intermediate_size=task["intermediate"],
        num_hidden_layers=task["layers"],
        num_attention_heads=task["heads"],
        num_key_value_heads=task["kv_heads"],
        vocab_size=task["vocab"],
        max_position_embeddings=task["seq"],
        use_cache=False,
        attn_implementation="sdpa",
    )


def train(bench, identity, task):
    try:
        from transformers import LlamaForCausalLM
    except Exception as error:
        emit(identity, "torch", None, f"no transformers: {reason(error)}")
        return
    batch, seq = task["batch"], task["seq"]
    config = llama_config(task)
    recipe = task["recipe"]
    peers = ["torch eager", "torch.compile"]
    if recipe is not None:
        name = f"torchao FP8 {recipe}"
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except Exception as error:
            emit(identity, name, None, f"no torchao: {reason(error)}")
            return
        peers = [name]
    for peer in peers:
        if bench.compile_only and peer == "torch eager":
            continue
        torch._dynamo.reset()
        model = optimizer = step_model = None
        try:
            with torch.device(bench.device):
                model = LlamaForCausalLM(config).to(torch.bfloat16)
            if recipe is not None:
                convert_to_float8_training(
                    model,
                    config=Float8LinearConfig.from_recipe_name(recipe),
                    module_filter_fn=lambda _, name: "lm_head" not in name,
                )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.is_gpu)
            step_model = model if peer == "torch eager" else torch.compile(model)
            tokens = torch.randint(0, task["vocab"], (batch, seq), device=bench.device)
            if bench.compile_only:
                step_model(input_ids=tokens, labels=tokens).loss.backward()
                continue
            if bench.is_gpu:
                torch.cuda.reset_peak_memory_stats()

            def step():
                step_model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            for _ in range(4 if bench.is_gpu else 1):
                step()
            samples = time_steps(bench, step)
            note, byte_count = "bf16 weights and moments", None
            if recipe is not None:
                note += ", lm_head in bf16"
            if bench.is_gpu:
                byte_count = torch.cuda.max_memory_allocated()
                note += f", peak {byte_count / 2**30:.2f} GiB"
            emit(identity, peer, statistics.median(samples), note, byte_count)
        except Exception as error:
            emit(identity, peer, None, reason(error))
        finally:
            del model, optimizer, step_model
            if bench.is_gpu:
                torch.cuda.empty_cache()


def forward(bench, identity, task):
    """A model of transformers with its loss; compiled with max-autotune, as one CUDA graph."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
    except Exception as error:
        emit(identity, "torch", None, f"no transformers: {reason(error)}")
        return
    batch, seq = task["batch"], task["seq"]
    if task["family"] == "llama":
        kind = LlamaForCausalLM
        config = llama_config(task)
    else:
        kind = GPT2LMHeadModel
        config = GPT2Config(
            n_embd=task["hidden"],
            n_inner=task["intermediate"],
            n_layer=task["layers"],
            n_head=task["heads"],
            vocab_size=task["vocab"],
            n_positions=seq,
            use_cache=False,
            attn_implementation="sdpa",
        )
    with torch.device(bench.device):
        model = kind(config).to(torch.bfloat16).eval()
    tokens = torch.randint(0, task["vocab"], (batch, seq), device=bench.device)
    for peer in ["torch eager", "torch.compile max-autotune"]:
        function = model
        if peer != "torch eager":
            function = torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False)

        def make(function=function):
            def call():
                with torch.no_grad():
                    return function(input_ids=tokens, labels=tokens).loss

            return call

        bench.report(identity, peer, make, 0, copies_max=1)


KINDS = {
    "gemm": gemm,
    "grouped_gemm": grouped_gemm,
    "moe_layer": moe_layer,
    "quantize": quantize,
    "attention": attention,
    "pointwise": pointwise,
    "rope": rope,
    "adamw": adamw,
    "grad_norm": grad_norm,
    "train": train,
    "forward": forward,
}


def main():
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        versions += f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    try:
        from importlib.metadata import version

        versions += f", torchao {version('torchao')}"
    except Exception:
        versions += ", no torchao"
    emit(-1, "environment", note=versions)
    for line in sys.stdin:
        if not line.strip():
            continue
        request = json.loads(line)
        try:
            bench = Bench(request["device"], request["samples"], request["compile_only"])
            KINDS[request["task"]["kind"]](bench, request["id"], request["task"])
        except Exception as error:
            emit(request["id"], "torch", None, reason(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(json.dumps({"id": request["id"], "peer": "", "done": True}), flush=True)


main()
