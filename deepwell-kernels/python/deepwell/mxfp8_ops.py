"""Operators in MXFP8: E4M3 elements with an E8M0 scale for each block.

A matrix is quantized along its rows, or along its columns and stored transposed, as the contraction
of a GEMM asks for. Each result is a pair of planes, data and scales.
"""

from __future__ import annotations

import functools
import math

import torch

from deepwell import plans
from deepwell.ops import operator

#: Elements that share a stored scale.
BLOCK = 32


def _format(granularity: int, square: bool) -> dict:
    rows = granularity if square else 1
    return {
        "element": "e4m3",
        "block": {"rows": rows, "k": granularity},
        "scale": {"e8m0": "rceil"},
        "tensor_scale": "none",
        "rounding": "nearest",
    }


def _quantize(axis: str, granularity: int, square: bool) -> dict:
    return {"format": _format(granularity, square), "axis": axis}


@functools.cache
def _quantize_op(axis: str, granularity: int, square: bool) -> bytes:
    return plans.encode("quantize", **_quantize(axis, granularity, square))


@functools.cache
def _fused_op(core: str, results: int, granularity: int) -> bytes:
    """An op of which only the quantized results are stored, in both directions."""
    steps = [
        {"step": "quantize", "of": result, "quantize": _quantize("both", granularity, False)}
        for result in range(results)
    ]
    skipped = list(range(results))
    return plans.encode("fused", core={"op": core}, epilogue=steps, skipped=skipped)


def _planes(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data, and scales in tiles of 128 rows by 4, of a matrix quantized along its columns."""
    blocks = -(-columns // BLOCK)
    tiles = (-(-rows // 128), -(-blocks // 4), 512)
    data = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return data, x.new_empty(tiles, dtype=torch.float8_e8m0fnu)


def _both_planes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    return *_planes(x, rows, columns), *_planes(x, columns, rows)


@functools.cache
def _counters(device: torch.device, result: int) -> torch.Tensor:
    """Memory for counters of a quantization, which nothing reads."""
    return torch.empty(6, dtype=torch.uint64, device=device)


def _matrix(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape in the library: planes as they are, other tensors as matrices."""
    is_plane = tensor.dtype not in (torch.bfloat16, torch.float32)
    return plans.whole(tensor) if is_plane else plans.rows(tensor)


def _run_quantize(op: bytes, inputs, outputs) -> None:
    """Runs an op with the planes of one or more quantizations as outputs."""
    if not inputs[0].numel():
        return
    results = max(len(outputs) // 4, 1)
    each = len(outputs) // results
    stored = []
    for result in range(results):
        stored += outputs[each * result : each * (result + 1)]
        stored.append(_counters(inputs[0].device, result))
    plans.run(op, inputs, stored, shape_of=_matrix)


@operator(
    "mxfp8_quantize(Tensor x, bool columnwise, int granularity, bool square) -> (Tensor, Tensor)"
)
def quantize(x, columnwise, granularity, square):
    outputs = quantize_fake(x, columnwise, granularity, square)
    axis = "column" if columnwise else "row"
    _run_quantize(_quantize_op(axis, granularity, square), [x], outputs)
    return outputs


@quantize.fake
def quantize_fake(x, columnwise, granularity, square):
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    return _planes(x, columns, rows) if columnwise else _planes(x, rows, columns)


@operator(
    "mxfp8_quantize_both(Tensor x, int granularity, bool square)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def quantize_both(x, granularity, square):
    outputs = _both_planes(x)
    _run_quantize(_quantize_op("both", granularity, square), [x], outputs)
    return outputs


@quantize_both.fake
def quantize_both_fake(x, granularity, square):
    return _both_planes(x)


@operator(
    "mxfp8_swiglu(Tensor gate, Tensor up, int granularity) -> (Tensor, Tensor, Tensor, Tensor)"
)
def swiglu(gate, up, granularity):
    """``silu(gate) · up``, quantized in both directions."""
    outputs = _both_planes(gate)
    _run_quantize(_fused_op("swi_glu", 1, granularity), [gate, up], outputs)
    return outputs


@swiglu.fake
def swiglu_fake(gate, up, granularity):
    return _both_planes(gate)


@operator(
    "mxfp8_swiglu_backward(Tensor dout, Tensor gate, Tensor up, int granularity)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def swiglu_backward(dout, gate, up, granularity):
    """Gradients with respect to gate, then to up, each quantized in both directions."""
    outputs = (*_both_planes(gate), *_both_planes(gate))
    _run_quantize(_fused_op("swi_glu_backward", 2, granularity), [dout, gate, up], outputs)
    return outputs


@swiglu_backward.fake
def swiglu_backward_fake(dout, gate, up, granularity):
    return *_both_planes(gate), *_both_planes(gate)


@operator(
    "mxfp8_gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, str kind, int granularity,"
    " bool square) -> Tensor"
)
def gemm(a, a_scales, b, b_scales, kind, granularity, square):
    """``a · bᵀ`` in BF16, or in FP32 for the kind ``wgrad``."""
    out = gemm_fake(a, a_scales, b, b_scales, kind, granularity, square)
    if not a.numel():
        return out.zero_()
    op = gemm_op(kind, granularity, square)
    plans.run(op, [a, a_scales, b, b_scales], [out])
    return out


@gemm.fake
def gemm_fake(a, a_scales, b, b_scales, kind, granularity, square):
    dtype = torch.float32 if kind == "wgrad" else torch.bfloat16
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@functools.cache
def gemm_op(kind: str, granularity: int, square: bool) -> bytes:
    return plans.encode(
        "scaled_gemm",
        kind=kind,
        output="bf16",
        bias=False,
        a=_format(granularity, False),
        b=_format(granularity, square),
    )
