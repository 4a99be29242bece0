"""Rotary position embedding within transformers' attention modules.

Their ``forward`` calls the function ``apply_rotary_pos_emb`` of its file. A swapped class has a
copy of this ``forward`` that finds a function of this file under that name; transformers' own file
stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref

import torch
from torch import nn

from deepwell import functional, swaps

NAME = "apply_rotary_pos_emb"


def _expected(x, cos, sin):
    """The rotation that the kernel computes, of ``[batch, heads, seq, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@functools.cache
def _rejects_function(function) -> str | None:
    """Why the kernel does not compute what a function of a model's file computes."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, 8, generator=generator)
    k = torch.randn(2, 1, 5, 8, generator=generator)
    angles = torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        got = function(q, k, cos, sin)
    except Exception as error:
        return f"kernels take another rotary embedding: {error}"
    expected = (_expected(q, cos, sin), _expected(k, cos, sin))
    if all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected)):
        return None
    return "kernels rotate pairs that are half a head apart"


_LAST = threading.local()


def _table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The kernel's table. All layers of a model pass the same tensors, so the last is kept."""
    if torch.compiler.is_compiling():
        return functional.rope_table(cos, sin)
    key = getattr(_LAST, "key", None)
    if key is None or key[0]() is not cos or key[1:] != (cos._version, sin._version):
        _LAST.key = (weakref.ref(cos, _forget), cos._version, sin._version)
        _LAST.table = functional.rope_table(cos, sin)
    return _LAST.table


def _forget(reference) -> None:
    if getattr(_LAST, "key", (None,))[0] is reference:
        _LAST.key = _LAST.table = None


def _rejects(q, k, cos, sin, unsqueeze_dim) -> str | None:
    if unsqueeze_dim != 1 or q.dim() != 4 or cos.dim() != 3:
        return "kernels rotate [batch, heads, seq, head_dim]"
    if cos.shape[-1] != q.shape[-1] or cos.shape[-1] % 2:
        return f"kernels rotate whole heads, not {cos.shape[-1]} of {q.shape[-1]} elements"
    if not q.dtype == k.dtype == cos.dtype == sin.dtype:
        return f"kernels take one type, not {q.dtype} and angles in {cos.dtype}"
    if cos.requires_grad or sin.requires_grad:
        return "kernels have no gradients of angles"
    return swaps.rejects_type(q.dtype, q.device)


def _rotation(original):
    """A function that rotates by the kernel, or by the original where the kernel cannot."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if reason := _rejects(q, k, cos, sin, unsqueeze_dim):
            swaps.count_fallback(NAME, reason)
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        table = _table(cos, sin)
        rotated = (functional.rope(x.transpose(1, 2), table).transpose(1, 2) for x in (q, k))
        return tuple(rotated)

    return apply_rotary_pos_emb


def _names(code) -> set[str]:
    """Names of globals that a function may read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _function_of(original: type[nn.Module]):
    """``forward`` of a class without decorators."""
    return inspect.unwrap(original.forward)


class RotaryAttention(swaps.Swapped):
    """Attention of transformers whose rotary embedding is a kernel."""

    def forward(self, *args, **kwargs):
        if "past_key_values" in kwargs and not self._deepwell_takes_past:
            # A decorator of the original renames it.
            return self._deepwell_class.forward(self, *args, **kwargs)
        return self._deepwell_forward(*args, **kwargs)

    @classmethod
    def attributes_of(cls, original):
        function = _function_of(original)
        own = {
            k: function.__globals__[k] for k in _names(function.__code__) & {*function.__globals__}
        }
        own[NAME] = _rotation(own[NAME])
        # Without a name of a module, whose globals torch.compile would look up in its place.
        own["__builtins__"] = function.__globals__["__builtins__"]
        rebound = types.FunctionType(
            function.__code__, own, "forward", function.__defaults__, function.__closure__
        )
        rebound.__kwdefaults__ = function.__kwdefaults__
        takes_past = "past_key_values" in inspect.signature(function).parameters
        return {"_deepwell_forward": rebound, "_deepwell_takes_past": takes_past}

    @classmethod
    def matches(cls, module):
        if not hasattr(module, "q_proj") and not hasattr(module, "qkv_proj"):
            raise NotImplementedError
        function = _function_of(type(module))
        if not isinstance(function, types.FunctionType) or NAME not in function.__code__.co_names:
            raise NotImplementedError
        if not isinstance(getattr(module, "head_dim", None), int):
            return "expected an attribute `head_dim`"
        weight = next(module.parameters())
        reason = swaps.rejects_type(weight.dtype, weight.device)
        return reason or _rejects_function(function.__globals__[NAME])

    @classmethod
    def compare(cls, module, forward):
        layer = getattr(module, "q_proj", None) or module.qkv_proj
        x = swaps.random_input(module, layer.in_features)
        angles = torch.arange(3.0, device=x.device)[:, None] * torch.rand(
            module.head_dim // 2,
            device=x.device,
            generator=torch.Generator(x.device).manual_seed(0),
        )
        angles = torch.cat([angles, angles], dim=-1)[None]
        embeddings = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return forward(module, x, position_embeddings=embeddings, attention_mask=None)[0]


swaps.SWAPS[RotaryAttention.__name__] = RotaryAttention
