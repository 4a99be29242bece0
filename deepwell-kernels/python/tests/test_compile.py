"""``torch.compile`` by Inductor, which plans strides by itself."""

import shutil

import pytest
import torch
from families import batch, model

import deepwell
from deepwell import functional


@pytest.fixture(autouse=True)
def compiler():
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()


def block(x, weight, sinks):
    """Ops on strides that models make: parts of a projection, heads first, a part expanded."""
    batch, seq, width = x.shape
    heads = functional.rms_norm(x, weight).view(batch, seq, 4, -1)
    keys = heads[:, :, :2].transpose(1, 2).contiguous().transpose(1, 2)
    values = heads[:, :, 2:3].expand(-1, -1, 2, -1) + 1
    out = functional.attention(heads, keys, values, sinks=sinks, window=5)
    return functional.swiglu(out.reshape(batch, seq, width), x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead"])
def test_a_whole_graph_of_other_sizes(mode):
    compiled = torch.compile(block, fullgraph=True, dynamic=True, mode=mode)
    for sizes in ((2, 9, 64), (1, 20, 64)):
        inputs = [torch.randn(sizes), torch.rand(64), torch.randn(4)]
        results = []
        for call in (block, compiled):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            loss = call(*leaves)
            loss.backward()
            results.append([loss, *(leaf.grad for leaf in leaves)])
        for got, expected in zip(*results):
            # Sums of FP32 in another order.
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_autocast_in_a_graph():
    net = deepwell.optimize(model("llama"), on_cpu=True)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(ids, use_cache=False).logits
        got = compiled(ids, use_cache=False).logits
    # Results of BF16, which graphs round in other places.
    assert (got - expected).norm() <= 2e-2 * expected.norm()
