"""Self-attention of ``nn.MultiheadAttention``."""

from __future__ import annotations

import torch
from torch import nn

from deepwell import functional, swaps


def self_attention(module: nn.Module, x: torch.Tensor, causal: bool) -> torch.Tensor:
    """Self-attention of ``[batch, seq, width]`` with the weights of a ``nn.MultiheadAttention``."""
    batch, seq, width = x.shape
    heads = module.num_heads
    qkv = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = qkv.view(batch, seq, 3, heads, width // heads).unbind(2)
    out = functional.attention(q, k, v, causal=causal)
    return module.out_proj(out.reshape(batch, seq, width))


def _rejects(module, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal):
    if query is not key or query is not value:
        return "kernels take self-attention: query, key and value of one tensor"
    if need_weights:
        return "kernels return no attention weights: pass need_weights=False"
    if key_padding_mask is not None:
        return "kernels take no key_padding_mask here"
    if attn_mask is not None and not is_causal:
        return "kernels take no attn_mask other than the causal one, with is_causal=True"
    if module.dropout and module.training:
        return f"kernels have no dropout, got {module.dropout}"
    if query.dim() != 3:
        return f"kernels take a batch of sequences, got {query.dim()} dimensions"
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return "kernels take equal widths, without bias_k and add_zero_attn"
    return swaps.rejects(module, query)


class MultiheadAttention(swaps.Swapped):
    """``nn.MultiheadAttention`` for self-attention without weights, masks and dropout."""

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        reason = _rejects(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal
        )
        if reason:
            swaps.fall_back(self, reason)
            return self._deepwell_class.forward(
                self,
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        x = query if self.batch_first else query.transpose(0, 1)
        out = self_attention(self, x, is_causal)
        return out if self.batch_first else out.transpose(0, 1), None

    @classmethod
    def matches(cls, module):
        if type(module) is not nn.MultiheadAttention:
            raise NotImplementedError
        if module.in_proj_weight is None:
            return "kernels take queries, keys and values of one width"
        return None

    @classmethod
    def compare(cls, module, forward):
        x = swaps.random_input(module, module.embed_dim)
        return forward(module, x, x, x, need_weights=False)[0]


swaps.SWAPS[MultiheadAttention.__name__] = MultiheadAttention
