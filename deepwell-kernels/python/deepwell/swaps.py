"""Classes that replace a module's class in place.

A swapped class is a subclass of the module's own class with the same name, so that ``isinstance``,
wrapping policies, hooks, parameters and ``state_dict`` stay as they are.
"""

from __future__ import annotations

import collections
import functools
import logging

import torch
from torch import nn

from deepwell import functional, plans
from deepwell.library import UnsupportedError

_LOG = logging.getLogger("deepwell")

#: Times that a swapped module took its original forward, by module and reason.
FALLBACKS: collections.Counter[tuple[str, str]] = collections.Counter()

#: Largest relative difference between a swapped module and its original on random input. Both round
#: an FP32 result to the type of the model; the originals round up to twice more on the way, so they
#: differ by up to two units in the last place, 2^-7 in BF16. In FP32 the order of sums differs.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float32: 1e-4}


def rejects_type(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel takes an element type: kernels of GPUs take BF16, those of CPUs also FP32."""
    if plans.is_gpu(device):
        return None if dtype == torch.bfloat16 else f"kernels of GPUs take BF16, not {dtype}"
    return None if dtype in TOLERANCE else f"kernels take BF16 or FP32, not {dtype}"


def rejects(module: nn.Module, x: torch.Tensor) -> str | None:
    """Why no kernel takes ``x`` at run time; ``None`` if one does."""
    if reason := rejects_type(x.dtype, x.device):
        return reason
    if x.device.type not in ("cuda", "cpu"):
        return f"kernels run on CUDA devices, not on `{x.device.type}`"
    if type(x) is not torch.Tensor and not torch.compiler.is_compiling():
        if not isinstance(x, nn.Parameter):
            return f"kernels take plain tensors, not {type(x).__name__}"
    return None


def fall_back(module: nn.Module, reason: str) -> None:
    """Counts a call of the original forward, and says so the first time."""
    count_fallback(type(module).__name__, reason)


def count_fallback(name: str, reason: str) -> None:
    """Counts a call of what a kernel would replace, and says so the first time."""
    if torch.compiler.is_compiling():
        return
    key = (name, reason)
    FALLBACKS[key] += 1
    if FALLBACKS[key] == 1:
        _LOG.warning("deepwell: %s runs its original forward: %s", *key)


class Swapped:
    """Base of the classes that :func:`swap` makes."""

    #: Whether the result equals the original's up to rounding.
    is_exact = True

    _deepwell_class: type[nn.Module]
    _deepwell_swap: str

    def __reduce_ex__(self, protocol):
        # The class has no name that pickle could look up.
        state = self.__dict__.copy()
        return _rebuild, (self._deepwell_class, self._deepwell_swap), state

    @classmethod
    def matches(cls, module: nn.Module) -> str | None:
        """Why this swap leaves a module alone that its name or attributes suggest; ``None`` to
        swap. A module that has nothing to do with this swap raises ``NotImplementedError``."""
        raise NotImplementedError

    @classmethod
    def attributes_of(cls, original: type[nn.Module]) -> dict:
        """Attributes of the swapped class that depend on the original class."""
        return {}

    @classmethod
    def compare(cls, module: nn.Module, forward) -> torch.Tensor:
        """Output of a module by one of two ``forward`` functions, on the same random input."""
        raise NotImplementedError


def _parameter(module: nn.Module) -> torch.Tensor:
    return next(module.parameters())


def random_input(module: nn.Module, width: int) -> torch.Tensor:
    """Two sequences of three tokens, in the type of the module's parameters."""
    like = _parameter(module)
    generator = torch.Generator(device=like.device).manual_seed(0)
    shape = (2, 3, width)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


class RmsNorm(Swapped):
    """RMSNorm of transformers and of PyTorch, ``x · rstd · weight``."""

    def forward(self, x, *args, **kwargs):
        reason = rejects(self, x)
        if reason is None and (args or kwargs):
            reason = "kernels take the input and nothing else"
        if reason:
            fall_back(self, reason)
            return self._deepwell_class.forward(self, x, *args, **kwargs)
        return self._deepwell_norm(x)

    def _deepwell_norm(self, x):
        return functional.rms_norm(x, self.weight, _eps(self, x))

    @classmethod
    def matches(cls, module):
        if "RMSNorm" not in type(module).__name__:
            raise NotImplementedError
        parameters = dict(module.named_parameters())
        if set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
            return f"expected one weight of one dimension, got {sorted(parameters)}"
        if not hasattr(module, "variance_epsilon") and not hasattr(module, "eps"):
            return "expected an attribute `variance_epsilon` or `eps`"
        return rejects_type(module.weight.dtype, module.weight.device)

    @classmethod
    def compare(cls, module, forward):
        return forward(module, random_input(module, module.weight.shape[0]))


def _eps(module: nn.Module, x: torch.Tensor) -> float:
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    return torch.finfo(x.dtype).eps if eps is None else eps


class OffsetRmsNorm(RmsNorm):
    """RMSNorm of Gemma, ``x · rstd · (1 + weight)`` in FP32."""

    @classmethod
    def matches(cls, module):
        reason = super().matches(module)
        if reason is None and plans.is_gpu(module.weight.device):
            return "kernels of GPUs take BF16 weights, and BF16 of 1 + weight loses bits of weight"
        return reason

    def _deepwell_norm(self, x):
        # `1 + weight` in BF16 would lose the weight's last bits.
        y = functional.rms_norm(x.float(), 1.0 + self.weight.float(), _eps(self, x))
        return y.type_as(x)


class SwiGluMlp(Swapped):
    """MLP with ``down(silu(gate(x)) · up(x))``."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        reason = rejects(self, gate)
        if reason:
            fall_back(self, reason)
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(functional.swiglu(gate, up))

    @classmethod
    def matches(cls, module):
        if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            raise NotImplementedError
        if not isinstance(module.gate_proj, nn.Module):
            raise NotImplementedError
        return _rejects_activation(getattr(module, "act_fn", None))

    @classmethod
    def compare(cls, module, forward):
        width = getattr(module, "hidden_size", None) or module.gate_proj.in_features
        return forward(module, random_input(module, width))


def _rejects_activation(act) -> str | None:
    if type(act).__name__ not in ("SiLU", "SiLUActivation") and act is not nn.functional.silu:
        return f"kernels take the activation SiLU, not {type(act).__name__}"
    return None


class SwiGluHalvesMlp(Swapped):
    """MLP of Phi-3, whose gate and up are halves of one weight."""

    def forward(self, x):
        layer = self.gate_up_proj
        reason = rejects(self, x)
        if reason is None and torch.is_autocast_enabled(x.device.type):
            reason = "kernels take halves of a linear layer without autocast"
        if reason is None and type(layer) is not nn.Linear:
            reason = f"kernels take halves of a plain linear layer, not of {type(layer).__name__}"
        if reason is None and (layer._forward_hooks or layer._forward_pre_hooks):
            reason = "a hook has to see the call of the linear layer"
        if reason:
            fall_back(self, reason)
            return self._deepwell_class.forward(self, x)
        return self.down_proj(functional.swiglu(*functional.linear_halves(x, layer.weight)))

    @classmethod
    def matches(cls, module):
        layer = getattr(module, "gate_up_proj", None)
        if not isinstance(layer, nn.Linear) or not hasattr(module, "down_proj"):
            raise NotImplementedError
        if layer.bias is not None:
            return "kernels take halves of a linear layer without a bias"
        return _rejects_activation(getattr(module, "activation_fn", None))

    @classmethod
    def compare(cls, module, forward):
        return forward(module, random_input(module, module.gate_up_proj.in_features))


class LayerNorm(Swapped):
    """``nn.LayerNorm`` over the last dimension, with weight and bias."""

    def forward(self, x):
        reason = rejects(self, x)
        if reason is None and self.weight.dtype != x.dtype:
            reason = f"kernels take one type, not {x.dtype} and weights in {self.weight.dtype}"
        if reason:
            fall_back(self, reason)
            return self._deepwell_class.forward(self, x)
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    @classmethod
    def matches(cls, module):
        if type(module) is not nn.LayerNorm:
            raise NotImplementedError
        if module.weight is None or module.bias is None or module.weight.dim() != 1:
            return "kernels take a weight and a bias of one dimension"
        return rejects_type(module.weight.dtype, module.weight.device)

    @classmethod
    def compare(cls, module, forward):
        return forward(module, random_input(module, module.weight.shape[0]))


class GeluTanh(Swapped):
    """``NewGELUActivation`` of transformers: eight kernels in eager mode."""

    def forward(self, x):
        reason = rejects(self, x)
        if reason:
            fall_back(self, reason)
            return self._deepwell_class.forward(self, x)
        return functional.gelu_tanh(x)

    @classmethod
    def matches(cls, module):
        if type(module).__name__ != "NewGELUActivation":
            raise NotImplementedError
        return None

    @classmethod
    def compare(cls, module, forward):
        return forward(module, torch.linspace(-4, 4, 128).view(2, 64))


#: Swaps in the order in which they are tried; several for one module differ in their formula.
SWAPS = {
    swap.__name__: swap
    for swap in (RmsNorm, OffsetRmsNorm, LayerNorm, SwiGluMlp, SwiGluHalvesMlp, GeluTanh)
}


@functools.cache
def swapped_class(original: type[nn.Module], swap: str) -> type[nn.Module]:
    """The subclass of a module's class that a swap sets."""
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(original, name) for name in names}
    attributes |= {"_deepwell_class": original, "_deepwell_swap": swap}
    attributes |= SWAPS[swap].attributes_of(original)
    return type(original.__name__, (SWAPS[swap], original), attributes)


