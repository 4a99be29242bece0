//! Which CUDA kernels there are, for the planner.

use deepwell_ir::{
    Binding, KernelCatalog, KernelChoice, KernelRequest, NoKernel, Op, OperandType, Ranks,
    Rejected, Selection, Target, TensorType,
};

use super::launch::fused;
use super::spec::{Architecture, CudaKernelSpec};
use crate::ops::OPS;
use crate::targets::others_that_serve;

/// The library of matrix products as [`Target::libraries`] names it.
pub const CUBLASLT: &str = "cublaslt";

/// What exchanges data with other ranks, as [`Target::libraries`] names it: a
/// [`DeviceComm`](super::DeviceComm).
pub const COLLECTIVES: &str = "collectives";

/// The CUDA kernels as a catalog.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaCatalog;

/// Every kernel, preferred ones first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    OPS.iter().flat_map(|op| op.cuda).copied().flatten()
}

/// A GPU as a target: the machine's first.
pub fn cuda_target(
    architecture: Architecture,
    multiprocessors: usize,
    libraries: &[&str],
) -> Target {
    Target {
        arch: architecture.target_name().to_string(),
        features: Vec::new(),
        libraries: libraries.iter().map(|&library| library.to_string()).collect(),
        workers: multiprocessors,
        gpu: Some(0),
        ranks: Ranks::default(),
    }
}

/// What a context, its loaded kernels and the vendor's library hold on a GPU before the first
/// allocation of ours, as the driver counts free memory: measured on an H200 with driver 580. An
/// emulated GPU has no context.
const CONTEXT_BYTES: usize = 560 << 20;

impl KernelCatalog for CudaCatalog {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        let op = request.op.name();
        let mut rejected = Vec::new();
        for spec in cuda_kernels().filter(|spec| spec.ops.contains(&op)) {
            match rejection(spec, request, target) {
                Some(reason) => {
                    rejected.push(Rejected { kernel: spec.name.to_string(), reason });
                }
                None => {
                    let selection = spec.select_tile.map(|select| select(request, target));
                    let tile = selection.as_ref().map(|selection| selection.tile);
                    for (tile, reason) in selection.into_iter().flat_map(|found| found.rejected) {
                        let kernel = format!("{} with {tile}", spec.name);
                        rejected.push(Rejected { kernel, reason });
                    }
                    let choice = KernelChoice {
                        kernel: spec.name.to_string(),
                        tile,
                        workspace_bytes: (spec.workspace_bytes)(request, target),
                    };
                    return Ok(Selection { choice, rejected });
                }
            }
        }
        let others = others_that_serve(request, target);
        Err(NoKernel { op, arch: target.arch.clone(), rejected, others })
    }

    /// Yes where one of our kernels makes all of it. Most of them need no sizes: what is quantized
    /// is an operand of a matrix product, so its rows are whole groups of 32, and the kernels take
    /// all such rows that they can index and hold the sums of. Products want rows of whole pieces,
    /// whatever the number of tokens; where a library makes them, they stay its own, since nobody
    /// has measured ours beside them.
    fn fuses(&self, op: &Op, inputs: &[TensorType], target: &Target) -> bool {
        let mut kernels = cuda_kernels().filter(|spec| spec.ops.contains(&op.name()));
        match op {
            Op::WithQuantize(fused) if !is_product(op.leading()) => {
                fused::reject(fused).is_none()
                    && kernels.any(|spec| absence(spec, target).is_none())
            }
            Op::WithQuantize(_) | Op::WithActivation(_) if !is_of_library(op.leading(), target) => {
                let one_token = Binding { batch: 1, seq: 1 };
                let bind = |input: &TensorType| OperandType {
                    dtype: input.dtype,
                    shape: input.shape.bind(&one_token),
                };
                let mut operands: Vec<OperandType> = inputs.iter().map(bind).collect();
                let Ok(outputs) = op.outputs_of(&operands) else { return false };
                operands.extend(outputs);
                let request = KernelRequest { op, operands: &operands, input_count: inputs.len() };
                kernels.any(|spec| rejection(spec, &request, target).is_none())
            }
            _ => false,
        }
    }

    fn fixed_overhead_bytes(&self, target: &Target) -> usize {
        target.gpu.map_or(0, |_| CONTEXT_BYTES) + super::prepare::RESERVED_BYTES
    }
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::Linear(_) | Op::LinearInputGrad(_) | Op::MxGemm(_))
}

