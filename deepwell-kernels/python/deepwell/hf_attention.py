"""Attention for transformers' registries.

The mask function returns ``None`` for a causal or full mask, INT32 ``[batch, seq, 2]`` where each
token sees a range of keys (padding, packed sequences, chunks), and a mask of SDPA otherwise.
"""

from __future__ import annotations

import inspect
import sys

import torch

from deepwell import functional
from deepwell.swaps import fall_back, rejects, rejects_type

#: Name in transformers' registries.
NAME = "deepwell"

#: Parts of transformers' mask functions that keep a mask causal with one range of keys per token.
_RANGES = {
    "causal_mask_function",
    "and_masks",
    "sliding_window_overlay",
    "chunked_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}
#: Model types whose masks consist of these parts. While a graph is traced, closures cannot be read.
_TRACED = {
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gpt2", "gemma2", "gemma3_text",
    "phi3", "gpt_oss",
}  # fmt: skip


def missing_interface() -> str | None:
    """Why the installed transformers cannot use this module; ``None`` if it can."""
    from transformers import __version__
    from transformers.masking_utils import sdpa_mask

    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        return f"transformers {__version__} has masks by cache_position, of an older interface"
    return None


def register() -> None:
    """Adds the attention and its mask to transformers' registries. Nothing uses them unless a model
    asks for the name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)


def _parts(function) -> set[str]:
    """Names of the functions that a mask function is made of."""
    names, open_functions = set(), [function]
    while open_functions:
        function = open_functions.pop()
        names.add(function.__qualname__.split(".")[0])
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            for value in content if isinstance(content, (tuple, list)) else (content,):
                if callable(value):
                    open_functions.append(value)
    return names


def _has_ranges(mask_function, config) -> bool:
    if torch.compiler.is_compiling():
        return getattr(config, "model_type", None) in _TRACED
    return _parts(mask_function) <= _RANGES


def mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    config=None,
    use_vmap=False,
    device="cpu",
    allow_is_causal_skip=True,
    **kwargs,
):
    """Mask of a layer, as ``AttentionMaskInterface`` calls it."""
    from transformers.masking_utils import sdpa_mask

    is_square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if is_square and not use_vmap and _has_ranges(mask_function, config):
        if attention_mask is None:
            if allow_is_causal_skip:
                return None
            return _packed(mask_function, batch_size, q_length, device)
        if not torch.compiler.is_compiling():
            ranges = _padded(attention_mask[:, :kv_length])
            if ranges is not False:
                return ranges
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def _packed(mask_function, batch, seq, device) -> torch.Tensor:
    """Ranges of packed sequences: one begins where a token does not see the token before it."""
    positions = torch.arange(seq, device=device)
    rows = torch.arange(batch, device=device)[:, None]
    sees = mask_function(rows, 0, positions[None], (positions - 1).clamp_min(0)[None])
    starts = ~sees.expand(batch, seq).bool()
    return _ranges(starts, positions)


def _ranges(starts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Begin and end of each token's range, from the tokens that begin one."""
    batch, seq = starts.shape
    starts = starts | (positions == 0)
    begin = torch.where(starts, positions, 0).cummax(1).values
    next_start = torch.where(starts, positions, seq).roll(-1, 1)
    next_start[:, -1] = seq
    end = next_start.flip(1).cummin(1).values.flip(1)
    return torch.stack([begin, end], dim=-1).to(torch.int32)


def _padded(attention_mask: torch.Tensor) -> torch.Tensor | None | bool:
    """Ranges of a padding mask; ``None`` if nothing is padded, ``False`` if padding lies between
    tokens, where no range of keys describes it."""
    shown = attention_mask.bool()
    changes = shown[:, 1:] != shown[:, :-1]
    returns = (changes & shown[:, 1:]).sum(1) + shown[:, 0]
    has_padding, has_holes = torch.stack([~shown.all(), (returns > 1).any()]).tolist()
    if not has_padding:
        return None
    if has_holes:
        return False
    positions = torch.arange(shown.shape[1], device=shown.device)
    starts = torch.cat([torch.zeros_like(shown[:, :1]), changes], dim=1)
    return _ranges(starts, positions)


def dense_mask(ranges: torch.Tensor, window: int) -> torch.Tensor:
    """The boolean mask ``[batch, 1, seq, seq]`` of causal ranges, for other implementations."""
    seq = ranges.shape[1]
    positions = torch.arange(seq, device=ranges.device)
    q, k = positions[:, None], positions[None, :]
    sees = (k <= q) & (k >= ranges[..., :1]) & (k < ranges[..., 1:])
    if window:
        sees = sees & (k > q - window)
    return sees[:, None]


def _rejects(module, q, k, v, attention_mask, dropout, window, causal, kwargs) -> str | None:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        if reason := rejects_type(torch.get_autocast_dtype(device), q.device):
            return reason
    elif reason := rejects(module, q):
        return reason
    if dropout and module.training:
        return f"kernels have no dropout, got {dropout}"
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            return f"kernels have no {name}"
    if kwargs.get("output_attentions"):
        return "kernels return no attention weights"
    if q.shape[2] != k.shape[2]:
        return "kernels take as many queries as keys"
    if q.shape[-1] != v.shape[-1]:
        return "values are of another width than keys"
    if attention_mask is not None and attention_mask.dim() != 3:
        return "kernels take masks of one range of keys per token"
    if window and not causal:
        return "kernels take windows of causal attention only"
    return None


def forward(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    is_causal=None,
    sliding_window=None,
    s_aux=None,
    **kwargs,
):
    """Attention of ``[batch, heads, seq, head_dim]``, as ``AttentionInterface`` calls it."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = int(sliding_window or 0)
    if window >= key.shape[2]:
        window = 0
    reason = _rejects(module, query, key, value, attention_mask, dropout, window, causal, kwargs)
    if reason:
        fall_back(module, reason)
        return _original(
            module, query, key, value, attention_mask, scaling, dropout, is_causal,
            sliding_window, s_aux, window, **kwargs,
        )  # fmt: skip
    out = functional.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scaling,
        causal=causal,
        window=window,
        sinks=s_aux,
        documents=attention_mask,
        # Models join the heads of a token.
        heads_first_output=False,
    )
    return out, None


def _original(
    module,
    q,
    k,
    v,
    attention_mask,
    scaling,
    dropout,
    is_causal,
    sliding_window,
    s_aux,
    window,
    **kw,
):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None and attention_mask.dim() == 3:
        attention_mask = dense_mask(attention_mask, window)
    elif attention_mask is None and window and q.shape[2] == k.shape[2]:
        # The mask function leaves windows to this module.
        seq = q.shape[2]
        whole = torch.tensor([0, seq], device=q.device).expand(q.shape[0], seq, 2)
        attention_mask = dense_mask(whole, window)
    if s_aux is None and kw.get("softcap") is None and not kw.get("output_attentions"):
        return sdpa_attention_forward(
            module, q, k, v, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **kw,
        )  # fmt: skip
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if attention_mask is None and q.shape[2] > 1:
        seq = q.shape[2]
        whole = torch.tensor([0, seq], device=q.device).expand(q.shape[0], seq, 2)
        attention_mask = dense_mask(whole, 0)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(q.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=q.dtype).masked_fill(
            ~attention_mask, lowest
        )
    return eager(
        module, q, k, v, attention_mask, scaling=scaling, dropout=dropout,
        sliding_window=sliding_window, s_aux=s_aux, **kw,
    )  # fmt: skip
