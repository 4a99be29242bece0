//! `adamw_quantize.cu`: parameters that are quantized in squares as they are updated.

use deepwell_ir::OperandType;
use deepwell_ir::ops::{AdamW, Axis, Quantize};

use super::cuda::parameter_operands;
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::mx;
use crate::runtime::cuda::prepare::{CallView, Device, Step};

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Shared bytes of the weights of a square.
const SHARED_BYTES: u32 = (mx::TILE * mx::TILE * size_of::<f32>()) as u32;

/// Number of matrices of a weight and the shape of each; `None` unless all are whole squares.
fn matrices_of(shape: &[usize]) -> Option<(usize, [usize; 2])> {
    let (matrices, [rows, columns]) = match *shape {
        [rows, columns] => (1, [rows, columns]),
        [matrices, rows, columns] => (matrices, [rows, columns]),
        _ => return None,
    };
    let is_whole = |size: usize| size > 0 && size.is_multiple_of(mx::TILE);
    (matrices > 0 && is_whole(rows) && is_whole(columns)).then_some((matrices, [rows, columns]))
}

/// Reason for not quantizing a weight in the update.
pub(super) fn reject(quantize: &Quantize, weight: &OperandType) -> Option<String> {
    let shape = weight.shape.as_slice();
    if mx::flags(&quantize.format) != mx::SQUARE_OF_128 {
        return Some("quantizes in squares of 128 x 128 by the RCEIL rule alone".to_string());
    }
    let Some((_, matrix)) = matrices_of(shape) else {
        return Some(format!("quantizes whole squares of 128 x 128, not {shape:?}"));
    };
    mx::reject(quantize, &matrix)
}

/// Table rows for the kernel, and the total number of squares.
#[derive(Default)]
pub(super) struct Squares {
    words: Vec<u64>,
    parameters: u32,
    squares: usize,
}

impl Squares {
    /// Adds a parameter whose quantized operands start at the call's operand `first`.
    pub(super) fn push(
        &mut self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        op: &AdamW,
        parameter: usize,
        (quantize, first): (&Quantize, usize),
    ) -> Result<(), KernelError> {
        let (addresses, _) = parameter_operands(call, parameter, op.moments)?;
        let shape = call.operand(AdamW::master(parameter)).shape;
        let Some((matrices, [rows, columns])) = matrices_of(&shape) else {
            return Err(call.refuse(format!(
                "parameter {parameter}: expected whole squares of 128 x 128, got {shape:?}"
            )));
        };
        let output = |index: usize| call.operand(first + index).pointer.0;
        let places = match quantize.axis {
            Axis::Row => [output(0), output(1), 0, 0],
            Axis::Column => [0, 0, output(0), output(1)],
            Axis::Both => [output(0), output(1), output(2), output(3)],
        };
        let statistics = output(quantize.output_count() - 1);
        let squares = matrices * rows * columns / (mx::TILE * mx::TILE);
        let pair = |low: usize, high: u32| low as u64 | u64::from(high) << 32;
        self.words.extend(addresses);
        self.words.extend(places);
        self.words.extend([
            mx::totals_at(device, 1)?.0,
            statistics,
            self.squares as u64,
            pair(rows, columns as u32),
            pair(squares, op.weight_decay[parameter].to_bits()),
            (op.parameters.start + parameter) as u64,
        ]);
        self.parameters += 1;
        self.squares += squares;
        Ok(())
    }

    /// The launch that updates these parameters; `None` without parameters.
    pub(super) fn step(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        kernel: &'static str,
        coefficients: Argument,
    ) -> Result<Option<Step>, KernelError> {
        if self.squares == 0 {
            return Ok(None);
        }
        let ctas = u32::try_from(self.squares).ok().filter(|&ctas| ctas <= i32::MAX as u32);
        let Some(ctas) = ctas else {
            let most = i32::MAX;
            let got = self.squares;
            return Err(call.refuse(format!("expected at most {most} squares, got {got}")));
        };
        let function = device.function("adamw_quantize", kernel, SHARED_BYTES)?;
        let arguments = vec![
            Argument::Pointer(device.constant(bytemuck::cast_slice(&self.words))?),
            Argument::U32(self.parameters),
            coefficients,
        ];
        Ok(Some(Device::launch(function, ctas, THREADS, SHARED_BYTES, arguments)))
    }
}
