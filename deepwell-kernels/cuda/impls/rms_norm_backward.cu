// Gradients of the root-mean-square normalization y = n * weight, n = x * rstd, of rows:
//
//   dx = dresidual + rstd * (g - n * mean(g * n)), g = dy * weight
//   dweight (+)= sum over rows of dy * n
//
// A row belongs to as many warps as hold it, and each such group of a block takes rows in turn;
// a thread keeps the same columns throughout, so its part of dweight stays in registers until the
// end, when the groups of a block add theirs in shared memory, and the blocks theirs in scratch.
// Each row is read once and written once. A thread copies its pieces of the group's next row to
// its own places in shared memory while it works on this one: no registers wait for memory, and
// two blocks fit on a multiprocessor that has the shared memory. Rows of more than 8192 columns
// take all threads of a block and are not copied ahead. Rows that do not consist of whole pieces,
// or are too long, go element by element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/block_columns.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/row_group.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kThreads = 512;
constexpr int kScalarThreads = 256;

__device__ __forceinline__ void write_gradient(float* dweight, uint32 column, float total,
                                               bool accumulate) {
    dweight[column] = accumulate ? dweight[column] + total : total;
}

struct Operands {
    const bf16* dy;
    const bf16* x;
    const bf16* weight;
    const float* rstd;
    const bf16* dresidual;  // or null
    bf16* dx;
    float* dweight;
    uint32 rows;
    uint32 columns;
};

// A thread's places in shared memory for its pieces of `kStages` rows of dy, x, and dresidual,
// [stage, matrix, piece, thread]: no other thread reads or writes them.
template <int kPieces, int kStages>
struct Places {
    uint4* mine;

    __device__ __forceinline__ uint4& at(uint32 stage, int matrix, int p) const {
        return mine[((stage * 3 + matrix) * kPieces + p) * kThreads];
    }

    // Starts to copy a row.
    __device__ __forceinline__ void start(const Operands& operands,
                                          const RowGroup<kPieces>& group, uint32 stage,
                                          uint64 row) const {
        const bf16* const matrices[3] = {operands.dy, operands.x, operands.dresidual};
        const uint32 pieces = operands.columns / 8;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            const uint32 piece = group.piece(p);
            if (piece < pieces) {
                const uint64 offset = row * pieces + piece;
#pragma unroll
                for (int matrix = 0; matrix < 3; ++matrix) {
                    if (matrices[matrix] != nullptr) {
                        cp_async_16(shared_address(&at(stage, matrix, p)),
                                    reinterpret_cast<const uint4*>(matrices[matrix]) + offset, 16);
                    }
                }
            }
        }
    }
};

// The row of a group whose pieces are in `stage`; adds to the thread's part of dweight.
template <int kPieces, int kStages>
__device__ __forceinline__ void gradient_of_row(const Operands& operands,
                                                const RowGroup<kPieces>& group,
                                                const Places<kPieces, kStages>& places,
                                                const uint4 (&weights)[kPieces], uint32 stage,
                                                uint64 row, float scale, uint32 sums_offset,
                                                float (&of_columns)[kPieces][8]) {
    const uint32 pieces = operands.columns / 8;
    float products[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
        products[p] = 0.0f;
        if (group.piece(p) < pieces) {
            float g[8], n[8], w[8];
            unpack_bf16x8(places.at(stage, 0, p), g);
            unpack_bf16x8(places.at(stage, 1, p), n);
            unpack_bf16x8(weights[p], w);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                g[i] *= w[i];
            }
            products[p] = sum_of_products(g, n);
        }
    }
    const float mean = group.sum(products, pieces, sums_offset) * scale / operands.columns;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
        const uint32 piece = group.piece(p);
        if (piece < pieces) {
            float g[8], n[8], w[8];
            float added[8] = {};
            unpack_bf16x8(places.at(stage, 0, p), g);
            unpack_bf16x8(places.at(stage, 1, p), n);
            unpack_bf16x8(weights[p], w);
            if (operands.dresidual != nullptr) {
                unpack_bf16x8(places.at(stage, 2, p), added);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                n[i] *= scale;
                of_columns[p][i] += g[i] * n[i];
                added[i] += scale * (g[i] * w[i] - n[i] * mean);
            }
            reinterpret_cast<uint4*>(operands.dx)[row * pieces + piece] = pack_bf16x8(added);
        }
    }
}

