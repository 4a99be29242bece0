"""Compares deepwell-precision, bit for bit, with PyPI's ml_dtypes and with numpy.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy ml_dtypes
    /tmp/venv/bin/python scripts/compare_ml_dtypes.py [random inputs, 10000000 by default]

Elements: each cast against that of ml_dtypes. Inputs are random f32 bit patterns, as many near the
range of each format, every bf16, every value of the format, every tie between two and the f32
neighbours of all these. Known differences, which are left out here and counted: NaN (ml_dtypes
keeps a sign, or gives -0 where a format has no NaN; PTX and deepwell-precision give positive NaN
or the largest value) and, in e4m3 and e5m2, magnitudes that round beyond the largest finite one
(ml_dtypes overflows to NaN or infinity; deepwell-precision saturates, which is checked).

Blocks: MX formats and NVFP4 against the functions `mx` and `nvfp4` below, which follow the
published definitions with numpy's f32 arithmetic and cast elements and scales with ml_dtypes. They
share no code with deepwell-precision. Left out here, and tested in Rust: blocks that are not finite.
"""

import subprocess
import sys

import ml_dtypes
import numpy as np

# Name: type, largest value, exponent of the largest value, place of the sign bit.
FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8, 7),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15, 7),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 4, 5),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2, 5),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 2, 3),
}
COLS = 1000  # not a multiple of 16 or 32: each row ends with a shorter block


def rust(example, *arguments, numbers):
    command = ["cargo", "run", "-q", "--release", "-p", "deepwell-precision", "--example", example]
    run = subprocess.run(
        [*command, "--", *map(str, arguments)], input=numbers.tobytes(), stdout=subprocess.PIPE, check=True
    )
    return run.stdout


def element_inputs(dtype, count):
    rng = np.random.default_rng(1)
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(codes[np.isfinite(codes)])
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = [edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))]
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    largest = np.log2(values[-1])
    smallest = np.log2(values[values > 0][0])
    near = np.exp2(rng.uniform(smallest - 3, largest + 2, count)) * rng.choice([-1.0, 1.0], count)
    bf16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    return np.concatenate([any_bits, near.astype(np.float32), bf16, *around])


def compare_elements(name, count):
    dtype, largest, _, sign_bit = FORMATS[name]
    x = element_inputs(dtype, count)
    got = np.frombuffer(rust("codes", name, numbers=x), np.uint8)
    with np.errstate(all="ignore"):
        cast = x.astype(dtype)
    expected = cast.view(np.uint8)
    nan = np.isnan(x)
    beyond = np.zeros_like(nan)
    wrong = len(got) != len(x)
    if sign_bit == 7:
        beyond = ~nan & ~np.isfinite(cast.astype(np.float32))
        top = np.array(largest, dtype).view(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)
        wrong |= bool((got[beyond] != top[beyond]).any())
    different = int((got != expected)[~nan & ~beyond].sum())
    print(f"{name}: {len(x)} inputs, {different} differ; left out {nan.sum()} NaN, "
          f"{beyond.sum()} saturated (and checked to be the largest value)")
    return wrong or different > 0


def block_inputs(count):
    """Rows of smooth, wide, tiny and sparse numbers, and of what lies at the edges of a block."""
    rng = np.random.default_rng(2)
    rows = max(count // COLS, 8)
    x = rng.standard_normal((rows, COLS)).astype(np.float32)
    kind = np.arange(rows) % 8
    wide = rng.integers(0, 2**32, (rows, COLS), dtype=np.uint32).view(np.float32)
    x[kind == 1] = np.where(np.isfinite(wide), wide, np.float32(0))[kind == 1]
    scale = np.exp2(rng.integers(-60, 60, (rows, 1))).astype(np.float32)
    x[kind == 2] *= scale[kind == 2]
    x[kind == 3] *= np.float32(2.0**-130)
    x[kind == 4] = np.where(rng.random((rows, COLS)) < 0.97, np.float32(0), x)[kind == 4]
    # Magnitudes at which scale rules and ties turn: largest elements, their ties, and neighbours.
    edges = np.array([448, 464, 480, 511, 57344, 61440, 28, 30, 31, 7.5, 7.75, 6, 5, 7, 256, 3, 0.25], np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e9))])
    picked = rng.choice(edges, (rows, COLS)) * np.exp2(rng.integers(-5, 5, (rows, COLS))).astype(np.float32)
    x[kind == 5] = picked[kind == 5]
    x[kind == 6] *= np.float32(2.0**100)
    x[0] = np.finfo(np.float32).max * rng.uniform(-1, 1, COLS)
    return x


