//! `grouped_bias.cu`: biases of experts, and their backward.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::row_lanes::{RowLanes, THREADS};
use crate::runtime::cuda::launch::support::{all_bf16, grid_of};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Columns per CTA in the gradient of the biases, as in the source.
const COLUMNS: usize = 256;
/// Elements of a 16-byte load.
const WIDTH: usize = 8;
/// CTAs that fill a large GPU. The number determines the order of summation, and so is the same for
/// all devices.
const CTAS_WANTED: usize = 1024;
/// Largest number of runs of a group's rows that are joined quickly.
const SPLITS_MAX: usize = 64;
/// Smallest average number of rows per run: four per warp.
const ROWS_PER_SPLIT_MIN: usize = 32;

pub(crate) const SPECS: &[CudaKernelSpec] = &[
    CudaKernelSpec::new("cuda_grouped_bias", &["grouped_bias"], prepare_forward)
        .reject(|request| all_bf16(request, &[0, 1, 6])),
    CudaKernelSpec::new("cuda_grouped_bias_backward", &["grouped_bias_backward"], prepare_backward)
        .reject(|request| all_bf16(request, &[0, 1]))
        .workspace_bytes(workspace_bytes),
];

/// Column tiles of a group, and the number of runs into which its rows are split; both at least
/// one.
fn tiles_and_splits(rows: usize, columns: usize, groups: usize) -> (usize, usize) {
    let tiles = columns.div_ceil(COLUMNS).max(1);
    let splits = (CTAS_WANTED / (tiles * groups.max(1)))
        .min(SPLITS_MAX)
        .min(rows.div_ceil(ROWS_PER_SPLIT_MIN * groups.max(1)));
    (tiles, splits.max(1))
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let (dout, bias) = (&request.operands[0].shape, &request.operands[1].shape);
    match tiles_and_splits(dout[0], dout[1], bias[0]) {
        (_, 1) => 0,
        (_, splits) => splits * bias[0] * bias[1] * size_of::<f32>(),
    }
}

fn prepare_forward(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::GroupedBias(op) = &call.call.op else {
        return Err(call.refuse("expected `grouped_bias`"));
    };
    let (x, bias) = (call.input(0), call.input(1));
    let (rows, columns, groups) = (x.shape[0], x.shape[1], bias.shape[0]);
    let RowLanes { ctas, lanes, suffix } = RowLanes::new(rows, columns, device.sm_count());
    let function = device.function("grouped_bias", &format!("grouped_bias{suffix}"), 0)?;
    let mut arguments = vec![
        x.argument(),
        bias.argument(),
        call.input(2).argument(),
        gates(call, op.gated),
        call.input(5).argument(),
        call.output(0).argument(),
    ];
    let sizes = [rows as u32, columns as u32, groups as u32, lanes];
    arguments.extend(sizes.map(Argument::U32));
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

/// Address of the gates; null without gates.
fn gates(call: &CallView<'_>, gated: bool) -> Argument {
    if gated { call.input(3).argument() } else { Argument::Pointer(DevicePtr(0)) }
}

fn prepare_backward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
) -> Result<Vec<Step>, KernelError> {
    let Op::GroupedBiasBackward(op) = &call.call.op else {
        return Err(call.refuse("expected `grouped_bias_backward`"));
    };
    let (dout, bias, offsets) = (call.input(0), call.input(1), call.input(2));
    let (rows_of_pairs, dbias) = (call.input(4), call.output(0));
    let (rows, columns, groups) = (dout.shape[0], dout.shape[1], bias.shape[0]);
    let (tiles, splits) = tiles_and_splits(rows, columns, groups);
    let suffix = if columns.is_multiple_of(WIDTH) { "" } else { "_scalar" };
    let partials = Argument::Pointer(call.workspace().0);
    let accumulate = Argument::U32(call.accumulate().into());

    let function = device.function("grouped_bias", &format!("grouped_bias_gradient{suffix}"), 0)?;
    let mut arguments = vec![
        dout.argument(),
        offsets.argument(),
        gates(call, op.forward.gated),
        call.input(5).argument(),
        dbias.argument(),
        partials,
    ];
    arguments.extend([columns, groups, splits].map(|size| Argument::U32(size as u32)));
    arguments.push(accumulate);
    let ctas = (tiles * groups * splits) as u32;
    let mut steps = vec![Device::launch(function, ctas, THREADS, 0, arguments)];
    if splits > 1 {
        let function = device.function("grouped_bias", "grouped_bias_join", 0)?;
        let elements = dbias.elements();
        let arguments = vec![
            partials,
            dbias.argument(),
            Argument::U64(elements as u64),
            Argument::U32(splits as u32),
            accumulate,
        ];
        let ctas = grid_of(elements, THREADS, device.sm_count());
        steps.push(Device::launch(function, ctas, THREADS, 0, arguments));
    }
    if op.forward.gated {
        let pairs = rows_of_pairs.elements();
        let RowLanes { ctas, lanes, suffix } = RowLanes::new(pairs, columns, device.sm_count());
        let name = format!("grouped_bias_gates{suffix}");
        let function = device.function("grouped_bias", &name, 0)?;
        let mut arguments = vec![
            dout.argument(),
            bias.argument(),
            offsets.argument(),
            rows_of_pairs.argument(),
            call.output(1).argument(),
        ];
        let sizes = [pairs as u32, columns as u32, groups as u32, lanes];
        arguments.extend(sizes.map(Argument::U32));
        steps.push(Device::launch(function, ctas, THREADS, 0, arguments));
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_rows_are_neither_short_nor_too_many() {
        // (rows, columns, groups)
        for (sizes, expected) in [
            // The published gpt-oss with 16,384 tokens: gate or up projection, down projection.
            ((66_528, 2880, 32), (12, 2)),
            ((66_528, 64, 32), (1, 32)),
            ((4096, 2880, 4), (12, 21)),
            ((128, 300, 4), (2, 1)),
            ((129, 300, 4), (2, 2)),
            ((1 << 20, 8, 1), (1, 64)),
            ((0, 5, 8), (1, 1)),
            ((5, 0, 8), (1, 1)),
        ] {
            let (rows, columns, groups) = sizes;
            assert_eq!(tiles_and_splits(rows, columns, groups), expected, "{sizes:?}");
        }
    }
}
