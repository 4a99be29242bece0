"""``optimize``, ``restore``, ``report`` and ``compare``."""

from __future__ import annotations

import dataclasses
import logging
import weakref

import torch
from torch import nn

from deepwell import attention_ops, experts, hf_attention, swaps
from deepwell import fused_loss as fused_losses
from deepwell import multihead, rotary  # noqa: F401
from deepwell.library import DeepwellError, UnsupportedError, is_available

_LOG = logging.getLogger("deepwell")
_PRECISIONS = ("bf16", "mxfp8", "nvfp4", "auto")


@dataclasses.dataclass
class Report:
    """What ``optimize`` did to a model."""

    #: Name of a module, and the swap.
    swapped: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Name of a module that a swap could be for, and the reason to leave it.
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Why nothing was swapped at all; empty otherwise.
    unavailable: str = ""
    #: Attention implementations before, by name of the submodel.
    attention: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Implementations of experts before, by name of the submodel.
    experts: dict[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def fallbacks(self) -> dict[tuple[str, str], int]:
        """Calls of original forwards in this process, by class and reason."""
        return dict(swaps.FALLBACKS)

    def __str__(self) -> str:
        if self.unavailable:
            return f"deepwell: the model is unchanged: {self.unavailable}"
        lines = ["deepwell: swapped"]
        for count, kind, example in _grouped(self.swapped):
            lines.append(f"  {count:4} x {kind}: {example}")
        if self.left:
            lines.append("left as they are")
            for count, reason, example in _grouped(self.left):
                lines.append(f"  {count:4} x {example}: {reason}")
        if self.fallbacks:
            lines.append("calls of the original forward")
            for (name, reason), count in self.fallbacks.items():
                lines.append(f"  {count:4} x {name}: {reason}")
        return "\n".join(lines)


def _grouped(items: dict[str, str]):
    groups: dict[str, list[str]] = {}
    for name, value in items.items():
        groups.setdefault(value, []).append(name)
    return [(len(names), value, names[0]) for value, names in groups.items()]


_REPORTS: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def optimize(
    model: nn.Module,
    *,
    precision: str = "bf16",
    verbose: bool = False,
    attention_kernels: bool = True,
    fused_loss: bool = False,
    on_cpu: bool = False,
    fallback: bool = True,
) -> nn.Module:
    """Makes a model use Deepwell's kernels, in place, and returns it.

    ``precision`` ``bf16`` keeps the mathematics of the model. ``mxfp8`` also quantizes its linear
    layers; ``auto`` does so on Blackwell. ``fused_loss`` computes the loss of a causal language
    model without logits in memory; in training its outputs then have no ``logits``. Without a GPU
    the model stays unchanged, or with ``fallback=False`` this is an error; ``on_cpu`` uses the
    library's CPU kernels, which are there for tests and are slow. :func:`report` tells what was
    done.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision: expected one of {_PRECISIONS}, got {precision!r}")
    if precision == "nvfp4":
        raise UnsupportedError(
            "precision: expected 'bf16', 'mxfp8' or 'auto', got 'nvfp4'\n"
            "hint: precision='mxfp8', or deepwell.capture, whose trainer has NVFP4"
        )
    report = _REPORTS.setdefault(model, Report())
    available, reason = (True, "") if on_cpu else is_available()
    if not available:
        if not fallback:
            raise DeepwellError(reason)
        report.unavailable = reason
        _LOG.warning("%s", report)
        return model
    report.unavailable = ""
    if precision == "auto":
        blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
        precision = "mxfp8" if blackwell else "bf16"
    _swap_modules(model, precision, report)
    if attention_kernels:
        _swap_attention(model, report)
    _swap_experts(model, report)
    if fused_loss:
        fused_losses.swap_losses(model, report)
    if not report.swapped:
        raise DeepwellError(
            f"expected modules to swap, found none in {type(model).__name__}\n{report}"
        )
    if verbose:
        print(report)
    return model


def _swap_modules(model: nn.Module, precision: str, report: Report) -> None:
    for name, module in model.named_modules():
        if swaps.is_swapped(module):
            continue
        kind, reason = swaps.swap(module)
        if kind is not None:
            report.swapped[name] = f"{type(module).__name__} by {kind}"
            report.left.pop(name, None)
        elif reason:
            report.left[name] = reason
    if precision == "mxfp8":
        from deepwell import mxfp8

        mxfp8.swap_linears(model, report)


def _submodels(model: nn.Module):
    """Transformers' models within a model that have a configuration of their own."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield name, module


def _leaves_attention(model) -> str | None:
    """Why a model keeps its attention; ``None`` if the kernels serve it."""
    config = model.config
    if reason := hf_attention.missing_interface():
        return reason
    if config._attn_implementation not in ("sdpa", "eager", hf_attention.NAME):
        return f"the model asks for {config._attn_implementation}"
    if not getattr(model, "_supports_attention_backend", False):
        return "the model does not use transformers' attention interface"
    if not getattr(model, "_supports_flash_attn", False):
        return "the model does not pass windows to its attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "kernels have no softcap"
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not heads or not hidden:
        return "the configuration has no `num_attention_heads` and `hidden_size`"
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    like = next(model.parameters())
    if like.is_meta:
        return None
    return attention_ops.missing_attention(heads, kv_heads, head_dim, like)


def _swap_attention(model: nn.Module, report: Report) -> None:
    for name, submodel in _submodels(model):
        key = f"{name}.attention" if name else "attention"
        before = submodel.config._attn_implementation
        if before == hf_attention.NAME:
            continue
        if reason := _leaves_attention(submodel):
            report.left[key] = reason
            continue
        hf_attention.register()
        submodel.config._attn_implementation = hf_attention.NAME
        report.attention[name] = before
        report.swapped[key] = f"{before} attention by kernels"
        report.left.pop(key, None)


def _swap_experts(model: nn.Module, report: Report) -> None:
    for name, submodel in _submodels(model):
        # What transformers' decorator of experts sets.
        modules = submodel.modules()
        own = [m for m in modules if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
        before = getattr(submodel.config, "_experts_implementation", None)
        if not own or before == experts.NAME:
            continue
        key = f"{name}.experts" if name else "experts"
        reason = experts.register()
        if reason is None and not own[0].down_proj.is_meta:
            reason = experts.missing(own[0])
        if reason:
            report.left[key] = reason
            continue
        submodel.config._experts_implementation = experts.NAME
        report.experts[name] = before
        report.swapped[key] = f"{before} experts by kernels"
        report.left.pop(key, None)


def restore(model: nn.Module) -> nn.Module:
    """Undoes :func:`optimize`."""
    report = _REPORTS.pop(model, Report())
    for module in model.modules():
        if swaps.is_swapped(module):
            swaps.restore(module)
    for name, before in report.attention.items():
        model.get_submodule(name).config._attn_implementation = before
    for name, before in report.experts.items():
        model.get_submodule(name).config._experts_implementation = before
    return model


def report(model: nn.Module) -> Report:
    """What :func:`optimize` did to a model, and the calls that took an original forward."""
    if model not in _REPORTS:
        raise DeepwellError("expected a model of `deepwell.optimize`, got one without a report")
    return _REPORTS[model]


def _first(output):
    """The tensor of a module's output: attention also returns its weights, or None."""
    return output[0] if isinstance(output, tuple) else output


def compare(model: nn.Module, *args, **kwargs) -> dict[str, float]:
    """Runs a batch through an optimized model, and each swapped module also in its original class
    on the same input. Returns the difference of each as a share of its largest output."""
    errors: dict[str, float] = {}
    handles = []

    def watch(name):
        def hook(module, inputs, named_inputs, got):
            expected = module._deepwell_class.forward(module, *inputs, **named_inputs)
            errors[name] = swaps.difference(_first(got), _first(expected))

        return hook

    for name, module in model.named_modules():
        if swaps.is_swapped(module) and not isinstance(module, fused_losses.FusedLoss):
            handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return errors
