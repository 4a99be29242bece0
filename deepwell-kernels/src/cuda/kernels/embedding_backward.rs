//! `embedding_backward.cu`: sums of gradient rows by token.

use deepwell_ir::KernelRequest;

use super::support::all_bf16;
use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Columns of a block.
const SLICE_COLUMNS: usize = 256;
/// Rows of the table that a block can own.
const ROWS_MAX: usize = 64;
/// Blocks for each multiprocessor that there should be where the table is small.
const BLOCKS_PER_MULTIPROCESSOR: usize = 16;
/// Elements of a 16-byte load.
const WIDTH: usize = 8;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_embedding_backward",
    ops: &["embedding_backward"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes: no_workspace,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let tokens = request.operands[0].shape[0];
    if u32::try_from(tokens).is_err() {
        return Some(format!("takes at most {} tokens, not {tokens}", u32::MAX));
    }
    all_bf16(request, &[1])
}

/// How the table is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Slices of the columns, at least one.
    slices: usize,
    /// Rows that a block owns.
    rows_per_block: usize,
    /// Runs of rows, at least one.
    row_runs: usize,
}

/// Many rows a block, so that few blocks look through all tokens, but enough blocks.
fn cut(vocab: usize, columns: usize, multiprocessors: usize) -> Cut {
    let slices = columns.div_ceil(SLICE_COLUMNS).max(1);
    let runs_wanted = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(slices).max(1);
    let rows_per_block = vocab.div_ceil(runs_wanted).clamp(1, ROWS_MAX);
    Cut { slices, rows_per_block, row_runs: vocab.div_ceil(rows_per_block).max(1) }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (tokens, dout, dtable) = (call.input(0), call.input(1), call.output(0));
    let (vocab, columns) = (dtable.shape[0], dtable.shape[1]);
    let cut = cut(vocab, columns, device.multiprocessors() as usize);
    let entry = if columns.is_multiple_of(WIDTH) {
        "embedding_backward_vector"
    } else {
        "embedding_backward_scalar"
    };
    let function = device.function("embedding_backward", entry, 0)?;
    let arguments = vec![
        tokens.argument(),
        dout.argument(),
        dtable.argument(),
        Argument::U64(tokens.elements() as u64),
        Argument::U32(vocab as u32),
        Argument::U32(columns as u32),
        Argument::U32(cut.rows_per_block as u32),
        Argument::U32(cut.slices as u32),
        Argument::U32(call.accumulate().into()),
    ];
    let blocks = (cut.slices * cut.row_runs) as u32;
    Ok(vec![Device::launch(function, blocks, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_table_and_are_not_too_few() {
        for (vocab, columns, expected) in [
            (32_000, 2048, Cut { slices: 8, rows_per_block: 64, row_runs: 500 }),
            (256, 1024, Cut { slices: 4, rows_per_block: 1, row_runs: 256 }),
            (8192, 1000, Cut { slices: 4, rows_per_block: 16, row_runs: 512 }),
            (128_256, 257, Cut { slices: 2, rows_per_block: 64, row_runs: 2004 }),
            (0, 0, Cut { slices: 1, rows_per_block: 1, row_runs: 1 }),
        ] {
            let cut = cut(vocab, columns, 132);
            assert_eq!(cut, expected, "{vocab}x{columns}");
            assert!(cut.row_runs * cut.rows_per_block >= vocab);
            assert!(cut.slices * SLICE_COLUMNS >= columns);
        }
    }
}
