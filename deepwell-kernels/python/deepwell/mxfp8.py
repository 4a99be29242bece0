"""Linear layers in MXFP8.

All three GEMMs of a layer are quantized. Each operand is quantized from BF16 along the contraction
of its GEMM, in both directions from one read. The backward pass gets the quantized input and
weight, which take half of the memory of the input that PyTorch's layer keeps.
"""

from __future__ import annotations

import torch
from torch import nn

from deepwell import swaps
from deepwell.mxfp8_ops import gemm, quantize, quantize_both, swiglu, swiglu_backward

#: A layer with fewer rows or columns of weights is quantized in more time than its GEMMs save.
SMALLEST = 1024


def _input_planes(x, granularity: int, both: bool):
    """Planes of an input for fprop, and, or ``None``, for wgrad."""
    if not both:
        return quantize(x, False, granularity, False), (None, None)
    planes = quantize_both(x, granularity, False)
    return planes[:2], planes[2:]


def _weight_planes(weight, granularity: int, is_transposed: bool, both: bool):
    """Planes of a weight for fprop, and, or ``None``, for dgrad."""
    if not both:
        return quantize(weight, is_transposed, granularity, True), (None, None)
    planes = quantize_both(weight, granularity, True)
    along, across = planes[:2], planes[2:]
    return (across, along) if is_transposed else (along, across)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, granularity, is_transposed):
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        a, of_x = _input_planes(x, granularity, needs_dw)
        b, of_weight = _weight_planes(weight, granularity, is_transposed, needs_dx)
        ctx.save_for_backward(*of_x, *of_weight)
        ctx.settings = (granularity, is_transposed, x.shape, weight.dtype)
        out = gemm(*a, *b, "fprop", granularity, True)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, dout):
        planes = ctx.saved_tensors
        of_x, of_weight = planes[:2], planes[2:]
        granularity, is_transposed, shape, dtype = ctx.settings
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        along, across = _input_planes(dout, granularity, needs_dw)
        if needs_dx:
            dx = gemm(*along, *of_weight, "dgrad", granularity, True).view(shape)
        if needs_dw:
            a, b = (of_x, across) if is_transposed else (across, of_x)
            dw = gemm(*a, *b, "wgrad", granularity, False).to(dtype)
        return dx, dw, None, None


class _SwiGluMlp(torch.autograd.Function):
    """``down(silu(gate(x)) · up(x))`` of weights without biases. The input is quantized once for
    two layers, and the hidden tensor and its gradients leave their kernels quantized."""

    @staticmethod
    def forward(ctx, x, gate_weight, up_weight, down_weight, granularity):
        a, of_x = _input_planes(x, granularity, True)
        weights = []
        hidden = []
        for weight in (gate_weight, up_weight):
            b, of_weight = _weight_planes(weight, granularity, False, True)
            hidden.append(gemm(*a, *b, "fprop", granularity, True))
            weights += of_weight
        planes = swiglu(*hidden, granularity)
        b, of_weight = _weight_planes(down_weight, granularity, False, True)
        out = gemm(*planes[:2], *b, "fprop", granularity, True)
        ctx.save_for_backward(*hidden, *of_x, *planes[2:], *weights, *of_weight)
        ctx.settings = (granularity, x.shape, gate_weight.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, dout):
        gate, up, *planes = ctx.saved_tensors
        of_x, of_hidden, of_gate, of_up, of_down = (planes[i : i + 2] for i in range(0, 10, 2))
        granularity, shape, dtype = ctx.settings
        along, across = _input_planes(dout, granularity, True)
        dhidden = gemm(*along, *of_down, "dgrad", granularity, True)
        ddown = gemm(*across, *of_hidden, "wgrad", granularity, False)
        both = swiglu_backward(dhidden, gate, up, granularity)
        dx = gemm(*both[:2], *of_gate, "dgrad", granularity, True)
        dx += gemm(*both[4:6], *of_up, "dgrad", granularity, True)
        dgate = gemm(*both[2:4], *of_x, "wgrad", granularity, False)
        dup = gemm(*both[6:8], *of_x, "wgrad", granularity, False)
        return dx.view(shape), dgate.to(dtype), dup.to(dtype), ddown.to(dtype), None


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
    granularity = granularity_of(x.device)
    if torch.is_grad_enabled():
        out = _Linear.apply(x, weight, granularity, is_transposed)
    else:
        a, _ = _input_planes(x, granularity, False)
        b, _ = _weight_planes(weight, granularity, is_transposed, False)
        out = gemm(*a, *b, "fprop", granularity, True)
        out = out.view(*x.shape[:-1], out.shape[-1])
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


class Mxfp8SwiGluMlp(swaps.SwiGluMlp):
    """An MLP of three :class:`Mxfp8Linear`, in one function."""

    is_exact = False

    def forward(self, x):
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if not (self._deepwell_is_whole(x) and all(map(_is_bare, layers))):
            return super().forward(x)
        weights = [layer.weight for layer in layers]
        return _SwiGluMlp.apply(x, *weights, granularity_of(x.device))

    def _deepwell_is_whole(self, x) -> bool:
        """Whether all gradients of this call are asked for, of BF16 tensors that kernels take."""
        return (
            torch.is_grad_enabled()
            and x.requires_grad
            and not torch.is_autocast_enabled(x.device.type)
            and swaps.rejects(self, x) is None
            and x.dtype == torch.bfloat16
            and _rejects_rows(x, granularity_of(x.device)) is None
        )


def _is_bare(layer: nn.Module) -> bool:
    """Whether a layer is its trained BF16 weight and nothing else: no hooks, bias or adapters."""
    return (
        isinstance(layer, Mxfp8Linear)
        and layer.bias is None
        and layer.weight.requires_grad
        and layer.weight.dtype == torch.bfloat16
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


for _swap in (Mxfp8Linear, Mxfp8Conv1D, Mxfp8SwiGluMlp):
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
    for module in model.modules():
        if isinstance(module, swaps.SwiGluMlp) and all(
            isinstance(getattr(module, name, None), Mxfp8Linear)
            for name in ("gate_proj", "up_proj", "down_proj")
        ):
            original = module._deepwell_class
            module.__class__ = swaps.swapped_class(original, Mxfp8SwiGluMlp.__name__)
