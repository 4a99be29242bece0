//! Description of one op on operands of known sizes, as C passes it, and its check.

use std::ffi::{CStr, c_char};

use deepwell_ir::{Access, Accumulate, Binding, DType, Dim, Op, OutputType, Shape, TensorType};
use deepwell_kernels::SingleCall;

use crate::session::not_null;
use crate::status::Failure;

/// Dimensions of an operand at most.
pub const DW_MAX_RANK: usize = 8;

/// Type of one operand of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DwOperand {
    /// A `DwDType`.
    pub dtype: i32,
    /// Number of dimensions, at most `DW_MAX_RANK`.
    pub rank: i32,
    /// Whether the op updates this input in place (AdamW's weights and moments); 0 otherwise.
    pub updated: i32,
    /// Zero.
    pub reserved: i32,
    /// Row-major sizes; entries from `rank` on do not count.
    pub sizes: [i64; 8],
}

/// One op on contiguous row-major operands.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DwRequest {
    /// `sizeof(DwRequest)` of the caller. Later versions append fields; a field that the caller
    /// does not have counts as zero.
    pub struct_bytes: usize,
    /// `cpu`, `cuda` or `cuda:N`; with the feature `emulated` also `emulated:sm90` on host memory,
    /// as of an architecture below; for `dw_supported` also an architecture: `sm90`, `sm100`,
    /// `sm103`, `sm120`.
    pub device: *const c_char,
    /// The op with its attributes in JSON, `{"op": "rms_norm", "eps": 1e-6}` for example. Ops,
    /// attributes and operands are those of the Rust enumeration `deepwell_ir::Op`.
    pub op: *const c_char,
    /// Inputs, then outputs.
    pub operands: *const DwOperand,
    /// Number of inputs.
    pub input_count: i32,
    /// Number of outputs.
    pub output_count: i32,
    /// Sequences, for ops whose tokens have positions (attention, RoPE); 1 otherwise.
    pub batch: i64,
    /// Tokens per sequence; 1 for other ops.
    pub seq: i64,
    /// If not 0, FP32 gradients of weights are added to the contents of the output.
    pub accumulate: i32,
    /// Zero.
    pub reserved: i32,
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) device: String,
    pub(crate) call: SingleCall,
}

fn invalid<T>(message: String) -> Result<T, Failure> {
    Err(Failure::InvalidArgument(message))
}

/// Every type of an operand, by the value of its `DwDType`.
const DTYPES: [DType; 10] = [
    DType::Bf16,
    DType::F32,
    DType::I32,
    DType::I64,
    DType::U64,
    DType::Bool,
    DType::E4m3,
    DType::E8m0,
    DType::E2m1,
    DType::Ue4m3,
];

impl DwOperand {
    fn check(&self, name: &str) -> Result<(DType, Vec<usize>), Failure> {
        let dtype = usize::try_from(self.dtype).ok().and_then(|index| DTYPES.get(index).copied());
        let Some(dtype) = dtype else {
            return invalid(format!("{name}: expected a DwDType, got {}", self.dtype));
        };
        let rank = usize::try_from(self.rank).ok().filter(|&rank| rank <= DW_MAX_RANK);
        let Some(rank) = rank else {
            return invalid(format!(
                "{name}: expected at most {DW_MAX_RANK} dimensions, got {}",
                self.rank
            ));
        };
        let sizes = self.sizes[..rank].iter().map(|&size| usize::try_from(size)).collect();
        match sizes {
            Ok(sizes) => Ok((dtype, sizes)),
            Err(_) => invalid(format!("{name}: expected sizes of 0 or more, got {:?}", self.sizes)),
        }
    }
}

/// A string of C.
///
/// # Safety
/// `text` is null or a string that ends with a zero byte.
unsafe fn text(name: &str, text: *const c_char) -> Result<String, Failure> {
    not_null(&[(name, text.cast())])?;
    // SAFETY: guaranteed by the caller, and not null.
    let text = unsafe { CStr::from_ptr(text) };
    match text.to_str() {
        Ok(text) => Ok(text.to_string()),
        Err(_) => invalid(format!("`{name}`: expected UTF-8, got {text:?}")),
    }
}

