"""Linear layers in MXFP8: E4M3 elements with an E8M0 scale for each block.

All three GEMMs of a layer are quantized. Each operand is quantized from BF16 along the contraction
of its GEMM. The forward pass saves the BF16 input and weight, as PyTorch's layer does, and the
backward pass quantizes them again, so the layer takes no more memory than PyTorch's.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from deepwell import plans, swaps
from deepwell.ops import operator

_OPS = torch.ops.deepwell
#: Elements that share a stored scale.
BLOCK = 32
#: A layer with fewer rows or columns of weights is quantized in more time than its GEMMs save.
SMALLEST = 1024


def _format(granularity: int, square: bool) -> dict:
    rows = granularity if square else 1
    return {
        "element": "e4m3",
        "block": {"rows": rows, "k": granularity},
        "scale": {"e8m0": "rceil"},
        "tensor_scale": "none",
        "rounding": "nearest",
    }


@functools.cache
def _quantize_op(axis: str, granularity: int, square: bool) -> bytes:
    return plans.encode("quantize", format=_format(granularity, square), axis=axis)


def _planes(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data, and scales in tiles of 128 rows by 4, of a matrix quantized along its columns."""
    blocks = -(-columns // BLOCK)
    tiles = (-(-rows // 128), -(-blocks // 4), 512)
    data = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return data, x.new_empty(tiles, dtype=torch.float8_e8m0fnu)


def _run_quantize(x, axis: str, granularity: int, square: bool, outputs) -> None:
    if not x.numel():
        return
    counters = torch.empty(6, dtype=torch.uint64, device=x.device)
    plans.run(_quantize_op(axis, granularity, square), [x], [*outputs, counters])


@operator(
    "mxfp8_quantize(Tensor x, bool columnwise, int granularity, bool square) -> (Tensor, Tensor)"
)
def quantize(x, columnwise, granularity, square):
    outputs = quantize_fake(x, columnwise, granularity, square)
    _run_quantize(x, "column" if columnwise else "row", granularity, square, outputs)
    return outputs


@quantize.fake
def quantize_fake(x, columnwise, granularity, square):
    rows, columns = x.shape
    return _planes(x, columns, rows) if columnwise else _planes(x, rows, columns)


@operator(
    "mxfp8_quantize_both(Tensor x, int granularity, bool square)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def quantize_both(x, granularity, square):
    outputs = quantize_both_fake(x, granularity, square)
    _run_quantize(x, "both", granularity, square, outputs)
    return outputs


@quantize_both.fake
def quantize_both_fake(x, granularity, square):
    rows, columns = x.shape
    return *_planes(x, rows, columns), *_planes(x, columns, rows)


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, granularity):
        ctx.save_for_backward(x, weight)
        ctx.granularity = granularity
        rows = x.reshape(-1, x.shape[-1])
        a = _OPS.mxfp8_quantize(rows, False, granularity, False)
        b = _OPS.mxfp8_quantize(weight, False, granularity, True)
        out = _OPS.mxfp8_gemm(*a, *b, "fprop", granularity, True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        granularity = ctx.granularity
        rows = dout.reshape(-1, dout.shape[-1])
        dx = dw = None
        a, a_scales, a_t, a_t_scales = _OPS.mxfp8_quantize_both(rows, granularity, False)
        if ctx.needs_input_grad[0]:
            b = _OPS.mxfp8_quantize(weight, True, granularity, True)
            dx = _OPS.mxfp8_gemm(a, a_scales, *b, "dgrad", granularity, True).view(x.shape)
        if ctx.needs_input_grad[1]:
            columns = x.reshape(-1, x.shape[-1])
            b = _OPS.mxfp8_quantize(columns, True, granularity, False)
            dw = _OPS.mxfp8_gemm(a_t, a_t_scales, *b, "wgrad", granularity, False)
            dw = dw.to(weight.dtype)
        return dx, dw, None


def granularity_of(device: torch.device) -> int:
    """Elements that share an exponent: Hopper's GEMM promotes its accumulator every 128."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return 128
    return 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x · weightᵀ + bias`` in MXFP8, of BF16 tensors."""
    out = _Linear.apply(x, weight, granularity_of(x.device))
    return out if bias is None else out + bias


def _rejects_rows(x: torch.Tensor, granularity: int) -> str | None:
    tokens = x.numel() // x.shape[-1]
    if tokens % granularity:
        return f"MXFP8 takes a multiple of {granularity} tokens, not {tokens}"
    return None


class Mxfp8Linear(swaps.Swapped):
    """``nn.Linear`` in MXFP8, of BF16 weights, or of FP32 weights under autocast."""

    is_exact = False

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        reason = swaps.rejects(self, x)
        if reason is None and x.dtype != torch.bfloat16:
            reason = f"MXFP8 takes BF16, not {x.dtype}"
        reason = reason or _rejects_rows(x, granularity_of(x.device))
        if reason:
            swaps.fall_back(self, reason)
            return self._deepwell_class.forward(self, x)
        return linear(x, weight, bias)

    @classmethod
    def matches(cls, module):
        if type(module) is not nn.Linear:
            raise NotImplementedError
        rows, columns = module.weight.shape
        if min(rows, columns) < SMALLEST:
            return f"MXFP8 saves no time with {rows} x {columns} weights"
        granularity = granularity_of(module.weight.device)
        if rows % granularity or columns % granularity:
            return f"MXFP8 takes weights of a multiple of {granularity}, not {rows} x {columns}"
        return None


swaps.SWAPS[Mxfp8Linear.__name__] = Mxfp8Linear


def _quantized_names(model: nn.Module) -> set[str]:
    """Linear layers that the policy quantizes: all but the first and the last, and routers."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    kept = set(names[:1] + names[-1:])
    return {name for name in names if name not in kept and name.rsplit(".")[-1] != "gate"}


def swap_linears(model: nn.Module, report, on_cpu: bool) -> None:
    """Swaps the linear layers of a model. Their results differ from BF16 by the rounding of MXFP8,
    so they are not compared at the swap."""
    quantized = _quantized_names(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if name not in quantized:
            report.left[name] = "the policy keeps the first and the last linear layer and routers"
        elif reason := Mxfp8Linear.matches(module):
            report.left[name] = reason
        else:
            module.__class__ = swaps.swapped_class(nn.Linear, Mxfp8Linear.__name__)
            report.swapped[name] = "Linear by Mxfp8Linear"
