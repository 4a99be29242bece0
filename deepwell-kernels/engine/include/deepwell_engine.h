// C interface of Deepwell's trainer. Made by cbindgen; the tests of deepwell-engine compare it.

#ifndef DEEPWELL_ENGINE_H
#define DEEPWELL_ENGINE_H



#include <stddef.h>
#include <stdint.h>

// Result of a function.
typedef enum DwEngineStatus {
  // Success.
  DW_ENGINE_STATUS_OK = 0,
  // An argument is invalid.
  DW_ENGINE_STATUS_INVALID_ARGUMENT = 1,
  // The model cannot be trained, or the device failed.
  DW_ENGINE_STATUS_FAILED = 2,
  // An internal error of Deepwell.
  DW_ENGINE_STATUS_INTERNAL = 3,
} DwEngineStatus;

// A model on a device, with its weights and optimizer state.
typedef struct DwEngine DwEngine;

// Results of a step.
typedef struct DwStepResult {
  // Mean loss of the targets that count, before the update.
  float loss;
  // Norm of all gradients, before clipping.
  float grad_norm;
  // 1 if the gradients were not finite and the weights are as before; 0 otherwise.
  int32_t skipped;
} DwStepResult;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Plans and loads a model on a device. `options` is JSON: `archive` (path of a `.pt2` file),
// `device` (`cpu`, `cuda:N`), `precision` (`f32`, `bf16`, `mxfp8`, `nvfp4`, `auto`), `seq`,
// `batch`, and if wanted `micro_batch`, `betas`, `eps`, `weight_decay`, `train_frozen`. `engine`
// receives the engine, which belongs to the caller until `dw_engine_destroy`.
//
// # Safety
// `options` is a string that ends with a zero byte; `engine` is memory for one pointer.
enum DwEngineStatus dw_engine_create(const char *options, struct DwEngine **engine);

// Frees an engine with its device memory. Null is ignored.
//
// # Safety
// `engine` is null or an engine of `dw_engine_create` that is not used any more.
void dw_engine_destroy(struct DwEngine *engine);

// The engine as JSON: device, sizes, predicted memory, names of the tensors that it trains. Valid
// as long as the engine.
//
// # Safety
// `engine` is an engine of `dw_engine_create`.
const char *dw_engine_describe(const struct DwEngine *engine);

// Trains one step on `count` token ids, all sequences of a step one behind the other, and the ids
// that should follow them (-100 does not count). Gradients are clipped to `max_grad_norm`.
//
// # Safety
// `engine` is an engine of `dw_engine_create`, used by this thread alone; `inputs` and `targets`
// have `count` numbers; `result` is memory for one result.
enum DwEngineStatus dw_engine_step(struct DwEngine *engine,
                                   const int32_t *inputs,
                                   const int32_t *targets,
                                   size_t count,
                                   double learning_rate,
                                   double max_grad_norm,
                                   struct DwStepResult *result);

// Computes the mean loss of a batch, as of `dw_engine_step`, without training.
//
// # Safety
// As `dw_engine_step`; `loss` is memory for one number.
enum DwEngineStatus dw_engine_evaluate(struct DwEngine *engine,
                                       const int32_t *inputs,
                                       const int32_t *targets,
                                       size_t count,
                                       float *loss);

// Copies the weights of one tensor, by its name in PyTorch, to `values`. Elements that the engine
// does not train keep their values.
//
// # Safety
// `engine` is an engine of `dw_engine_create`, used by this thread alone; `name` is a string that
// ends with a zero byte; `values` has `count` numbers.
enum DwEngineStatus dw_engine_read_tensor(struct DwEngine *engine,
                                          const char *name,
                                          float *values,
                                          size_t count);

// Replaces the weights of one tensor, by its name in PyTorch. The optimizer's state stays.
//
// # Safety
// As `dw_engine_read_tensor`.
enum DwEngineStatus dw_engine_write_tensor(struct DwEngine *engine,
                                           const char *name,
                                           const float *values,
                                           size_t count);

// Error message of this thread's last call, in UTF-8; empty if the call succeeded. Valid until the
// next call of this thread.
const char *dw_engine_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DEEPWELL_ENGINE_H */
