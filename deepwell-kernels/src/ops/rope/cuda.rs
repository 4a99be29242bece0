//! `rope.cu`: rotary position embedding and its backward.

use deepwell_ir::ops::{Rope, Zigzag};
use deepwell_ir::{KernelRequest, Op};

use crate::KernelError;
use crate::ops::rope::cpu::rope_tables_at;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Pairs that a thread rotates at a time, if half a head is a multiple of this.
const WIDTH: usize = 8;
/// Heads per thread, as in the source.
const HEADS: usize = 4;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_rope", OPS, prepare).reject(reject)];

const OPS: &[&str] = &["rope", "rope_backward", "rope_of_part", "rope_by_table"];

/// Returns the rotation, whether it is backward, and the rank's part of each sequence; without
/// context parallelism the part is the whole sequence.
pub(super) fn rope_of(op: &Op) -> Option<(&Rope, bool, Zigzag)> {
    let whole = Zigzag { place: 0, ranks: 1 };
    match op {
        Op::Rope(rope) => Some((rope, false, whole)),
        Op::RopeBackward(backward) => Some((&backward.forward, true, whole)),
        Op::RopeOfPart(op) => Some((&op.rope, op.back, op.part)),
        _ => None,
    }
}

/// Heads, pairs of a head, and whether the rotation is backward.
fn turn_of(op: &Op) -> Option<(usize, usize, bool)> {
    if let Op::RopeByTable(op) = op {
        return Some((op.heads, op.head_dim / 2, op.back));
    }
    let (rope, backward, _) = rope_of(op)?;
    Some((rope.heads, rope.inverse_frequencies.len(), backward))
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (heads, half, _) = turn_of(request.op)?;
    let rows = request.operands[0].shape[0];
    if rope_of(request.op).is_some_and(|(rope, ..)| rope.interleaved || rope.plain_dim > 0) {
        return Some("turns whole heads, pairs half a head apart".to_string());
    }
    if Split::new(rows, heads, half).is_none() {
        return Some(format!(
            "indexes its threads with 32 bits, which {rows} rows of {heads} heads of {} exceed",
            2 * half
        ));
    }
    all_bf16(request, &[0, request.operands.len() - 1])
}

/// Division of the pairs of all rows among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    /// Pairs that a thread rotates at a time.
    width: usize,
    /// Threads per unit of pairs of a row; these share the heads.
    head_step: usize,
    /// Total number of threads.
    items: u32,
}

impl Split {
    /// Returns `None` if threads or other numbers exceed the source's 32-bit integers.
    fn new(rows: usize, heads: usize, half: usize) -> Option<Split> {
        let width = if half.is_multiple_of(WIDTH) { WIDTH } else { 1 };
        let head_step = heads.div_ceil(HEADS);
        let items = rows.checked_mul(half / width)?.checked_mul(head_step)?;
        u32::try_from(2 * half).ok()?;
        Some(Split { width, head_step, items: u32::try_from(items).ok()? })
    }
}

/// Cosines and sines for `positions` tokens of a part, `[positions, 2, half]`, with the bits of the
/// CPU's tables.
fn table(rope: &Rope, positions: usize, part: Zigzag) -> Vec<f32> {
    let half = rope.inverse_frequencies.len();
    let (mut cosines, mut sines) = (vec![0.0; positions * half], vec![0.0; positions * half]);
    let position = |token| part.position(token, positions);
    let of_tokens = (positions, &position as &dyn Fn(usize) -> usize);
    rope_tables_at(&rope.inverse_frequencies, of_tokens, &mut cosines, &mut sines);
    let rows = cosines.chunks_exact(half.max(1)).zip(sines.chunks_exact(half.max(1)));
    rows.flat_map(|(cosines, sines)| cosines.iter().chain(sines))
        .map(|value| value * rope.attention_factor)
        .collect()
}

/// The inputs of a table, as a key by which calls share the table.
fn table_key(rope: &Rope, positions: usize, part: Zigzag) -> Vec<u8> {
    let mut key = b"rope".to_vec();
    key.extend([positions, part.place, part.ranks].iter().flat_map(|&it| it.to_le_bytes()));
    key.extend(rope.attention_factor.to_bits().to_le_bytes());
    key.extend(rope.inverse_frequencies.iter().flat_map(|value| value.to_bits().to_le_bytes()));
    key
}

