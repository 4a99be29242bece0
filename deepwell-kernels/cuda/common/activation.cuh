// Activation functions of feed-forward layers and their derivatives in FP32, for memory-bound
// kernels. The relative error is about 2^-20, below the resolution of BF16.
#pragma once

#include "common/types.cuh"

// 1 / (1 + e^-x). Zero below about -88, where the exponential is infinite; NaN stays NaN. Denormal
// exponentials are flushed to zero: the sum with 1 hides the difference, and handling denormals
// would take three instructions.
__device__ __forceinline__ float sigmoid(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    float exponential;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * -kLog2E));
    return __fdividef(1.0f, 1.0f + exponential);
}

// silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) {
    return gate * sigmoid(gate) * up;
}

struct SwigluGradients {
    float gate;
    float up;
};

__device__ __forceinline__ SwigluGradients swiglu_gradients(float dout, float gate, float up) {
    const float s = sigmoid(gate);
    return SwigluGradients{dout * up * s * (1.0f + gate * (1.0f - s)), dout * (gate * s)};
}

// Distribution function of the standard normal, and e^(-x^2 / 2).
struct Normal {
    float cdf;
    float exponential;
};

// The tail at |x| is e^(-x^2 / 2) times a polynomial in 1 / (1 + 0.3625 |x|) without a constant
// (after Hastings; Abramowitz and Stegun 7.1.26 has the form). The coefficients were fitted for
// the least largest relative error, 8e-7, over |x| up to 13.6, beyond which the tail is zero.
__device__ __forceinline__ Normal normal(float x) {
    const float t = __fdividef(1.0f, 1.0f + 0.3625f * fabsf(x));
    float tail = 0.048062810709f;
    tail = tail * t - 0.179742170632f;
    tail = tail * t + 0.175103711018f;
    tail = tail * t + 0.029682600101f;
    tail = tail * t + 0.139256649103f;
    tail = tail * t + 0.142936407056f;
    tail = tail * t + 0.144700375168f;
    Normal result;
    result.exponential = __expf(-0.5f * x * x);
    tail = tail * t * result.exponential;
    result.cdf = x < 0.0f ? tail : 1.0f - tail;
    return result;
}

// x times the distribution function.
__device__ __forceinline__ float gelu(float x) {
    return x * normal(x).cdf;
}

__device__ __forceinline__ float gelu_slope(float x) {
    constexpr float kDensityAtZero = 0.3989422804f;  // 1 / sqrt(2 pi)
    const Normal n = normal(x);
    return n.cdf + x * (kDensityAtZero * n.exponential);
}

// tanh GELU, with (1 + tanh u) / 2 = sigmoid(2 u) and u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluTwiceRoot = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

__device__ __forceinline__ float gelu_tanh(float x) {
    return x * sigmoid(kGeluTwiceRoot * x * (1.0f + kGeluCubic * x * x));
}

__device__ __forceinline__ float gelu_tanh_slope(float x) {
    // Beyond 30 the sigmoid is exactly zero or one in FP32, and the clamp keeps the square finite.
    // The comparisons let NaN pass.
    x = x > 30.0f ? 30.0f : x;
    x = x < -30.0f ? -30.0f : x;
    const float s = sigmoid(kGeluTwiceRoot * x * (1.0f + kGeluCubic * x * x));
    const float slope_of_argument = kGeluTwiceRoot * (1.0f + 3.0f * kGeluCubic * x * x);
    return s * (1.0f + x * (1.0f - s) * slope_of_argument);
}
