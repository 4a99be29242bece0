"""Differentiable functions on the operators: any leading dimensions, autocast, gradients."""

from __future__ import annotations

import torch

from deepwell import ops  # noqa: F401  registers the operators

_OPS = torch.ops.deepwell


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _autocast(*tensors):
    """The tensors in the type that autocast asks for, as PyTorch casts operands of a GEMM."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = _OPS.rms_norm(_rows(x), weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = _OPS.rms_norm_backward(_rows(dy), _rows(x), weight, rstd)
        return dx.view(x.shape), dw.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(mean(x², -1) + eps) · weight``, with FP32 statistics."""
    return _RmsNorm.apply(x, weight.to(x.dtype), float(eps))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = _OPS.layer_norm(_rows(x), weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dw, db = _OPS.layer_norm_backward(_rows(dy), _rows(x), weight, mean, rstd)
        return dx.view(x.shape), dw.to(weight.dtype), db.to(weight.dtype), None


def layer_norm(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    """Layer normalization over the last dimension, with FP32 statistics."""
    return _LayerNorm.apply(x, weight.to(x.dtype), bias.to(x.dtype), float(eps))


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _OPS.swiglu(_rows(gate), _rows(up)).view(gate.shape)

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        dgate, dup = _OPS.swiglu_backward(_rows(dout), _rows(gate), _rows(up))
        return dgate.view(gate.shape), dup.view(up.shape)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``."""
    return _SwiGlu.apply(gate, up)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _OPS.gelu_tanh(_rows(x)).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return _OPS.gelu_tanh_backward(_rows(dy), _rows(x)).view(x.shape)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation, as GPT-2 has it."""
    return _GeluTanh.apply(x)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, documents, scale, causal, window):
        q, k, v = (t.contiguous() for t in (q, k, v))
        o, lse = _OPS.attention(q, k, v, sinks, documents, scale, causal, window)
        ctx.save_for_backward(q, k, v, o, lse, sinks, documents)
        ctx.settings = (scale, causal, window)
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse, sinks, documents = ctx.saved_tensors
        dq, dk, dv, dsinks = _OPS.attention_backward(
            dout.contiguous(), q, k, v, o, lse, sinks, documents, *ctx.settings
        )
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``[batch, seq, heads, head_dim]``; k and v may have fewer heads.

    ``window`` is the number of tokens that a token sees, itself included; 0 is all. ``sinks`` is
    one score per head in the softmax. ``documents`` ``[batch, seq, 2]`` (INT32) is the begin and
    the end of the keys of each token's document.
    """
    q, k, v = _autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    sinks = None if sinks is None else sinks.float()
    return _Attention.apply(q, k, v, sinks, documents, scale, bool(causal), int(window))
