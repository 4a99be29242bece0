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
    def forward(ctx, x, weight, granularity, is_transposed):
        ctx.save_for_backward(x, weight)
        ctx.granularity, ctx.is_transposed = granularity, is_transposed
        rows = x.reshape(-1, x.shape[-1])
        a = _OPS.mxfp8_quantize(rows, False, granularity, False)
        b = _OPS.mxfp8_quantize(weight, is_transposed, granularity, True)
        out = _OPS.mxfp8_gemm(*a, *b, "fprop", granularity, True)
        return out.view(*x.shape[:-1], weight.shape[1 if is_transposed else 0])

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        granularity, is_transposed = ctx.granularity, ctx.is_transposed
        rows = dout.reshape(-1, dout.shape[-1])
        dx = dw = None
        rowwise, columnwise = _halves(_OPS.mxfp8_quantize_both(rows, granularity, False))
        if ctx.needs_input_grad[0]:
            b = _OPS.mxfp8_quantize(weight, not is_transposed, granularity, True)
            dx = _OPS.mxfp8_gemm(*rowwise, *b, "dgrad", granularity, True).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_x = _OPS.mxfp8_quantize(x.reshape(-1, x.shape[-1]), True, granularity, False)
            a, b = (of_x, columnwise) if is_transposed else (columnwise, of_x)
            dw = _OPS.mxfp8_gemm(*a, *b, "wgrad", granularity, False).to(weight.dtype)
        return dx, dw, None, None


def _halves(planes):
    return planes[:2], planes[2:]


def granularity_of(device: torch.device) -> int:
    """Elements that share an exponent: Hopper's GEMM promotes its accumulator every 128."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return 128
    return 32


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """``x · weightᵀ + bias`` in MXFP8, of BF16 tensors; ``x · weight`` if the weight is stored
    transposed, ``[in, out]``."""
    out = _Linear.apply(x, weight, granularity_of(x.device), is_transposed)
    return out if bias is None else out + bias


def _rejects_rows(x: torch.Tensor, granularity: int) -> str | None:
    tokens = x.numel() // x.shape[-1]
    if tokens % granularity:
        return f"MXFP8 takes a multiple of {granularity} tokens, not {tokens}"
    return None


class Mxfp8Linear(swaps.Swapped):
    """``nn.Linear`` in MXFP8, of BF16 weights, or of FP32 weights under autocast."""

    is_exact = False
    is_transposed = False

    def forward(self, x):
        weight, bias = self.weight, self.bias
        rows = x
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            rows, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        reason = swaps.rejects(self, rows)
        if reason is None and rows.dtype != torch.bfloat16:
            reason = f"MXFP8 takes BF16, not {rows.dtype}"
        reason = reason or _rejects_rows(rows, granularity_of(x.device))
        if reason:
            swaps.fall_back(self, reason)
            return self._deepwell_class.forward(self, x)
        return linear(rows, weight, bias, self.is_transposed)

    @classmethod
    def matches(cls, module):
        rows, columns = module.weight.shape
        if min(rows, columns) < SMALLEST:
            return f"MXFP8 saves no time with {rows} x {columns} weights"
        granularity = granularity_of(module.weight.device)
        if rows % granularity or columns % granularity:
            return f"MXFP8 takes weights of a multiple of {granularity}, not {rows} x {columns}"
        return None


class Mxfp8Conv1D(Mxfp8Linear):
    """``Conv1D`` of GPT-2, a linear layer with the weight ``[in, out]``."""

    is_transposed = True


for _swap in (Mxfp8Linear, Mxfp8Conv1D):
    swaps.SWAPS[_swap.__name__] = _swap


def _swap_of(module: nn.Module) -> type[Mxfp8Linear] | None:
    """The swap of a module that is a linear layer and not swapped yet."""
    if type(module) is nn.Linear:
        return Mxfp8Linear
    if type(module).__name__ == "Conv1D" and not swaps.is_swapped(module):
        return Mxfp8Conv1D
    return None


def swap_linears(model: nn.Module, report) -> None:
    """Swaps the linear layers of a model except the first, the last and routers. Their results
    differ from BF16 by the rounding of MXFP8, so they are not compared at the swap."""
    layers = [(name, module) for name, module in model.named_modules() if _swap_of(module)]
    kept = {name for name, _ in layers[:1] + layers[-1:]}
    for name, module in layers:
        swap = _swap_of(module)
        if name in kept or name.split(".")[-1] == "gate":
            report.left[name] = "the policy keeps the first and the last linear layer and routers"
        elif reason := swap.matches(module):
            report.left[name] = reason
        else:
            report.swapped[name] = f"{type(module).__name__} by {swap.__name__}"
            module.__class__ = swaps.swapped_class(type(module), swap.__name__)
