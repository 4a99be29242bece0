// Rounds the elements of a quantized operand again, stochastically: each scaled value goes to one
// of the two neighbouring E4M3 numbers, with the value as expectation. Random words are those of
// Philox at the element's index in the operand, with a seed and a step in device memory. Runs after
// a quantization, whose scales the kernel reads.
//
// A CTA has a tile of 64 x 64 elements, which pass through shared memory, since a columnwise
// operand is stored transposed. A thread rounds 16 elements of a row of the operand, which share
// one scale.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/philox.cuh"
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr uint32 kTile = 64;
constexpr uint32 kVector = 16;               // elements per thread
constexpr uint32 kVectors = kTile / kVector;  // per row of a tile
constexpr uint32 kScaleElements = 32;       // elements per scale

static_assert(kThreads == kTile * kVectors);

// 2^(127 - code), the reciprocal of a scale. The result for code 254 is subnormal.
__device__ __forceinline__ float scale_reciprocal(uint32 code) {
    const uint32 bits = code == 254 ? 0x00400000u : (254 - code) << 23;
    return __uint_as_float(code == 255 ? 0x7fc00000u : bits);
}

// Converts x to E4M3. Rounds away from zero if the fraction of the distance to the next code, in
// units of 2^-32, exceeds `word`; values beyond 448 become 448.
__device__ __forceinline__ uint32 to_e4m3_stochastic(float x, uint32 word) {
    constexpr uint32 kShift = 20;  // bits of an FP32 fraction beyond those of E4M3
    constexpr uint32 kLeast = 121;  // exponent field of the smallest normal element, 2^-6
    constexpr uint32 kMaxBits = 0x43e00000u;  // 448
    const uint32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7f;
    }
    const uint32 magnitude = min(bits & 0x7fffffffu, kMaxBits);
    const uint32 exponent = max(magnitude >> 23, kLeast);
    // Distance of the last bit from that of a normal value of this exponent.
    const uint32 below = exponent - (magnitude >> 23);
    // A subnormal FP32 gets a false implicit bit, far below all 32 bits of `share`.
    const uint32 significand = (magnitude & 0x007fffffu) | 0x00800000u;
    const uint32 units = significand >> min(kShift + below, 31u);
    constexpr uint32 kUp = 32 - kShift;
    const uint32 shifted = significand << (kUp - min(below, kUp));
    const uint32 share = shifted >> min(below - min(below, kUp), 31u);
    // `units` includes the implicit bit, which is absent for an exponent field of zero.
    const uint32 code = ((exponent - kLeast) << 3) + units + (share > word ? 1u : 0u);
    return code | bits >> 31 << 7;
}

template <typename E, bool kColumn>
__device__ __forceinline__ void stochastic_round(const E* __restrict__ x,
                                                 const uint8* __restrict__ scales,
                                                 const uint64* __restrict__ key,
                                                 uint8* __restrict__ data, uint32 rows,
                                                 uint32 k, uint64 stream) {
    // One column more than the tile, so that the elements of a column are in different banks.
    __shared__ float tile[kTile][kTile + 1];
    // An empty matrix has one CTA.
    const uint32 across = k == 0 ? 1 : (k + kTile - 1) / kTile;
    const uint32 row0 = blockIdx.x / across * kTile, first0 = blockIdx.x % across * kTile;
    for (uint32 i = threadIdx.x; i < kTile * kTile; i += kThreads) {
        const uint32 major = i / kTile, minor = i % kTile;
        const uint32 down = kColumn ? minor : major, along = kColumn ? major : minor;
        if (row0 + down < rows && first0 + along < k) {
            const uint64 at = kColumn ? static_cast<uint64>(first0 + along) * rows + row0 + down
                                      : static_cast<uint64>(row0 + down) * k + first0 + along;
            tile[down][along] = to_f32(x[at]);
        }
    }
    __syncthreads();
    const uint32 of_tile = threadIdx.x / kVectors, vector = threadIdx.x % kVectors * kVector;
    const uint32 row = row0 + of_tile, first = first0 + vector;
    if (row >= rows || first >= k) {
        return;
    }
    const uint64 place = scale_tile_place(row, first, k) +
                         scale_row_place(row % kScaleTileRows) +
                         first % kScaleTileElements / kScaleElements;
    const float factor = scale_reciprocal(scales[place]);
    const uint64 seed = key[0];
    stream |= key[1] & 0xffffffffu;
    const uint64 index = static_cast<uint64>(row) * k + first;
    uint32 words[4];
#pragma unroll
    for (uint32 i = 0; i < kVector; ++i) {
        // In rows that are not a multiple of four, indices begin within a counter's four words.
        const uint32 word = (index + i) % 4;
        if (i == 0 || word == 0) {
            const uint4 made = philox_words((index + i) / 4, stream, seed);
            words[0] = made.x, words[1] = made.y, words[2] = made.z, words[3] = made.w;
        }
        if (first + i < k) {
            const uint32 random = word < 2 ? (word == 0 ? words[0] : words[1])
                                           : (word == 2 ? words[2] : words[3]);
            const float scaled = tile[of_tile][vector + i] * factor;
            data[index + i] = static_cast<uint8>(to_e4m3_stochastic(scaled, random));
        }
    }
}

// x [rows, k] for a rowwise operand and [k, rows] for a columnwise operand; scales of the operand,
// in tiles; key [2]: seed and step; data [rows, k]. One CTA per tile.
#define STOCHASTIC_ROUND_KERNEL(name, E, column)                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const E* __restrict__ x, const uint8* __restrict__ scales,                          \
             const uint64* __restrict__ key, uint8* __restrict__ data, uint32 rows, uint32 k,    \
             uint64 stream) {                                                                    \
        stochastic_round<E, column>(x, scales, key, data, rows, k, stream);                      \
    }

STOCHASTIC_ROUND_KERNEL(stochastic_round_bf16_row, bf16, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_bf16_column, bf16, true)
STOCHASTIC_ROUND_KERNEL(stochastic_round_f32_row, float, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_f32_column, float, true)
