"""LoRA by PEFT, before and after ``optimize``."""

import pytest
import torch
from families import batch, model

import deepwell
from deepwell import swaps

peft = pytest.importorskip("peft")
CONFIG = dict(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.0)


def train(net, steps=3):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    ids = batch()
    losses = []
    for _ in range(steps):
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("order", ["optimize, then PEFT", "PEFT, then optimize"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_lora(order, use_dora, tmp_path):
    results = []
    for is_optimized in (False, True):
        net = model("llama", attn_implementation="eager")
        if is_optimized and order.startswith("optimize"):
            deepwell.optimize(net, on_cpu=True)
        torch.manual_seed(5)
        net = peft.get_peft_model(net, peft.LoraConfig(**CONFIG, use_dora=use_dora))
        if is_optimized and order.startswith("PEFT"):
            deepwell.optimize(net, on_cpu=True)
        assert any(map(swaps.is_swapped, net.modules())) == is_optimized
        losses = train(net)
        folder = tmp_path / str(is_optimized)
        net.save_pretrained(folder)
        merged = net.merge_and_unload()
        assert any(map(swaps.is_swapped, merged.modules())) == is_optimized
        files = sorted(path.name for path in folder.iterdir())
        results.append((losses, merged(batch()).logits, list(merged.state_dict()), files))
    (theirs, their_logits, *their_names), (ours, our_logits, *our_names) = results
    assert theirs[0] - theirs[-1] > 1e-2, "nothing was trained"
    assert (ours - theirs).abs().max() < 1e-4
    assert (our_logits - their_logits).abs().max() < 1e-3
    assert our_names == their_names


def test_unload_gives_the_model_back():
    net = deepwell.optimize(model("llama"), on_cpu=True)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    adapted = peft.get_peft_model(net, peft.LoraConfig(**CONFIG))
    train(adapted)
    unloaded = adapted.unload()
    assert any(map(swaps.is_swapped, unloaded.modules()))
    after = unloaded.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    deepwell.restore(unloaded)
    assert not any(map(swaps.is_swapped, unloaded.modules()))
