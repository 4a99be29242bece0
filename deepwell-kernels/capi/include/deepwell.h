// C interface of Deepwell's kernels. Made by cbindgen; the tests of deepwell-capi compare it.

#ifndef DEEPWELL_H
#define DEEPWELL_H



#include <stddef.h>
#include <stdint.h>

// Version of the interface of plans: a library with the same number, or a larger one, serves a
// caller that was written for this number.
#define DW_ABI_VERSION 3

// Dimensions of an operand at most.
#define DW_MAX_RANK 8

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

// Element types. Matrices in high precision are BF16 or FP32.
typedef enum DwDType {
  // BF16.
  DW_D_TYPE_BF16 = 0,
  // FP32.
  DW_D_TYPE_F32 = 1,
  // 32-bit signed integers.
  DW_D_TYPE_I32 = 2,
  // 64-bit signed integers.
  DW_D_TYPE_I64 = 3,
  // 64-bit unsigned integers.
  DW_D_TYPE_U64 = 4,
  // Booleans of one byte.
  DW_D_TYPE_BOOL = 5,
  // OCP E4M3 elements.
  DW_D_TYPE_E4M3 = 6,
  // OCP E8M0 scales.
  DW_D_TYPE_E8M0 = 7,
  // OCP E2M1 elements, two per byte.
  DW_D_TYPE_E2M1 = 8,
  // Unsigned scales with four exponent and three mantissa bits.
  DW_D_TYPE_UE4M3 = 9,
} DwDType;

// A kernel for one op, one device and fixed sizes.
typedef struct DwPlan DwPlan;

// Type of one operand of a request.
typedef struct DwOperand {
  // A `DwDType`.
  int32_t dtype;
  // Number of dimensions, at most `DW_MAX_RANK`.
  int32_t rank;
  // Whether the op updates this input in place (AdamW's weights and moments); 0 otherwise.
  int32_t updated;
  // Zero.
  int32_t reserved;
  // Row-major sizes; entries from `rank` on do not count.
  int64_t sizes[8];
} DwOperand;

// One op on contiguous row-major operands.
typedef struct DwRequest {
  // `sizeof(DwRequest)` of the caller. Later versions append fields; a field that the caller
  // does not have counts as zero.
  size_t struct_bytes;
  // `cpu`, `cuda` or `cuda:N`; with the feature `emulated` also `emulated:sm90` on host memory,
  // as of an architecture below; for `dw_supported` also an architecture: `sm90`, `sm100`,
  // `sm103`, `sm120`.
  const char *device;
  // The op with its attributes in JSON, `{"op": "rms_norm", "eps": 1e-6}` for example. Ops,
  // attributes and operands are those of the Rust enumeration `deepwell_ir::Op`.
  const char *op;
  // Inputs, then outputs.
  const struct DwOperand *operands;
  // Number of inputs.
  int32_t input_count;
  // Number of outputs.
  int32_t output_count;
  // Sequences, for ops whose tokens have positions (attention, RoPE); 1 otherwise.
  int64_t batch;
  // Tokens per sequence; 1 for other ops.
  int64_t seq;
  // If not 0, FP32 gradients of weights are added to the contents of the output.
  int32_t accumulate;
  // Zero.
  int32_t reserved;
} DwRequest;

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

// Version of the library's interface, `DW_ABI_VERSION`.
uint32_t dw_abi_version(void);

// Whether a kernel serves a request: `DW_STATUS_OK`, or `DW_STATUS_UNSUPPORTED` with the reason of
// every kernel in `dw_last_error`. For a device `cpu` or `cuda:N` of this machine, or for an
// architecture (`sm90`, `sm100`, `sm103`, `sm120`) that need not be here.
//
// # Safety
// `request` is a request whose strings end with a zero byte, with as many operands as it says.
enum DwStatus dw_supported(const struct DwRequest *request);

// Selects a kernel for a request and loads it. `plan` receives the plan, which belongs to the
// caller until `dw_plan_destroy`. May allocate device memory and wait for the device.
//
// # Safety
// As `dw_supported`; `plan` is memory for one pointer.
enum DwStatus dw_plan_create(const struct DwRequest *request, struct DwPlan **plan);

// Frees a plan. Work of the plan that is still in a stream is not affected. Null is ignored.
//
// # Safety
// `plan` is null or a plan of `dw_plan_create` that is not used any more.
void dw_plan_destroy(struct DwPlan *plan);

// Bytes of device memory that a run needs besides the operands, aligned to 64 bytes.
//
// # Safety
// `plan` is a plan of `dw_plan_create`.
size_t dw_plan_workspace_bytes(const struct DwPlan *plan);

// Name of the plan's kernel, `cuda_rms_norm` for example. Valid as long as the plan.
//
// # Safety
// `plan` is a plan of `dw_plan_create`.
const char *dw_plan_kernel(const struct DwPlan *plan);

// Floating-point operations of a run, by the op's definition: two per multiply-add of a GEMM, and
// those of the visible scores alone in attention. Since version 2 of the interface.
//
// # Safety
// `plan` is a plan of `dw_plan_create`.
uint64_t dw_plan_flops(const struct DwPlan *plan);

// Runs a plan. On a GPU the work is enqueued in `stream` (a `CUstream`; null is the legacy default
// stream), without an allocation and without waiting, so the stream may be captured into a CUDA
// graph. On the CPU the result is complete when the function returns. `operands` has the
// addresses of inputs, then outputs, each a multiple of 64 bytes; operands do not overlap.
// `workspace` has at least `dw_plan_workspace_bytes` bytes, with any contents.
//
// # Safety
// `plan` is a plan of `dw_plan_create`, and each address is memory of its device with as many
// bytes as the request says. Until the work has ended, no other work writes this memory or
// accesses outputs and workspace.
enum DwStatus dw_plan_run(const struct DwPlan *plan,
                          void *const *operands,
                          void *workspace,
                          size_t workspace_bytes,
                          void *stream);

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
