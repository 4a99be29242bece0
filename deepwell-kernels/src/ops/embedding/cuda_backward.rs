//! `embedding_backward.cu`: sums of gradient rows by token.

use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::support::all_bf16;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

use super::cuda::{slice_of, slice_tokens};

/// Threads of a CTA of each kernel, as in the source.
const SORT_THREADS: u32 = 1024;
const SUM_THREADS: u32 = 256;
const JOIN_THREADS: u32 = 128;
/// Largest number of table rows that a CTA of the sort owns.
const SORT_ROWS_MAX: usize = 256;
/// Sorted positions of a chunk.
const CHUNK: usize = 64;
/// Columns per warp.
const SLICE_COLUMNS: usize = 128;
/// Table rows that a CTA fills with zeros.
const ZERO_ROWS: usize = SUM_THREADS as usize / 32 * 4;
/// Columns that a lane reads at a time.
const WIDTH: usize = 4;
/// Alignment of the parts of the scratch.
const ALIGNMENT: usize = 64;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec::new(
    "cuda_embedding_backward",
    &["embedding_backward", "vocab_parallel_embedding_backward"],
    prepare,
)
.reject(reject)
.workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let (tokens, table) = (request.operands[0].shape[0], &request.operands[2].shape);
    let cut = Cut::new(tokens, table[0], table[1]);
    let indexed = u32::try_from(tokens).is_ok() && i32::try_from(table[0]).is_ok();
    if !indexed || i32::try_from(cut.items()).is_err() {
        return Some(format!(
            "indexes tokens, rows, and chunks of {CHUNK} tokens by {SLICE_COLUMNS} columns with \
             32 bits, which {tokens} tokens of a table {table:?} exceed"
        ));
    }
    all_bf16(request, &[1])
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let (tokens, table) = (request.operands[0].shape[0], &request.operands[2].shape);
    let bytes = Cut::new(tokens, table[0], table[1]).scratch().bytes;
    // Followed by the tokens' rows within a rank's slice of the vocabulary.
    match request.op {
        Op::VocabParallelEmbeddingBackward(_) => bytes + tokens * size_of::<i32>(),
        _ => bytes,
    }
}

/// How the work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    tokens: usize,
    vocab: usize,
    columns: usize,
    /// Chunks of the sorted positions.
    chunks: usize,
    /// Slices of the columns.
    slices: usize,
}

/// Offsets of the parts of the scratch, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scratch {
    sorted: usize,
    firsts: usize,
    spans: usize,
    partials: usize,
    bytes: usize,
}

impl Cut {
    fn new(tokens: usize, vocab: usize, columns: usize) -> Cut {
        let chunks = tokens.div_ceil(CHUNK);
        let slices = columns.div_ceil(SLICE_COLUMNS);
        Cut { tokens, vocab, columns, chunks, slices }
    }

    /// Warps that sum: one per chunk and slice.
    fn items(&self) -> usize {
        self.chunks.saturating_mul(self.slices)
    }

    fn scratch(&self) -> Scratch {
        let mut bytes = 0;
        let mut place = |words: usize| {
            let start = bytes;
            bytes = (bytes + words * size_of::<u32>()).next_multiple_of(ALIGNMENT);
            start
        };
        let sorted = place(self.tokens);
        let firsts = place(self.vocab + 1);
        let spans = place(self.chunks);
        let partials = place(2 * self.chunks * self.columns);
        Scratch { sorted, firsts, spans, partials, bytes }
    }

    /// Rows that a CTA owns in the sort. Each CTA scans all tokens, so the grid has at most one CTA
    /// per SM, unless the table is too large.
    fn rows_per_cta(&self, sm_count: usize) -> usize {
        self.vocab.div_ceil(sm_count.max(1)).clamp(1, SORT_ROWS_MAX)
    }

    /// CTAs that sum, plus CTAs that fill rows without tokens.
    fn sum_ctas(&self, accumulate: bool) -> usize {
        let filling = if accumulate { 0 } else { self.vocab.div_ceil(ZERO_ROWS) };
        (self.items().div_ceil(SUM_THREADS as usize / 32) + filling).max(1)
    }
}