/// Whether a library is there that computes `op`, and so is preferred.
fn is_of_library(op: &Op, target: &Target) -> bool {
    cuda_kernels().any(|spec| {
        spec.library.is_some() && spec.ops.contains(&op.name()) && absence(spec, target).is_none()
    })
}

/// Why a kernel is not there on a target.
fn absence(spec: &CudaKernelSpec, target: &Target) -> Option<String> {
    let serves = |known: &Architecture| known.target_name() == target.arch;
    if !spec.architectures.iter().any(serves) {
        let known: Vec<_> = spec.architectures.iter().map(|known| known.target_name()).collect();
        return Some(format!("runs on {}, not on {}", known.join(", "), target.arch));
    }
    let library = spec.library?;
    let is_there = target.libraries.iter().any(|known| known == library);
    (!is_there).then(|| format!("needs the library `{library}`"))
}

fn rejection(
    spec: &CudaKernelSpec,
    request: &KernelRequest<'_>,
    target: &Target,
) -> Option<String> {
    absence(spec, target).or_else(|| (spec.reject)(request))
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{
        AddRmsNorm, Axis, Gelu, GeluBackward, LayerNorm, LinearInputGrad, MxGemm, Quantize,
        QuantizedOutput, RmsNorm, SwiGlu, SwiGluBackward, WithActivation, WithQuantize,
    };
    use deepwell_ir::{DType, Dim, Product, Shape};
    use deepwell_precision::{BlockShape, ElementFormat, Granularity, MxSpec};

    use super::*;

    fn entry(output: usize, axis: Axis) -> QuantizedOutput {
        let quantize = Quantize { spec: MxSpec::default(), axis };
        QuantizedOutput { output, quantize, keep: false }
    }

    fn fused(producer: impl Into<Op>, quantized: Vec<QuantizedOutput>) -> Op {
        WithQuantize { producer: Box::new(producer.into()), quantized }.into()
    }

    #[test]
    fn fusions_are_made_where_one_kernel_does_all() {
        let check = |op: Op, expected: bool| {
            for architecture in Architecture::ALL {
                let target = cuda_target(architecture, 132, &[]);
                let what = format!("{} {} on {}", op.name(), op.rule().attributes(), target.arch);
                assert_eq!(CudaCatalog.fuses(&op, &[], &target), expected, "{what}");
            }
            assert!(!CudaCatalog.fuses(&op, &[], &Target::cpu(2, Vec::new())));
        };
        let (norm, add) = (RmsNorm { eps: 1e-5 }, AddRmsNorm { eps: 1e-5 });
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            check(fused(norm.clone(), vec![entry(0, axis)]), true);
            check(fused(add.clone(), vec![entry(1, axis)]), true);
            check(fused(LayerNorm { eps: 1e-5 }, vec![entry(0, axis)]), true);
            check(fused(SwiGlu {}, vec![entry(0, axis)]), true);
            check(fused(Gelu { tanh: false }, vec![entry(0, axis)]), true);
            check(fused(GeluBackward { tanh: true }, vec![entry(0, axis)]), true);
            check(fused(SwiGluBackward {}, vec![entry(1, axis), entry(0, axis)]), true);
        }
        // One gradient alone, or each along another axis.
        check(fused(SwiGluBackward {}, vec![entry(1, Axis::Both)]), false);
        let differ = vec![entry(0, Axis::Row), entry(1, Axis::Column)];
        check(fused(SwiGluBackward {}, differ), false);
        // Not fused at all; nothing quantized; the sum before a norm; two copies of one output.
        check(norm.clone().into(), false);
        check(fused(norm.clone(), vec![]), false);
        check(fused(add.clone(), vec![entry(0, Axis::Row)]), false);
        check(fused(add, vec![entry(0, Axis::Row), entry(1, Axis::Row)]), false);
        check(fused(norm.clone(), vec![entry(0, Axis::Row), entry(0, Axis::Column)]), false);
        let mut other = entry(0, Axis::Row);
        other.quantize.spec.element = ElementFormat::E5M2;
        check(fused(norm, vec![other]), false);
    }

    /// A product with what follows it: where there is tcgen05, and for widths that the kernels take
    /// whatever the number of tokens.
    #[test]
    fn products_are_fused_with_what_follows_where_their_sizes_allow_it() {
        let spec = MxSpec::default();
        let product = |product, output| MxGemm { product, output, bias: false, a: spec, b: spec };
        let fprop = || -> Op { product(Product::Fprop, DType::Bf16).into() };
        let activated = |product: Op, activation: Op, keep| -> Op {
            let (product, activation) = (Box::new(product), Box::new(activation));
            WithActivation { product, activation, keep }.into()
        };
        let quantized = |producer: Op, output, spec| -> Op {
            let quantize = Quantize { spec, axis: Axis::Both };
            fused(producer, vec![QuantizedOutput { output, quantize, keep: true }])
        };
        let (gelu, backward) = (Gelu { tanh: true }, GeluBackward { tanh: false });
        let mx_gelu = |keep| activated(fprop(), gelu.clone().into(), keep);
        let gradient = activated(LinearInputGrad {}.into(), backward.into(), false);
        let matrix = |dtype, rows: Dim, columns: Dim| TensorType {
            dtype,
            shape: Shape(vec![rows, columns]),
        };
        let scales = |rows: Dim, depth: Dim| TensorType {
            dtype: DType::E8m0,
            shape: Shape(vec![rows.blocks_of(128), depth.blocks_of(128), 512.into()]),
        };
        let check = |op: &Op, (columns, depth): (usize, usize), expected: bool| {
            let tokens = Dim::TOKENS;
            let [columns, depth] = [columns, depth].map(Dim::fixed);
            let inputs = match op.leading() {
                Op::MxGemm(_) => vec![
                    matrix(DType::E4m3, tokens, depth),
                    scales(tokens, depth),
                    matrix(DType::E4m3, columns, depth),
                    scales(columns, depth),
                ],
                _ => vec![
                    matrix(DType::Bf16, tokens, depth),
                    matrix(DType::Bf16, depth, columns),
                    matrix(DType::Bf16, tokens, columns),
                ],
            };
            for architecture in Architecture::ALL {
                let here = [Architecture::Sm100a, Architecture::Sm103a].contains(&architecture);
                // The library has products of BF16 there, none with scales.
                let is_mx = matches!(op.leading(), Op::MxGemm(_));
                for (libraries, serves) in [(&[][..], true), (&[CUBLASLT], is_mx)] {
                    let target = cuda_target(architecture, 4, libraries);
                    let what = format!("{} {columns} of {depth} on {target:?}", op.name());
                    let found = CudaCatalog.fuses(op, &inputs, &target);
                    assert_eq!(found, expected && here && serves, "{what}");
                }
            }
        };
        check(&mx_gelu(true), (96, 64), true);
        check(&mx_gelu(false), (72, 48), true);
        // Rows in pieces of 16 bytes, of operands and of results; in groups where there are copies.
        check(&mx_gelu(false), (100, 64), false);
        check(&mx_gelu(false), (96, 40), false);
        check(&gradient, (96, 64), true);
        check(&gradient, (96, 60), false);
        check(&quantized(mx_gelu(true), 1, spec), (96, 64), true);
        check(&quantized(mx_gelu(false), 0, spec), (96, 64), true);
        check(&quantized(mx_gelu(false), 0, spec), (72, 64), false);
        check(&quantized(fprop(), 0, spec), (96, 64), true);
        check(&quantized(gradient.clone(), 0, spec), (96, 64), true);
        // The product itself is no operand of another one here.
        check(&quantized(mx_gelu(true), 0, spec), (96, 64), false);
        let wide = MxSpec { granularity: Granularity::G128, ..spec };
        check(&quantized(mx_gelu(false), 0, wide), (256, 64), false);
        let square = MxSpec { block: BlockShape::Square, ..spec };
        check(&quantized(fprop(), 0, square), (256, 64), false);
        let in_f32: Op = product(Product::Fprop, DType::F32).into();
        check(&activated(in_f32, gelu.into(), true), (96, 64), false);
    }

    /// What is fused before it has a shape has a kernel when it has one.
    #[test]
    fn rows_of_whole_groups_have_a_kernel() {
        let norm = fused(RmsNorm { eps: 1e-5 }, vec![entry(0, Axis::Both)]);
        let target = cuda_target(Architecture::Sm90a, 132, &[]);
        for (rows, columns) in [(0, 32), (1, 32), (31, 96), (4096, 4096), (1 << 20, 16384)] {
            let matrix = OperandType { dtype: DType::Bf16, shape: vec![rows, columns] };
            let vector = OperandType { dtype: DType::Bf16, shape: vec![columns] };
            let inputs = [matrix, vector];
            let mut operands = inputs.to_vec();
            operands.extend(norm.outputs_of(&inputs).unwrap());
            let request = KernelRequest { op: &norm, operands: &operands, input_count: 2 };
            let selection = CudaCatalog.select(&request, &target).unwrap();
            assert_eq!(selection.choice.kernel, "cuda_rms_norm_quantize");
        }
    }
}
