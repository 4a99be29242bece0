"""Compares the casts of deepwell-precision with those of PyPI's ml_dtypes, bit for bit.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy ml_dtypes
    /tmp/venv/bin/python scripts/compare_ml_dtypes.py [random inputs]

Inputs: random f32 bit patterns, as many near the range of each format, every bf16, every value of
the format, every tie between two and the f32 neighbours of both. Known differences, which are left
out here and counted: NaN (ml_dtypes keeps a sign or gives -0 where a format has no NaN; PTX, and
deepwell-precision, give positive NaN or the largest value) and, in e4m3 and e5m2, magnitudes that
round beyond the largest finite one (ml_dtypes overflows to NaN or infinity; deepwell saturates).
"""

import subprocess
import sys

import ml_dtypes
import numpy as np

FORMATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def inputs(dtype, count):
    rng = np.random.default_rng(1)
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = [edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)]
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    largest = np.log2(values[-1])
    smallest = np.log2(values[values > 0][0])
    near = np.exp2(rng.uniform(smallest - 3, largest + 2, count)) * rng.choice([-1.0, 1.0], count)
    bf16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    return np.concatenate([any_bits, near.astype(np.float32), bf16, *around]), values[-1]


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10**7
    failed = False
    for name, dtype in FORMATS.items():
        x, largest = inputs(dtype, count)
        command = ["cargo", "run", "-q", "--release", "-p", "deepwell-precision", "--example", "codes", "--", name]
        run = subprocess.run(command, input=x.tobytes(), stdout=subprocess.PIPE, check=True)
        got = np.frombuffer(run.stdout, np.uint8)
        with np.errstate(all="ignore"):
            cast = x.astype(dtype)
        expected = cast.view(np.uint8)
        skipped = np.isnan(x)
        beyond = np.zeros_like(skipped)
        if name in ("e4m3", "e5m2"):
            beyond = ~skipped & ~np.isfinite(cast.astype(np.float32))
            top = np.array(largest, dtype).view(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)
            failed |= bool((got[beyond] != top[beyond]).any())
        different = int((got != expected)[~skipped & ~beyond].sum())
        failed |= different > 0 or len(got) != len(x)
        print(f"{name}: {len(x)} inputs, {different} differ; left out {skipped.sum()} NaN, "
              f"{beyond.sum()} saturated (checked to be the largest value)")
    sys.exit(failed)


if __name__ == "__main__":
    main()