/// The row, within the table or the rank's slice, that gets no gradient; -1 without such a row.
fn padding_of(op: &Op) -> i32 {
    let row = match op {
        Op::EmbeddingBackward(op) => op.padding,
        Op::VocabParallelEmbeddingBackward(op) => {
            op.padding.and_then(|row| op.slice.row_of(i32::try_from(row).ok()?))
        }
        _ => None,
    };
    row.map_or(-1, |row| row as i32)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let tokens = call.input(0);
    let dout = call.input(1);
    let dtable = call.output(0);
    let cut = Cut::new(tokens.elements(), dtable.shape[0], dtable.shape[1]);
    let scratch = cut.scratch();
    let at = |offset: usize| Argument::Pointer(call.workspace().0.offset(offset));
    let mut steps = Vec::new();
    let rows = match &call.call.op {
        op @ Op::VocabParallelEmbeddingBackward(_) => {
            let slice_tokens_at = call.workspace().0.offset(scratch.bytes);
            steps.push(slice_tokens(device, &tokens, slice_of(op, cut.vocab), slice_tokens_at)?);
            Argument::Pointer(slice_tokens_at)
        }
        _ => tokens.argument(),
    };
    let suffix = if cut.columns.is_multiple_of(WIDTH) { "vector" } else { "scalar" };
    let mut function = |name: &str| device.function("embedding_backward", name, 0);
    let sort = function("embedding_backward_sort")?;
    let sum = function(&format!("embedding_backward_sum_{suffix}"))?;
    let join = function(&format!("embedding_backward_join_{suffix}"))?;

    let rows_per_cta = cut.rows_per_cta(device.sm_count() as usize);
    let sort_ctas = cut.vocab.div_ceil(rows_per_cta).max(1) as u32;
    let sort_arguments = vec![
        rows,
        at(scratch.sorted),
        at(scratch.firsts),
        Argument::U32(cut.tokens as u32),
        Argument::U32(cut.vocab as u32),
        Argument::U32(rows_per_cta as u32),
        Argument::I32(padding_of(&call.call.op)),
    ];
    let sizes = [Argument::U32(cut.vocab as u32), Argument::U32(cut.columns as u32)];
    let slices = Argument::U32(cut.slices as u32);
    let accumulate = Argument::U32(call.accumulate().into());
    let mut sum_arguments = vec![
        rows,
        dout.argument(),
        dtable.argument(),
        at(scratch.sorted),
        at(scratch.firsts),
        at(scratch.partials),
        at(scratch.spans),
    ];
    sum_arguments.extend(sizes);
    sum_arguments.extend([Argument::U32(cut.items() as u32), slices, accumulate]);
    let sum_ctas = cut.sum_ctas(call.accumulate()) as u32;
    steps.push(Device::launch(sort, sort_ctas, SORT_THREADS, 0, sort_arguments));
    steps.push(Device::launch(sum, sum_ctas, SUM_THREADS, 0, sum_arguments));
    // The last chunk needs no join: a row of several chunks begins in an earlier chunk.
    if cut.chunks > 1 && cut.slices > 0 {
        let mut join_arguments =
            vec![dtable.argument(), at(scratch.firsts), at(scratch.partials), at(scratch.spans)];
        join_arguments.extend(sizes);
        join_arguments.extend([slices, accumulate]);
        let join_ctas = cut.items() as u32;
        steps.push(Device::launch(join, join_ctas, JOIN_THREADS, 0, join_arguments));
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_and_the_table_are_covered() {
        for ((tokens, vocab, columns), (rows_per_cta, items, adding, all)) in [
            ((32_768, 32_000, 768), (243, 512 * 6, 384, 384 + 1000)),
            ((16_384, 256, 1024), (2, 256 * 8, 256, 256 + 8)),
            ((65, 128_256, 129), (256, 4, 1, 1 + 4008)),
            ((64, 33, 128), (1, 1, 1, 1 + 2)),
            ((0, 5, 8), (1, 0, 1, 1)),
            ((0, 0, 0), (1, 0, 1, 1)),
        ] {
            let cut = Cut::new(tokens, vocab, columns);
            let what = format!("{tokens} of {vocab}x{columns}");
            assert_eq!(cut.rows_per_cta(132), rows_per_cta, "{what}");
            assert_eq!(cut.items(), items, "{what}");
            assert_eq!((cut.sum_ctas(true), cut.sum_ctas(false)), (adding, all), "{what}");
        }
    }

    #[test]
    fn parts_of_the_scratch_do_not_overlap() {
        for (tokens, vocab, columns) in [(0, 0, 0), (1, 1, 1), (65, 33, 7), (4096, 32_000, 768)] {
            let cut = Cut::new(tokens, vocab, columns);
            let Scratch { sorted, firsts, spans, partials, bytes } = cut.scratch();
            assert_eq!(sorted, 0);
            assert!(firsts >= 4 * tokens && spans >= firsts + 4 * (vocab + 1));
            assert!(partials >= spans + 4 * cut.chunks && partials.is_multiple_of(16));
            assert!(bytes >= partials + 8 * cut.chunks * columns);
        }
    }
}
