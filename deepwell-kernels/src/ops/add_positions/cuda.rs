//! `add_positions.cu` and `add_positions_backward.cu`: learned positions.

use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::ops::add_positions::cpu::too_few_positions;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA of the forward kernel, as in the source.
pub(crate) const FORWARD_THREADS: u32 = 256;
/// Units that a thread adds at a time.
pub(crate) const UNITS_PER_THREAD: usize = 4;
/// Threads of a CTA of the backward kernel, as in the source.
const BACKWARD_THREADS: u32 = 128;
/// BF16 numbers in a 16-byte unit.
pub(crate) const WIDTH: usize = 8;
/// Largest number of table elements that the kernels can index.
const TABLE_MAX: usize = i32::MAX as usize;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new(
        "cuda_add_positions",
        &["add_positions", "add_positions_of_part"],
        prepare_forward,
    )
    .reject(|request| all_bf16(request, &[0, 1, 2]).or_else(|| reject_table(request, 1))),
    CudaKernelSpec::new(
        "cuda_add_positions_backward",
        &["add_positions_backward", "add_positions_of_part_backward"],
        prepare_backward,
    )
    .reject(|request| all_bf16(request, &[0]).or_else(|| reject_table(request, 1))),
];

fn reject_table(request: &KernelRequest<'_>, table: usize) -> Option<String> {
    let shape = &request.operands[table].shape;
    let too_large = shape.iter().product::<usize>() > TABLE_MAX;
    too_large.then(|| format!("takes tables of at most {TABLE_MAX} elements, not {shape:?}"))
}

/// Sizes of a call in units: 16 bytes if rows consist of whole 16-byte units, else one element.
struct Units {
    /// Elements of a unit: 8 or 1.
    width: usize,
    /// Units of all tokens.
    tokens: usize,
    /// Units of the table.
    table: usize,
    /// Units of a sequence.
    sequence: usize,
    /// Position of the first unit within its sequence.
    begin: usize,
}

impl Units {
    /// `rows` is the shape of the tokens, `[tokens, width]`; `place` is the part's place among the
    /// ranks, if there are several; `table` is `[positions, width]`.
    fn of(
        call: &CallView<'_>,
        rows: &[usize],
        table: &[usize],
        place: Option<usize>,
    ) -> Result<Units, KernelError> {
        let seq = call.program.seq;
        let (&[tokens, columns], &[positions, _]) = (rows, table) else {
            return Err(call.refuse("expected two matrices"));
        };
        if seq == 0 || seq > positions {
            return Err(call.refuse(too_few_positions(positions, seq)));
        }
        if columns == 0 || place.is_none() && !tokens.is_multiple_of(seq) {
            return Err(call.refuse(format!(
                "expected whole sequences of {seq} tokens with a width of at least 1, got \
                 {tokens} tokens and a width of {columns}"
            )));
        }
        let width = if columns.is_multiple_of(WIDTH) { WIDTH } else { 1 };
        Ok(Units {
            width,
            tokens: tokens * columns / width,
            table: positions * columns / width,
            sequence: seq * columns / width,
            begin: place.unwrap_or_default() * tokens % seq * columns / width,
        })
    }
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let place = match &call.call.op {
        Op::AddPositions(_) => None,
        Op::AddPositionsOfPart(part) => Some(part.place),
        _ => return Err(call.refuse("expected `add_positions`")),
    };
    let (x, table, out) = (call.input(0), call.input(1), call.output(0));
    let units = Units::of(call, &x.shape, &table.shape, place)?;
    let bytes = 2 * units.width;
    let function = device.function("add_positions", &format!("add_positions_{bytes}_bytes"), 0)?;
    let threads = units.tokens.div_ceil(UNITS_PER_THREAD);
    let ctas = grid_of(threads, FORWARD_THREADS, device.sm_count());
    let arguments = vec![
        x.argument(),
        table.argument(),
        out.argument(),
        Argument::U64(units.tokens as u64),
        Argument::U32(units.sequence as u32),
        Argument::U32(units.begin as u32),
    ];
    Ok(vec![Device::launch(function, ctas, FORWARD_THREADS, 0, arguments)])
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let place = match &call.call.op {
        Op::AddPositionsBackward(_) => None,
        Op::AddPositionsOfPartBackward(part) => Some(part.place),
        _ => return Err(call.refuse("expected `add_positions_backward`")),
    };
    let (dout, dtable) = (call.input(0), call.output(0));
    let units = Units::of(call, &dout.shape, &dtable.shape, place)?;
    let suffix = if units.width == WIDTH { "vector" } else { "scalar" };
    let name = format!("add_positions_backward_{suffix}");
    let function = device.function("add_positions_backward", &name, 0)?;
    let arguments = vec![
        dout.argument(),
        dtable.argument(),
        Argument::U32(units.table as u32),
        Argument::U32(units.sequence as u32),
        Argument::U64(units.tokens as u64),
        Argument::U32(units.begin as u32),
        Argument::U32(call.accumulate().into()),
    ];
    let ctas = (units.table as u32).div_ceil(BACKWARD_THREADS).max(1);
    Ok(vec![Device::launch(function, ctas, BACKWARD_THREADS, 0, arguments)])
}
