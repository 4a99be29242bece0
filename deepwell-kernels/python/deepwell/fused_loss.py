"""Loss of transformers' causal language models without logits in memory, on request.

The original forward runs on a stand-in for the model. The stand-in's output layer hands the hidden
states on, and its loss function multiplies them with the layer's weight in the kernel of the loss.
So routers' losses, hidden states and caches are those of the original.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from deepwell import functional, swaps
from deepwell.cross_entropy import IGNORED, linear_cross_entropy
from deepwell.library import UnsupportedError


class _StandIn:
    """A model, some of whose attributes are others."""

    def __init__(self, model: nn.Module, /, **others):
        self._deepwell_model = model
        # PyTorch 2.10 traces no update of `__dict__`.
        for name, value in others.items():
            setattr(self, name, value)

    def __getattr__(self, name):
        return getattr(self._deepwell_model, name)


class _HiddenStates:
    """Output of a decoder that was not run: hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index):
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name):
        return None


def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None) -> torch.Tensor:
    """The next token of each token; the last token of a sequence has none."""
    if shift_labels is not None:
        return shift_labels
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _loss(model: nn.Module, head: nn.Linear, hidden, labels, settings) -> torch.Tensor:
    """What transformers' ``ForCausalLMLoss`` gives for the logits of the hidden states."""
    x, weight = functional._autocast(hidden, head.weight)
    if reason := swaps.rejects(model, x):
        swaps.fall_back(model, reason)
        loss = model.loss_function
        return loss(head(hidden), labels, vocab_size=head.out_features, **settings)
    targets = _targets(labels, settings.get("shift_labels")).to(x.device)
    return linear_cross_entropy(x, weight, targets, settings.get("num_items_in_batch"))


def _stand_in(model: nn.Module, /, **others) -> _StandIn:
    """The model with its loss from hidden states."""
    name, head = _head(model)

    def loss_function(logits, labels, vocab_size=None, **settings):
        return _loss(model, head, logits, labels, settings)

    others |= {name: lambda hidden: hidden, "loss_function": loss_function}
    return _StandIn(model, **others)


def _head(model: nn.Module) -> tuple[str, nn.Module | None]:
    """Output layer, and its name."""
    head = model.get_output_embeddings()
    names = (name for name, child in model.named_children() if child is head)
    return next(names, ""), head


def _rejects_head(model: nn.Module) -> str | None:
    """Why the loss needs the logits of this model's output layer; ``None`` if it does not."""
    name, head = _head(model)
    if not name:
        return "the loss kernel takes a model with an output layer of its own"
    if type(head) is not nn.Linear:
        return f"the loss kernel takes a plain linear output layer, not {type(head).__name__}"
    if head.bias is not None:
        return "the loss kernel takes an output layer without a bias"
    if head._forward_hooks or head._forward_pre_hooks:
        return "a hook has to see the call of the output layer"
    if type(head.weight) not in (torch.Tensor, nn.Parameter):
        return f"the loss kernel takes a whole weight, not {type(head.weight).__name__}"
    return None


class FusedLoss(swaps.Swapped):
    """A causal language model whose outputs in training have a loss and no logits."""

    is_exact = False

    @classmethod
    def attributes_of(cls, original):
        # With the signature of the original, which transformers reads.
        @functools.wraps(original.forward)
        def forward(self, *args, **kwargs):
            reason = None
            if kwargs.get("labels") is None or not self.training:
                return original.forward(self, *args, **kwargs)
            if kwargs.get("return_dict") is False:
                reason = "an output without logits is not a tuple"
            reason = reason or _rejects_head(self)
            if reason:
                swaps.fall_back(self, reason)
                return original.forward(self, *args, **kwargs)
            output = original.forward(_stand_in(self), *args, **kwargs)
            return type(output)(**{k: v for k, v in output.items() if k != "logits"})

        return {"forward": forward}

    @classmethod
    def matches(cls, module):
        try:
            from transformers import PreTrainedModel
            from transformers.loss.loss_utils import ForCausalLMLoss
        except ImportError:
            raise NotImplementedError from None
        if not isinstance(module, PreTrainedModel) or "CausalLM" not in type(module).__name__:
            if not type(module).__name__.endswith("LMHeadModel"):
                raise NotImplementedError
        if module.loss_function is not ForCausalLMLoss:
            return "the model has a loss function of its own"
        return _rejects_head(module)

    @classmethod
    def compare(cls, module, forward):
        """The loss of random hidden states by the original forward, with the model's own output
        layer and loss if ``forward`` is the original, which says whether logits are changed on
        their way from one to the other."""
        head = module.get_output_embeddings()
        hidden = swaps.random_input(module, head.in_features)
        # Logits so far apart that a cap or a factor shows in the loss.
        hidden = hidden * (8.0 / head(hidden).float().std()).to(hidden.dtype)
        ids = torch.arange(hidden.shape[0] * hidden.shape[1], device=hidden.device)
        ids = ids.view(hidden.shape[:2]) % head.out_features
        decoder = {module.base_model_prefix: lambda *args, **kwargs: _HiddenStates(hidden)}
        original = module._deepwell_class if swaps.is_swapped(module) else type(module)
        is_original = forward is original.forward
        model = (_StandIn if is_original else _stand_in)(module, **decoder)
        return original.forward(model, input_ids=ids, labels=ids).loss


swaps.SWAPS[FusedLoss.__name__] = FusedLoss


def swap_losses(model: nn.Module, report) -> None:
    """Swaps the causal language models in a model."""
    for name, module in model.named_modules():
        if swaps.is_swapped(module):
            continue
        try:
            reason = FusedLoss.matches(module) or swaps.try_swap(module, FusedLoss.__name__)
        except NotImplementedError:
            continue
        except (TypeError, AttributeError, UnsupportedError) as error:
            reason = f"its forward is not that of other models: {error}"
        key = f"{name}.loss" if name else "loss"
        if reason:
            report.left[key] = reason
        else:
            report.swapped[key] = f"loss of {type(module).__name__} by a kernel without logits"
            report.left.pop(key, None)
