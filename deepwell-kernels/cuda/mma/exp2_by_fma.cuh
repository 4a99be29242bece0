// Powers of two by FMA units, for kernels that ask more of the special function units than these
// can do.
#pragma once

#include "common/types.cuh"
#include "ptx/f32x2.cuh"

// 2^x of pairs by a cubic polynomial: the relative error is below 2^-13, that of a BF16 2^-9.
// Results below 2^-127 are zero. The coefficients minimize the relative error on [0, 1). The steps
// are separate, so that a caller can put other instructions between them.
template <int kPairs>
struct Exp2ByFma {
    static constexpr int kSteps = 8;

    FloatPair x[kPairs];  // later the fractional part

    __device__ __forceinline__ void step(int step) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            switch (step) {
                case 0: {
                    float low, high;
                    unpack(x[i], low, high);
                    x[i] = pair_of(fmaxf(low, -127.0f), fmaxf(high, -127.0f));
                    break;
                }
                // The integer part, rounded down, is then in the low bits of the significand.
                case 1: shifted_[i] = add_down(x[i], both(kShift)); break;
                case 2: power_[i] = subtract(shifted_[i], both(kShift)); break;
                case 3: x[i] = subtract(x[i], power_[i]); break;
                case 4:
                    power_[i] = multiply_add(x[i], both(0.0771190897f), both(0.2275643945f));
                    break;
                case 5: power_[i] = multiply_add(x[i], power_[i], both(0.6951461434f)); break;
                case 6: power_[i] = multiply_add(x[i], power_[i], both(1.0f)); break;
                case 7: power_[i] = with_exponents(power_[i], shifted_[i]); break;
            }
        }
    }

    // After all steps.
    __device__ __forceinline__ FloatPair power(int pair) const {
        return power_[pair];
    }

  private:
    static constexpr float kShift = 12582912.0f;  // 2^23 + 2^22

    FloatPair shifted_[kPairs];
    FloatPair power_[kPairs];

    static __device__ __forceinline__ FloatPair both(float value) {
        return pair_of(value, value);
    }

    // Adds integers to exponents.
    static __device__ __forceinline__ FloatPair with_exponents(FloatPair powers,
                                                               FloatPair integers) {
        float low, high, low_integer, high_integer;
        unpack(powers, low, high);
        unpack(integers, low_integer, high_integer);
        return pair_of(with_exponent(low, low_integer), with_exponent(high, high_integer));
    }

    static __device__ __forceinline__ float with_exponent(float power, float integer) {
        uint32 scaled;
        // One multiplication in the FMA lanes, in place of a shift and an addition elsewhere.
        asm("mad.lo.u32 %0, %1, 0x800000, %2;"
            : "=r"(scaled)
            : "r"(__float_as_uint(integer)), "r"(__float_as_uint(power)));
        return __uint_as_float(scaled);
    }
};
