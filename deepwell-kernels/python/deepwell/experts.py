"""Experts of a mixture for transformers' registry: grouped GEMMs, in BF16.

The pairs of token and expert are rows of a buffer, group by group. Each group begins at a multiple
of :data:`ALIGN` rows, so that a kernel's tile belongs to one expert; the rows in between are zeros.
No size depends on the routing: the host never waits for it.
"""

from __future__ import annotations

import functools

import torch

from deepwell import plans, swaps
from deepwell.ops import operator

#: Name in transformers' registry.
NAME = "deepwell"

#: Rows that groups are a multiple of: what wgrad on Hopper takes at once.
ALIGN = 64


@functools.cache
def _op(name: str, groups: int) -> bytes:
    return plans.encode(name, grouped={"groups": groups, "align": ALIGN})


@operator("grouped_gemm(Tensor x, Tensor weight, Tensor offsets, bool transposed) -> Tensor")
def grouped_gemm(x, weight, offsets, transposed):
    """Rows ``offsets[e]..offsets[e + 1]`` of x times matrix e of ``[experts, outputs, inputs]``,
    transposed; or, if ``transposed``, of ``[experts, inputs, outputs]``."""
    out = grouped_gemm_fake(x, weight, offsets, transposed)
    name = "grouped_gemm_dgrad" if transposed else "grouped_gemm"
    if x.numel():
        plans.run(_op(name, weight.shape[0]), [x, weight, offsets], [out])
    return out


@grouped_gemm.fake
def grouped_gemm_fake(x, weight, offsets, transposed):
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@operator("grouped_gemm_wgrad(Tensor dy, Tensor x, Tensor offsets) -> Tensor")
def grouped_gemm_wgrad(dy, x, offsets):
    """For each group the transpose of its rows of dy times its rows of x, in FP32."""
    dw = grouped_gemm_wgrad_fake(dy, x, offsets)
    if not x.numel():
        return dw.zero_()
    plans.run(_op("grouped_gemm_wgrad", dw.shape[0]), [dy, x, offsets], [dw])
    return dw


@grouped_gemm_wgrad.fake
def grouped_gemm_wgrad_fake(dy, x, offsets):
    shape = (offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    return x.new_empty(shape, dtype=torch.float32)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, transposed):
        ctx.save_for_backward(x, weight, offsets)
        ctx.transposed = transposed
        return grouped_gemm(x, weight, offsets, transposed)

    @staticmethod
    def backward(ctx, dy):
        x, weight, offsets = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grouped_gemm(dy, weight, offsets, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            left, right = (x, dy) if ctx.transposed else (dy, x)
            dw = grouped_gemm_wgrad(left, right, offsets).to(weight.dtype)
        return dx, dw, None, None


class _Spread(torch.autograd.Function):
    """Tokens to the rows of their pairs; other rows are zeros."""

    @staticmethod
    def forward(ctx, tokens, places, row_count):
        ctx.save_for_backward(places)
        ctx.top_k = places.shape[0] // tokens.shape[0]
        rows = tokens.new_zeros(row_count, tokens.shape[1])
        return rows.index_copy(0, places, tokens.repeat_interleave(ctx.top_k, 0))

    @staticmethod
    def backward(ctx, drows):
        (places,) = ctx.saved_tensors
        of_pairs = drows.index_select(0, places)
        return of_pairs.view(-1, ctx.top_k, drows.shape[1]).sum(1), None, None


class _Collect(torch.autograd.Function):
    """Rows in the order of the pairs. No two pairs share a row, so gradients are copied back."""

    @staticmethod
    def forward(ctx, rows, places):
        ctx.save_for_backward(places)
        ctx.row_count = rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx, dpairs):
        (places,) = ctx.saved_tensors
        drows = dpairs.new_zeros(ctx.row_count, dpairs.shape[1])
        return drows.index_copy(0, places, dpairs), None


