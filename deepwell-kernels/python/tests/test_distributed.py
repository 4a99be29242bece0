"""Data parallelism on two CPU processes: DDP, and FSDP2 before and after its class swap."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import batch, model

import deepwell
from deepwell import swaps


def reference():
    """Gradients of the whole batch in one process, without Deepwell."""
    net = model("llama", attn_implementation="eager")
    ids = batch(4, 16)
    net(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def wrapped(kind: str) -> torch.nn.Module:
    net = deepwell.optimize(model("llama"), on_cpu=True)
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    for layer in net.model.layers:
        fully_shard(layer)
    return fully_shard(net)


def rank(index: int, kind: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    gradients = reference()
    net = wrapped(kind)
    assert any(map(swaps.is_swapped, net.modules()))
    ids = batch(4, 16).chunk(2)[index]
    net(ids, labels=ids, use_cache=False).loss.backward()
    assert not swaps.FALLBACKS, swaps.FALLBACKS
    for name, parameter in net.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        expected = gradients[name.removeprefix("module.")]
        assert (grad - expected).norm() <= 1e-4 * expected.norm().clamp_min(1e-3), name
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(kind):
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        torch.multiprocessing.spawn(rank, (kind, store), nprocs=2)
