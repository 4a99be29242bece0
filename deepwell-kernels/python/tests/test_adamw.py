"""``deepwell.AdamW`` beside ``torch.optim.AdamW``, on the kernels of the CPU."""

import copy
import io

import pytest
import torch
from torch import nn

import deepwell
from deepwell import plans, swaps

SETTINGS = dict(lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 5)).to(dtype)


def groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


def train(model, optimizer, steps, seed=0, schedule=None):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(8, 33, generator=generator).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()


def distance(a, b):
    pairs = zip(a.parameters(), b.parameters())
    return max((p - q).abs().max().item() for p, q in pairs)


def test_steps_are_those_of_torch():
    mine, theirs = net(), net()
    ours = deepwell.AdamW(groups(mine), **SETTINGS, on_cpu=True)
    reference = torch.optim.AdamW(groups(theirs), **SETTINGS)
    halved = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, reference)]
    train(mine, ours, 5, schedule=halved[0])
    train(theirs, reference, 5, schedule=halved[1])
    # Sums of the same terms with roundings in another order.
    assert distance(mine, theirs) < 1e-6
    for p, q in zip(mine.parameters(), theirs.parameters()):
        assert set(ours.state[p]) == set(reference.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(ours.state[p][name], reference.state[q][name], 1e-5, 1e-9)
        assert ours.state[p]["step"] == 5


def test_every_setting_counts():
    """A setting that is not passed on would leave the weights as they are without it."""
    first = net()
    train(first, deepwell.AdamW(first.parameters(), **SETTINGS, on_cpu=True), 3)
    changes = [("lr", 2e-2), ("betas", (0.9, 0.99)), ("betas", (0.8, 0.9)), ("eps", 1e-2),
               ("weight_decay", 0.0)]  # fmt: skip
    for name, value in changes:
        settings = {**SETTINGS, name: value}
        mine, theirs = net(), net()
        train(mine, deepwell.AdamW(mine.parameters(), **settings, on_cpu=True), 3)
        train(theirs, torch.optim.AdamW(theirs.parameters(), **settings), 3)
        assert distance(mine, first) > 1e-5, name
        assert distance(mine, theirs) < 1e-6, name


@pytest.mark.parametrize("into_torch", [True, False])
def test_state_dicts_are_interchangeable(into_torch):
    start, other = net(), net()
    make = [
        lambda m: deepwell.AdamW(m.parameters(), **SETTINGS, on_cpu=True),
        lambda m: torch.optim.AdamW(m.parameters(), **SETTINGS, fused=True),
    ]
    before, after = make if into_torch else make[::-1]
    optimizer = before(start)
    train(start, optimizer, 3)
    other.load_state_dict(start.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    moved = after(other)
    moved.load_state_dict(torch.load(file))
    train(start, optimizer, 3, seed=1)
    train(other, moved, 3, seed=1)
    assert distance(start, other) < 1e-6
    assert all(state["step"] == 6 for state in moved.state.values())


def test_bf16_keeps_what_rounding_would_lose():
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = deepwell.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, on_cpu=True)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    # Each step is 1e-4, far below half a unit of BF16 at 1, which is 2^-9.
    state = optimizer.state[model.weight]
    assert state["master_weight"].dtype == torch.float32
    assert (state["master_weight"] - (1 - 50e-4)).abs().max() < 1e-5
    assert (model.weight == state["master_weight"].bfloat16()).all()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_bf16_state_survives_a_file():
    model, again = net(torch.bfloat16), net(torch.bfloat16)
    optimizer = deepwell.AdamW(model.parameters(), **SETTINGS, on_cpu=True)
    train(model, optimizer, 3)
    again.load_state_dict(model.state_dict())
    resumed = deepwell.AdamW(again.parameters(), **SETTINGS, on_cpu=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, seed=1)
    train(again, resumed, 3, seed=1)
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)
        masters = (optimizer.state[p]["master_weight"], resumed.state[q]["master_weight"])
        assert torch.equal(*masters)
    # PyTorch's optimizer takes the state too, and ignores the masters.
    theirs = torch.optim.AdamW(again.parameters(), **SETTINGS)
    theirs.load_state_dict(optimizer.state_dict())
    train(again, theirs, 1)


def test_a_bf16_weight_that_something_else_wrote():
    model = nn.Linear(64, 1, bias=False).bfloat16()
    optimizer = deepwell.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, on_cpu=True)

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()

    step()
    kept = optimizer.state[model.weight]["master_weight"].clone()
    with torch.no_grad():
        model.weight[0, :3] = 5.0
    step()
    master = optimizer.state[model.weight]["master_weight"]
    assert torch.allclose(master[0, :3], torch.full((3,), 5.0 - 1e-3))
    assert torch.allclose(master[0, 3:], kept[0, 3:] - 1e-3)


def test_autograd_notices_the_update():
    weight = nn.Parameter(torch.ones(4))
    optimizer = deepwell.AdamW([weight], on_cpu=True)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_kernels_do_not_take():
    swaps.FALLBACKS.clear()
    storage = torch.randn(20)
    odd = nn.Parameter(storage[1:17])
    transposed = nn.Parameter(torch.randn(4, 8).T)
    half = nn.Parameter(torch.randn(8).half())
    without = nn.Parameter(torch.randn(8))
    empty = nn.Parameter(torch.randn(0, 4))
    own = [odd, transposed, half, without, empty]
    theirs = [nn.Parameter(p.detach().clone()) for p in own]
    optimizers = [deepwell.AdamW(own, on_cpu=True), torch.optim.AdamW(theirs)]
    for parameters in (own, theirs):
        for p in parameters:
            p.grad = None if p.shape == (8,) and p.dtype == torch.float32 else torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(own, theirs):
        assert torch.allclose(p, q, atol=1e-6)
    reasons = "\n".join(reason for name, reason in swaps.FALLBACKS if name == "AdamW")
    for expected in ("multiples of 64", "contiguous", "not torch.float16"):
        assert expected in reasons
    assert without not in optimizers[0].state or not optimizers[0].state[without]


def test_on_cpu_is_asked_for():
    swaps.FALLBACKS.clear()
    model = net()
    train(model, deepwell.AdamW(model.parameters()), 1)
    assert any("kernels run on GPUs" in reason for _, reason in swaps.FALLBACKS)


def test_settings_without_a_kernel_are_refused():
    model = net()
    for name in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match=f"{name}: expected False"):
            deepwell.AdamW(model.parameters(), **{name: True})
    optimizer = deepwell.AdamW(model.parameters(), on_cpu=True)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="expected amsgrad and maximize to be False"):
        optimizer.step()


def test_copies_and_closures():
    model = net()
    optimizer = copy.deepcopy(deepwell.AdamW(model.parameters(), on_cpu=True))
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer._versions == {}
    loss = optimizer.step(lambda: torch.ones(()))
    assert loss == 1


def test_plans_are_kept_by_what_they_update(monkeypatch):
    monkeypatch.setattr(plans, "_PLANS", {})
    weights = [nn.Parameter(torch.randn(100)) for _ in range(3)]
    optimizer = deepwell.AdamW(weights, on_cpu=True)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(100)
        optimizer.step()
    assert len(plans._PLANS) == 1
