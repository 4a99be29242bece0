"""``optimize`` on models of transformers: what it swaps, and what it must not change."""

import copy
import io
import pickle

import pytest
import torch
from families import FAMILIES, batch, model

import deepwell
from deepwell import swaps


def optimized(family, dtype=torch.float32, **settings):
    return deepwell.optimize(model(family, dtype, **settings), on_cpu=True)


def loss_and_gradients(net, ids, labels=None, **inputs):
    net.zero_grad()
    out = net(ids, labels=ids if labels is None else labels, use_cache=False, **inputs)
    out.loss.backward()
    gradients = {n: p.grad.float() for n, p in net.named_parameters() if p.grad is not None}
    return out.loss.detach().float(), gradients


def distance(got, exact) -> torch.Tensor:
    """Euclidean distance of all gradients, as a share of their norm."""
    assert got.keys() == exact.keys()
    squares = sum(((got[n] - exact[n]) ** 2).sum() for n in exact)
    return (squares / sum((g**2).sum() for g in exact.values())).sqrt()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_family(family):
    # The bar: within twice the distance that eager and SDPA attention have from FP32.
    ids = batch()
    exact = model(family, attn_implementation="eager")
    loss, gradients = loss_and_gradients(exact, ids)
    in_f32, f32_gradients = loss_and_gradients(optimized(family), ids)
    assert abs(in_f32 - loss) < 1e-5
    assert distance(f32_gradients, gradients) < 1e-4
    theirs = 0.0
    for implementation in ("eager", "sdpa"):
        if family in ("gemma2", "gpt_oss") and implementation == "sdpa":
            continue
        peer = model(family, torch.bfloat16, attn_implementation=implementation)
        theirs = max(theirs, distance(loss_and_gradients(peer, ids)[1], gradients))
    ours = distance(loss_and_gradients(optimized(family, torch.bfloat16), ids)[1], gradients)
    assert ours <= 2 * theirs, f"{ours} > 2 * {theirs}"


@pytest.mark.parametrize("family", FAMILIES)
def test_report_counts_what_is_swapped(family):
    norms, mlps, attentions = FAMILIES[family][2]
    report = deepwell.report(optimized(family))
    count = lambda text: sum(text in how for how in report.swapped.values())  # noqa: E731
    found = (count("Norm by "), count("Mlp"), count("attention by kernels"))
    assert found == (norms, mlps, attentions), str(report)


MASKS = {
    "left padding": [[0] * 7 + [1] * 17, [1] * 24],
    "right padding": [[1] * 20 + [0] * 4, [1] * 24],
    "both": [[0] * 3 + [1] * 12 + [0] * 9, [1] * 24],
    "a row of padding": [[0] * 24, [1] * 24],
    "a hole": [[1] * 9 + [0] * 3 + [1] * 12, [1] * 24],
    "nothing": [[1] * 24, [1] * 24],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MASKS)
def test_padding(family, name):
    mask = torch.tensor(MASKS[name])
    ids = batch()
    # The token before a label is not padding: implementations differ in rows that see no key.
    counts = mask.bool() & mask.roll(1, 1).bool()
    labels = ids.masked_fill(~counts, -100)
    inputs = dict(attention_mask=mask, labels=labels)
    expected, gradients = loss_and_gradients(
        model(family, attn_implementation="eager"), ids, **inputs
    )
    swaps.FALLBACKS.clear()
    net = optimized(family)
    got, own = loss_and_gradients(net, ids, **inputs)
    assert abs(got - expected) < 1e-5
    assert distance(own, gradients) < 1e-4
    # Gemma 2 keeps its attention, which has a softcap.
    falls_back = name == "a hole" and "attention" in deepwell.report(net).swapped
    assert bool(swaps.FALLBACKS) == falls_back, swaps.FALLBACKS


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(family):
    ids = batch(1, 24)
    positions = torch.cat([torch.arange(n) for n in (9, 1, 14)])[None]
    eager = model(family, attn_implementation="eager")
    expected, gradients = loss_and_gradients(eager, ids, position_ids=positions)
    got, own = loss_and_gradients(optimized(family), ids, position_ids=positions)
    assert abs(got - expected) < 1e-5
    assert distance(own, gradients) < 1e-4


def test_packed_sequences_do_not_see_each_other():
    ids = batch(1, 24)
    lengths = (9, 1, 14)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    net = optimized("llama")
    with torch.no_grad():
        packed = net(ids, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([net(part, use_cache=False).logits[0] for part in ids.split(lengths, 1)])
        mixed = net(ids, use_cache=False).logits[0]
    assert (packed - alone).abs().max() < 1e-5
    assert (mixed - alone).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [0, 4])
def test_generation_with_a_cache(family, padding):
    ids = batch(2, 10)
    ids[0, :padding] = 0
    mask = (ids != 0).long()
    settings = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    expected = model(family, attn_implementation="eager").eval().generate(ids, **settings)
    assert torch.equal(optimized(family).eval().generate(ids, **settings), expected)


def saved(net) -> dict[str, bytes]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_is_byte_for_byte_the_same(family):
    assert saved(optimized(family, torch.bfloat16)) == saved(model(family, torch.bfloat16))


