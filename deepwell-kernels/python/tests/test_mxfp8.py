"""Linear layers in MXFP8."""

import pytest
import torch
from families import batch, model
from test_ops import LAYOUTS
from torch import nn

import deepwell
from deepwell import mxfp8, mxfp8_ops, ops, plans, swaps

OPS = torch.ops.deepwell
#: E4M3 keeps three bits after the first, so rounding moves an element by at most 2^-4 of itself.
#: In the root mean square of a normal distribution it moves each operand by 0.0264 (measured).
#: Errors of two operands add as squares.
RELATIVE_ERROR = 0.0264 * 2**0.5
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def dequantized(data, scales, granularity_rows, columns):
    """The matrix of elements and scales in tiles."""
    rows = data.shape[0]
    tiles = scales.view(torch.uint8).view(*scales.shape[:2], 32, 4, 4)
    # Scale of row r and block b is at (r % 32) · 16 + (r / 32 % 4) · 4 + b % 4 of its tile.
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape[0] * 128, -1)
    plain = plain[:rows, : -(-columns // 32)].float()
    factors = torch.exp2(plain - 127).repeat_interleave(32, 1)[:, :columns]
    return data.float() * factors


@pytest.mark.parametrize("name, arguments", [
    ("mxfp8_quantize", (False, 32, False)),
    ("mxfp8_quantize", (True, 128, True)),
    ("mxfp8_quantize_both", (32, True)),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(128, 256), (0, 64), (2, 64, 256)])
@pytest.mark.parametrize("make", LAYOUTS)
def test_opcheck(name, arguments, shape, make):
    x = make(*shape, dtype=torch.bfloat16)
    torch.library.opcheck(getattr(OPS, name).default, (x, *arguments), test_utils=CHECKS)


@pytest.mark.parametrize("name, count", [("mxfp8_swiglu", 2), ("mxfp8_swiglu_backward", 3)])
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 64])
def test_opcheck_of_swiglu(name, count, make, tokens):
    tensors = [make(2, tokens, 256, dtype=torch.bfloat16) for _ in range(count)]
    torch.library.opcheck(getattr(OPS, name).default, (*tensors, 32), test_utils=CHECKS)


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
@pytest.mark.parametrize("rows", [0, 128])
def test_opcheck_of_gemm(kind, rows):
    square = kind == "fprop"
    a = OPS.mxfp8_quantize(torch.randn(rows, 128).bfloat16(), False, 32, False)
    b = OPS.mxfp8_quantize(torch.randn(256, 128).bfloat16(), False, 32, square)
    arguments = (*a, *b, kind, 32, square)
    # PyTorch cannot compare E4M3 tensors, which the schema check does.
    torch.library.opcheck(OPS.mxfp8_gemm.default, arguments, test_utils=CHECKS[1:])


