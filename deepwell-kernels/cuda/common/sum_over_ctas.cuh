// Sums rows of numbers, one row per CTA, over all CTAs of a launch: gradients of parameters that
// all rows of a matrix share.
//
// Two levels keep each CTA's reads short: `members` neighbouring CTAs form a team. The last CTA of
// a team to arrive sums the team's rows in order; the last team to finish sums the rows of all
// teams in order.
#pragma once

#include "common/last_cta.cuh"
#include "common/types.cuh"

// Calls `emit(column, total)` with the sum, in row order, of `count` rows of `width` numbers that
// other CTAs wrote at `from`. The threads of the CTA share the columns.
template <typename Emit>
__device__ __forceinline__ void sum_rows_of_ctas(const float* from, uint32 count, uint32 width,
                                                   const Emit& emit) {
    if (width % 4 == 0) {
        for (uint32 column = threadIdx.x * 4; column < width; column += blockDim.x * 4) {
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (uint32 row = 0; row < count; ++row) {
                const float4 value = __ldcg(reinterpret_cast<const float4*>(
                    from + static_cast<uint64>(row) * width + column));
                total.x += value.x;
                total.y += value.y;
                total.z += value.z;
                total.w += value.w;
            }
            emit(column, total.x);
            emit(column + 1, total.y);
            emit(column + 2, total.z);
            emit(column + 3, total.w);
        }
        return;
    }
    for (uint32 column = threadIdx.x; column < width; column += blockDim.x) {
        float total = 0.0f;
        for (uint32 row = 0; row < count; ++row) {
            total += __ldcg(from + static_cast<uint64>(row) * width + column);
        }
        emit(column, total);
    }
}

// Called by all threads of all CTAs (one-dimensional grid) after CTA `b` wrote row `b` of `scratch`
// [gridDim.x + teams, width], 16-byte aligned. `arrivals` holds teams + 1 counters. The last CTA
// calls `emit(column, total)` for each column; its threads share the columns.
template <typename Emit>
__device__ __forceinline__ void sum_over_ctas(float* scratch, uint32 width, uint32 members,
                                                uint32* arrivals, const Emit& emit) {
    const uint32 ctas = gridDim.x;
    const uint32 teams = (ctas + members - 1) / members;
    const uint32 team = blockIdx.x / members;
    const uint32 first = team * members;
    const uint32 count = min(members, ctas - first);
    if (!is_last_cta(arrivals + 1 + team, count)) {
        return;
    }
    float* const of_teams = scratch + static_cast<uint64>(ctas) * width;
    float* const of_team = of_teams + static_cast<uint64>(team) * width;
    sum_rows_of_ctas(scratch + static_cast<uint64>(first) * width, count, width,
                       [&](uint32 column, float total) { of_team[column] = total; });
    if (!is_last_cta(arrivals, teams)) {
        return;
    }
    sum_rows_of_ctas(of_teams, teams, width, emit);
}
