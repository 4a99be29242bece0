//! Launches of attention kernels that read and write heads through tensor maps.

use std::ops::Range;

use deepwell_ir::ops::AttentionHeads;

use super::cuda::{
    OperandHeads, Sizes, documents_argument, is_extended, scale_log2, sinks_argument,
    window_argument,
};
use crate::KernelError;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{
    Argument, Launch, TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use crate::runtime::cuda::prepare::{CallView, Device, Step};

/// Elements of a box of a head: the width of the swizzle.
pub(super) const BOX_ELEMENTS: usize = 64;
/// Counters: tiles taken, CTAs done.
pub(super) const COUNTERS: usize = 2;

/// A kernel of persistent CTAs that take tiles of queries from a counter. Kernels of a file are
/// named by file and width, with `_extended` for windows, sinks and documents.
pub(super) struct MapKernel {
    pub(super) file: &'static str,
    /// Largest number of elements of a head.
    pub(super) head_dim: usize,
    /// Queries of a tile.
    pub(super) tile_queries: usize,
    /// Rows of a box of queries, of keys and values, and of results.
    pub(super) rows: [usize; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// Boxes of `rows` tokens and 64 elements of one of the heads: `[batch, seq, heads, D]`, or
/// `[batch, heads, seq, D]` in memory. Elements beyond a head or a sequence are filled with zeros,
/// not with the neighbour's.
pub(crate) fn head_boxes(
    tensor: &DeviceTensor,
    sizes: &Sizes,
    heads: OperandHeads,
    rows: usize,
) -> TensorMapSpec {
    let mut boxes = row_boxes(tensor, sizes, heads.count, rows, 0..sizes.seq);
    if heads.are_first {
        let row_bytes = (sizes.head_dim * 2) as u64;
        let head_bytes = row_bytes * sizes.seq as u64;
        boxes.strides_bytes = vec![head_bytes, row_bytes, head_bytes * heads.count as u64];
    }
    boxes
}

/// The same of some tokens of each sequence, with the tokens before the heads.
pub(super) fn row_boxes(
    tensor: &DeviceTensor,
    sizes: &Sizes,
    heads: usize,
    rows: usize,
    tokens: Range<usize>,
) -> TensorMapSpec {
    let batch = sizes.batch_heads / sizes.heads;
    let head_bytes = (sizes.head_dim * 2) as u64;
    let token_bytes = head_bytes * heads as u64;
    TensorMapSpec {
        base: tensor.pointer.offset(tokens.start * token_bytes as usize),
        element: TensorMapElement::Bf16,
        sizes: [sizes.head_dim, heads, tokens.len(), batch].map(|size| size as u64).to_vec(),
        strides_bytes: vec![head_bytes, token_bytes, token_bytes * sizes.seq as u64],
        box_sizes: vec![BOX_ELEMENTS as u32, 1, rows as u32, 1],
        swizzle: TensorMapSwizzle::Bytes128,
    }
}

/// The launch of an attention, if it has any rows: from q, k, v to out and lse.
pub(super) fn launch(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    heads: &AttentionHeads,
    kernel: &MapKernel,
) -> Result<Vec<Step>, KernelError> {
    let [q, k, v] = [0, 1, 2].map(|index| call.input(index));
    let (out, lse): (DeviceTensor, DeviceTensor) = (call.output(0), call.output(1));
    let sizes = Sizes::new(heads, &lse.shape);
    if lse.elements() == 0 {
        return Ok(Vec::new());
    }
    let is_extended = is_extended(heads);
    let ends = if is_extended { "_extended" } else { "" };
    let name = format!("{}_d{}{ends}", kernel.file, kernel.head_dim);
    let function = device.function(kernel.file, &name, kernel.shared_bytes)?;
    let mut arguments = Vec::with_capacity(16);
    let [query_rows, key_rows, result_rows] = kernel.rows;
    let of_values = Sizes { head_dim: heads.value_dim(), ..sizes };
    let [of_q, of_k, of_v, of_out] = OperandHeads::of(heads);
    for (tensor, sizes, of_tensor, rows) in [
        (&q, &sizes, of_q, query_rows),
        (&k, &sizes, of_k, key_rows),
        (&v, &of_values, of_v, key_rows),
        (&out, &of_values, of_out, result_rows),
    ] {
        let boxes = head_boxes(tensor, sizes, of_tensor, rows);
        arguments.push(Argument::TensorMap(device.tensor_map(&boxes)?));
    }
    // Sections of whole groups, whose heads share keys and values.
    let l2_bytes = device.driver.properties().l2_bytes;
    let section = sizes.section(sizes.key_heads(), 2, l2_bytes) * (sizes.heads / sizes.kv_heads);
    arguments.push(lse.argument());
    arguments.push(Argument::Pointer(device.arrival_counters(COUNTERS)?));
    arguments.extend(
        [sizes.seq, sizes.heads, sizes.kv_heads, sizes.batch_heads, section]
            .map(|size| Argument::U32(size as u32)),
    );
    arguments.push(Argument::U32(heads.causal.into()));
    arguments.push(Argument::F32(scale_log2(heads)));
    if is_extended {
        arguments.push(window_argument(heads, sizes.seq));
        arguments.push(sinks_argument(call, heads));
        arguments.push(documents_argument(call, heads, 3));
    }
    let tiles = sizes.seq.div_ceil(kernel.tile_queries) * sizes.batch_heads;
    Ok(vec![Step::Launch(Launch {
        function,
        // Persistent CTAs loop over tiles.
        grid: [tiles.min(device.sm_count() as usize) as u32, 1, 1],
        block: [kernel.threads, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: kernel.shared_bytes,
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::DType;

    use super::*;
    use crate::runtime::cuda::driver::DevicePtr;

    #[test]
    fn boxes_end_where_heads_and_sequences_do() {
        let tensor =
            DeviceTensor { pointer: DevicePtr(256), dtype: DType::Bf16, shape: vec![30, 192] };
        let sizes = Sizes { seq: 10, heads: 4, kv_heads: 2, batch_heads: 12, head_dim: 96 };
        let of = |are_first| head_boxes(&tensor, &sizes, OperandHeads { count: 2, are_first }, 128);
        let boxes = of(false);
        assert_eq!(boxes.sizes, [96, 2, 10, 3]);
        assert_eq!(boxes.strides_bytes, [192, 384, 3840]);
        let first = of(true);
        assert_eq!(first.strides_bytes, [1920, 192, 3840]);
        assert_eq!((&first.sizes, &first.box_sizes), (&boxes.sizes, &boxes.box_sizes));
        assert_eq!(boxes.box_sizes, [64, 1, 128, 1]);
        let of_part = row_boxes(&tensor, &sizes, 2, 128, 4..10);
        assert_eq!(of_part.base, DevicePtr(256 + 4 * 384));
        assert_eq!(of_part.sizes, [96, 2, 6, 3]);
        assert_eq!(of_part.strides_bytes, boxes.strides_bytes);
    }
}
