// C interface of Deepwell's kernels. Made by cbindgen; the tests of deepwell-capi compare it.

#ifndef DEEPWELL_H
#define DEEPWELL_H



#include <stddef.h>
#include <stdint.h>

// Result of a call.
typedef enum DwStatus {
  // Success: the result is complete.
  DW_STATUS_OK = 0,
  // An argument is invalid.
  DW_STATUS_INVALID_ARGUMENT = 1,
  // The device does not exist, or has no driver.
  DW_STATUS_NO_DEVICE = 2,
  // No kernel of the device supports the arguments.
  DW_STATUS_UNSUPPORTED = 3,
  // The device failed, or has too little memory.
  DW_STATUS_DEVICE_ERROR = 4,
  // An internal error of Deepwell.
  DW_STATUS_INTERNAL = 5,
} DwStatus;

// Element types of matrices in high precision.
typedef enum DwDType {
  // BF16.
  DW_D_TYPE_BF16 = 0,
  // FP32.
  DW_D_TYPE_F32 = 1,
} DwDType;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Scaled dot-product attention in BF16 with contiguous heads: q, k, v and o are `[B, H, S, D]`.
// The scores are multiplied by `1/sqrt(D)`; if `causal` is not 0 a token sees itself and earlier
// tokens only. `Q` and `K`, the numbers of queries and keys, must be equal.
//
// # Safety
// Each pointer is memory of the chosen device with `B * H * S * D` BF16 numbers. No other code may
// write this memory (or read `o`) during the call.
enum DwStatus dw_fmha_bf16_forward(const void *q,
                                   const void *k,
                                   const void *v,
                                   void *o,
                                   int32_t B,
                                   int32_t H,
                                   int32_t Q,
                                   int32_t K,
                                   int32_t D,
                                   int32_t causal);

// Scaled dot-product attention in BF16 with grouped query heads and contiguous tokens: q and o are
// `[batch, seq, heads, head_dim]`, k and v `[batch, seq, kv_heads, head_dim]`. `lse` is `[batch,
// heads, seq]` in FP32, the natural logarithm of the sum of exponentials of the scaled scores; the
// backward pass reads it. `scale` multiplies the scores; 0 stands for `1/sqrt(head_dim)`. If
// `causal` is not 0 a token sees itself and earlier tokens only.
//
// # Safety
// Each pointer is memory of the chosen device with the stated number of elements. No other code
// may write this memory (or read the outputs) during the call.
enum DwStatus dw_attention_bf16_forward(const void *q,
                                        const void *k,
                                        const void *v,
                                        void *o,
                                        void *lse,
                                        int32_t batch,
                                        int32_t seq,
                                        int32_t heads,
                                        int32_t kv_heads,
                                        int32_t head_dim,
                                        double scale,
                                        int32_t causal);

// Gradients of [`dw_attention_bf16_forward`] with respect to q, k and v. `dout` is the gradient of
// o, `o` and `lse` are outputs of the forward pass, and the sizes are those of the forward pass.
//
// # Safety
// As [`dw_attention_bf16_forward`].
enum DwStatus dw_attention_bf16_backward(const void *dout,
                                         const void *q,
                                         const void *k,
                                         const void *v,
                                         const void *o,
                                         const void *lse,
                                         void *dq,
                                         void *dk,
                                         void *dv,
                                         int32_t batch,
                                         int32_t seq,
                                         int32_t heads,
                                         int32_t kv_heads,
                                         int32_t head_dim,
                                         double scale,
                                         int32_t causal);

// Bytes of the scales of a matrix of `rows` x `columns` that is quantized rowwise; for the
// columnwise operand use `dw_mxfp8_scale_bytes(columns, rows)`. Scales are stored in tiles of 128
// rows by four scales of 32 elements, 512 bytes each, the layout of cuBLAS and `tcgen05.mma`.
// Returns 0 if a size is negative.
size_t dw_mxfp8_scale_bytes(int32_t rows, int32_t columns);

// Quantizes `x` `[rows, columns]` (`x_dtype` is a `DwDType`) to MXFP8, E4M3 data with E8M0 scales
// by the RCEIL rule: rowwise into `data` `[rows, columns]` and `scales`, columnwise, transposed,
// into `data_t` `[columns, rows]` and `scales_t`, or both. Pointers of an omitted operand are
// null. `granularity` elements, 32 or 128, share an exponent; if `square` is not 0, so do
// `granularity` rows.
//
// # Safety
// Each non-null pointer is memory of the chosen device with the stated number of elements (scales:
// [`dw_mxfp8_scale_bytes`] bytes). No other code may access the outputs during the call.
enum DwStatus dw_mxfp8_quantize(const void *x,
                                int32_t x_dtype,
                                int32_t rows,
                                int32_t columns,
                                int32_t granularity,
                                int32_t square,
                                void *data,
                                void *scales,
                                void *data_t,
                                void *scales_t);

// `out [m, n] = a [m, k] · b [n, k]ᵀ` of two operands quantized along `k` by
// [`dw_mxfp8_quantize`], accumulated in FP32. `a_granularity` and `b_granularity` are the
// granularities of the operands; `b_square` says whether `b` has square blocks. `out_dtype` is a
// `DwDType`; if it is FP32 and `accumulate` is not 0, the result is added to `out`.
//
// # Safety
// Each pointer is memory of the chosen device with the stated number of elements (scales:
// [`dw_mxfp8_scale_bytes`] bytes). No other code may access the outputs during the call.
enum DwStatus dw_mxfp8_gemm(const void *a,
                            const void *a_scales,
                            const void *b,
                            const void *b_scales,
                            void *out,
                            int32_t out_dtype,
                            int32_t m,
                            int32_t n,
                            int32_t k,
                            int32_t a_granularity,
                            int32_t b_granularity,
                            int32_t b_square,
                            int32_t accumulate);

