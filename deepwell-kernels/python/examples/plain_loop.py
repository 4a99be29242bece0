"""A training loop: one line more than without Deepwell.

    python plain_loop.py

Without a GPU the kernels of the CPU run, which are slow and there to try things out.
"""

import torch
from small_llama import sequences, small_llama

import deepwell


def main(steps: int = 10) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_llama(device).train()
    deepwell.optimize(model, verbose=True, on_cpu=device == "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = sequences(4 * steps).to(device).split(4)
    losses = []
    for ids in data:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
