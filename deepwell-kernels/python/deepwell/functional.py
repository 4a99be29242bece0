"""Differentiable functions on the operators: any leading dimensions, autocast, gradients."""

from __future__ import annotations

import torch
from torch import nn

from deepwell import attention_ops, ops
from deepwell.library import UnsupportedError


def _autocast(*tensors):
    """The tensors in the type that autocast asks for, as PyTorch casts operands of a GEMM."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def _keeps(*tensors) -> bool:
    """Whether a call has to keep what its gradients need."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = ops.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = ops.rms_norm_backward(dy, x, weight, rstd)
        return dx, _as(dw, weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(mean(x², -1) + eps) · weight``, with FP32 statistics."""
    weight = _as(weight, x.dtype)
    if not _keeps(x, weight):
        return ops.rms_norm(x, weight, float(eps))[0]
    return _RmsNorm.apply(x, weight, float(eps))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = ops.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dw, db = ops.layer_norm_backward(dy, x, weight, mean, rstd)
        return dx, _as(dw, weight.dtype), _as(db, weight.dtype), None


def layer_norm(x, weight, bias, eps: float = 1e-5) -> torch.Tensor:
    """Layer normalization over the last dimension, with FP32 statistics."""
    weight, bias = _as(weight, x.dtype), _as(bias, x.dtype)
    if not _keeps(x, weight, bias):
        return ops.layer_norm(x, weight, bias, float(eps))[0]
    return _LayerNorm.apply(x, weight, bias, float(eps))


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return ops.swiglu(gate, up)

    @staticmethod
    def backward(ctx, dout):
        return ops.swiglu_backward(dout, *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``."""
    return _SwiGlu.apply(gate, up) if _keeps(gate, up) else ops.swiglu(gate, up)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return tuple(nn.functional.linear(x, half) for half in weight.chunk(2))

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        dx = dw = None
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        if ctx.needs_input_grad[0]:
            first, second = weight.chunk(2)
            dx = torch.addmm(rows[0] @ first, rows[1], second).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            dw = torch.cat([row.T @ inputs for row in rows])
        return dx, dw


def linear_halves(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of ``x · weightᵀ``, each contiguous, as kernels take gate and up."""
    return _Halves.apply(x, weight)


class _GeluTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return ops.gelu_tanh(x)

    @staticmethod
    def backward(ctx, dy):
        return ops.gelu_tanh_backward(dy, *ctx.saved_tensors)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation, as GPT-2 has it."""
    return _GeluTanh.apply(x) if _keeps(x) else ops.gelu_tanh(x)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table):
        ctx.save_for_backward(table)
        return ops.rope(x, table, False)

    @staticmethod
    def backward(ctx, dy):
        return ops.rope(dy, *ctx.saved_tensors, True), None


def rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[batch, seq, heads, head_dim]``, with pairs half a head apart.

    Row ``t mod P`` of the table ``[P, head_dim]`` in FP32 has the cosines, then the sines, of the
    pairs of token t: :func:`rope_table`.
    """
    return _Rope.apply(x, table) if _keeps(x) else ops.rope(x, table, False)


def rope_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The table of :func:`rope` from transformers' cosines and sines, ``[…, seq, head_dim]``, whose
    halves are equal."""
    half = cos.shape[-1] // 2
    table = torch.cat([cos[..., :half], sin[..., :half]], dim=-1)
    return table.reshape(-1, 2 * half).float()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, documents, scale, causal, window, heads_first):
        settings = (scale, causal, window, heads_first)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = attention_ops.attention(q, k, v, sinks, documents, *settings)
        ctx.save_for_backward(q, k, v, o, lse, sinks, documents)
        ctx.settings = settings
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse, sinks, documents = ctx.saved_tensors
        dq, dk, dv, dsinks = attention_ops.attention_backward(
            dout.contiguous(), q, k, v, o, lse, sinks, documents, *ctx.settings
        )
        return dq, dk, dv, None if sinks is None else dsinks, *[None] * 5


def _has_heads_first(tensor: torch.Tensor) -> bool:
    """Whether memory has the tokens of a head together."""
    return not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous()


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
    heads_first_output: bool | None = None,
) -> torch.Tensor:
    """Attention of ``[batch, seq, heads, head_dim]``; k and v may have fewer heads.

    ``window`` is the number of tokens that a token sees, itself included; 0 is all. ``sinks`` is
    one score per head in the softmax. ``documents`` ``[batch, seq, 2]`` (INT32) is the begin and
    the end of the keys of each token's document. Heads without a kernel for the forward pass, or
    for the gradients that the call will need, raise :class:`UnsupportedError`.

    Each of q, k and v may be a view of a contiguous ``[batch, heads, seq, head_dim]``. On Hopper,
    Blackwell of data centers and CPUs such views are not copied. ``heads_first_output`` says
    whether the output is such a view, too; without it the output has the order of q.
    """
    q, k, v = _autocast(q, k, v)
    orders = [_has_heads_first(t) for t in (q, k, v)]
    orders.append(orders[0] if heads_first_output is None else heads_first_output)
    q, k, v = (t.transpose(1, 2) if is_first else t for t, is_first in zip((q, k, v), orders))
    heads_first = sum(is_first << bit for bit, is_first in enumerate(orders))
    o = _attend(q, k, v, sinks, documents, scale, causal, window, heads_first)
    return o.transpose(1, 2) if orders[3] else o


def attention_by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """:func:`attention` of ``[batch, heads, seq, head_dim]``, with fewer calls where operands are
    contiguous."""
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        operands = _autocast(q, k, v)
        return _attend(*operands, None, None, None, causal, 0, attention_ops.ALL_FIRST)
    by_token = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention(*by_token, causal=causal).transpose(1, 2)


def _attend(q, k, v, sinks, documents, scale, causal, window, heads_first) -> torch.Tensor:
    """Attention of operands and an output in the order that ``heads_first`` says."""
    keeps = _keeps(q, k, v) if sinks is None else _keeps(q, k, v, sinks)
    if keeps and not torch.compiler.is_compiling():
        # Now, rather than in the backward pass.
        heads, kv_heads = attention_ops.head_counts(q, k, heads_first)
        if reason := attention_ops.missing_attention(heads, kv_heads, q.shape[-1], q):
            raise UnsupportedError(reason)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    sinks = None if sinks is None else sinks.float()
    attend = _Attention.apply if keeps else _attention_without_gradients
    return attend(q, k, v, sinks, documents, scale, bool(causal), int(window), heads_first)


def _attention_without_gradients(*operands) -> torch.Tensor:
    return attention_ops.attention(*operands)[0]
