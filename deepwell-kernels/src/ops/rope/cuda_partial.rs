//! `rope_partial.cu`: rotary position embedding of a head's last elements, and its backward.

use deepwell_ir::KernelRequest;
use deepwell_ir::ops::Rope;

use super::cuda::{rope_of, table_of};
use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements of 16 bytes.
const WIDTH: usize = 8;
/// Heads per thread, as in the source.
const HEADS: usize = 4;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_rope_partial",
    &["rope", "rope_backward", "rope_of_part"],
    prepare,
)
.reject(reject)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (rope, ..) = rope_of(request.op)?;
    let rows = request.operands[0].shape[0];
    if !rope.interleaved && rope.plain_dim == 0 {
        return Some("turns parts of heads, or neighbors".to_string());
    }
    if Split::new(rows, rope).is_none() {
        return Some(format!(
            "indexes its threads with 32 bits, which {rows} rows of {} heads of {} exceed",
            rope.heads, rope.head_dim
        ));
    }
    all_bf16(request, &[0, 1])
}

/// Division of the units of all rows among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    /// Whether a unit is 16 bytes.
    is_vector: bool,
    /// Threads per unit of a row; these share the heads.
    head_step: usize,
    /// Total number of threads.
    items: u32,
}

impl Split {
    /// Returns `None` if threads or other numbers exceed the source's 32-bit integers.
    fn new(rows: usize, rope: &Rope) -> Option<Split> {
        let half = rope.inverse_frequencies.len();
        // Pairs per thread: pairs of neighbors fill 16 bytes, other pairs twice 16 bytes.
        let pairs = if rope.interleaved { WIDTH / 2 } else { WIDTH };
        let is_vector = rope.plain_dim.is_multiple_of(WIDTH) && half.is_multiple_of(pairs);
        let units =
            if is_vector { rope.plain_dim / WIDTH + half / pairs } else { rope.plain_dim + half };
        let head_step = rope.heads.div_ceil(HEADS);
        let items = rows.checked_mul(units)?.checked_mul(head_step)?;
        u32::try_from(rope.plain_dim.checked_add(2 * half)?).ok()?;
        Some(Split { is_vector, head_step, items: u32::try_from(items).ok()? })
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((rope, backward, part)) = rope_of(&call.call.op) else {
        return Err(call.refuse("expected a rotary embedding"));
    };
    let (x, y) = (call.input(0), call.output(0));
    let rows = x.shape[0];
    let Some(split) = Split::new(rows, rope) else {
        return Err(call.refuse(format!("expected fewer than {rows} rows")));
    };
    let positions = call.program.seq.min(rows).max(1);
    let table = table_of(rope, (positions, part), device)?;
    let interleaved = if rope.interleaved { "_interleaved" } else { "" };
    let scalar = if split.is_vector { "" } else { "_scalar" };
    let entry = format!("rope_partial{interleaved}{scalar}");
    let function = device.function("rope_partial", &entry, 0)?;
    let mut arguments =
        vec![x.argument(), Argument::Pointer(table), y.argument(), Argument::U32(split.items)];
    let half = rope.inverse_frequencies.len();
    arguments.extend(
        [positions, rope.heads, rope.plain_dim, half, split.head_step]
            .map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::F32(if backward { -1.0 } else { 1.0 }));
    let ctas = split.items.div_ceil(THREADS).max(1);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_cover_what_turns_and_what_does_not() {
        for ((rows, heads, plain_dim, half, interleaved), expected) in [
            // DeepSeek-V3: queries, and the columns shared by all heads.
            ((4096, 128, 128, 32, true), Some((true, 32, 4096 * 24 * 32))),
            ((4096, 1, 0, 32, true), Some((true, 1, 4096 * 8))),
            ((10, 5, 8, 8, false), Some((true, 2, 10 * 2 * 2))),
            ((10, 5, 8, 4, true), Some((true, 2, 10 * 2 * 2))),
            ((10, 5, 8, 4, false), Some((false, 2, 10 * 12 * 2))),
            ((10, 5, 3, 8, true), Some((false, 2, 10 * 11 * 2))),
            ((0, 2, 8, 8, true), Some((true, 1, 0))),
            ((1 << 30, 128, 128, 32, true), None),
            ((usize::MAX, 2, 8, 8, true), None),
        ] {
            let rope = Rope {
                heads,
                head_dim: plain_dim + 2 * half,
                plain_dim,
                interleaved,
                inverse_frequencies: vec![1.0; half],
                attention_factor: 1.0,
            };
            let expected =
                expected.map(|(is_vector, head_step, items)| Split { is_vector, head_step, items });
            assert_eq!(Split::new(rows, &rope), expected, "{rows} rows of {rope:?}");
        }
    }
}
