"""Two CPU processes beside one without Deepwell: DDP, FSDP2 and tensor parallelism by DTensor."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from families import batch, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deepwell
from deepwell import swaps

RANKS = 2
STEPS = 3


def data_parallel(net, _):
    return torch.nn.parallel.DistributedDataParallel(net)


def sharded(net, _):
    # Replaces classes, too: of modules that `optimize` has swapped.
    for layer in net.model.layers:
        fully_shard(layer)
    return fully_shard(net)


def tensor_parallel(net, mesh):
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in net.model.layers:
        parallelize_module(layer, mesh, plan)
    return net


#: How ranks share a model, and whether each has a part of the sequences.
KINDS = {"ddp": (data_parallel, True), "fsdp2": (sharded, True), "tp": (tensor_parallel, False)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(net, ids):
    """Losses of a few steps, and gradients of the first. Without momentum and moments, which
    magnify rounding."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses, gradients = [], {}
    for _ in range(STEPS):
        loss = net(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        named = net.named_parameters()
        gradients = gradients or {
            n.removeprefix("module."): whole(p.grad).clone() for n, p in named
        }
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients


def rank(index: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    ids = batch(4, 16)
    expected, gradients = train(model("llama", attn_implementation="eager"), ids)
    assert expected[0] - expected[-1] > 0.1, "nothing was trained"
    for kind, (share, has_part) in KINDS.items():
        net = share(deepwell.optimize(model("llama"), on_cpu=True), mesh)
        assert any(map(swaps.is_swapped, net.modules())), kind
        losses, own = train(net, ids.chunk(RANKS)[index] if has_part else ids)
        assert not swaps.FALLBACKS, (kind, swaps.FALLBACKS)
        if has_part:
            dist.all_reduce(losses)
            losses /= RANKS
        # FP32, with other orders of sums.
        assert (losses - expected).abs().max() < 1e-5, (kind, losses, expected)
        for name, gradient in gradients.items():
            difference = (own[name] - gradient).norm()
            assert difference <= 1e-4 * gradient.norm().clamp_min(1e-3), (kind, name)
    dist.destroy_process_group()


def test_two_ranks():
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        torch.multiprocessing.spawn(rank, (store,), nprocs=RANKS)
