"""Names of the specification: attention by itself and as a module."""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from deepwell import functional, multihead, swaps
from deepwell.library import DeepwellError
from deepwell.model import optimize

_LOG = logging.getLogger("deepwell")


@dataclasses.dataclass
class BlackwellConfig:
    """Settings of :class:`BlackwellFlashAttention`, :class:`DWSelfAttention` and
    :func:`optimize_for_blackwell`. The kernels run on Hopper, too."""

    use_flash_attention: bool = True
    #: Without a kernel for a request, use PyTorch's attention and say so once; otherwise an error.
    use_pytorch_fallback: bool = False
    #: Print the table of a :class:`deepwell.KernelProfiler` with this configuration as it ends.
    enable_profiling: bool = False


class BlackwellFlashAttention:
    """Attention of ``[batch, heads, seq, head_dim]`` in BF16 or FP32, strided or not."""

    def __init__(self, config: BlackwellConfig | None = None):
        self.config = config or BlackwellConfig()

    def forward(self, q, k, v, causal: bool = False) -> torch.Tensor:
        """Attention of q, k, v; k and v may have fewer heads. Differentiable."""
        if not self.config.use_flash_attention:
            return self._pytorch(q, k, v, causal)
        try:
            self._check(q, k, v)
            return functional.attention_by_heads(q, k, v, causal=causal)
        except DeepwellError as error:
            if not self.config.use_pytorch_fallback:
                raise
            swaps.FALLBACKS[("BlackwellFlashAttention", str(error))] += 1
            if swaps.FALLBACKS[("BlackwellFlashAttention", str(error))] == 1:
                _LOG.warning("deepwell: PyTorch's attention runs: %s", error)
            return self._pytorch(q, k, v, causal)

    __call__ = forward

    @staticmethod
    def _check(q, k, v) -> None:
        if q.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
            raise DeepwellError(
                "expected q [B, H, S, D] and k, v [B, H or fewer, S, D], got "
                f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if q.shape[3] != k.shape[3]:
            raise DeepwellError(f"expected one width of heads, got {q.shape[3]} and {k.shape[3]}")

    @staticmethod
    def _pytorch(q, k, v, causal):
        grouped = q.shape[1] != k.shape[1]
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=causal, enable_gqa=grouped)


class DWSelfAttention(nn.Module):
    """Self-attention with the parameters of ``nn.MultiheadAttention``, whose ``state_dict`` it
    loads. Takes ``[batch, seq, hidden_dim]`` and returns the output alone, as a tensor."""

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        config: BlackwellConfig | None = None,
        bias: bool = True,
        **factory,
    ):
        super().__init__()
        if hidden_dim % num_heads:
            raise ValueError(
                f"hidden_dim: expected a multiple of num_heads {num_heads}, got {hidden_dim}"
            )
        reference = nn.MultiheadAttention(
            hidden_dim, num_heads, bias=bias, batch_first=True, **factory
        )
        self.hidden_dim, self.num_heads = hidden_dim, num_heads
        self.config = config or BlackwellConfig()
        self.in_proj_weight = reference.in_proj_weight
        self.in_proj_bias = reference.in_proj_bias
        self.out_proj = reference.out_proj

    def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
        return multihead.self_attention(self, x, causal)


def optimize_for_blackwell(
    model: nn.Module, config: BlackwellConfig | None = None, **settings
) -> nn.Module:
    """:func:`deepwell.optimize` with a :class:`BlackwellConfig`."""
    config = config or BlackwellConfig()
    return optimize(
        model,
        attention_kernels=config.use_flash_attention,
        fallback=config.use_pytorch_fallback,
        **settings,
    )
