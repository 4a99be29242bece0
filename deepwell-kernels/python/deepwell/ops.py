"""Operators of ``torch.ops.deepwell``: one call of the library each, without gradients or casts.

Tensors of tokens are ``[tokens, width]``. Attention takes ``[batch, seq, heads, head_dim]``. Every
operator returns new tensors, contiguous, on the device of its inputs.
"""

from __future__ import annotations

import functools

import torch

from deepwell import plans

_LIBRARY = torch.library.Library("deepwell", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)


#: Names of all operators.
OPERATORS: list[str] = []


def operator(schema: str):
    """Registers a function for CPU and CUDA tensors. ``fake`` of the result registers its fake."""

    def register(function):
        _LIBRARY.define(schema, tags=_TAGS)
        name = schema.split("(")[0]
        OPERATORS.append(name)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        function.fake = torch.library.register_fake(f"deepwell::{name}", lib=_LIBRARY)
        return function

    return register


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


def _f32(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return tensor.new_empty(shape, dtype=torch.float32)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def rms_norm(x, weight, eps):
    y, rstd = rms_norm_fake(x, weight, eps)
    if x.numel():
        plans.run(plans.op_text("rms_norm", eps=eps), [x, weight], [y, rstd])
    return y, rstd


@rms_norm.fake
def rms_norm_fake(x, weight, eps):
    return _like(x), _f32(x, x.shape[0])


@operator("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
def rms_norm_backward(dy, x, weight, rstd):
    dx, dw = rms_norm_backward_fake(dy, x, weight, rstd)
    if not x.numel():
        return dx, dw.zero_()
    op = plans.op_text("rms_norm_backward", residual=False)
    plans.run(op, [dy, x, weight, rstd], [dx, dw])
    return dx, dw


@rms_norm_backward.fake
def rms_norm_backward_fake(dy, x, weight, rstd):
    return _like(x), _f32(x, x.shape[1])


@operator(
    "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)"
)
def add_rms_norm(x, delta, weight, eps):
    total, y, rstd = add_rms_norm_fake(x, delta, weight, eps)
    if x.numel():
        op = plans.op_text("add_rms_norm", eps=eps)
        plans.run(op, [x, delta, weight], [total, y, rstd])
    return total, y, rstd


@add_rms_norm.fake
def add_rms_norm_fake(x, delta, weight, eps):
    return _like(x), _like(x), _f32(x, x.shape[0])


@operator("swiglu(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate, up):
    out = swiglu_fake(gate, up)
    if gate.numel():
        plans.run(plans.op_text("swi_glu"), [gate, up], [out])
    return out


@swiglu.fake
def swiglu_fake(gate, up):
    return _like(gate)


@operator("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)")
def swiglu_backward(dout, gate, up):
    dgate, dup = swiglu_backward_fake(dout, gate, up)
    if gate.numel():
        plans.run(plans.op_text("swi_glu_backward"), [dout, gate, up], [dgate, dup])
    return dgate, dup


@swiglu_backward.fake
def swiglu_backward_fake(dout, gate, up):
    return _like(gate), _like(gate)


@operator("gelu_tanh(Tensor x) -> Tensor")
def gelu_tanh(x):
    out = gelu_tanh_fake(x)
    if x.numel():
        plans.run(plans.op_text("gelu", tanh=True), [x], [out])
    return out


@gelu_tanh.fake
def gelu_tanh_fake(x):
    return _like(x)


@operator("gelu_tanh_backward(Tensor dy, Tensor x) -> Tensor")
def gelu_tanh_backward(dy, x):
    dx = gelu_tanh_backward_fake(dy, x)
    if x.numel():
        plans.run(plans.op_text("gelu_backward", tanh=True), [dy, x], [dx])
    return dx


@gelu_tanh_backward.fake
def gelu_tanh_backward_fake(dy, x):
    return _like(x)


@operator("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
def layer_norm(x, weight, bias, eps):
    y, mean, rstd = layer_norm_fake(x, weight, bias, eps)
    if x.numel():
        plans.run(plans.op_text("layer_norm", eps=eps), [x, weight, bias], [y, mean, rstd])
    return y, mean, rstd


@layer_norm.fake
def layer_norm_fake(x, weight, bias, eps):
    return _like(x), _f32(x, x.shape[0]), _f32(x, x.shape[0])


@operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)"
)
def layer_norm_backward(dy, x, weight, mean, rstd):
    dx, dw, db = layer_norm_backward_fake(dy, x, weight, mean, rstd)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    op = plans.op_text("layer_norm_backward", residual=False)
    plans.run(op, [dy, x, weight, mean, rstd], [dx, dw, db])
    return dx, dw, db


@layer_norm_backward.fake
def layer_norm_backward_fake(dy, x, weight, mean, rstd):
    return _like(x), _f32(x, x.shape[1]), _f32(x, x.shape[1])


@functools.cache
def attention_op(name, heads, kv_heads, head_dim, scale, causal, window, sinks, documents) -> bytes:
    """An attention as the library reads it. ``window`` is 0 for none."""
    attributes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": scale,
        "causal": causal,
    }
    if window:
        attributes["window"] = window
    if sinks:
        attributes["sinks"] = True
    if documents:
        attributes["documents"] = True
    return plans.encode(name, heads=attributes)


def _attention_operands(q, k, v, sinks, documents):
    """Operands of the library: one row for each token."""
    batch, seq, heads, head_dim = q.shape
    rows = [t.reshape(batch * seq, t.shape[2] * t.shape[3]) for t in (q, k, v)]
    extras = [] if sinks is None else [sinks]
    if documents is not None:
        extras.append(documents.reshape(batch * seq, 2))
    return rows, extras


@operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? documents, float scale,"
    " bool causal, int window) -> (Tensor, Tensor)"
)
def attention(q, k, v, sinks, documents, scale, causal, window):
    o, lse = attention_fake(q, k, v, sinks, documents, scale, causal, window)
    batch, seq, heads, head_dim = q.shape
    if not q.numel():
        return o, lse
    has = (sinks is not None, documents is not None)
    op = attention_op("attention", heads, k.shape[2], head_dim, scale, causal, window, *has)
    rows, extras = _attention_operands(q, k, v, sinks, documents)
    plans.run(op, rows + extras, [o.view(batch * seq, -1), lse], batch, seq)
    return o, lse