def _rebuild(original: type[nn.Module], swap: str) -> nn.Module:
    made = swapped_class(original, swap)
    return made.__new__(made)


def is_swapped(module: nn.Module) -> bool:
    """Whether a module has a class of :func:`swapped_class`."""
    return isinstance(module, Swapped)


def restore(module: nn.Module) -> None:
    """Gives a swapped module its own class."""
    module.__class__ = module._deepwell_class


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest magnitude."""
    scale = expected.float().abs().max().clamp_min(1e-30)
    return ((got.float() - expected.float()).abs().max() / scale).item()


def swap(module: nn.Module) -> tuple[str | None, str]:
    """Swaps a module's class, with equal mathematics. Returns the name of the swap, or ``None`` and
    the reason, empty if no swap has to do with the module."""
    reason = ""
    for name in (name for name, swap in SWAPS.items() if swap.is_exact):
        try:
            rejected = SWAPS[name].matches(module)
        except NotImplementedError:
            continue
        rejected = rejected or try_swap(module, name)
        if rejected is None:
            return name, ""
        reason = rejected
    return None, reason


def try_swap(module: nn.Module, name: str) -> str | None:
    """Swaps, and undoes it if the result differs from the original on random input."""
    tensors = [*module.parameters(), *module.buffers()]
    dtype = tensors[0].dtype if tensors else torch.float32
    device = tensors[0].device if tensors else torch.device("cpu")
    if dtype not in TOLERANCE:
        return f"kernels take BF16 or FP32, not {dtype}"
    original, made = type(module), swapped_class(type(module), name)
    if device.type == "meta":
        module.__class__ = made
        return None
    # Kernels of GPUs see a model in FP32 under autocast, or not at all.
    as_bf16 = dtype == torch.float32 and plans.is_gpu(device)
    dtype = torch.bfloat16 if as_bf16 else dtype
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=as_bf16):
            expected = SWAPS[name].compare(module, original.forward)
            module.__class__ = made
            got = SWAPS[name].compare(module, made.forward)
    except UnsupportedError as error:
        module.__class__ = original
        return str(error)
    error = difference(got, expected)
    if not error <= TOLERANCE[dtype]:
        restore(module)
        return (
            f"differs from its original by {error:.1e} on random input, more than the rounding of "
            f"{dtype}, {TOLERANCE[dtype]:.1e}"
        )
    return None
