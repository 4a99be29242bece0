"""FSDP2: `optimize` comes before `fully_shard`, which replaces classes, too.

    torchrun --nproc-per-node 2 fsdp2.py

One process for each GPU, or processes on the CPU with gloo.
"""

import os

import torch
import torch.distributed as dist
from small_llama import sequences, small_llama
from torch.distributed.fsdp import fully_shard

import deepwell


def main(steps: int = 10) -> list[float]:
    rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    device = f"cuda:{rank}" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    model = deepwell.optimize(small_llama(device).train(), verbose=rank == 0, on_cpu=not has_gpu)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ranks = dist.get_world_size()
    losses = []
    for ids in sequences(4 * ranks * steps).to(device).split(4 * ranks):
        own = ids.chunk(ranks)[dist.get_rank()]
        loss = model(own, labels=own, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"loss {losses[-1]:.3f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
