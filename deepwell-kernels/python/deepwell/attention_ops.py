"""Operators of attention: forward, backward, and which kernels there are.

An operand is ``[batch, seq, heads, head_dim]``, or ``[batch, heads, seq, head_dim]`` if
``heads_first`` has its bit. An operand's gradient has its order. If no kernel of the device reads
this order in place, operands are copied.
"""

from __future__ import annotations

import functools

import torch

from deepwell import plans
from deepwell.ops import _f32, _like, operator

#: Bits of ``heads_first``: queries, keys, values, and the output.
Q_FIRST, K_FIRST, V_FIRST, O_FIRST = 1, 2, 4, 8
ALL_FIRST = Q_FIRST | K_FIRST | V_FIRST | O_FIRST
_LETTERS = {"q": Q_FIRST, "k": K_FIRST, "v": V_FIRST, "o": O_FIRST}

#: Bits of the tensors of each op, inputs and then outputs; 0 for what has no heads to order.
_BITS = {
    "attention": ((Q_FIRST, K_FIRST, V_FIRST), (O_FIRST, 0)),
    "attention_backward": (
        (O_FIRST, Q_FIRST, K_FIRST, V_FIRST, O_FIRST, 0),
        (Q_FIRST, K_FIRST, V_FIRST, 0),
    ),
}


@functools.cache
def attention_op(
    name, heads, kv_heads, head_dim, scale, causal, window, sinks, documents, heads_first=0
) -> bytes:
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
    if heads_first:
        attributes["heads_first"] = {k: True for k, bit in _LETTERS.items() if heads_first & bit}
    return plans.encode(name, heads=attributes)


def missing_attention(heads: int, kv_heads: int, head_dim: int, like: torch.Tensor) -> str | None:
    """Why no kernel serves an attention with these heads and its gradients, on the device of a
    tensor; ``None`` if kernels serve it."""
    dtype = like.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        return f"kernels take BF16 or FP32, not {dtype}"
    # A model in FP32 has BF16 attention under autocast on a GPU; without it, calls fall back.
    if plans.is_gpu(like.device):
        dtype = torch.bfloat16
    return _missing_with_gradients(heads, kv_heads, head_dim, dtype, plans.device_name(like.device))


@functools.cache
def _missing_with_gradients(heads, kv_heads, head_dim, dtype, device) -> str | None:
    reasons = (
        _missing(name, heads, kv_heads, head_dim, False, False, 0, dtype, device) for name in _BITS
    )
    return next(filter(None, reasons), None)


