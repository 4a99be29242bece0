"""Output projection and cross-entropy in one call, which keeps no logits."""

from __future__ import annotations

import torch

from deepwell import plans
from deepwell.ops import operator

_OPS = torch.ops.deepwell
#: Targets that do not count, as in PyTorch.
IGNORED = -100


@operator(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor loss_scale) -> Tensor"
)
def loss_alone(x, weight, targets, loss_scale):
    """``loss_scale`` times the sum of the losses of all tokens."""
    loss = loss_alone_fake(x, weight, targets, loss_scale)
    if not x.shape[0]:
        return loss.zero_()
    op = plans.op_text("linear_cross_entropy")
    plans.run(op, [x, weight, targets, loss_scale], [loss])
    return loss


@loss_alone.fake
def loss_alone_fake(x, weight, targets, loss_scale):
    return x.new_empty(1, dtype=torch.float32)


@operator(
    "linear_cross_entropy_grad(Tensor x, Tensor weight, Tensor targets, Tensor loss_scale)"
    " -> (Tensor, Tensor, Tensor)"
)
def loss_and_gradients(x, weight, targets, loss_scale):
    """The loss, and its gradients with respect to x and, in FP32, to the weight."""
    loss, dx, dw = loss_and_gradients_fake(x, weight, targets, loss_scale)
    if not x.shape[0]:
        return loss.zero_(), dx, dw.zero_()
    op = plans.op_text("linear_cross_entropy_grad")
    plans.run(op, [x, weight, targets, loss_scale], [loss, dx, dw])
    return loss, dx, dw


@loss_and_gradients.fake
def loss_and_gradients_fake(x, weight, targets, loss_scale):
    dw = x.new_empty(weight.shape, dtype=torch.float32)
    return x.new_empty(1, dtype=torch.float32), x.new_empty(x.shape), dw


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, loss_scale):
        ctx.dtype = weight.dtype
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return _OPS.linear_cross_entropy(x, weight, targets, loss_scale)
        # Gradients come with the loss: the logits are there only during this call.
        loss, dx, dw = _OPS.linear_cross_entropy_grad(x, weight, targets, loss_scale)
        ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        return dx * dloss.to(dx.dtype), dw * dloss.to(dw.dtype), None, None


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy of ``x · weightᵀ``, of ``[…, width]`` and ``[vocabulary, width]``, with targets
    ``[…]``, of which -100 does not count. The mean over targets that count, or, as transformers'
    Trainer asks for with accumulation of gradients, the sum over ``num_items_in_batch``."""
    rows, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    count = num_items_in_batch
    if count is None:
        count = (targets != IGNORED).sum().clamp_min(1)
    scale = (1.0 / torch.as_tensor(count, device=x.device)).float().reshape(1)
    return _LinearCrossEntropy.apply(rows, weight, targets.int(), scale)[0]
