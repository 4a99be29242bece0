"""The specification's names, and ``nn.MultiheadAttention``."""

import pytest
import torch
from torch import nn

import deepwell
from deepwell import swaps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flash_attention(causal, kv_heads):
    q, k, v = (torch.randn(2, heads, 33, 16) for heads in (4, kv_heads, kv_heads))
    attend = deepwell.BlackwellFlashAttention(deepwell.BlackwellConfig())
    sdpa = nn.functional.scaled_dot_product_attention
    expected = sdpa(q, k, v, is_causal=causal, enable_gqa=True)
    assert (attend(q, k, v, causal=causal) - expected).abs().max() < 1e-5
    # A strided view: heads of one projection.
    rows = torch.randn(2, 33, 3 * 64).view(2, 33, 3, 4, 16).permute(2, 0, 3, 1, 4)
    expected = sdpa(*rows, is_causal=causal)
    assert (attend.forward(*rows, causal=causal) - expected).abs().max() < 1e-5


def test_flash_attention_of_a_type_without_a_kernel():
    q = torch.randn(1, 2, 8, 16, dtype=torch.float16)
    config = deepwell.BlackwellConfig(use_pytorch_fallback=False)
    with pytest.raises(deepwell.UnsupportedError, match="got torch.float16"):
        deepwell.BlackwellFlashAttention(config)(q, q, q)
    config.use_pytorch_fallback = True
    expected = nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(deepwell.BlackwellFlashAttention(config)(q, q, q), expected)
    with pytest.raises(deepwell.DeepwellError, match=r"expected q \[B, H, S, D\]"):
        deepwell.BlackwellFlashAttention()(q[0], q[0], q[0])


def causal_mask(seq):
    return nn.Transformer.generate_square_subsequent_mask(seq)


@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_loads_the_weights_of_multihead_attention(bias):
    theirs = nn.MultiheadAttention(64, 4, bias=bias, batch_first=True)
    ours = deepwell.DWSelfAttention(64, 4, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 64)
    expected = theirs(x, x, x, attn_mask=causal_mask(9), is_causal=True, need_weights=False)[0]
    assert (ours(x, causal=True) - expected).abs().max() < 1e-5
    with pytest.raises(ValueError, match="expected a multiple of num_heads 5, got 64"):
        deepwell.DWSelfAttention(64, 5)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("arguments, reason", [
    (dict(need_weights=False), ""),
    (dict(need_weights=False, attn_mask=causal_mask(9), is_causal=True), ""),
    (dict(), "need_weights"),
    (dict(need_weights=False, key_padding_mask=torch.arange(9).expand(9, 9) > 6), "padding"),
    (dict(need_weights=False, attn_mask=torch.randn(9, 9)), "attn_mask"),
])  # fmt: skip
def test_swapped_multihead_attention(batch_first, arguments, reason):
    net = nn.MultiheadAttention(64, 4, batch_first=batch_first)
    x = torch.randn(9, 9, 64, requires_grad=True)
    expected = net(x, x, x, **arguments)
    (gradient,) = torch.autograd.grad(expected[0].square().sum(), x)
    deepwell.optimize(net, on_cpu=True)
    swaps.FALLBACKS.clear()
    got = net(x, x, x, **arguments)
    assert (got[0] - expected[0]).abs().max() < 1e-5
    own = torch.autograd.grad(got[0].square().sum(), x)[0]
    assert (own - gradient).abs().max() < 1e-4
    assert [reason in key[1] for key in swaps.FALLBACKS] == ([True] if reason else [])


def test_transformer_encoder_layer():
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 64)
    for mode in (layer.train(), layer.eval()):
        expected = mode(x)
        deepwell.optimize(mode, on_cpu=True)
        assert swaps.is_swapped(mode.self_attn)
        assert (mode(x) - expected).abs().max() < 1e-5
        deepwell.restore(mode)


def test_optimize_for_blackwell():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    net = nn.MultiheadAttention(64, 4)
    with pytest.raises(deepwell.DeepwellError, match="no GPU"):
        deepwell.optimize_for_blackwell(net)
    config = deepwell.BlackwellConfig(use_pytorch_fallback=True)
    assert deepwell.optimize_for_blackwell(net, config) is net
    with pytest.raises(deepwell.DeepwellError, match="no GPU"):
        deepwell.KernelProfiler()
