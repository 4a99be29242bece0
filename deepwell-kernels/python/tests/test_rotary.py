"""The rotary embedding within attention modules of transformers."""

import pytest
import torch
from families import FAMILIES, batch, model
from transformers.models.llama import modeling_llama

import deepwell
from deepwell import rotary, swaps


def count(net) -> int:
    return sum("RotaryAttention" in how for how in deepwell.report(net).swapped.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_modules_are_swapped(family):
    # GPT-2 has positions of its own, gpt-oss pairs of another kind.
    expected = 0 if family in ("gpt2", "gpt_oss") else 2
    net = deepwell.optimize(model(family), on_cpu=True)
    assert count(net) == expected, str(deepwell.report(net))
    swaps.FALLBACKS.clear()
    net(batch(), use_cache=False)
    assert not [key for key in swaps.FALLBACKS if key[0] == rotary.NAME]


def test_the_file_of_transformers_stays_as_it_is():
    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    net = deepwell.optimize(model("llama"), on_cpu=True)
    assert before == (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward)
    deepwell.restore(net)
    assert type(net.model.layers[0].self_attn) is modeling_llama.LlamaAttention


def test_the_kernel_runs(monkeypatch):
    calls = []
    rope = rotary.functional.rope
    monkeypatch.setattr(rotary.functional, "rope", lambda *a: calls.append(1) or rope(*a))
    net = deepwell.optimize(model("llama"), on_cpu=True)
    calls.clear()
    net(batch(), use_cache=False)
    assert len(calls) == 4


def test_a_part_of_a_head_falls_back():
    swaps.FALLBACKS.clear()
    net = deepwell.optimize(model("phi3", partial_rotary_factor=0.5), on_cpu=True)
    expected = model("phi3", partial_rotary_factor=0.5)(batch(), use_cache=False).logits
    assert torch.allclose(net(batch(), use_cache=False).logits, expected, atol=1e-4)
    assert any("not 8 of 16 elements" in reason for _, reason in swaps.FALLBACKS)


def test_a_table_follows_a_change_of_its_angles():
    cos, sin = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    first = rotary._table(cos, sin)
    assert rotary._table(cos, sin) is first
    cos.mul_(2)
    assert torch.equal(rotary._table(cos, sin)[:, :4], cos[0, :, :4])