def layout(expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The row of each pair, the offsets of the groups (INT32, one more than experts), and the
    number of rows, which depends on sizes alone."""
    pairs = expert_ids.shape[0]
    rows = (pairs + experts * (ALIGN - 1) + ALIGN - 1) // ALIGN * ALIGN
    in_order, order = torch.sort(expert_ids, stable=True)
    bounds = torch.arange(experts + 1, device=expert_ids.device, dtype=expert_ids.dtype)
    begins = torch.searchsorted(in_order, bounds)
    counts = begins[1:] - begins[:-1]
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    offsets = torch.cat([begins[:1], padded.cumsum(0)])
    of_order = torch.arange(pairs, device=expert_ids.device) + (offsets - begins)[in_order]
    places = torch.empty_like(of_order).scatter(0, order, of_order)
    return places, offsets.int(), rows


def _linear(x, weight, bias, offsets, transposed):
    y = _GroupedLinear.apply(x, weight, offsets, transposed)
    if bias is None:
        return y
    row = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets[1:], row, right=True).clamp(max=bias.shape[0] - 1)
    return y + bias[expert]


def forward(self, hidden_states, top_k_index, top_k_weights):
    """What a module of experts computes, for transformers' ``ExpertsInterface``."""
    if reason := _rejects(self, hidden_states):
        from transformers.integrations.moe import grouped_mm_experts_forward

        swaps.fall_back(self, reason)
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    up, down = getattr(self, name), self.down_proj
    biases = (None, None)
    if self.has_bias:
        biases = (getattr(self, f"{name}_bias"), self.down_proj_bias)
    places, offsets, row_count = layout(top_k_index.reshape(-1), self.num_experts)
    x = _Spread.apply(hidden_states.to(up.dtype), places, row_count)
    hidden = _linear(x, up, biases[0], offsets, self.is_transposed)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    rows = _linear(hidden, down, biases[1], offsets, self.is_transposed)
    weighted = _Collect.apply(rows, places) * top_k_weights.reshape(-1, 1)
    out = weighted.view(*hidden_states.shape[:1], -1, rows.shape[1]).sum(1)
    return out.to(hidden_states.dtype)


def _rejects(module, hidden_states) -> str | None:
    """Why the kernels do not serve a call; ``None`` if they do."""
    # Both attributes are younger than the registry.
    if getattr(module, "_is_expert_parallel", False) or getattr(
        module, "has_post_expert_norm", False
    ):
        return "kernels take no expert parallelism and no norm after experts"
    if not hidden_states.shape[0]:
        return "kernels take at least one token"
    if reason := swaps.rejects(module, hidden_states):
        return reason
    return None if torch.compiler.is_compiling() else missing(module)


def missing(module) -> str | None:
    """Why no kernel serves the weights of a module of experts; ``None`` if kernels do."""
    up = getattr(module, "gate_up_proj", None)
    up = getattr(module, "up_proj", None) if up is None else up
    down = getattr(module, "down_proj", None)
    if up is None or down is None or up.dim() != 3 or type(up.data) is not torch.Tensor:
        return "its weights are not stacks of plain matrices"
    if reason := swaps.rejects_type(up.dtype, up.device):
        return reason
    device = plans.device_name(up.device)
    for weight in (up, down):
        shape = tuple(weight.shape)
        if reason := _missing(shape, weight.dtype, device, module.is_transposed):
            return reason
    return None


@functools.cache
def _missing(shape, dtype, device: str, transposed: bool) -> str | None:
    groups, first, second = shape
    outputs, inputs = (second, first) if transposed else (first, second)
    rows = groups * ALIGN
    x, y = (dtype, (rows, inputs)), (dtype, (rows, outputs))
    offsets, weight = (torch.int32, (groups + 1,)), (dtype, shape)
    narrow, wide = (y, x) if transposed else (x, y)
    left, right = (x, y) if transposed else (y, x)
    for name, types in (
        ("grouped_gemm", [narrow, weight, offsets, wide]),
        ("grouped_gemm_dgrad", [wide, weight, offsets, narrow]),
        ("grouped_gemm_wgrad", [left, right, offsets, (torch.float32, shape)]),
    ):
        if reason := plans.unsupported(device, _op(name, groups), types, 3):
            return reason
    return None


def register() -> str | None:
    """Adds the experts to transformers' registry, which nothing uses unless a model asks for the
    name. Returns why the installed transformers has none."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return "the installed transformers has no registry of experts"
    ExpertsInterface.register(NAME, forward)
    return None
