//! `sm100_mxfp8_gemm.cu`: products of MXFP8 matrices of any granularity, on tcgen05.
//!
//! Operands are what quantizing gives, codes and scales by rows: the kernel itself makes the scale
//! tiles that tensor cores read, in shared memory, so that a call is one launch without workspace.

use deepwell_ir::{DType, KernelRequest, Op};

use super::products::{extents_fit, not_empty};
use crate::KernelError;
use crate::cuda::driver::{
    Argument, DevicePtr, Launch, TensorMapElement, TensorMapSpec, TensorMapSwizzle,
};
use crate::cuda::prepare::{CallView, Device, Step, Tensor};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Rows that a block computes, and elements of depth of a stage, as in the source.
const BLOCK: usize = 128;
/// Rows of one scale tile, and its bytes.
const SCALE_TILE_ROWS: usize = 128;
const SCALE_TILE_BYTES: usize = 512;
/// Shared memory of a block, and what of it is not for stages: room to align the stages, results on
/// their way out, barriers.
const SHARED_LIMIT: usize = 227 << 10;
const SHARED_BESIDE_STAGES: usize = 1024 + 4 * 32 * 128 + 256;
/// Columns of tensor memory.
const TENSOR_COLUMNS: usize = 512;
/// Codes by which rows of operands are apart, as tensor copies want.
const WIDTH: usize = 16;
/// Cycles in which a multiprocessor multiplies 128 rows, one column and 128 in depth: 8192 products
/// of E4M3 each.
const CYCLES_PER_COLUMN: u64 = 2;
/// Bytes of codes that a multiprocessor's tensor core reads from shared memory in a cycle.
const SHARED_BYTES_PER_CYCLE: u64 = 128;
/// Cycles in which a block writes a column of 128 results: assumed, no Blackwell has been timed.
const CYCLES_PER_RESULT_COLUMN: u64 = 8;

pub(super) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_sm100_mxfp8_gemm",
    ops: &["mx_gemm"],
    architectures: &[Architecture::Sm100a, Architecture::Sm103a],
    library: None,
    reject,
    workspace_bytes: no_workspace,
    prepare,
}];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let output = request.operands[request.input_count].dtype;
    if !matches!(output, DType::Bf16 | DType::F32) {
        return Some(format!("gives bf16 or f32, not {output}"));
    }
    if let Some(bias) = request.operands[4..request.input_count].first()
        && bias.dtype != output
    {
        return Some(format!("adds a bias of the result's type, {output}, not {}", bias.dtype));
    }
    let depth = request.operands[0].shape[1];
    if !depth.is_multiple_of(WIDTH) {
        return Some(format!("takes a contraction in multiples of {WIDTH}, not {depth}"));
    }
    not_empty(request, &[0, 2]).or_else(|| extents_fit(request, &[0, 2]))
}

/// What a tile is computed by: a block, or a pair of which each has half of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    blocks: usize,
    columns: usize,
}

/// All that the source has, preferred ones first among equals.
const SHAPES: [Shape; 4] = [
    Shape { blocks: 2, columns: 256 },
    Shape { blocks: 2, columns: 128 },
    Shape { blocks: 1, columns: 256 },
    Shape { blocks: 1, columns: 128 },
];

impl Shape {
    /// Rows of a tile.
    fn rows(self) -> usize {
        self.blocks * BLOCK
    }

    /// Rows of `b` that a block reads.
    fn b_rows(self) -> usize {
        self.columns / self.blocks
    }

    /// Bytes of codes of a stage of one block.
    fn code_bytes(self) -> usize {
        (BLOCK + self.b_rows()) * BLOCK
    }

    /// Dynamic shared memory: as many stages as fit.
    fn shared_bytes(self) -> u32 {
        let scale_tiles = 1 + self.columns / SCALE_TILE_ROWS;
        let stage = self.code_bytes() + scale_tiles * SCALE_TILE_BYTES;
        let stages = (SHARED_LIMIT - SHARED_BESIDE_STAGES) / stage;
        (SHARED_BESIDE_STAGES + stages * stage) as u32
    }

    /// Whether tensor memory holds two accumulators, so that one is written while the other is
    /// computed.
    fn overlaps(self) -> bool {
        let scale_columns = 4 * (1 + self.columns / SCALE_TILE_ROWS);
        2 * self.columns + scale_columns <= TENSOR_COLUMNS
    }

    fn tiles(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.rows()) * columns.div_ceil(self.columns)
    }

    /// Cycles that a product takes, by a model: whole waves of tiles, each bound by products or by
    /// shared memory, and by results where they do not overlap.
    fn cycles(self, rows: usize, columns: usize, depth: usize, multiprocessors: u32) -> u64 {
        let at_once = (multiprocessors as usize / self.blocks).max(1);
        let waves = self.tiles(rows, columns).div_ceil(at_once) as u64;
        let products = CYCLES_PER_COLUMN * self.columns as u64;
        let reads = self.code_bytes() as u64 / SHARED_BYTES_PER_CYCLE;
        let multiply = depth.div_ceil(BLOCK) as u64 * products.max(reads);
        let write = CYCLES_PER_RESULT_COLUMN * self.columns as u64;
        if self.overlaps() {
            waves * multiply.max(write) + write
        } else {
            waves * (multiply + write)
        }
    }

    /// The shape that takes the fewest cycles, and among those computes least beyond the edges.
    fn choose(rows: usize, columns: usize, depth: usize, multiprocessors: u32) -> Shape {
        SHAPES
            .into_iter()
            .min_by_key(|shape| {
                let cycles = shape.cycles(rows, columns, depth, multiprocessors);
                (cycles, shape.tiles(rows, columns) * shape.rows() * shape.columns)
            })
            .unwrap_or(SHAPES[0])
    }

    fn kernel(self, output: DType) -> String {
        let element = if output == DType::Bf16 { "bf16" } else { "f32" };
        format!("sm100_mxfp8_gemm_{}x{}_{element}", self.rows(), self.columns)
    }

    /// Blocks of the grid: each walks several tiles when there are more than fit the device.
    fn grid(self, rows: usize, columns: usize, multiprocessors: u32) -> u32 {
        let at_once = (multiprocessors as usize / self.blocks).max(1);
        (self.tiles(rows, columns).min(at_once) * self.blocks) as u32
    }
}

