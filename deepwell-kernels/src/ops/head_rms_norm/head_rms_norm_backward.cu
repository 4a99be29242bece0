// Gradients of the root-mean-square normalization of heads, y = n * weight, n = x * rstd:
//
//   dx = rstd * (g - n * mean(g * n)), g = dy * weight
//   dweight (+)= sum over tokens and heads of dy * n
//
// dy, x, dx [heads, head_dim] BF16, with the heads of all tokens contiguous; weight [head_dim]
// BF16; rstd [heads], dweight [head_dim] FP32. There is one CTA per SM, whose groups of lanes loop
// over heads. Each head is read once and written once. A thread keeps the same elements throughout,
// so its part of dweight stays in registers until the end. Then sums are added over the lanes of a
// warp, over the warps of the CTA in shared memory, and over the CTAs in scratch, each in a fixed
// order. Heads of other widths are processed as rows by rms_norm_backward.cu.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/sum_over_ctas.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/head_group.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Heads of a thread in flight.
constexpr int kHeads = 4;
constexpr int kHeadDimMax = 256;

static_assert(kHeadDimMax <= kThreads, "a thread joins the warps' sums of one element");

// head_dim a multiple of 8, at most 8 * lanes; lanes a power of two, at most 32. partials
// [gridDim.x + teams, head_dim], arrivals [1 + teams], teams of `members` CTAs.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    head_rms_norm_backward(const uint4* __restrict__ dy, const uint4* __restrict__ x,
                           const uint4* __restrict__ weight, const float* __restrict__ rstd,
                           uint4* __restrict__ dx, float* dweight, uint32 heads, uint32 head_dim,
                           uint32 lanes, uint32 accumulate, float* partials, uint32* arrivals,
                           uint32 members) {
    __shared__ alignas(16) float of_warps[kWarps][kHeadDimMax];
    const HeadGroup<kThreads, kHeads> group(head_dim, lanes);
    float gain[8];
    unpack_bf16x8(group.holds_a_vector() ? weight[group.lane] : make_uint4(0, 0, 0, 0), gain);
    float of_elements[8] = {};

    // All groups run the same number of iterations, so that whole warps reach the shuffles.
    const uint32 stride = gridDim.x * group.heads_at_a_time();
    for (uint32 first = blockIdx.x * group.heads_at_a_time(); first < heads; first += stride) {
        uint4 packed_dy[kHeads], packed_x[kHeads];
        float scale[kHeads];
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const uint32 head = group.head(first, k);
            packed_dy[k] = packed_x[k] = make_uint4(0, 0, 0, 0);
            scale[k] = 0.0f;
            if (group.holds_a_vector() && head < heads) {
                packed_dy[k] = dy[group.vector_of(head)];
                packed_x[k] = x[group.vector_of(head)];
                scale[k] = rstd[head];
            }
        }
        float products[kHeads];
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            float g[8], values[8];
            unpack_bf16x8(packed_dy[k], g);
            unpack_bf16x8(packed_x[k], values);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                g[i] *= gain[i];
            }
            products[k] = sum_of_products(g, values);
        }
        group.sum(products);
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const uint32 head = group.head(first, k);
            const float mean = products[k] * scale[k] / static_cast<float>(head_dim);
            float g[8], n[8];
            unpack_bf16x8(packed_dy[k], g);
            unpack_bf16x8(packed_x[k], n);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                n[i] = __fmul_rn(n[i], scale[k]);
                of_elements[i] = __fmaf_rn(g[i], n[i], of_elements[i]);
                g[i] = scale[k] * __fmaf_rn(g[i], gain[i], -__fmul_rn(n[i], mean));
            }
            if (group.holds_a_vector() && head < heads) {
                dx[group.vector_of(head)] = pack_bf16x8(g);
            }
        }
    }

    // Sums over the groups of a warp, then over the warps of the CTA in order.
#pragma unroll
    for (uint32 distance = 16; distance > 0; distance /= 2) {
        if (distance >= lanes) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                of_elements[i] = __fadd_rn(
                    of_elements[i], __shfl_xor_sync(0xffffffffu, of_elements[i], distance));
            }
        }
    }
    if (threadIdx.x % 32 < group.vectors) {
        float4* const place =
            reinterpret_cast<float4*>(&of_warps[threadIdx.x / 32][threadIdx.x % 32 * 8]);
        place[0] = make_float4(of_elements[0], of_elements[1], of_elements[2], of_elements[3]);
        place[1] = make_float4(of_elements[4], of_elements[5], of_elements[6], of_elements[7]);
    }
    __syncthreads();
    if (threadIdx.x < head_dim) {
        float total = of_warps[0][threadIdx.x];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) {
            total += of_warps[warp][threadIdx.x];
        }
        partials[static_cast<uint64>(blockIdx.x) * head_dim + threadIdx.x] = total;
    }
    sum_over_ctas(partials, head_dim, members, arrivals, [&](uint32 element, float total) {
        dweight[element] = accumulate != 0 ? dweight[element] + total : total;
    });
}