def test_a_swap_keeps_the_module():
    net = model("llama")
    norm, mlp = net.model.norm, net.model.layers[0].mlp
    before = (type(norm), id(norm.weight), list(net.state_dict()), repr(net))
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    deepwell.optimize(net, on_cpu=True)
    assert net.config._attn_implementation == "deepwell"
    assert net.model.norm is norm and isinstance(norm, before[0])
    assert (type(norm).__name__, id(norm.weight)) == (before[0].__name__, before[1])
    assert (list(net.state_dict()), repr(net)) == before[2:]
    net(batch())
    assert calls == [1]
    assert swaps.is_swapped(norm) and swaps.is_swapped(mlp)
    deepwell.restore(net)
    assert type(norm) is before[0] and not any(swaps.is_swapped(m) for m in net.modules())
    assert net.config._attn_implementation == "sdpa"


def test_optimize_twice_is_optimize_once():
    net = optimized("llama")
    classes = [type(m) for m in net.modules()]
    first = dict(deepwell.report(net).swapped)
    deepwell.optimize(net, on_cpu=True)
    assert [type(m) for m in net.modules()] == classes
    assert deepwell.report(net).swapped == first


def test_copies_and_pickles_stay_swapped():
    net = optimized("llama")
    ids = batch()
    expected = net(ids).logits
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(file, weights_only=False),
    ):
        assert swaps.is_swapped(other.model.norm)
        assert torch.equal(other(ids).logits, expected)
        assert other.model.norm.weight is not net.model.norm.weight


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_same_numbers(reentrant):
    ids = batch()
    expected = loss_and_gradients(optimized("llama").train(), ids)
    net = optimized("llama").train()
    net.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    got = loss_and_gradients(net, ids)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[1][n], g) for n, g in expected[1].items())


def test_autocast():
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = loss_and_gradients(model("llama"), ids)
        got, own = loss_and_gradients(optimized("llama"), ids)
    assert abs(got - expected) < 2e-2
    assert distance(own, gradients) < 3e-2


def test_autocast_to_half_precision_falls_back():
    ids = batch()
    swaps.FALLBACKS.clear()
    with torch.autocast("cpu", torch.float16):
        expected, gradients = loss_and_gradients(model("llama"), ids)
        got, own = loss_and_gradients(optimized("llama"), ids)
    assert abs(got - expected) < 2e-3
    assert distance(own, gradients) < 1e-2
    assert any("not torch.float16" in reason for _, reason in swaps.FALLBACKS), swaps.FALLBACKS


def test_gradients_of_four_batches_add_up():
    results = []
    for net in (model("llama", attn_implementation="eager"), optimized("llama")):
        for ids in batch(4, 16).split(1):
            (net(ids, labels=ids, use_cache=False).loss / 4).backward()
        results.append({n: p.grad for n, p in net.named_parameters()})
    assert distance(results[1], results[0]) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_fullgraph_compile(family):
    ids = batch()
    net = optimized(family)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    results = []
    for call in (net, compiled):
        net.zero_grad()
        logits = call(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        results.append((logits.detach(), gradients))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5
    assert distance(results[1][1], results[0][1]) < 1e-5


def test_dropout_falls_back_and_says_so():
    swaps.FALLBACKS.clear()
    net = optimized("llama", attention_dropout=0.5).train()
    net(batch())
    (key,) = swaps.FALLBACKS
    assert "dropout" in key[1] and swaps.FALLBACKS[key] == 2
    assert "dropout" in str(deepwell.report(net))


def test_precisions_that_are_refused():
    with pytest.raises(deepwell.UnsupportedError, match="got 'nvfp4'.*\nhint: precision='mxfp8'"):
        deepwell.optimize(model("llama"), precision="nvfp4", on_cpu=True)
    with pytest.raises(ValueError, match="got 'fp8'"):
        deepwell.optimize(model("llama"), precision="fp8", on_cpu=True)


def test_half_precision_is_left_alone():
    with pytest.raises(deepwell.DeepwellError, match="found none(.|\n)*not torch.float16"):
        optimized("llama", torch.float16)


def test_a_norm_with_another_formula_is_left_alone():
    class ScaledRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.rand(16)), 1e-6

        def forward(self, x):
            return 1.1 * torch.nn.functional.rms_norm(x, (16,), self.weight, self.eps)

    net = torch.nn.ModuleList([ScaledRMSNorm(), torch.nn.RMSNorm(16)])
    report = deepwell.report(deepwell.optimize(net, on_cpu=True))
    assert list(report.swapped) == ["1"]
    assert "differs from its original" in report.left["0"]


def test_compare_measures_each_module():
    net = optimized("llama", torch.bfloat16)
    errors = deepwell.compare(net, batch())
    # Two layers of two norms, attention and MLP, and the last norm.
    assert len(errors) == 9 and max(errors.values()) <= swaps.TOLERANCE[torch.bfloat16]
    with torch.no_grad():
        net.model.norm.variance_epsilon = 1.0
    assert deepwell.compare(net, batch())["model.norm"] <= swaps.TOLERANCE[torch.bfloat16]


def test_without_a_gpu_the_model_stays_as_it_is():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    net = model("llama")
    assert deepwell.optimize(net) is net
    assert not any(swaps.is_swapped(m) for m in net.modules())
    assert "no GPU" in str(deepwell.report(net))
    with pytest.raises(deepwell.DeepwellError, match="no GPU"):
        deepwell.optimize(net, fallback=False)