@functools.cache
def _missing(
    name, heads, kv_heads, head_dim, sinks, documents, heads_first, dtype, device
) -> str | None:
    """Why no kernel of a device serves an op with these heads, operands and order."""
    rows = 256
    q = (dtype, (rows, heads * head_dim))
    k = (dtype, (rows, kv_heads * head_dim))
    lse = (torch.float32, (1, heads, rows))
    of_sinks = [(torch.float32, (heads,))] * sinks
    extras = of_sinks + [(torch.int32, (rows, 2))] * documents
    settings = (heads, kv_heads, head_dim, head_dim**-0.5, True, 0, sinks, documents, heads_first)
    op = attention_op(name, *settings)
    if name == "attention":
        inputs, outputs = [q, k, k, *extras], [q, lse]
    else:
        inputs, outputs = [q, q, k, k, q, lse, *extras], [q, k, k, *of_sinks]
    return plans.unsupported(device, op, inputs + outputs, len(inputs), 1, rows)


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def head_counts(q: torch.Tensor, k: torch.Tensor, heads_first: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    return q.shape[1 if heads_first & Q_FIRST else 2], k.shape[1 if heads_first & K_FIRST else 2]


def _sizes(name, operands, heads_first):
    """Batch, tokens, heads, heads of keys and width of a head."""
    q, k = operands[:2] if name == "attention" else operands[1:3]
    q = _swap(q) if heads_first & Q_FIRST else q
    k = _swap(k) if heads_first & K_FIRST else k
    return (*q.shape[:3], k.shape[2], q.shape[3])


def _run(name, operands, outputs, extras, settings, heads_first) -> None:
    """Runs attention, or its backward, whose first operand is the gradient of its output.
    ``extras`` are sinks and documents or ``None``, ``settings`` scale, mask and window."""
    if heads_first == ALL_FIRST and extras[0] is None and extras[1] is None:
        q, k = operands[:2] if name == "attention" else operands[1:3]
        if q.shape == k.shape:
            _run_as_sequences(name, operands, outputs, q.shape, settings)
            return
    batch, seq, heads, kv_heads, head_dim = _sizes(name, operands, heads_first)
    if heads_first:
        has = tuple(extra is not None for extra in extras)
        device = plans.device_name(operands[0].device)
        of_kernel = (heads_first, operands[0].dtype, device)
        if _missing(name, heads, kv_heads, head_dim, *has, *of_kernel):
            _run_on_copies(name, operands, outputs, extras, settings, heads_first)
            return
    given = [extra for extra in extras if extra is not None]
    has = (extras[0] is not None, extras[1] is not None)
    op = attention_op(name, heads, kv_heads, head_dim, *settings, *has, heads_first)
    tokens = batch * seq

    def as_rows(tensor: torch.Tensor) -> tuple[int, ...]:
        """The library reads one row for each token."""
        if tensor.dim() == 4:
            return tokens, tensor.numel() // tokens
        return (tokens, 2) if tensor.dtype == torch.int32 else tuple(tensor.shape)

    plans.run(op, [*operands, *given], outputs, batch, seq, as_rows)


def _run_as_sequences(name, operands, outputs, shape, settings) -> None:
    """Each head is a sequence with one head, which kernels of every GPU read."""
    batch, heads, seq, head_dim = shape
    op = attention_op(name, 1, 1, head_dim, *settings, False, False)
    plans.run(op, operands, outputs, batch * heads, seq, _as_sequences)


def _as_sequences(tensor: torch.Tensor) -> tuple[int, ...]:
    """The library reads a row for each token, and statistics of one head in each sequence."""
    sizes = tensor.shape
    if len(sizes) == 3:
        return sizes[0] * sizes[1], 1, sizes[2]
    return sizes[:3].numel(), sizes[3]


def _run_on_copies(name, operands, outputs, extras, settings, heads_first) -> None:
    of_inputs, of_outputs = _BITS[name]
    operands = [
        _swap(tensor).contiguous() if bit & heads_first else tensor
        for tensor, bit in zip(operands, of_inputs)
    ]
    swapped = [
        torch.empty_like(_swap(tensor), memory_format=torch.contiguous_format)
        if bit & heads_first
        else tensor
        for tensor, bit in zip(outputs, of_outputs)
    ]
    _run(name, operands, swapped, extras, settings, 0)
    for tensor, own in zip(outputs, swapped):
        if tensor is not own:
            tensor.copy_(_swap(own))


@operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? documents, float scale,"
    " bool causal, int window, int heads_first) -> (Tensor, Tensor)"
)
def attention(q, k, v, sinks, documents, scale, causal, window, heads_first):
    o, lse = attention_fake(q, k, v, sinks, documents, scale, causal, window, heads_first)
    if q.numel():
        settings = (scale, causal, window)
        _run("attention", [q, k, v], [o, lse], (sinks, documents), settings, heads_first)
    return o, lse


@attention.fake
def attention_fake(q, k, v, sinks, documents, scale, causal, window, heads_first):
    batch, seq, heads, _ = q.shape
    is_first = bool(heads_first & Q_FIRST)
    if is_first:
        seq, heads = heads, seq
    has_order_of_o = is_first == bool(heads_first & O_FIRST)
    return _like(q if has_order_of_o else _swap(q)), _f32(q, batch, heads, seq)


@operator(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? sinks, Tensor? documents, float scale, bool causal, int window, int heads_first)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def attention_backward(dout, q, k, v, o, lse, sinks, documents, scale, causal, window, heads_first):
    gradients = attention_backward_fake(
        dout, q, k, v, o, lse, sinks, documents, scale, causal, window, heads_first
    )
    if not q.numel():
        gradients[3].zero_()
        return gradients
    outputs = list(gradients[:3] if sinks is None else gradients)
    operands, settings = [dout, q, k, v, o, lse], (scale, causal, window)
    _run("attention_backward", operands, outputs, (sinks, documents), settings, heads_first)
    return gradients


@attention_backward.fake
def attention_backward_fake(
    dout, q, k, v, o, lse, sinks, documents, scale, causal, window, heads_first
):
    count = 0 if sinks is None else lse.shape[1]
    return _like(q), _like(k), _like(v), _f32(q, count)