impl Checked {
    /// Reads and checks a request.
    ///
    /// # Safety
    /// `request` is null or a request whose pointers are null, strings that end with a zero byte,
    /// and as many operands as the counts say.
    pub(crate) unsafe fn read(request: *const DwRequest) -> Result<Checked, Failure> {
        not_null(&[("request", request.cast())])?;
        // SAFETY: the first field of every version of the structure.
        let struct_bytes = unsafe { (*request).struct_bytes };
        if struct_bytes < size_of::<DwRequest>() {
            return invalid(format!(
                "`struct_bytes`: expected at least {} bytes, the first version of DwRequest, got \
                 {struct_bytes}",
                size_of::<DwRequest>()
            ));
        }
        // SAFETY: the caller's structure has at least the fields of this version.
        let request = unsafe { *request };
        // SAFETY: guaranteed by the caller.
        let (device, json) = unsafe { (text("device", request.device)?, text("op", request.op)?) };
        let counts = [request.input_count, request.output_count].map(usize::try_from);
        let [Ok(input_count), Ok(output_count)] = counts else {
            return invalid("expected `input_count` and `output_count` of 0 or more".to_string());
        };
        not_null(&[("operands", request.operands.cast())])?;
        // SAFETY: guaranteed by the caller.
        let operands =
            unsafe { std::slice::from_raw_parts(request.operands, input_count + output_count) };
        let op: Op = serde_json::from_str(&json)
            .map_err(|error| Failure::InvalidArgument(format!("`op`: {error}, in {json}")))?;
        let sizes = [("batch", request.batch), ("seq", request.seq)].map(|(name, size)| {
            usize::try_from(size).map_err(|_| {
                Failure::InvalidArgument(format!("`{name}`: expected 0 or more, got {size}"))
            })
        });
        let [batch, seq] = sizes;
        let binding = Binding { batch: batch?, seq: seq? };
        let call = call_of(op, operands, input_count, binding, request.accumulate != 0)?;
        Ok(Checked { device, call })
    }
}

fn call_of(
    op: Op,
    operands: &[DwOperand],
    input_count: usize,
    binding: Binding,
    accumulate: bool,
) -> Result<SingleCall, Failure> {
    let types = operands
        .iter()
        .enumerate()
        .map(|(index, operand)| operand.check(&format!("operand {index}")))
        .collect::<Result<Vec<_>, Failure>>()?;
    let (inputs, outputs) = types.split_at(input_count);
    check_tokens(&op, inputs, binding)?;
    let input_types: Vec<TensorType> = inputs
        .iter()
        .map(|(dtype, shape)| TensorType { shape: symbolic(&op, shape, binding), dtype: *dtype })
        .collect();
    let expected = op
        .rule()
        .infer(&input_types)
        .map_err(|error| Failure::InvalidArgument(error.to_string()))?;
    check_outputs(&op, &expected, outputs, binding)?;
    let mut call = SingleCall::new(op, inputs, outputs);
    (call.batch, call.seq) = (binding.batch, binding.seq);
    for (access, operand) in call.access.iter_mut().zip(operands) {
        if operand.updated != 0 {
            *access = Access::Update;
        }
    }
    if accumulate {
        call.accumulate = Accumulate::Always;
        call.access[input_count..].fill(Access::Update);
    }
    Ok(call)
}

/// Whether an op derives positions from the row of a token.
fn has_positions(op: &Op) -> bool {
    matches!(
        op,
        Op::Attention(_)
            | Op::AttentionBackward(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::AddPositions(_)
    )
}

/// A shape as the rules of ops expect it: statistics of attention have a batch and a sequence
/// dimension, `[B, heads, S]`.
fn symbolic(op: &Op, shape: &[usize], binding: Binding) -> Shape {
    match *shape {
        [batch, heads, seq]
            if has_positions(op) && (batch, seq) == (binding.batch, binding.seq) =>
        {
            Shape(vec![Dim::BATCH, Dim::fixed(heads), Dim::SEQ])
        }
        _ => Shape(shape.iter().map(|&size| Dim::fixed(size)).collect()),
    }
}

/// An op with positions needs as many rows as tokens.
fn check_tokens(op: &Op, inputs: &[(DType, Vec<usize>)], binding: Binding) -> Result<(), Failure> {
    let rows = inputs.first().and_then(|(_, shape)| shape.first().copied()).unwrap_or(0);
    if has_positions(op) && rows != binding.tokens() {
        return invalid(format!(
            "`{}`: expected batch · seq rows, {} · {}, got {rows}",
            op.name(),
            binding.batch,
            binding.seq
        ));
    }
    Ok(())
}

fn check_outputs(
    op: &Op,
    expected: &[OutputType],
    outputs: &[(DType, Vec<usize>)],
    binding: Binding,
) -> Result<(), Failure> {
    let expected: Vec<(DType, Vec<usize>)> =
        expected.iter().map(|output| (output.dtype, output.shape.bind(&binding))).collect();
    if expected != outputs {
        let list = |types: &[(DType, Vec<usize>)]| -> String {
            let text: Vec<String> =
                types.iter().map(|(dtype, shape)| format!("{} {shape:?}", dtype.name())).collect();
            text.join(", ")
        };
        return invalid(format!(
            "`{}`: expected the outputs {}; got {}",
            op.name(),
            list(&expected),
            list(outputs)
        ));
    }
    Ok(())
}
