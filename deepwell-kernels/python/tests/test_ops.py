"""Operators: fakes, gradients and values next to PyTorch's own."""

import pytest
import torch
from torch.nn import functional as F

from deepwell import attention_ops, cross_entropy, experts, functional  # noqa: F401

OPS = torch.ops.deepwell
#: Results are rounded to BF16 once, so they differ by at most a unit of the largest, 2^-8; sums of
#: FP32 differ in their order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
DTYPES = list(TOLERANCE)


def contiguous(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def transposed(*shape, dtype=torch.float32):
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def expanded(*shape, dtype=torch.float32):
    return torch.randn(1, *shape[1:], dtype=dtype).expand(*shape)


def misaligned(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.randn(count + 1, dtype=dtype)[1:].view(shape)


LAYOUTS = [contiguous, transposed, expanded, misaligned]


def arguments(make, tokens):
    """Arguments of each operator, tensors of tokens by ``make``."""
    x = lambda: make(tokens, 32)  # noqa: E731
    w, rstd = torch.rand(32), torch.rand(tokens)
    heads = lambda count: make(1, tokens, count, 16)  # noqa: E731
    lse = torch.zeros(1, 4, tokens)
    ranges = torch.tensor([0, tokens], dtype=torch.int32).expand(1, tokens, 2)
    settings = (0.25, True, 0, 0)
    # Keys and values with the heads first.
    first = (0.25, True, 0, attention_ops.K_FIRST | attention_ops.V_FIRST)
    sinks = torch.randn(4)
    targets = torch.arange(tokens, dtype=torch.int32)
    return {
        "rms_norm": (x(), w, 1e-6),
        "rms_norm_backward": (x(), x(), w, rstd),
        "add_rms_norm": (x(), x(), w, 1e-6),
        "layer_norm": (x(), w, w, 1e-6),
        "layer_norm_backward": (x(), x(), w, rstd, rstd),
        "linear_cross_entropy": (x(), make(48, 32), targets, torch.ones(1)),
        "linear_cross_entropy_grad": (x(), make(48, 32), targets, torch.ones(1)),
        "swiglu": (x(), x()),
        "swiglu_backward": (x(), x(), x()),
        "rope": (heads(4), torch.randn(tokens, 16), False),
        "gelu_tanh": (x(),),
        "gelu_tanh_backward": (x(), x()),
        "grouped_gemm": (x(), make(3, 16, 32), torch.zeros(4, dtype=torch.int32), False),
        "grouped_gemm_wgrad": (x(), x(), torch.zeros(4, dtype=torch.int32)),
        "attention": (heads(4), heads(2), heads(2), sinks, ranges, *settings),
        "attention heads first": (
            heads(4), make(1, 2, tokens, 16), make(1, 2, tokens, 16), sinks, ranges, *first
        ),
        "attention_backward": (
            heads(4), heads(4), heads(2), heads(2), heads(4), lse, None, ranges, *settings
        ),
        "attention_backward heads first": (
            heads(4), heads(4), make(1, 2, tokens, 16), make(1, 2, tokens, 16), heads(4), lse,
            None, ranges, *first
        ),
    }  # fmt: skip


NAMES = list(arguments(contiguous, 4))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_opcheck(name, make, tokens):
    # Catches a fake with another shape, type or stride than the operator, and undeclared writes.
    call = getattr(OPS, name.split()[0]).default
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(call, arguments(make, tokens)[name], test_utils=utilities)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", LAYOUTS)
def test_a_layout_changes_no_value(name, make):
    # Catches an output with the strides of an input: kernels write row-major.
    given = arguments(make, 7)[name]
    plain = [a.contiguous().clone() if isinstance(a, torch.Tensor) else a for a in given]
    as_tuple = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    call = getattr(OPS, name.split()[0])
    for got, expected in zip(as_tuple(call(*given)), as_tuple(call(*plain))):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_every_operator_is_checked():
    from deepwell.ops import OPERATORS

    checked = {name.split()[0] for name in NAMES}
    assert {name for name in OPERATORS if not name.startswith("mxfp8")} == checked


def check(ours, theirs, inputs, dtype):
    """Values and gradients of a function, next to PyTorch's in FP32."""
    inputs = [i.to(dtype).clone().requires_grad_() for i in inputs]
    exact = [i.detach().float().clone().requires_grad_() for i in inputs]
    got, expected = ours(*inputs), theirs(*exact)
    direction = torch.randn_like(expected).to(dtype)
    got.backward(direction)
    expected.backward(direction.float())
    for a, b in [(got, expected), *((i.grad, e.grad) for i, e in zip(inputs, exact))]:
        # A gradient may be zero: of queries that see one key.
        scale = b.abs().max().clamp_min(0.1)
        assert (a.float() - b).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 64), (2, 3, 2, 40)])