@pytest.mark.parametrize("make", LAYOUTS[1:])
def test_a_layout_changes_no_bit(make):
    x = make(128, 256, dtype=torch.bfloat16)
    for got, expected in zip(
        OPS.mxfp8_quantize_both(x, 32, False), OPS.mxfp8_quantize_both(x.clone(), 32, False)
    ):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_gemm_of_what_was_quantized(granularity, kind):
    # Exact up to the order of sums and the rounding of the result; a wrong scale exceeds both.
    m, n, k = 256, 384, 128
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    square = kind != "wgrad"
    qa = OPS.mxfp8_quantize(a, False, granularity, False)
    qb = OPS.mxfp8_quantize(b, False, granularity, square)
    out = OPS.mxfp8_gemm(*qa, *qb, kind, granularity, square)
    exact = dequantized(*qa, m, k) @ dequantized(*qb, n, k).T
    assert out.dtype == (torch.float32 if kind == "wgrad" else torch.bfloat16)
    tolerance = 1e-5 if kind == "wgrad" else 2.0**-8
    assert (out.float() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("granularity", [32, 128])
def test_linear(granularity, monkeypatch):
    monkeypatch.setattr(mxfp8, "granularity_of", lambda device: granularity)
    x = torch.randn(2, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(384, 256, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(384, dtype=torch.bfloat16, requires_grad=True)
    y = mxfp8.linear(x, w, bias)
    direction = torch.randn_like(y)
    y.backward(direction)
    exact = [t.detach().float().requires_grad_() for t in (x, w, bias)]
    expected = nn.functional.linear(*exact)
    expected.backward(direction.float())
    pairs = [(y, expected), (x.grad, exact[0].grad), (w.grad, exact[1].grad)]
    for got, want in pairs:
        error = (got.float() - want).norm() / want.norm()
        # Below half of the expected error, nothing was quantized; above twice, a scale is wrong.
        assert RELATIVE_ERROR / 2 < error < RELATIVE_ERROR * 2
    assert torch.allclose(bias.grad.float(), exact[2].grad, rtol=2**-6, atol=0.1)


def test_policy(monkeypatch):
    monkeypatch.setattr(mxfp8, "SMALLEST", 32)
    net = model("llama", torch.bfloat16)
    deepwell.optimize(net, precision="mxfp8", on_cpu=True)
    report = deepwell.report(net)
    linears = [name for name, how in report.swapped.items() if "Mxfp8Linear" in how]
    assert len(linears) == 13 and "model.layers.0.self_attn.q_proj" not in linears
    assert "lm_head" in report.left
    assert isinstance(net.model.layers[1].mlp.up_proj, nn.Linear)
    ids = batch(4, 16)
    loss = net(ids, labels=ids, use_cache=False).loss
    loss.backward()
    exact = model("llama")(ids, labels=ids, use_cache=False).loss
    assert abs(loss - exact) < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_an_mlp_in_one_function_equals_its_layers(monkeypatch):
    monkeypatch.setattr(mxfp8, "SMALLEST", 32)
    results = []
    for is_whole in (True, False):
        net = model("llama", torch.bfloat16)
        deepwell.optimize(net, precision="mxfp8", on_cpu=True)
        mlp = net.model.layers[1].mlp
        assert isinstance(mlp, mxfp8.Mxfp8SwiGluMlp)
        seen = []
        if not is_whole:
            # A hook has to see the layer's call.
            mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))  # noqa: B023
        x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        x.requires_grad_()
        out = mlp(x)
        out.backward(x.detach())
        assert bool(seen) != is_whole
        results.append([out, x.grad, *(p.grad for p in mlp.parameters())])
    # The layers round the hidden tensor to BF16 before it is quantized.
    for got, expected in zip(*results):
        assert (got - expected).norm() < 0.02 * expected.norm()


def test_nothing_is_kept_without_gradients(monkeypatch):
    monkeypatch.setattr(mxfp8, "quantize_both", None)
    x, w = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16().requires_grad_()
    with torch.no_grad():
        assert not mxfp8.linear(x, w).requires_grad


def test_conv1d(monkeypatch):
    monkeypatch.setattr(mxfp8, "SMALLEST", 32)
    ids = batch(4, 16)
    results = []
    for precision in ("bf16", "mxfp8"):
        net = model("gpt2", torch.bfloat16)
        deepwell.optimize(net, precision=precision, on_cpu=True)
        loss = net(ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss, *(p.grad.float() for p in net.transformer.h.parameters())])
    swapped = deepwell.report(net).swapped
    assert sum("Conv1D by Mxfp8Conv1D" in how for how in swapped.values()) == 7
    assert abs(results[0][0] - results[1][0]) < 0.05
    for got, expected in zip(results[1][1:], results[0][1:]):
        # Rounding adds up over layers; a transposed GEMM would give a distance of 1 and more.
        assert 0 < (got - expected).norm() < 0.25 * expected.norm()


def test_a_number_of_tokens_that_no_kernel_takes_falls_back(monkeypatch):
    monkeypatch.setattr(mxfp8, "SMALLEST", 32)
    swaps.FALLBACKS.clear()
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).bfloat16()
    expected = net(torch.ones(7, 64).bfloat16())
    deepwell.optimize(net, precision="mxfp8", on_cpu=True)
    assert torch.equal(net(torch.ones(7, 64).bfloat16()), expected)
    assert "multiple of 32 tokens, not 7" in next(iter(swaps.FALLBACKS))[1]


@pytest.mark.parametrize("arch, granularity", [("sm90", 128), ("sm100", 32)])
def test_gpus_have_kernels_for_a_layer(arch, granularity):
    tokens, n, k = 4096, 2048, 5632
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def planes(rows, columns):
        return [(e4m3, (rows, columns)), (e8m0, (rows // 128, columns // 128, 512))]

    for kind, (rows, columns, depth) in {
        "fprop": (tokens, n, k),
        "dgrad": (tokens, k, n),
        "wgrad": (n, k, tokens),
    }.items():
        dtype = torch.float32 if kind == "wgrad" else torch.bfloat16
        types = [*planes(rows, depth), *planes(columns, depth), (dtype, (rows, columns))]
        op = mxfp8_ops.gemm_op(kind, granularity, kind != "wgrad")
        assert plans.unsupported(arch, op, types, 4) is None


def test_operators_are_all_checked():
    assert {name for name in ops.OPERATORS if name.startswith("mxfp8")} == {
        "mxfp8_quantize", "mxfp8_quantize_both", "mxfp8_gemm", "mxfp8_swiglu",
        "mxfp8_swiglu_backward",
    }  # fmt: skip
