// AdamW over all parameters in one launch, with clipping by the gradients' norm. A step whose
// norm is not finite changes nothing but the count of skipped steps.
//
// Per element, with g = gradient * clip, t the number of the step from 1:
//
//     m = m + (1 - beta1) (g - m)
//     v = beta2 v + (1 - beta2) g^2
//     w = w (1 - rate decay) - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Every operation is rounded by itself, as on the CPU, so that both give the same bits (the
// coefficients, made in FP64, may differ by their last one). The parameters are one list of
// chunks of 4096 elements; block b takes the chunks b, b + grid, .... 28 bytes move per parameter:
// four are read, three written. All blocks read the count of steps before the last one raises it.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_block.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr uint64 kChunk = 4096;

// A parameter of the list, none of them empty; all four 16-byte aligned.
struct Parameter {
    const float* gradient;
    float* master;
    float* first_moment;
    float* second_moment;
    uint64 elements;
    uint64 first_chunk;
    float weight_decay;
    uint32 unused;
};

static_assert(sizeof(Parameter) == 56, "the host writes this layout");

struct Coefficients {
    float clip;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;
    float root_correction;
    float eps;
    double learning_rate;
    uint64 step;
    bool skips;
};

__device__ __forceinline__ Coefficients coefficients_of(const float* grad_norm,
                                                        const float* schedule,
                                                        const uint64* counters, float beta1,
                                                        float beta2, float eps) {
    const double norm = *grad_norm;
    const double learning_rate = schedule[0];
    const double norm_max = schedule[1];
    const double wide_beta1 = beta1;
    const double wide_beta2 = beta2;
    Coefficients c;
    c.step = __ldcg(counters) + 1;
    c.skips = !(fabsf(*grad_norm) < __uint_as_float(0x7f800000u));  // infinite or NaN
    const double t = static_cast<double>(c.step);
    c.clip = static_cast<float>(fmin(norm_max / (norm + 1e-6), 1.0));
    c.one_minus_beta1 = static_cast<float>(1.0 - wide_beta1);
    c.beta2 = beta2;
    c.one_minus_beta2 = static_cast<float>(1.0 - wide_beta2);
    c.step_size = static_cast<float>(learning_rate / (1.0 - pow(wide_beta1, t)));
    c.root_correction = static_cast<float>(1.0 / sqrt(1.0 - pow(wide_beta2, t)));
    c.eps = eps;
    c.learning_rate = learning_rate;
    return c;
}

__device__ __forceinline__ void update(float gradient, float& w, float& m, float& v, float decay,
                                       const Coefficients& c) {
    const float g = __fmul_rn(gradient, c.clip);
    m = __fadd_rn(m, __fmul_rn(c.one_minus_beta1, __fsub_rn(g, m)));
    v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.one_minus_beta2, __fmul_rn(g, g)));
    const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.root_correction), c.eps);
    w = __fsub_rn(__fmul_rn(w, decay), __fmul_rn(c.step_size, __fdiv_rn(m, denominator)));
}

// Four elements of each tensor.
struct Quad {
    float4 gradient, w, m, v;
};

__device__ __forceinline__ Quad load(const Parameter& p, uint64 at) {
    return Quad{*reinterpret_cast<const float4*>(p.gradient + at),
                *reinterpret_cast<const float4*>(p.master + at),
                *reinterpret_cast<const float4*>(p.first_moment + at),
                *reinterpret_cast<const float4*>(p.second_moment + at)};
}

__device__ __forceinline__ void update_and_store(const Parameter& p, uint64 at, Quad& q,
                                                 float decay, const Coefficients& c) {
    update(q.gradient.x, q.w.x, q.m.x, q.v.x, decay, c);
    update(q.gradient.y, q.w.y, q.m.y, q.v.y, decay, c);
    update(q.gradient.z, q.w.z, q.m.z, q.v.z, decay, c);
    update(q.gradient.w, q.w.w, q.m.w, q.v.w, decay, c);
    *reinterpret_cast<float4*>(p.master + at) = q.w;
    *reinterpret_cast<float4*>(p.first_moment + at) = q.m;
    *reinterpret_cast<float4*>(p.second_moment + at) = q.v;
}

// Elements [first, first + elements) of a parameter, first a multiple of four.
__device__ __forceinline__ void update_chunk(const Parameter& p, uint64 first, uint32 elements,
                                             float decay, const Coefficients& c) {
    const uint32 quads = elements / 4;
    // Two at a time: their eight loads are in flight together.
    for (uint32 i = threadIdx.x; i < quads; i += 2 * kThreads) {
        const bool has_second = i + kThreads < quads;
        const uint64 at = first + i * 4;
        const uint64 at_second = has_second ? at + kThreads * 4 : at;
        Quad quad = load(p, at);
        Quad second = load(p, at_second);
        update_and_store(p, at, quad, decay, c);
        if (has_second) {
            update_and_store(p, at_second, second, decay, c);
        }
    }
    const uint32 tail = quads * 4 + threadIdx.x;
    if (tail < elements) {
        const uint64 at = first + tail;
        update(p.gradient[at], p.master[at], p.first_moment[at], p.second_moment[at], decay, c);
    }
}

// table [parameters], grad_norm [1], schedule [2] (learning rate, largest norm), counters [2]
// (applied steps, skipped steps).
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    adamw(const Parameter* __restrict__ table, uint32 parameters, uint64 chunks,
          const float* __restrict__ grad_norm, const float* __restrict__ schedule,
          uint64* counters, float beta1, float beta2, float eps, uint32* ticket) {
    __shared__ Coefficients shared;
    if (threadIdx.x == 0) {
        shared = coefficients_of(grad_norm, schedule, counters, beta1, beta2, eps);
    }
    __syncthreads();
    const Coefficients& c = shared;  // read where it is needed: registers are for the loads

    uint32 index = 0;
    for (uint64 chunk = blockIdx.x; chunk < chunks && !c.skips; chunk += gridDim.x) {
        while (index + 1 < parameters && chunk >= table[index + 1].first_chunk) {
            ++index;
        }
        const Parameter p = table[index];
        const uint64 first = (chunk - p.first_chunk) * kChunk;
        const uint64 left = p.elements - first;
        const double weight_decay = p.weight_decay;
        const float decay =
            static_cast<float>(__dsub_rn(1.0, __dmul_rn(c.learning_rate, weight_decay)));
        update_chunk(p, first, static_cast<uint32>(left < kChunk ? left : kChunk), decay, c);
    }
    if (is_last_block(ticket, gridDim.x) && threadIdx.x == 0) {
        if (c.skips) {
            counters[1] += 1;
        } else {
            counters[0] = c.step;
        }
    }
}