def in_blocks(x, size):
    """[rows, blocks, size], zeros after the end of a row."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // size) * size), np.float32)
    padded[:, :cols] = x
    return padded.reshape(rows, -1, size)


def mx(x, name, rule):
    """Codes and scale bytes of blocks of 32, by OCP MX v1.0 (floor) or as cuBLAS has it (rceil)."""
    dtype, largest, exponent_max, sign_bit = FORMATS[name]
    blocks = in_blocks(x, 32)
    amax = np.abs(blocks).max(axis=2)
    if rule == "floor":
        # frexp: amax = fraction * 2^exponent with the fraction from 1/2 to below 1.
        exponent = np.frexp(amax)[1] - 1 - exponent_max
    else:
        fraction, exponent = np.frexp(amax / np.float32(largest))
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        # Above, an element would round to 2^128: the scale of the floor rule.
        fraction_bits = ml_dtypes.finfo(dtype).nmant
        beyond = np.float32((2 - 0.5**fraction_bits) * 2.0**127)
        exponent = np.where(amax > beyond, 127 - exponent_max, exponent)
    exponent = np.where(amax == 0, -127, np.clip(exponent, -127, 127))
    scaled = np.ldexp(blocks.astype(np.float64), -exponent[..., None])
    # The product in f32, as hardware forms it. It is exact unless it is subnormal.
    scaled = scaled.astype(np.float32)
    codes = np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
    # A clipped negative zero keeps its sign only if the cast does.
    codes = codes | (np.signbit(scaled).astype(np.uint8) << sign_bit)
    return codes.reshape(len(x), -1)[:, : x.shape[1]], (exponent + 127).astype(np.uint8)


def nvfp4(x, block, bound):
    """Tensor scale, scale bytes and packed codes, by the definition of arXiv 2509.25149."""
    one, six, top = np.float32(1), np.float32(6), np.finfo(np.float32).max
    amax = np.abs(x).max()
    with np.errstate(over="ignore"):
        encode = one if amax == 0 else min(np.float32(bound) * six / amax, top)
    blocks = in_blocks(x, 16)
    block_amax = np.abs(blocks).max(axis=2)
    if block == "square":
        rows = len(x)
        padded = np.zeros((-(-rows // 16) * 16, block_amax.shape[1]), np.float32)
        padded[:rows] = block_amax
        groups = padded.reshape(-1, 16, padded.shape[1]).max(axis=1)
        block_amax = np.repeat(groups, 16, axis=0)[:rows]
    wanted = np.minimum(block_amax / six * encode, np.float32(448))
    scales = wanted.astype(ml_dtypes.float8_e4m3fn)
    decoded = scales.astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(decoded == 0, np.float32(0), np.minimum(encode / decoded, top))
    scaled = blocks * factor[..., None]
    codes = np.clip(scaled, -six, six).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    codes = codes.reshape(len(x), -1)[:, : x.shape[1]]
    return one / encode, scales.view(np.uint8), codes[:, ::2] | (codes[:, 1::2] << 4)


def compare_blocks(count):
    x = block_inputs(count)
    rows = len(x)
    failed = False
    for name in FORMATS:
        for rule in ["rceil", "floor"]:
            got = np.frombuffer(rust("blocks", COLS, name, rule, numbers=x), np.uint8)
            codes, scales = mx(x, name, rule)
            expected = np.concatenate([scales.ravel(), codes.ravel()])
            different = int((got != expected).sum()) if len(got) == len(expected) else -1
            print(f"mx {name} {rule}: {x.size} elements, {different} bytes differ")
            failed |= different != 0
    # NVFP4 has one scale for the whole tensor, so that wide rows and smooth ones go by themselves.
    tensors = {"all kinds": x, "smooth": x[::8], "wide": x[1::8], "scaled": x[2::8], "tiny": x[3::8],
               "edges": x[5::8], "zeros": x[:3] * np.float32(0)}
    for block in ["row", "square"]:
        for bound in [448, 256]:
            for what, tensor in tensors.items():
                out = rust("blocks", COLS, "nvfp4", block, bound, numbers=tensor)
                scale, scales, codes = nvfp4(tensor, block, bound)
                expected = np.float32(scale).tobytes() + scales.tobytes() + codes.tobytes()
                got, expected = np.frombuffer(out, np.uint8), np.frombuffer(expected, np.uint8)
                different = int((got != expected).sum()) if len(got) == len(expected) else -1
                print(f"nvfp4 {block} {bound} {what}: {tensor.size} elements, {different} bytes differ")
                failed |= different != 0
    return failed


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10**7
    failed = [compare_elements(name, count) for name in FORMATS] + [compare_blocks(count)]
    print("differences found" if any(failed) else "no difference")
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