/// A box of `box_rows` rows and 128 codes of an operand.
fn codes_map(codes: &Tensor, box_rows: usize) -> TensorMapSpec {
    let [rows, depth] = [0, 1].map(|axis| codes.shape[axis] as u64);
    TensorMapSpec {
        base: codes.pointer,
        element: TensorMapElement::U8,
        sizes: vec![depth, rows],
        strides_bytes: vec![depth],
        box_sizes: vec![BLOCK as u32, box_rows as u32],
        swizzle: TensorMapSwizzle::Bytes128,
    }
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (a, b, out) = (call.input(0), call.input(2), call.output(0));
    let (rows, columns, depth) = (a.shape[0], b.shape[0], a.shape[1]);
    let has_bias = matches!(&call.call.op, Op::MxGemm(op) if op.bias);
    let bias = if has_bias { call.input(4).pointer } else { DevicePtr(0) };
    let multiprocessors = device.multiprocessors();
    let shape = Shape::choose(rows, columns, depth, multiprocessors);
    let shared_bytes = shape.shared_bytes();
    let function = device.function("sm100_mxfp8_gemm", &shape.kernel(out.dtype), shared_bytes)?;
    let arguments = vec![
        Argument::TensorMap(device.tensor_map(&codes_map(&a, BLOCK))?),
        call.input(1).argument(),
        Argument::TensorMap(device.tensor_map(&codes_map(&b, shape.b_rows()))?),
        call.input(3).argument(),
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(rows as i32),
        Argument::I32(columns as i32),
        Argument::I32(depth as i32),
        Argument::U32(call.accumulate().into()),
    ];
    Ok(vec![Step::Launch(Launch {
        function,
        grid: [shape.grid(rows, columns, multiprocessors), 1, 1],
        block: [THREADS, 1, 1],
        cluster: [shape.blocks as u32, 1, 1],
        shared_bytes,
        programmatic: false,
        arguments,
    })])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{OperandType, Product, ops};
    use deepwell_precision::MxSpec;

    use super::*;

    const B200: u32 = 148;

    #[test]
    fn shapes_fill_the_device() {
        for (rows, columns, depth, expected) in [
            // One tile: the smallest.
            (1, 1, 16, (1, 128)),
            (128, 128, 4096, (1, 128)),
            // Many waves: results are written behind products.
            (16384, 16384, 4096, (2, 128)),
            // 148 tiles of one wave.
            (128 * 148, 128, 8192, (2, 128)),
        ] {
            let shape = Shape::choose(rows, columns, depth, B200);
            assert_eq!((shape.blocks, shape.columns), expected, "{rows} {columns} {depth}");
        }
    }

    #[test]
    fn stages_fit_and_grids_cover() {
        for (shape, shared_bytes, overlaps, kernel, grid) in [
            (SHAPES[0], 223_488, false, "sm100_mxfp8_gemm_256x256_bf16", 4),
            (SHAPES[1], 222_464, true, "sm100_mxfp8_gemm_256x128_bf16", 4),
            (SHAPES[2], 220_416, false, "sm100_mxfp8_gemm_128x256_bf16", 4),
            (SHAPES[3], 220_416, true, "sm100_mxfp8_gemm_128x128_bf16", 4),
        ] {
            assert_eq!(shape.shared_bytes(), shared_bytes, "{shape:?}");
            assert_eq!(shape.overlaps(), overlaps, "{shape:?}");
            assert_eq!(shape.kernel(DType::Bf16), kernel);
            assert_eq!(shape.grid(1000, 1000, 4), grid, "{shape:?}");
            assert_eq!(shape.grid(1, 1, 4), shape.blocks as u32, "{shape:?}");
        }
    }

    #[test]
    fn refusals_say_what_is_taken() {
        let operand = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let spec = MxSpec::default();
        for (rows, depth, output, bias, expected) in [
            (4usize, 32usize, DType::F32, None, None),
            (4, 64, DType::Bf16, Some(DType::Bf16), None),
            (4, 48, DType::F32, None, None),
            (4, 40, DType::F32, None, Some("takes a contraction in multiples of 16, not 40")),
            (0, 64, DType::F32, None, Some("takes no empty matrices")),
            (4, 0, DType::F32, None, Some("takes no empty matrices")),
            (
                4,
                64,
                DType::F32,
                Some(DType::Bf16),
                Some("adds a bias of the result's type, f32, not bf16"),
            ),
        ] {
            let product = Product::Fprop;
            let op: Op =
                ops::MxGemm { product, output, bias: bias.is_some(), a: spec, b: spec }.into();
            let blocks = depth.div_ceil(32);
            let mut operands = vec![
                operand(DType::E4m3, &[rows, depth]),
                operand(DType::E8m0, &[rows, blocks]),
                operand(DType::E4m3, &[3, depth]),
                operand(DType::E8m0, &[3, blocks]),
            ];
            operands.extend(bias.map(|dtype| operand(dtype, &[3])));
            let input_count = operands.len();
            operands.push(operand(output, &[rows, 3]));
            let request = KernelRequest { op: &op, operands: &operands, input_count };
            assert_eq!(reject(&request).as_deref(), expected, "{rows} {depth} {output}");
        }
    }
}
