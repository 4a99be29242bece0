"""Operators of ``torch.ops.deepwell``: one call of the library each, without gradients or casts.

Tensors of tokens are ``[…, width]``. Every operator returns new tensors, contiguous, on the device
of its inputs. :mod:`deepwell.attention_ops` has the operators of attention.
"""

from __future__ import annotations

import functools

import torch

from deepwell import plans

_LIBRARY = torch.library.Library("deepwell", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


#: Names of all operators.
OPERATORS: list[str] = []


def _needs_dispatch(tensor) -> bool:
    """Whether something besides kernels has to see a call: a trace, a mode, a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
    )


def operator(schema: str):
    """Registers a function for CPU and CUDA tensors. Returns a function that calls it, without the
    dispatcher if nothing else has to see the call; its ``fake`` registers a fake."""

    def register(function):
        _LIBRARY.define(schema, tags=_TAGS)
        name = schema.split("(")[0]
        OPERATORS.append(name)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        overload = getattr(torch.ops.deepwell, name).default

        @functools.wraps(function)
        def call(*args):
            return overload(*args) if _needs_dispatch(args[0]) else function(*args)

        call.fake = torch.library.register_fake(f"deepwell::{name}", lib=_LIBRARY)
        return call

    return register


# Calls without keywords and tuples where PyTorch has them: each costs a fraction of a microsecond.
_empty, _empty_like = torch.empty, torch.empty_like


def _like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return _empty_like(tensor)
    return _empty_like(tensor, memory_format=torch.contiguous_format)


def _f32(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32, device=tensor.device)


def _per_row(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 statistics, one for each row of the last dimension."""
    return _f32(tensor, tensor.shape[:-1].numel())


def _run_rows(op: bytes, inputs, outputs) -> None:
    plans.run(op, inputs, outputs, shape_of=plans.rows)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def rms_norm(x, weight, eps):
    y, rstd = rms_norm_fake(x, weight, eps)
    if x.numel():
        _run_rows(plans.op_text("rms_norm", eps=eps), [x, weight], [y, rstd])
    return y, rstd


@rms_norm.fake
def rms_norm_fake(x, weight, eps):
    return _like(x), _per_row(x)


@operator("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
def rms_norm_backward(dy, x, weight, rstd):
    dx, dw = rms_norm_backward_fake(dy, x, weight, rstd)
    if not x.numel():
        return dx, dw.zero_()
    op = plans.op_text("rms_norm_backward", residual=False)
    _run_rows(op, [dy, x, weight, rstd], [dx, dw])
    return dx, dw


@rms_norm_backward.fake
def rms_norm_backward_fake(dy, x, weight, rstd):
    return _like(x), _f32(x, x.shape[-1])


@operator(
    "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)"
)
def add_rms_norm(x, delta, weight, eps):
    total, y, rstd = add_rms_norm_fake(x, delta, weight, eps)
    if x.numel():
        op = plans.op_text("add_rms_norm", eps=eps)
        _run_rows(op, [x, delta, weight], [total, y, rstd])
    return total, y, rstd


@add_rms_norm.fake
def add_rms_norm_fake(x, delta, weight, eps):
    return _like(x), _like(x), _per_row(x)


@operator("swiglu(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate, up):
    out = swiglu_fake(gate, up)
    if gate.numel():
        _run_rows(plans.op_text("swi_glu"), [gate, up], [out])
    return out


@swiglu.fake
def swiglu_fake(gate, up):
    return _like(gate)


@operator("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)")
def swiglu_backward(dout, gate, up):
    dgate, dup = swiglu_backward_fake(dout, gate, up)
    if gate.numel():
        _run_rows(plans.op_text("swi_glu_backward"), [dout, gate, up], [dgate, dup])
    return dgate, dup


@swiglu_backward.fake
def swiglu_backward_fake(dout, gate, up):
    return _like(gate), _like(gate)


@operator("gelu_tanh(Tensor x) -> Tensor")
def gelu_tanh(x):
    out = gelu_tanh_fake(x)
    if x.numel():
        _run_rows(plans.op_text("gelu", tanh=True), [x], [out])
    return out


@gelu_tanh.fake
def gelu_tanh_fake(x):
    return _like(x)


@operator("gelu_tanh_backward(Tensor dy, Tensor x) -> Tensor")
def gelu_tanh_backward(dy, x):
    dx = gelu_tanh_backward_fake(dy, x)
    if x.numel():
        _run_rows(plans.op_text("gelu_backward", tanh=True), [dy, x], [dx])
    return dx


@gelu_tanh_backward.fake
def gelu_tanh_backward_fake(dy, x):
    return _like(x)


@operator("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
def layer_norm(x, weight, bias, eps):
    y, mean, rstd = layer_norm_fake(x, weight, bias, eps)
    if x.numel():
        _run_rows(plans.op_text("layer_norm", eps=eps), [x, weight, bias], [y, mean, rstd])
    return y, mean, rstd


@layer_norm.fake
def layer_norm_fake(x, weight, bias, eps):
    return _like(x), _per_row(x), _per_row(x)


@operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)"
)
def layer_norm_backward(dy, x, weight, mean, rstd):
    dx, dw, db = layer_norm_backward_fake(dy, x, weight, mean, rstd)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    op = plans.op_text("layer_norm_backward", residual=False)
    _run_rows(op, [dy, x, weight, mean, rstd], [dx, dw, db])
    return dx, dw, db


@layer_norm_backward.fake
def layer_norm_backward_fake(dy, x, weight, mean, rstd):
    return _like(x), _f32(x, x.shape[-1]), _f32(x, x.shape[-1])


def _tokens(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of heads, or of a table, in the library: one row for each token."""
    shape = tensor.shape
    if len(shape) == 4:
        return shape[0] * shape[1], shape[2] * shape[3]
    return tuple(shape)


@functools.cache
def _rope_op(heads: int, head_dim: int, back: bool) -> bytes:
    return plans.encode("rope_by_table", heads=heads, head_dim=head_dim, back=back)


@operator("rope(Tensor x, Tensor table, bool back) -> Tensor")
def rope(x, table, back):
    """Rotates heads of ``[batch, seq, heads, head_dim]``. Row ``t mod P`` of the table
    ``[P, head_dim]`` in FP32 has the cosines, then the sines, of token t."""
    y = rope_fake(x, table, back)
    if x.numel():
        op = _rope_op(x.shape[2], x.shape[3], back)
        plans.run(op, [x, table], [y], shape_of=_tokens)
    return y


@rope.fake
def rope_fake(x, table, back):
    return _like(x)
