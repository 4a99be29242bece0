// permute.cu in FP32, for the gates of tokens, with few columns each, that are sent to the ranks of
// the experts, and for the gates' gradients. A thread processes one element at a time.
//
//   permute    out[row] = x[pairs[row] / top_k], zero for a row without a pair
//   unpermute  out[token] = sum over the token's pairs of y[rows[pair]] in the order of the pairs;
//              a pair without a row adds nothing
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr uint32 kThreads = 256;

// x [tokens, columns], pairs [rows], out [rows, columns].
extern "C" __global__ void __launch_bounds__(kThreads)
    permute_f32(const float* __restrict__ x, const int32* __restrict__ pairs,
                float* __restrict__ out, uint32 rows, uint32 columns, uint32 top_k) {
    const uint64 elements = uint64{rows} * columns;
    const uint64 stride = uint64{gridDim.x} * kThreads;
    for (uint64 at = uint64{blockIdx.x} * kThreads + threadIdx.x; at < elements; at += stride) {
        const int32 pair = pairs[at / columns];
        const uint32 token = static_cast<uint32>(pair) / top_k;
        out[at] = pair < 0 ? 0.0f : x[uint64{token} * columns + at % columns];
    }
}

// y [rows of pairs, columns], rows [tokens, top_k], out [tokens, columns].
extern "C" __global__ void __launch_bounds__(kThreads)
    unpermute_f32(const float* __restrict__ y, const int32* __restrict__ rows,
                  float* __restrict__ out, uint32 tokens, uint32 columns, uint32 top_k) {
    const uint64 elements = uint64{tokens} * columns;
    const uint64 stride = uint64{gridDim.x} * kThreads;
    for (uint64 at = uint64{blockIdx.x} * kThreads + threadIdx.x; at < elements; at += stride) {
        const int32* const of_token = rows + at / columns * top_k;
        float sum = 0.0f;
        for (uint32 choice = 0; choice < top_k; ++choice) {
            const int32 row = of_token[choice];
            sum += row < 0 ? 0.0f : y[uint64{static_cast<uint32>(row)} * columns + at % columns];
        }
        out[at] = sum;
    }
}
