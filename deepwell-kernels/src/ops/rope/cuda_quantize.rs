//! `rope_quantize.cu`: rotary position embedding or its backward, with block quantization of the
//! result.

use deepwell_ir::KernelRequest;

use super::cuda::{rope_of, table_of};
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_quantize::{self, Rows, Tiles};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Pairs that a thread rotates at a time.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_rope_quantize", &["rope", "rope_backward"], prepare)
        .epilogue(row_quantize::epilogue)
        .reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (rope, ..) = rope_of(request.op.leading())?;
    if rope.interleaved || rope.plain_dim > 0 {
        return Some("turns whole heads, pairs half a head apart".to_string());
    }
    let half = rope.inverse_frequencies.len();
    if half == 0 || !half.is_multiple_of(WIDTH) {
        return Some(format!("takes heads of multiples of {}, not of {}", 2 * WIDTH, 2 * half));
    }
    row_quantize::reject(request)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((rope, backward, part)) = rope_of(call.call.op.leading()) else {
        return Err(call.refuse("expected a rotary embedding and its quantization"));
    };
    let x = call.input(0);
    let positions = call.program.seq.min(x.shape[0]).max(1);
    let table = table_of(rope, (positions, part), device)?;
    let rows = Rows {
        shape: &x.shape,
        inputs: vec![x.argument()],
        rest: vec![
            Argument::Pointer(table),
            Argument::U32(positions as u32),
            Argument::U32(rope.inverse_frequencies.len() as u32),
            Argument::F32(if backward { -1.0 } else { 1.0 }),
        ],
        tiles: Tiles::OneEach,
        pipe: None,
    };
    Ok(vec![rows.launch(call, device, "rope_quantize", "rope")?])
}
