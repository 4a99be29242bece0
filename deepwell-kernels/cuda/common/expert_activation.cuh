// Gated activations of experts and their derivatives, in FP32.
#pragma once

#include "common/activation.cuh"
#include "common/types.cuh"

struct Activated {
    float value;
    float by_gate;
    float by_up;
};

// silu(gate) * up.
struct Plain {
    __device__ __forceinline__ Activated operator()(float gate, float up) const {
        const float s = sigmoid(gate);
        return Activated{gate * s * up, up * s * (1.0f + gate * (1.0f - s)), gate * s};
    }
};

// g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u = clamp(up, -limit, limit). The
// derivative is zero at a limit and beyond. Comparisons keep NaN; a minimum would lose NaN.
struct Clamped {
    float alpha;
    float limit;

    __device__ __forceinline__ Activated operator()(float gate, float up) const {
        const float g = gate > limit ? limit : gate;
        const float upper = up > limit ? limit : up;
        const float u = upper < -limit ? -limit : upper;
        const float x = alpha * g;
        const float s = sigmoid(x);
        const bool gate_passes = !(gate >= limit);
        const bool up_passes = !(up >= limit) && !(up <= -limit);
        return Activated{g * s * (u + 1.0f),
                         gate_passes ? (u + 1.0f) * s * (1.0f + x * (1.0f - s)) : 0.0f,
                         up_passes ? g * s : 0.0f};
    }
};

// Computes the gradients of gate and up for `kCount` elements, and adds their contribution to
// `dot`, the gradient of the routing factor. On entry `dgate` and `dup` hold gate and up.
template <int kCount, typename Activation>
__device__ __forceinline__ void expert_gradients(const Activation& activation,
                                                 const float (&dout)[kCount], float factor,
                                                 float (&dgate)[kCount], float (&dup)[kCount],
                                                 float& dot) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const Activated at_element = activation(dgate[i], dup[i]);
        dot += dout[i] * at_element.value;
        dgate[i] = dout[i] * factor * at_element.by_gate;
        dup[i] = dout[i] * factor * at_element.by_up;
    }
}
