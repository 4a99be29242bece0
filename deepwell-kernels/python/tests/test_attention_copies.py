"""Attention reads operands in the order that models hand over, without copies."""

import pytest
import torch
from families import batch, model
from test_ops import reference_attention

import deepwell
from deepwell import attention_ops, functional, plans

#: Heads and heads of keys: grouped, of one key head, and not grouped.
HEADS = [(4, 2), (4, 1), (4, 4)]
#: Operands with the heads first in memory.
ORDERS = ["", "q", "v", "kv", "qkv"]
DOCUMENTS = torch.tensor([[0, 20]] * 20 + [[20, 33]] * 13, dtype=torch.int32).expand(2, 33, 2)


@pytest.fixture
def reads(monkeypatch):
    """Addresses that kernels read and write, by the name of the op: a list for each run."""
    found = {"attention": [], "attention_backward": []}
    run = plans.run

    def spy(op, inputs, outputs, *rest):
        aligned = [plans.aligned(tensor) for tensor in inputs]
        name = op.decode().split('"')[3]
        addresses = [tensor.data_ptr() for tensor in aligned + outputs]
        found[name].append((len(inputs), addresses))
        return run(op, aligned, outputs, *rest)

    monkeypatch.setattr(attention_ops.plans, "run", spy)
    return found


def view(shape, is_first: bool) -> torch.Tensor:
    """Random ``[batch, seq, heads, head_dim]``, or a view with the heads first in memory."""
    if not is_first:
        return torch.randn(shape)
    batch, seq, heads, head_dim = shape
    return torch.randn(batch, heads, seq, head_dim).transpose(1, 2)


def same_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first_output", [False, True, None])
@pytest.mark.parametrize("extras", ["", "window", "sinks and documents"])
def test_operands_are_read_in_place(heads, order, first_output, extras, reads):
    shapes = {"q": heads[0], "k": heads[1], "v": heads[1]}
    given = [view((2, 33, shapes[name], 16), name in order) for name in "qkv"]
    settings = {}
    if extras:
        settings = dict(window=7)
    if extras.startswith("sinks"):
        settings = dict(sinks=torch.randn(4), documents=DOCUMENTS)
    own, exact = ([same_view(tensor) for tensor in given] for _ in range(2))
    got = functional.attention(*own, heads_first_output=first_output, **settings)
    expected = reference_attention(*exact, **settings)
    assert (got - expected).abs().max() < 1e-5
    is_first = order.startswith("q") if first_output is None else first_output
    assert got.transpose(1, 2).is_contiguous() == is_first
    # A gradient in the order of the output, as its users hand it over.
    direction = torch.randn_like(got)
    gradients = torch.autograd.grad(got, own, direction)
    theirs = torch.autograd.grad(expected, exact, direction)
    for name, gradient, their, tensor in zip("qkv", gradients, theirs, own):
        assert (gradient - their).abs().max() < 1e-4, name
        assert gradient.stride() == tensor.stride(), name
    ((_, forward),), ((count, backward),) = reads["attention"], reads["attention_backward"]
    q, k, v = (tensor.data_ptr() for tensor in own)
    assert forward[:3] == [q, k, v]
    assert backward[:5] == [direction.data_ptr(), q, k, v, got.data_ptr()]
    assert backward[count : count + 3] == [gradient.data_ptr() for gradient in gradients]


def test_a_device_without_such_kernels_copies(monkeypatch, reads):
    reason = attention_ops._missing

    def missing(name, heads, kv_heads, head_dim, sinks, documents, heads_first, *device):
        if heads_first:
            return "takes operands with the tokens before the heads"
        return reason(name, heads, kv_heads, head_dim, sinks, documents, heads_first, *device)

    monkeypatch.setattr(attention_ops, "_missing", missing)
    for heads in HEADS:
        for order in ORDERS:
            test_operands_are_read_in_place_up_to_copies(heads, order)
    # Heads that are all first, and as many of keys as of queries, are sequences of one head.
    reads["attention"].clear()
    q = view((2, 33, 4, 16), True)
    functional.attention(q, q, q)
    ((_, addresses),) = reads["attention"]
    assert addresses[:3] == [q.data_ptr()] * 3


def test_operands_are_read_in_place_up_to_copies(heads=(4, 2), order="qkv"):
    given = [view((2, 33, n, 16), c in order) for n, c in zip((heads[0], *heads[1:] * 2), "qkv")]
    own, exact = ([same_view(tensor) for tensor in given] for _ in range(2))
    got, expected = functional.attention(*own), reference_attention(*exact)
    direction = torch.randn_like(got)
    theirs = torch.autograd.grad(expected, exact, direction)
    assert (got - expected).abs().max() < 1e-5
    for gradient, their in zip(torch.autograd.grad(got, own, direction), theirs):
        assert (gradient - their).abs().max() < 1e-4


@pytest.mark.parametrize("arch, takes", [("sm90", True), ("sm100", True), ("sm120", False)])
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_which_gpus_have_such_kernels(arch, takes, name, head_dim):
    for heads_first in (attention_ops.K_FIRST | attention_ops.V_FIRST, attention_ops.ALL_FIRST):
        for extras in ((False, False), (True, True)):
            reason = attention_ops._missing(
                name, 32, 8, head_dim, *extras, heads_first, torch.bfloat16, arch
            )
            assert (reason is None) == takes, reason
            assert takes or "tokens before the heads" in reason


#: Family, whether keys and values go through a cache, and copies of operands in a forward and
#: backward pass of two layers: of parts of a projection (Phi-3's values, all of GPT-2's), unless
#: a cache has joined them to what it holds.
HANDED_OVER = [
    *((family, cached, 0) for family in ("llama", "qwen3", "gpt_oss") for cached in (False, True)),
    ("mistral", True, 0),
    ("gemma3", True, 0),
    ("phi3", False, 2),
    ("phi3", True, 0),
    ("gpt2", False, 6),
    ("gpt2", True, 2),
]


@pytest.mark.parametrize("row", HANDED_OVER)
def test_models_hand_over_what_kernels_read(row, monkeypatch):
    family, use_cache, expected = row
    copies = []
    forward, backward = functional._Attention.forward, functional._Attention.backward

    def note(tensors):
        copies.extend(tensor.stride() for tensor in tensors if not tensor.is_contiguous())

    def spied_forward(ctx, *operands):
        note(operands[:3])
        return forward(ctx, *operands)

    def spied_backward(ctx, dout):
        note([dout])
        return backward(ctx, dout)

    monkeypatch.setattr(functional._Attention, "forward", staticmethod(spied_forward))
    monkeypatch.setattr(functional._Attention, "backward", staticmethod(spied_backward))
    net = deepwell.optimize(model(family), on_cpu=True)
    ids = batch()
    net(ids, labels=ids, use_cache=use_cache).loss.backward()
    assert len(copies) == expected, copies


def test_blackwell_flash_attention_of_grouped_heads(reads):
    q, k, v = (torch.randn(2, heads, 33, 16, requires_grad=True) for heads in (4, 2, 2))
    got = deepwell.BlackwellFlashAttention()(q, k, v, causal=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    direction = torch.randn_like(got)
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    ours = torch.autograd.grad(got, (q, k, v), direction)
    assert got.is_contiguous() and (got - expected).abs().max() < 1e-5
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, theirs))
    ((_, forward),), ((_, backward),) = reads["attention"], reads["attention_backward"]
    given = [tensor.data_ptr() for tensor in (q, k, v)]
    assert forward[:3] == given and backward[1:4] == given
    assert backward[0] == direction.data_ptr()
