"""LoRA by PEFT: adapters on an optimized model, trained and merged.

python lora.py
"""

import peft
import torch
from small_llama import sequences, small_llama

import deepwell


def main(steps: int = 10) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = deepwell.optimize(small_llama(device), verbose=True, on_cpu=device == "cpu")
    settings = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(model, settings).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for ids in sequences(4 * steps).to(device).split(4):
        loss = adapted(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.3f}")
    merged = adapted.merge_and_unload()
    print(f"merged: {sum(p.numel() for p in merged.parameters())} parameters")
    return losses


if __name__ == "__main__":
    main()
