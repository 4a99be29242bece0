"""Experts of transformers' mixtures by grouped GEMMs."""

import copy

import pytest
import torch
from families import batch, model

import deepwell
from deepwell import experts, swaps

MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss"]


def module_of(net):
    return next(m for m in net.modules() if hasattr(m, "_is_expert_parallel"))


def gradients_of(forward, module, x, weights, ids):
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    module.zero_grad()
    out = forward(module, leaves[0], ids, leaves[1])
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    of_parameters = [p.grad.clone() for p in module.parameters()]
    return [out.detach(), *(leaf.grad for leaf in leaves), *of_parameters]


def routing(kind: str, tokens: int, count: int = 4):
    """Two different experts for each token."""
    first = torch.arange(tokens) % count
    if kind == "one expert gets all":
        first = torch.zeros(tokens, dtype=torch.long)
    if kind == "the last gets none":
        first = torch.arange(tokens) % (count - 2)
    return torch.stack([first, first + 1 if kind != "even" else (first + 1) % count], 1)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("kind", ["even", "one expert gets all", "the last gets none"])
@pytest.mark.parametrize("tokens", [1, 37, 200])
def test_outputs_and_gradients(family, kind, tokens):
    from transformers.integrations.moe import batched_mm_experts_forward

    module = module_of(model(family))
    x = torch.randn(tokens, 64)
    ids, weights = routing(kind, tokens), torch.rand(tokens, 2)
    swaps.FALLBACKS.clear()
    got = gradients_of(experts.forward, module, x, weights, ids)
    assert not swaps.FALLBACKS
    expected = gradients_of(batched_mm_experts_forward, module, x, weights, ids)
    for index, (a, b) in enumerate(zip(got, expected)):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp_min(1e-3), (index, family)


def test_layout_gives_each_pair_a_row_of_its_expert():
    for ids, count in [([2, 0, 2, 2, 0], 4), ([3] * 65 + [1], 4), ([0], 1)]:
        ids = torch.tensor(ids)
        places, offsets, rows = experts.layout(ids, count)
        assert len(set(places.tolist())) == len(ids)
        assert offsets.dtype == torch.int32 and (offsets % experts.ALIGN == 0).all()
        assert offsets[0] == 0 and offsets[-1] <= rows and rows % experts.ALIGN == 0
        for place, expert in zip(places.tolist(), ids.tolist()):
            assert offsets[expert] <= place < offsets[expert + 1]


@pytest.mark.parametrize("family", MIXTURES)
def test_optimize_and_restore(family):
    net = model(family)
    before = net.config._experts_implementation
    deepwell.optimize(net, on_cpu=True)
    assert net.config._experts_implementation == experts.NAME
    assert any("experts by kernels" in how for how in deepwell.report(net).swapped.values())
    copied = copy.deepcopy(net)
    assert copied.config._experts_implementation == experts.NAME
    deepwell.restore(net)
    assert net.config._experts_implementation == before


def test_what_kernels_do_not_take():
    net = model("mixtral")
    module = module_of(net)
    x, weights, ids = torch.randn(8, 64), torch.rand(8, 2), routing("even", 8)
    expected = module(x, ids, weights)
    module._is_expert_parallel = True
    swaps.FALLBACKS.clear()
    assert torch.allclose(experts.forward(module, x, ids, weights), expected, atol=1e-6)
    assert any("expert parallelism" in reason for _, reason in swaps.FALLBACKS)
    half = module_of(model("mixtral", torch.float16))
    assert "not torch.float16" in experts.missing(half)
    assert "not stacks" in experts.missing(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", MIXTURES)
def test_in_a_graph(family):
    net = deepwell.optimize(model(family), on_cpu=True)
    ids = batch()
    expected = net(ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(module_of(net), fullgraph=True, backend="aot_eager")
    module_of(net)
    x, weights, pairs = torch.randn(8, 64), torch.rand(8, 2), routing("even", 8)
    got = compiled(x, pairs, weights)
    assert torch.allclose(got, experts.forward(module_of(net), x, pairs, weights), atol=1e-6)
    assert expected.isfinite().all()
