#!/usr/bin/env python3
"""Compares each function of libdeepwell.so with PyTorch.

    cargo build --release -p deepwell-capi
    python3 scripts/compare_capi.py target/release/libdeepwell.so [cpu|cuda]

Needs torch. Prints a line for each comparison and exits with 1 if one is too far off.
"""

import ctypes
import sys

import torch


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    device = sys.argv[2] if len(sys.argv) > 2 else ("cuda" if torch.cuda.is_available() else "cpu")
    lib = ctypes.CDLL(sys.argv[1])
    lib.dw_last_error.restype = ctypes.c_char_p
    lib.dw_mxfp8_scale_bytes.restype = ctypes.c_size_t
    failures = []

    def call(function, *arguments):
        given = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor)
            else ctypes.c_void_p(None) if a is None
            else ctypes.c_double(a) if isinstance(a, float)
            else ctypes.c_int(a)
            for a in arguments
        ]
        if function(*given) != 0:
            raise RuntimeError(lib.dw_last_error().decode())

    def compare(what, got, expected, tolerance):
        got, expected = got.double(), expected.double()
        distance = ((got - expected).norm() / expected.norm()).item()
        verdict = "ok" if distance <= tolerance else "WRONG"
        print(f"{what:60} {distance:.2e} of {tolerance:.0e} {verdict}")
        if distance > tolerance:
            failures.append(what)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    torch.manual_seed(0)
    call_device = ctypes.c_char_p(device.encode())
    if lib.dw_set_device(call_device) != 0:
        raise RuntimeError(lib.dw_last_error().decode())

    # Results in BF16 are off by up to 2^-9 of themselves, intermediate ones too.
    small = device == "cpu"
    for batch, heads, seq, dim in [(2, 3, 129, 64), (1, 4, 512, 128)]:
        for causal in (0, 1):
            q, k, v = (random(batch, heads, seq, dim) for _ in range(3))
            o = torch.empty_like(q)
            call(lib.dw_fmha_bf16_forward, q, k, v, o, batch, heads, seq, seq, dim, causal)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), is_causal=bool(causal)
            )
            name = f"dw_fmha_bf16_forward B{batch} H{heads} S{seq} D{dim} causal {causal}"
            compare(name, o, expected, 6e-3)

    batch, seq, heads, kv_heads, dim = (1, 65, 4, 2, 64) if small else (4, 1000, 32, 8, 128)
    q, dout = random(batch, seq, heads, dim), random(batch, seq, heads, dim)
    k, v = random(batch, seq, kv_heads, dim), random(batch, seq, kv_heads, dim)
    o = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq, device=device, dtype=torch.float32)
    sizes = (batch, seq, heads, kv_heads, dim, 0.0, 1)
    call(lib.dw_attention_bf16_forward, q, k, v, o, lse, *sizes)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    call(lib.dw_attention_bf16_backward, dout, q, k, v, o, lse, dq, dk, dv, *sizes)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    grouped = [x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1) for x in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(*grouped, is_causal=True)
    expected.backward(dout.transpose(1, 2).float())
    compare("dw_attention_bf16_forward, grouped heads: o", o, expected.transpose(1, 2), 6e-3)
    for name, got, leaf in zip(("dq", "dk", "dv"), (dq, dk, dv), leaves):
        compare(f"dw_attention_bf16_backward, grouped heads: {name}", got, leaf.grad, 1e-2)

    m, n, k_size = (96, 64, 256) if small else (4096, 4096, 4096)
    a, b = random(m, k_size), random(n, k_size)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    call(lib.dw_bf16_gemm, a, b, out, m, n, k_size)
    exact = a.double() @ b.double().T
    compare(f"dw_bf16_gemm {m} x {n} x {k_size}", out, exact, 4e-3)

    for granularity in (32, 128):
        data, scales = {}, {}
        for name, x, rows, square in (("a", a, m, 0), ("b", b, n, 1)):
            data[name] = torch.empty(rows, k_size, device=device, dtype=torch.uint8)
            size = lib.dw_mxfp8_scale_bytes(rows, k_size)
            scales[name] = torch.empty(size, device=device, dtype=torch.uint8)
            call(lib.dw_mxfp8_quantize, x, 0, rows, k_size, granularity, square, data[name],
                 scales[name], None, None)
        sums = torch.zeros(m, n, device=device, dtype=torch.float32)
        for to, to_dtype, accumulate in ((out, 0, 0), (sums, 1, 1)):
            call(lib.dw_mxfp8_gemm, data["a"], scales["a"], data["b"], scales["b"], to, to_dtype,
                 m, n, k_size, granularity, granularity, 1, accumulate)
            # E4M3 has three bits behind the point: each operand is off by 2.6 % of itself in the
            # mean square.
            name = f"dw_mxfp8_gemm, granularity {granularity}, {str(to.dtype)[6:]}"
            compare(name, to, exact, 5e-2)

    groups, width, depth = (4, 64, 128) if small else (64, 1408, 2048)
    counts = torch.tensor([(3 * e) % 5 * 128 for e in range(groups)])
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(device, torch.int32)
    rows = int(counts.sum()) + 128  # the last ones are of no group
    x, dy, w = random(rows, depth), random(rows, width), random(groups, width, depth)
    ends = offsets.tolist()
    parts = list(zip(range(groups), ends, ends[1:]))
    y, dx = random(rows, width), random(rows, depth)
    dw = random(groups, width, depth, dtype=torch.float32)
    exact_y, exact_dx = torch.zeros_like(y).double(), torch.zeros_like(dx).double()
    exact_dw = torch.zeros_like(dw).double()
    for e, first, end in parts:
        exact_y[first:end] = x[first:end].double() @ w[e].double().T
        exact_dx[first:end] = dy[first:end].double() @ w[e].double()
        exact_dw[e] = dy[first:end].double().T @ x[first:end].double()
    sizes = (groups, 128, rows, width, depth)
    call(lib.dw_grouped_gemm_bf16, x, w, offsets, y, *sizes)
    call(lib.dw_grouped_gemm_bf16_dgrad, dy, w, offsets, dx, *sizes)
    call(lib.dw_grouped_gemm_bf16_wgrad, dy, x, offsets, dw, *sizes, 0)
    name = f"{groups} groups of {rows - 128} rows, {width} x {depth}"
    compare(f"dw_grouped_gemm_bf16 {name}", y, exact_y, 4e-3)
    compare(f"dw_grouped_gemm_bf16_dgrad {name}", dx, exact_dx, 4e-3)
    compare(f"dw_grouped_gemm_bf16_wgrad {name}", dw, exact_dw, 4e-3)

    def quantized(matrices, square):
        count, rows, columns = matrices.shape
        data = torch.empty(count, rows, columns, device=device, dtype=torch.uint8)
        size = lib.dw_mxfp8_scale_bytes(rows, columns)
        scales = torch.empty(count, size, device=device, dtype=torch.uint8)
        for index in range(count):
            call(lib.dw_mxfp8_quantize, matrices[index], 0, rows, columns, 128, square,
                 data[index], scales[index], None, None)
        return data, scales

    of_x, of_w = quantized(x[None], 0), quantized(w, 1)
    call(lib.dw_grouped_gemm_mxfp8, *of_x, *of_w, offsets, y, 0, *sizes, 128, 1)
    compare(f"dw_grouped_gemm_mxfp8 {name}", y, exact_y, 5e-2)
    along_dy, along_x = (quantized(m.T.contiguous()[None], 0) for m in (dy, x))
    call(lib.dw_grouped_gemm_mxfp8_wgrad, *along_dy, *along_x, offsets, dw, *sizes, 128, 0)
    compare(f"dw_grouped_gemm_mxfp8_wgrad {name}", dw, exact_dw, 5e-2)

    if failures:
        sys.exit(f"{len(failures)} of the comparisons failed")


main()
