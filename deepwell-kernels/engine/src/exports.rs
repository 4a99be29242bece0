//! The exported functions.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use crate::engine::TrainedModel;
use crate::options::EngineOptions;
use crate::status::{DwEngineStatus, Failure, guard};

/// A model on a device, with its weights and optimizer state.
pub struct DwEngine {
    model: TrainedModel,
    description: CString,
}

/// Results of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DwStepResult {
    /// Mean loss of the targets that count, before the update.
    pub loss: f32,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f32,
    /// 1 if the gradients were not finite and the weights are as before; 0 otherwise.
    pub skipped: i32,
}

fn not_null<T>(name: &str, pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() {
        let message = format!("`{name}`: expected an address, got a null pointer");
        return Err(Failure::InvalidArgument(message));
    }
    Ok(())
}

/// # Safety
/// `text` is null or a string that ends with a zero byte and outlives the result.
unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, Failure> {
    not_null(name, text)?;
    // SAFETY: guaranteed by the caller, and not null.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|_| Failure::InvalidArgument(format!("`{name}`: expected UTF-8, got {text:?}")))
}

/// Plans and loads a model on a device. `options` is JSON: `archive` (path of a `.pt2` file),
/// `device` (`cpu`, `cuda:N`), `precision` (`f32`, `bf16`, `mxfp8`, `nvfp4`, `auto`), `seq`,
/// `batch`, and if wanted `micro_batch`, `betas`, `eps`, `weight_decay`, `train_frozen`. `engine`
/// receives the engine, which belongs to the caller until `dw_engine_destroy`.
///
/// # Safety
/// `options` is a string that ends with a zero byte; `engine` is memory for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_create(
    options: *const c_char,
    engine: *mut *mut DwEngine,
) -> DwEngineStatus {
    guard(|| {
        not_null("engine", engine)?;
        // SAFETY: guaranteed by the caller.
        unsafe { *engine = ptr::null_mut() };
        // SAFETY: guaranteed by the caller.
        let json = unsafe { text("options", options)? };
        let options: EngineOptions = serde_json::from_str(json)
            .map_err(|error| Failure::InvalidArgument(format!("`options`: {error}, in {json}")))?;
        let model = TrainedModel::open(&options)?;
        let description = CString::new(model.description().to_string()).unwrap_or_default();
        // SAFETY: guaranteed by the caller.
        unsafe { *engine = Box::into_raw(Box::new(DwEngine { model, description })) };
        Ok(())
    })
}

/// Frees an engine with its device memory. Null is ignored.
///
/// # Safety
/// `engine` is null or an engine of `dw_engine_create` that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_destroy(engine: *mut DwEngine) {
    if !engine.is_null() {
        // SAFETY: made by `Box::into_raw`, and given back once.
        drop(unsafe { Box::from_raw(engine) });
    }
}

/// The engine as JSON: device, sizes, predicted memory, names of the tensors that it trains. Valid
/// as long as the engine.
///
/// # Safety
/// `engine` is an engine of `dw_engine_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_describe(engine: *const DwEngine) -> *const c_char {
    // SAFETY: guaranteed by the caller.
    unsafe { engine.as_ref() }.map_or(ptr::null(), |engine| engine.description.as_ptr())
}

/// The engine and the token ids of a call.
///
/// # Safety
/// `engine` is null or an engine that no other thread uses; `inputs` and `targets` are null or
/// `count` numbers that outlive the result.
unsafe fn batch<'a>(
    engine: *mut DwEngine,
    inputs: *const i32,
    targets: *const i32,
    count: usize,
) -> Result<(&'a mut DwEngine, &'a [i32], &'a [i32]), Failure> {
    not_null("engine", engine)?;
    not_null("inputs", inputs)?;
    not_null("targets", targets)?;
    // SAFETY: guaranteed by the caller, and not null.
    Ok(unsafe {
        (
            &mut *engine,
            std::slice::from_raw_parts(inputs, count),
            std::slice::from_raw_parts(targets, count),
        )
    })
}

/// Trains one step on `count` token ids, all sequences of a step one behind the other, and the ids
/// that should follow them (-100 does not count). Gradients are clipped to `max_grad_norm`.
///
/// # Safety
/// `engine` is an engine of `dw_engine_create`, used by this thread alone; `inputs` and `targets`
/// have `count` numbers; `result` is memory for one result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_step(
    engine: *mut DwEngine,
    inputs: *const i32,
    targets: *const i32,
    count: usize,
    learning_rate: f64,
    max_grad_norm: f64,
    result: *mut DwStepResult,
) -> DwEngineStatus {
    guard(|| {
        not_null("result", result)?;
        // SAFETY: guaranteed by the caller.
        let (engine, inputs, targets) = unsafe { batch(engine, inputs, targets, count)? };
        let (loss, grad_norm, skipped) =
            engine.model.step(inputs, targets, learning_rate, max_grad_norm)?;
        let skipped = i32::from(skipped);
        // SAFETY: guaranteed by the caller.
        unsafe { *result = DwStepResult { loss, grad_norm, skipped } };
        Ok(())
    })
}

/// Computes the mean loss of a batch, as of `dw_engine_step`, without training.
///
/// # Safety
/// As `dw_engine_step`; `loss` is memory for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_evaluate(
    engine: *mut DwEngine,
    inputs: *const i32,
    targets: *const i32,
    count: usize,
    loss: *mut f32,
) -> DwEngineStatus {
    guard(|| {
        not_null("loss", loss)?;
        // SAFETY: guaranteed by the caller.
        let (engine, inputs, targets) = unsafe { batch(engine, inputs, targets, count)? };
        let mean = engine.model.evaluate(inputs, targets)?;
        // SAFETY: guaranteed by the caller.
        unsafe { *loss = mean };
        Ok(())
    })
}

/// Copies the weights of one tensor, by its name in PyTorch, to `values`. Elements that the engine
/// does not train keep their values.
///
/// # Safety
/// `engine` is an engine of `dw_engine_create`, used by this thread alone; `name` is a string that
/// ends with a zero byte; `values` has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_read_tensor(
    engine: *mut DwEngine,
    name: *const c_char,
    values: *mut f32,
    count: usize,
) -> DwEngineStatus {
    guard(|| {
        not_null("engine", engine)?;
        not_null("values", values)?;
        // SAFETY: guaranteed by the caller.
        let (engine, name, values) = unsafe {
            (&mut *engine, text("name", name)?, std::slice::from_raw_parts_mut(values, count))
        };
        engine.model.read(name, values)
    })
}

/// Replaces the weights of one tensor, by its name in PyTorch. The optimizer's state stays.
///
/// # Safety
/// As `dw_engine_read_tensor`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_engine_write_tensor(
    engine: *mut DwEngine,
    name: *const c_char,
    values: *const f32,
    count: usize,
) -> DwEngineStatus {
    guard(|| {
        not_null("engine", engine)?;
        not_null("values", values)?;
        // SAFETY: guaranteed by the caller.
        let (engine, name, values) = unsafe {
            (&mut *engine, text("name", name)?, std::slice::from_raw_parts(values, count))
        };
        engine.model.write(name, values)
    })
}