// `out [m, n] = a [m, k] · b [n, k]ᵀ` in BF16, accumulated in FP32.
//
// # Safety
// Each pointer is memory of the chosen device with the stated number of BF16 numbers. No other
// code may access the outputs during the call.
enum DwStatus dw_bf16_gemm(const void *a,
                           const void *b,
                           void *out,
                           int32_t m,
                           int32_t n,
                           int32_t k);

// fprop: the rows of group e of `out [rows, n]` are the rows of group e of `a [rows, k]` times
// matrix e of `b [groups, n, k]`, transposed, in BF16 and accumulated in FP32. Group e has the
// rows `offsets[e]..offsets[e + 1]`, a multiple of `align`, possibly none; `offsets` are `groups +
// 1` INT32 in device memory, ascending from 0. Rows after the last group become zeros.
//
// # Safety
// Each pointer is memory of the chosen device with the stated number of elements, and no offset is
// larger than `rows`. No other code may access the outputs during the call.
enum DwStatus dw_grouped_gemm_bf16(const void *a,
                                   const void *b,
                                   const void *offsets,
                                   void *out,
                                   int32_t groups,
                                   int32_t align,
                                   int32_t rows,
                                   int32_t n,
                                   int32_t k);

// dgrad: the rows of group e of `out [rows, k]` are the rows of group e of `a [rows, n]` times
// matrix e of `b [groups, n, k]`; everything else is as in [`dw_grouped_gemm_bf16`].
//
// # Safety
// As [`dw_grouped_gemm_bf16`].
enum DwStatus dw_grouped_gemm_bf16_dgrad(const void *a,
                                         const void *b,
                                         const void *offsets,
                                         void *out,
                                         int32_t groups,
                                         int32_t align,
                                         int32_t rows,
                                         int32_t n,
                                         int32_t k);

// wgrad: matrix e of `out [groups, n, k]`, in FP32, is the transpose of the rows of group e of `a
// [rows, n]` times the rows of group e of `b [rows, k]`, both in BF16. If `accumulate` is not 0
// the result is added to `out`; otherwise the matrix of a group without rows becomes zeros.
// Offsets are as in [`dw_grouped_gemm_bf16`].
//
// # Safety
// As [`dw_grouped_gemm_bf16`].
enum DwStatus dw_grouped_gemm_bf16_wgrad(const void *a,
                                         const void *b,
                                         const void *offsets,
                                         void *out,
                                         int32_t groups,
                                         int32_t align,
                                         int32_t rows,
                                         int32_t n,
                                         int32_t k,
                                         int32_t accumulate);

// fprop and dgrad of MXFP8 operands: the rows of group e of `out [rows, n]` are the rows of group
// e of `a [rows, k]` times matrix e of `b [groups, n, k]`, transposed, accumulated in FP32. Both
// operands are quantized along `k` as by `dw_mxfp8_quantize`: `a` as one matrix, and each matrix
// of `b` separately, with contiguous scales. For dgrad, `b` is the weight quantized columnwise.
// `out_dtype` is a `DwDType`. Offsets are as in [`dw_grouped_gemm_bf16`]. Granularity 128 requires
// groups of a multiple of 128 rows.
//
// # Safety
// As [`dw_grouped_gemm_bf16`], with scales of `dw_mxfp8_scale_bytes` bytes for each matrix.
enum DwStatus dw_grouped_gemm_mxfp8(const void *a,
                                    const void *a_scales,
                                    const void *b,
                                    const void *b_scales,
                                    const void *offsets,
                                    void *out,
                                    int32_t out_dtype,
                                    int32_t groups,
                                    int32_t align,
                                    int32_t rows,
                                    int32_t n,
                                    int32_t k,
                                    int32_t granularity,
                                    int32_t b_square);

// wgrad of MXFP8 operands: matrix e of `out [groups, m, n]`, in FP32, is the columns of group e of
// `a [m, rows]` times the transposed columns of group e of `b [n, rows]`. Both operands are
// quantized along `rows`: columnwise, from matrices whose rows belong to groups. `accumulate` and
// offsets are as in [`dw_grouped_gemm_bf16_wgrad`]; `align` is a multiple of `granularity`.
//
// # Safety
// As [`dw_grouped_gemm_mxfp8`].
enum DwStatus dw_grouped_gemm_mxfp8_wgrad(const void *a,
                                          const void *a_scales,
                                          const void *b,
                                          const void *b_scales,
                                          const void *offsets,
                                          void *out,
                                          int32_t groups,
                                          int32_t align,
                                          int32_t rows,
                                          int32_t m,
                                          int32_t n,
                                          int32_t granularity,
                                          int32_t accumulate);

// Sets the device of this process's calls: `cuda` or `cuda:N` (pointers are addresses in the
// memory of that GPU's primary context, which PyTorch and the CUDA runtime use), or `cpu`
// (pointers are addresses of host memory). The default is `cuda:0`.
//
// # Safety
// `device` is a string that ends with a zero byte.
enum DwStatus dw_set_device(const char *device);

// Error message of this thread's last call, in UTF-8; empty if the call succeeded. Valid until the
// next call of this thread.
const char *dw_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DEEPWELL_H */