/// The table of cosines and sines on the device.
pub(super) fn table_of(
    rope: &Rope,
    (positions, part): (usize, Zigzag),
    device: &mut Device<'_>,
) -> Result<DevicePtr, KernelError> {
    device.constant_of(&table_key(rope, positions, part), || {
        bytemuck::cast_slice(&table(rope, positions, part)).to_vec()
    })
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Some((heads, half, backward)) = turn_of(&call.call.op) else {
        return Err(call.refuse("expected a rotary embedding"));
    };
    let (x, y) = (call.input(0), call.output(0));
    let rows = x.shape[0];
    let Some(split) = Split::new(rows, heads, half) else {
        return Err(call.refuse(format!("expected fewer than {rows} rows")));
    };
    let (table, positions) = match rope_of(&call.call.op) {
        Some((rope, _, part)) => {
            let positions = call.program.seq.min(rows).max(1);
            (table_of(rope, (positions, part), device)?, positions)
        }
        None => {
            let table = call.input(1);
            (table.pointer, table.shape[0].max(1))
        }
    };
    let entry = if split.width == WIDTH { "rope_vector" } else { "rope_scalar" };
    let function = device.function("rope", entry, 0)?;
    let arguments = vec![
        x.argument(),
        Argument::Pointer(table),
        y.argument(),
        Argument::U32(split.items),
        Argument::U32(positions as u32),
        Argument::U32(heads as u32),
        Argument::U32(half as u32),
        Argument::U32(split.head_step as u32),
        Argument::F32(if backward { -1.0 } else { 1.0 }),
    ];
    let ctas = split.items.div_ceil(THREADS).max(1);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_cover_all_heads_and_pairs() {
        for ((rows, heads, half), expected) in [
            ((32_768, 12, 32), Some((8, 3, 32_768 * 4 * 3))),
            ((100, 4, 64), Some((8, 1, 800))),
            ((100, 5, 64), Some((8, 2, 1600))),
            ((10, 1, 3), Some((1, 1, 30))),
            ((0, 2, 8), Some((8, 1, 0))),
            ((7, 0, 0), Some((8, 0, 0))),
            ((1 << 30, 32, 64), None),
            ((usize::MAX, 32, 64), None),
        ] {
            let split = Split::new(rows, heads, half);
            let expected =
                expected.map(|(width, head_step, items)| Split { width, head_step, items });
            assert_eq!(split, expected, "{rows} rows, {heads} heads of {half} pairs");
        }
    }

    #[test]
    fn a_table_has_cosines_and_then_sines_of_each_position() {
        let rope = Rope {
            heads: 1,
            head_dim: 4,
            inverse_frequencies: vec![1.0, 0.25],
            attention_factor: 2.0,
            ..Rope::default()
        };
        let expected: Vec<f32> = [0.0f64, 1.0, 2.0]
            .iter()
            .flat_map(|&position| {
                let (slow, once) = (position * 0.25, position);
                [once.cos(), slow.cos(), once.sin(), slow.sin()]
            })
            .map(|value| 2.0 * value as f32)
            .collect();
        let whole = Zigzag { place: 0, ranks: 1 };
        assert_eq!(table(&rope, 3, whole), expected);
        let still = Rope { inverse_frequencies: Vec::new(), ..rope.clone() };
        assert!(table(&still, 3, whole).is_empty());
        let keys: Vec<Vec<u8>> = [
            (rope.clone(), 3, whole),
            (rope.clone(), 4, whole),
            (rope.clone(), 4, Zigzag { place: 0, ranks: 2 }),
            (rope.clone(), 4, Zigzag { place: 1, ranks: 2 }),
            (Rope { attention_factor: 1.0, ..rope.clone() }, 3, whole),
            (Rope { inverse_frequencies: vec![1.0, 0.5], ..rope }, 3, whole),
        ]
        .iter()
        .map(|(rope, positions, part)| table_key(rope, *positions, *part))
        .collect();
        for (index, key) in keys.iter().enumerate() {
            assert_eq!(keys.iter().position(|other| other == key), Some(index));
        }
    }
}