@attention.fake
def attention_fake(q, k, v, sinks, documents, scale, causal, window):
    return _like(q), _f32(q, q.shape[0], q.shape[2], q.shape[1])


@operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? sinks, Tensor? documents, float scale, bool causal, int window)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def attention_backward(dout, q, k, v, o, lse, sinks, documents, scale, causal, window):
    gradients = attention_backward_fake(
        dout, q, k, v, o, lse, sinks, documents, scale, causal, window
    )
    dq, dk, dv, dsinks = gradients
    batch, seq, heads, head_dim = q.shape
    if not q.numel():
        return dq, dk, dv, dsinks.zero_()
    has = (sinks is not None, documents is not None)
    name = "attention_backward"
    op = attention_op(name, heads, k.shape[2], head_dim, scale, causal, window, *has)
    rows, extras = _attention_operands(q, k, v, sinks, documents)
    outer = [t.reshape(batch * seq, -1) for t in (dout, o)]
    outputs = [t.view(batch * seq, -1) for t in (dq, dk, dv)]
    if sinks is not None:
        outputs.append(dsinks)
    plans.run(op, [outer[0], *rows, outer[1], lse, *extras], outputs, batch, seq)
    return gradients


@attention_backward.fake
def attention_backward_fake(dout, q, k, v, o, lse, sinks, documents, scale, causal, window):
    count = 0 if sinks is None else q.shape[2]
    return _like(q), _like(k), _like(v), _f32(q, count)
