"""A model in Deepwell's trainer: the same losses as PyTorch's, and the weights back."""

import pytest
import torch
from families import batch, model

import deepwell

RATE = 3e-3
ADAM = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def captured(net, ids=None, **settings):
    ids = batch() if ids is None else ids
    return deepwell.capture(net, ids, precision="f32", device="cpu", **ADAM, **settings)


def train(net, batches):
    """Losses of PyTorch's AdamW, with decay of matrices alone and clipping by norm 1."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, **ADAM)
    losses = []
    for ids, labels in batches:
        loss = net(ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches_of(count=6):
    generator = torch.Generator().manual_seed(4)
    for number in range(count):
        ids = torch.randint(3, 96, (2, 24), generator=generator)
        labels = ids.clone()
        # A prompt that does not count, longer in later batches.
        labels[0, : 3 * number] = -100
        yield ids, labels


@pytest.mark.parametrize(
    "family, settings",
    [("llama", {}), ("llama", dict(tie_word_embeddings=True)), ("qwen3", {}), ("gpt2", {})],
)
def test_losses_and_weights_are_those_of_torch(family, settings):
    net, peer = model(family, **settings), model(family, **settings)
    engine = captured(net)
    losses = []
    for ids, labels in batches_of():
        result = engine.step({"input_ids": ids, "labels": labels}, lr=RATE)
        assert not result.skipped and result.grad_norm > 0
        losses.append(result.loss)
    expected = train(peer, batches_of())
    assert losses == pytest.approx(expected, rel=1e-5)
    # The model is as it was, until the weights are brought back: by their names, all of them.
    untouched = model(family, **settings)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), untouched.parameters()))
    net.load_state_dict(engine.state_dict())
    for (name, a), b in zip(net.named_parameters(), peer.parameters()):
        # AdamW scales gradients of rounding up to whole steps; biases of keys have no others.
        assert (a - b).abs().max() < (0.05 if "bias" in name else 1e-3), name
    ids = batch()
    with torch.no_grad():
        loss = net(ids, labels=ids, use_cache=False).loss.item()
    assert engine.evaluate(ids) == pytest.approx(loss, rel=1e-5)


def test_weights_go_into_an_engine():
    net, other = model("llama"), model("llama")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.25)
    engine = captured(net)
    ids = batch()
    first = engine.evaluate(ids)
    engine.load_state_dict(other.state_dict())
    with torch.no_grad():
        expected = other(ids, labels=ids, use_cache=False).loss.item()
    assert engine.evaluate(ids) == pytest.approx(expected, rel=1e-5) != first
    with pytest.raises(KeyError, match="is missing"):
        engine.load_state_dict({})


def test_types_and_batches():
    net = model("llama", torch.bfloat16)
    engine = captured(net)
    ids = batch()
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    assert engine.evaluate((ids, shifted)) == engine.evaluate(ids)
    assert engine.evaluate({"input_ids": ids, "attention_mask": torch.ones_like(ids)}) > 0
    state = engine.state_dict()
    assert state.keys() == net.state_dict().keys()
    for name, tensor in net.state_dict().items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
    engine.step(ids, lr=0.1)
    assert not torch.equal(engine.state_dict()["lm_head.weight"], net.lm_head.weight)


def test_a_module_that_is_not_of_transformers():
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(50, 32)
            self.norm = torch.nn.LayerNorm(32)
            self.head = torch.nn.Linear(32, 50, bias=False)
            self.register_buffer("seen", torch.ones(3))

        def forward(self, ids):
            return self.head(self.norm(self.tokens(ids)))

    torch.manual_seed(0)
    net = Tiny()
    ids = torch.randint(0, 50, (2, 8))
    engine = captured(net, ids)
    losses = [engine.step(ids, lr=0.05).loss for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    net.load_state_dict(engine.state_dict())
    loss = torch.nn.functional.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert engine.evaluate(ids) == pytest.approx(loss.item(), rel=1e-5)


def test_what_is_refused():
    net, ids = model("llama"), batch()
    with pytest.raises(deepwell.DeepwellError, match="got one that `optimize` swapped"):
        captured(deepwell.optimize(model("llama"), on_cpu=True))
    with pytest.raises(deepwell.UnsupportedError, match="expected no dropout.*got 0.1"):
        captured(model("gpt2", resid_pdrop=0.1))
    with pytest.raises(ValueError, match="expected ids"):
        captured(net, ids[0])
    with pytest.raises(deepwell.DeepwellError, match="`cuda:99`|cuda"):
        deepwell.capture(net, ids, precision="f32", device="cuda:99")
    engine = captured(net)
    with pytest.raises(ValueError, match=r"expected \[2, 24\], got \[2, 23\]"):
        engine.step(ids[:, 1:], lr=RATE)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(deepwell.UnsupportedError, match="expected ones, got padding"):
        engine.step({"input_ids": ids, "attention_mask": mask}, lr=RATE)
    with pytest.raises(deepwell.DeepwellError, match="below 96"):
        engine.step(ids + 96, lr=RATE)
