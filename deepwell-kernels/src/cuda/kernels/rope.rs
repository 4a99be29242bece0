//! `rope.cu`: rotary position embedding and its backward.

use deepwell_ir::ops::Rope;
use deepwell_ir::{KernelRequest, Op};

use super::support::all_bf16;
use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Pairs that a thread turns at a time, where a head's half divides by it.
const WIDTH: usize = 8;
/// Sines that a tile has room for.
const TABLE_PAIRS: usize = 2048;
/// Turns that a tile should give each thread: enough to hide the making of its sines.
const TURNS_PER_THREAD: usize = 8;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_rope",
    ops: &["rope", "rope_backward"],
    architectures: &Architecture::ALL,
    library: None,
    reject,
    workspace_bytes: no_workspace,
    prepare,
}];

fn rope_of(op: &Op) -> Option<(&Rope, bool)> {
    match op {
        Op::Rope(rope) => Some((rope, false)),
        Op::RopeBackward(backward) => Some((&backward.forward, true)),
        _ => None,
    }
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (rope, _) = rope_of(request.op)?;
    let half = rope.inverse_frequencies.len();
    if half > TABLE_PAIRS {
        return Some(format!(
            "takes heads of at most {} elements, not {}",
            2 * TABLE_PAIRS,
            2 * half
        ));
    }
    all_bf16(request, &[0, 1])
}

/// Pairs that a thread turns at a time.
fn step(half: usize) -> usize {
    if half.is_multiple_of(WIDTH) { WIDTH } else { 1 }
}

/// Rows of a tile, at least one and no more than the table takes.
fn tile_rows(heads: usize, half: usize) -> usize {
    let turns_per_row = (heads * half / step(half)).max(1);
    let wanted = (TURNS_PER_THREAD * THREADS as usize).div_ceil(turns_per_row);
    wanted.min(TABLE_PAIRS / half.max(1)).max(1)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((rope, backward)) = rope_of(&call.call.op) else {
        return Err(call.refuse("expected a rotary embedding"));
    };
    let (x, y) = (call.input(0), call.output(0));
    let half = rope.inverse_frequencies.len();
    let tile_rows = tile_rows(rope.heads, half);
    let tiles = x.shape[0].div_ceil(tile_rows).max(1);
    let blocks = tiles.min(16 * device.multiprocessors() as usize) as u32;
    let entry = if step(half) == WIDTH { "rope_vector" } else { "rope_scalar" };
    let function = device.function("rope", entry, 0)?;
    let frequencies = device.constant(bytemuck::cast_slice(&rope.inverse_frequencies))?;
    let factor = rope.attention_factor;
    let arguments = vec![
        x.argument(),
        Argument::Pointer(frequencies),
        y.argument(),
        Argument::U64(x.shape[0] as u64),
        Argument::U64(call.program.seq.max(1) as u64),
        Argument::U32(rope.heads as u32),
        Argument::U32(half as u32),
        Argument::U32(tile_rows as u32),
        Argument::F32(factor),
        Argument::F32(if backward { -factor } else { factor }),
    ];
    Ok(vec![Device::launch(function, blocks, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_their_table_and_hold_a_row() {
        for (heads, half, expected) in [
            (32, 64, 8),    // 256 turns of 8 pairs a row
            (4, 32, 64),    // as many as the table takes
            (1, 1, 2048),   // likewise
            (1, 2048, 1),   // the widest head
            (200, 2048, 1), // a row alone is enough
            (1, 3, 682),    // no whole vectors
            (0, 0, 2048),   // nothing to turn
        ] {
            let rows = tile_rows(heads, half);
            assert_eq!(rows, expected, "{heads} heads of {half} pairs");
            assert!(rows >= 1 && rows * half <= TABLE_PAIRS);
        }
    }
}
