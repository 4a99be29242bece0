"""``optimize(model, fused_loss=True)`` on transformers' families, on the library's CPU kernels."""

import copy

import families
import pytest
import torch
from torch import nn

import deepwell
from deepwell import swaps
from deepwell.fused_loss import FusedLoss

FUSED = ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gpt2", "gemma3", "phi3"]


def batch():
    ids = torch.randint(3, 96, (2, 13), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, 4:8] = -100
    return ids, labels


def step(model, **settings):
    ids, labels = batch()
    model.zero_grad()
    output = model(input_ids=ids, labels=labels, **settings)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pair(family, dtype=torch.float32, **settings):
    original = families.model(family, dtype, **settings).train()
    fused = deepwell.optimize(copy.deepcopy(original), on_cpu=True, fused_loss=True)
    return original, fused


@pytest.mark.parametrize("settings", [{}, {"num_items_in_batch": 40}], ids=["mean", "items"])
@pytest.mark.parametrize("family", FUSED)
def test_losses_and_gradients_are_those_of_logits(family, settings):
    original, fused = pair(family)
    assert isinstance(fused, FusedLoss), deepwell.report(fused)
    (expected, theirs), (got, ours) = step(original, **settings), step(fused, **settings)
    assert got.logits is None and expected.logits is not None
    assert type(got) is type(expected)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=2e-3, atol=2e-5, msg=name)


def test_losses_of_routers_stay():
    original, fused = pair("mixtral", output_router_logits=True)
    (expected, _), (got, _) = step(original), step(fused)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_a_cap_of_logits_is_seen_at_the_swap():
    _, fused = pair("gemma2", final_logit_softcapping=20.0)
    assert "differs from its original" in deepwell.report(fused).left["loss"]
    assert not isinstance(fused, FusedLoss)


def test_logits_are_there_outside_of_training():
    original, fused = pair("llama")
    ids, labels = batch()
    for model in (original, fused):
        model.eval()
    with torch.no_grad():
        got, expected = (model(input_ids=ids, labels=labels) for model in (fused, original))
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert fused.generate(ids[:1], max_new_tokens=4, do_sample=False).shape == (1, 17)
        assert fused.train()(input_ids=ids).logits is not None


def test_what_the_kernel_cannot_see_takes_the_original():
    original, fused = pair("llama")
    calls = []
    handle = fused.lm_head.register_forward_hook(lambda *_: calls.append(1))
    before = sum(swaps.FALLBACKS.values())
    output, _ = step(fused)
    assert calls and output.logits is not None
    assert sum(swaps.FALLBACKS.values()) == before + 1
    handle.remove()
    fused.lm_head = nn.Sequential(fused.lm_head)
    assert step(fused)[0].logits is not None


def test_restore_and_names():
    original, fused = pair("llama")
    assert type(fused).__name__ == "LlamaForCausalLM" and isinstance(fused, type(original))
    assert fused.state_dict().keys() == original.state_dict().keys()
    assert "labels" in __import__("inspect").signature(fused.forward).parameters
    deepwell.restore(fused)
    assert type(fused) is type(original)
    assert step(fused)[0].logits is not None


def test_without_asking_outputs_have_logits():
    model = deepwell.optimize(families.model("llama").train(), on_cpu=True)
    assert step(model)[0].logits is not None


def test_it_compiles_without_a_break():
    original, fused = pair("llama")
    ids, labels = batch()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=ids, labels=labels, use_cache=False)
    expected = original(input_ids=ids, labels=labels, use_cache=False)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    got.loss.backward()


def test_bf16():
    original, fused = pair("llama", torch.bfloat16)
    (expected, _), (got, _) = step(original), step(fused)
    torch.testing.assert_close(got.loss, expected.loss, rtol=2**-8, atol=0)
