"""Small random models of transformers' families on a GPU, next to transformers' own attention.

    python3 gpu_families.py [--out FOLDER]

Loss and gradients of an optimized BF16 model are within twice the distance that eager attention and
SDPA have from FP32, with padding on either side and without. Needs the wheel, transformers, pytest,
and the folder `tests` beside this file.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).with_name("tests")))
import families as small  # noqa: E402
import test_optimize as on_cpu  # noqa: E402

import deepwell  # noqa: E402
from gpu_check import BF16, DEVICE, Log  # noqa: E402

#: Head sizes that kernels of GPUs take.
SIZES = dict(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=128)
OWN = {"gpt2": dict(n_embd=256, n_positions=128), "qwen3_moe": dict(moe_intermediate_size=256)}
SEQ = 96


def made(family: str, dtype, **settings):
    sizes = OWN["gpt2"] if family == "gpt2" else {**SIZES, **OWN.get(family, {})}
    return small.model(family, dtype, **sizes, **settings).to(DEVICE)


def masks():
    whole = torch.ones(2, SEQ, dtype=torch.long, device=DEVICE)
    left, right = whole.clone(), whole.clone()
    left[0, :17], right[0, -23:] = 0, 0
    return {"no padding": None, "left padding": left, "right padding": right}


def check_family(log: Log, family: str) -> None:
    ids = small.batch(2, SEQ).to(DEVICE)
    for name, mask in masks().items():
        inputs = {}
        if mask is not None:
            counts = mask.bool() & mask.roll(1, 1).bool()
            inputs = dict(attention_mask=mask, labels=ids.masked_fill(~counts, -100))
        exact_loss, exact = on_cpu.loss_and_gradients(
            made(family, torch.float32, attn_implementation="eager"), ids, **inputs
        )
        loss_error = gradient_error = 0.0
        for implementation in ("eager", "sdpa"):
            if family in ("gemma2", "gpt_oss") and implementation == "sdpa":
                continue
            peer = made(family, BF16, attn_implementation=implementation)
            loss, gradients = on_cpu.loss_and_gradients(peer, ids, **inputs)
            loss_error = max(loss_error, abs(loss - exact_loss).item())
            gradient_error = max(gradient_error, on_cpu.distance(gradients, exact).item())
        net = deepwell.optimize(made(family, BF16))
        loss, gradients = on_cpu.loss_and_gradients(net, ids, **inputs)
        # A loss rounds to BF16 where the model computes it so: a bound below that shows nothing.
        bound = max(2 * loss_error, 2.0**-9 * exact_loss.item())
        log.check(f"{family}, {name}, loss", abs(loss - exact_loss).item(), bound)
        error = on_cpu.distance(gradients, exact).item()
        log.check(f"{family}, {name}, gradients", error, 2 * gradient_error)
        log.write(
            section="families", family=family, mask=name,
            swapped=len(deepwell.report(net).swapped),
            left=sorted(set(deepwell.report(net).left.values())),
        )  # fmt: skip


def families(log: Log) -> None:
    for family in small.FAMILIES:
        log.attempt(family, lambda: check_family(log, family))  # noqa: B023


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    log = Log(parser.parse_args().out)
    families(log)
    print(f"{log.failures} failed")
    return 1 if log.failures else 0


if __name__ == "__main__":
    sys.exit(main())