def test_rows(dtype, shape):
    x, y, w, b = (torch.randn(s) for s in (shape, shape, shape[-1:], shape[-1:]))
    width = shape[-1:]
    check(
        lambda x, w: functional.rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, width, w, 1e-6),
        [x, w],
        dtype,
    )
    check(functional.layer_norm, lambda x, w, b: F.layer_norm(x, width, w, b), [x, w, b], dtype)
    check(functional.swiglu, lambda g, u: F.silu(g) * u, [x, y], dtype)
    check(functional.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [x], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_of_angles", [1, 2])
def test_rope(dtype, batch_of_angles):
    angles = torch.randn(batch_of_angles, 7, 8).repeat(1, 1, 2)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]

    def theirs(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    table = functional.rope_table(angles.cos(), angles.sin())
    check(lambda x: functional.rope(x, table), theirs, [torch.randn(2, 7, 3, 16)], dtype)


def test_linear_halves():
    x, w = torch.randn(2, 3, 8), torch.randn(10, 8)

    def joined(x, w):
        return torch.cat(functional.linear_halves(x, w), -1)

    check(joined, F.linear, [x, w], torch.float32)


def reference_attention(q, k, v, sinks=None, documents=None, window=0, causal=True, scale=None):
    """Attention with a dense mask and a softmax over one more column."""
    from deepwell.hf_attention import dense_mask

    batch, seq, heads, width = q.shape
    groups = heads // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (width**-0.5 if scale is None else scale)
    if documents is None:
        documents = torch.tensor([0, seq]).expand(batch, seq, 2)
    if causal:
        scores = scores.masked_fill(~dense_mask(documents, window), -torch.inf)
    if sinks is not None:
        column = sinks.view(1, heads, 1, 1).expand(batch, heads, seq, 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., :seq] @ v).transpose(1, 2)


DOCUMENTS = torch.tensor([[0, 5]] * 5 + [[5, 12]] * 7 + [[12, 19]] * 7, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(causal=False),
        dict(scale=0.5),
        dict(window=1),
        dict(window=6),
        dict(documents=DOCUMENTS.expand(2, 19, 2)),
        dict(documents=DOCUMENTS.expand(2, 19, 2), window=3),
    ],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention(dtype, settings, has_sinks):
    q, k, v = (torch.randn(2, 19, heads, 16) for heads in (4, 2, 2))
    sinks = [torch.randn(4)] if has_sinks else []

    def call(attend):
        return lambda q, k, v, *s: attend(q, k, v, sinks=s[0] if s else None, **settings)

    check(call(functional.attention), call(reference_attention), [q, k, v, *sinks], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [None, 40])
def test_linear_cross_entropy(dtype, items):
    targets = torch.randint(0, 70, (3, 11))
    targets[0, 2:9] = -100
    x, w = torch.randn(3, 11, 32), torch.randn(70, 32)

    def theirs(x, w):
        reduction = "mean" if items is None else "sum"
        logits, flat = (x @ w.T).flatten(0, 1), targets.flatten()
        return F.cross_entropy(logits, flat, reduction=reduction) / (1 if items is None else items)

    check(
        lambda x, w: cross_entropy.linear_cross_entropy(x, w, targets, items), theirs, [x, w], dtype
    )
    ignored = torch.full_like(targets, -100)
    nothing = cross_entropy.linear_cross_entropy(x.to(dtype).requires_grad_(), w.to(dtype), ignored)
    nothing.backward()
    assert nothing == 0


def test_compiles_without_a_break_and_with_dynamic_sizes():
    def f(x, w):
        return functional.swiglu(functional.rms_norm(x, w), x).sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 9):
        x, w = torch.randn(2, tokens, 16, requires_grad=True), torch.rand(16)
        compiled(x, w).backward()
        got, x.grad = x.grad, None
        f(x, w).backward()
        assert torch.equal(got, x.grad)


def test_an_unsupported_request_says_why():
    x = torch.randn(4, 32, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="expected BF16 or FP32, got torch.float16"):
        OPS.swiglu(x, x)