// Columns a multiple of 8, at most 8 * kPieces * threads_per_row; threads_per_row a multiple of 32
// that divides kThreads. Dynamic shared memory: the threads' places, and at least one FP32 for
// each column.
template <int kPieces, int kStages>
__device__ __forceinline__ void backward_rows(const Operands& operands, uint32 threads_per_row,
                                              bool accumulate, float* partials, uint32* tickets,
                                              uint32 members) {
    constexpr uint32 kSlices = RowGroup<kPieces>::slices(kThreads);
    __shared__ float sums[2 * kSlices];
    extern __shared__ uint4 dynamic[];
    const RowGroup<kPieces> group(threads_per_row, sums);
    const Places<kPieces, kStages> places{dynamic + threadIdx.x};
    const uint32 groups = kThreads / threads_per_row;
    const uint32 columns = operands.columns;
    const uint32 pieces = columns / 8;
    const uint32 rows = operands.rows;

    float of_columns[kPieces][8];
    uint4 weights[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            of_columns[p][i] = 0.0f;
        }
        weights[p] = group.piece(p) < pieces
                         ? reinterpret_cast<const uint4*>(operands.weight)[group.piece(p)]
                         : make_uint4(0, 0, 0, 0);
    }
    uint32 sums_offset = 0;
    uint32 stage = 0;
    const uint64 stride = static_cast<uint64>(gridDim.x) * groups;
    uint64 row = static_cast<uint64>(blockIdx.x) * groups + group.index;
    float next_scale = row < rows ? operands.rstd[row] : 0.0f;
    if (kStages == 2 && row < rows) {
        places.start(operands, group, 0, row);
    }
    cp_async_commit();
    for (; row < rows; row += stride) {
        const float scale = next_scale;
        const uint64 ahead = kStages == 2 ? row + stride : row;
        if (ahead < rows) {
            places.start(operands, group, kStages == 2 ? stage ^ 1 : 0, ahead);
        }
        cp_async_commit();
        if (row + stride < rows) {
            next_scale = operands.rstd[row + stride];
        }
        cp_async_wait<kStages - 1>();
        gradient_of_row<kPieces, kStages>(operands, group, places, weights, stage, row, scale,
                                          sums_offset, of_columns);
        sums_offset ^= kSlices;
        stage ^= kStages == 2 ? 1 : 0;
    }

    // The groups of the block, one after the other, where the rows were.
    for (uint32 turn = 0; turn < groups; ++turn) {
        __syncthreads();
        if (group.index == turn) {
#pragma unroll
            for (int p = 0; p < kPieces; ++p) {
                if (group.piece(p) < pieces) {
                    float4* const place =
                        reinterpret_cast<float4*>(dynamic) + 2 * group.piece(p);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* const of = &of_columns[p][4 * half];
                        float4 total = make_float4(of[0], of[1], of[2], of[3]);
                        if (turn > 0) {
                            const float4 before = place[half];
                            total = make_float4(before.x + total.x, before.y + total.y,
                                                before.z + total.z, before.w + total.w);
                        }
                        place[half] = total;
                    }
                }
            }
        }
    }
    __syncthreads();
    uint4* const partial =
        reinterpret_cast<uint4*>(partials + static_cast<uint64>(blockIdx.x) * columns);
    for (uint32 i = threadIdx.x; i < columns / 4; i += kThreads) {
        partial[i] = dynamic[i];
    }
    float* const dweight = operands.dweight;
    sum_over_blocks(partials, columns, members, tickets, [=](uint32 column, float total) {
        write_gradient(dweight, column, total, accumulate);
    });
}

// dy, x, dresidual (or null), dx [rows, columns]; weight, dweight [columns]; rstd [rows];
// partials [gridDim.x + teams, columns], tickets [1 + teams], teams of `members` blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    rms_norm_backward_rows(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                           const bf16* __restrict__ weight, const float* __restrict__ rstd,
                           const bf16* __restrict__ dresidual, bf16* __restrict__ dx,
                           float* dweight, uint32 rows, uint32 columns, uint32 threads_per_row,
                           uint32 accumulate, float* partials, uint32* tickets, uint32 members) {
    backward_rows<2, 2>(Operands{dy, x, weight, rstd, dresidual, dx, dweight, rows, columns},
                        threads_per_row, accumulate != 0, partials, tickets, members);
}

// The same for rows of up to 16384 columns.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    rms_norm_backward_long(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                           const bf16* __restrict__ weight, const float* __restrict__ rstd,
                           const bf16* __restrict__ dresidual, bf16* __restrict__ dx,
                           float* dweight, uint32 rows, uint32 columns, uint32 threads_per_row,
                           uint32 accumulate, float* partials, uint32* tickets, uint32 members) {
    backward_rows<4, 1>(Operands{dy, x, weight, rstd, dresidual, dx, dweight, rows, columns},
                        threads_per_row, accumulate != 0, partials, tickets, members);
}

// The same for any number of columns; a block takes rows in turn, and its part of dweight lies in
// scratch from the start.
extern "C" __global__ void __launch_bounds__(kScalarThreads)
    rms_norm_backward_scalar(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                             const bf16* __restrict__ weight, const float* __restrict__ rstd,
                             const bf16* __restrict__ dresidual, bf16* __restrict__ dx,
                             float* dweight, uint32 rows, uint32 columns, uint32 threads_per_row,
                             uint32 accumulate, float* partials, uint32* tickets,
                             uint32 members) {
    float* const partial = partials + static_cast<uint64>(blockIdx.x) * columns;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        partial[i] = 0.0f;
    }
    for (uint64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint64 first = row * columns;
        float products = 0.0f;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            products += to_f32(dy[first + i]) * to_f32(weight[i]) * to_f32(x[first + i]);
        }
        const float scale = rstd[row];
        const float mean = sum_of_block<kScalarThreads>(products) * scale / columns;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            const float g = to_f32(dy[first + i]), n = to_f32(x[first + i]) * scale;
            const float added = dresidual != nullptr ? to_f32(dresidual[first + i]) : 0.0f;
            dx[first + i] = to_bf16(added + scale * (g * to_f32(weight[i]) - n * mean));
            partial[i] += g * n;
        }
    }
    sum_over_blocks(partials, columns, members, tickets, [&](uint32 column, float total) {
        write_gradient(dweight, column, total, accumulate);
    });
}
