//! Which fusions are made and which kernels are taken, on each architecture.

use deepwell_ir::ops::{
    Activation, AddRmsNorm, AddUnpermute, Axis, Collective, CollectiveKind, Epilogue,
    ExpertActivation, ExpertSwiGlu, ExpertSwiGluBackward, Fused, Gelu, GeluBackward, GroupedRows,
    LayerNorm, Linear, LinearDgrad, Permute, Quantize, RmsNorm, ScaledGemm, ScaledGroupedGemm,
    SwiGlu, SwiGluBackward,
};
use deepwell_ir::{DType, GemmKind, GroupId, OperandType};
use deepwell_precision::{ElementFormat, Granularity, Hadamard16, QuantFormat};

use super::*;
use crate::SingleCall;
use crate::runtime::cuda::architecture::{COLLECTIVES, CUBLASLT, cuda_target};

fn quantize(of: usize, axis: Axis) -> Epilogue {
    Epilogue::Quantize { of, quantize: Quantize { format: QuantFormat::MXFP8, axis } }
}

fn quantize_as(of: usize, format: QuantFormat) -> Epilogue {
    Epilogue::Quantize { of, quantize: Quantize { format, axis: Axis::Both } }
}

fn gelu(tanh: bool) -> Epilogue {
    Epilogue::Activation { of: 0, function: Activation::Gelu(Gelu { tanh }) }
}

fn gelu_backward(tanh: bool) -> Epilogue {
    Epilogue::Activation { of: 0, function: Activation::GeluBackward(GeluBackward { tanh }) }
}

fn fused(core: impl Into<Op>, epilogue: &[Epilogue], skipped: &[usize]) -> Op {
    let core = Box::new(core.into());
    Fused { core, epilogue: epilogue.to_vec(), skipped: skipped.to_vec() }.into()
}

fn operand(dtype: DType, shape: &[usize]) -> OperandType {
    OperandType { dtype, shape: shape.to_vec() }
}

/// Which kernel is chosen of an op with these inputs.
fn chosen(op: &Op, inputs: &[OperandType], target: &Target) -> Result<String, NoKernel> {
    let mut operands = inputs.to_vec();
    operands.extend(op.outputs_of(inputs).expect("operands of the op"));
    let request = KernelRequest { op, operands: &operands, input_count: inputs.len() };
    let selection = CudaCatalog.select(&request, target);
    assert_eq!(selection.is_ok(), CudaCatalog.predicted_s(&request, target).is_some());
    selection.map(|selection| selection.choice.kernel)
}

#[test]
fn epilogues_of_norms_and_activations_have_a_kernel() {
    let (norm, add) = (|| RmsNorm { eps: 1e-5 }, || AddRmsNorm { eps: 1e-5 });
    let matrix = || operand(DType::Bf16, &[40, 96]);
    let vector = || operand(DType::Bf16, &[96]);
    let check = |op: Op, expected: Option<&str>| {
        let inputs = match op.leading() {
            Op::RmsNorm(_) => vec![matrix(), vector()],
            Op::LayerNorm(_) => vec![matrix(), vector(), vector()],
            Op::AddRmsNorm(_) => vec![matrix(), matrix(), vector()],
            Op::Gelu(_) => vec![matrix()],
            Op::SwiGluBackward(_) => vec![matrix(), matrix(), matrix()],
            _ => vec![matrix(), matrix()],
        };
        for architecture in Architecture::ALL {
            let target = cuda_target(architecture, 132, &[]);
            let what = format!("{} {} on {}", op.name(), op.rule().attributes(), target.arch);
            assert_eq!(chosen(&op, &inputs, &target).ok().as_deref(), expected, "{what}");
        }
    };
    let of_rms = Some("cuda_rms_norm_quantize");
    for axis in [Axis::Row, Axis::Column, Axis::Both] {
        check(fused(norm(), &[quantize(0, axis)], &[0]), of_rms);
        check(fused(add(), &[quantize(1, axis)], &[1]), of_rms);
        check(fused(LayerNorm { eps: 1e-5 }, &[quantize(0, axis)], &[]), {
            Some("cuda_layer_norm_quantize")
        });
        check(fused(SwiGlu {}, &[quantize(0, axis)], &[0]), Some("cuda_swiglu_quantize"));
        for core in [Op::from(Gelu { tanh: false }), GeluBackward { tanh: true }.into()] {
            check(fused(core, &[quantize(0, axis)], &[0]), Some("cuda_gelu_quantize"));
        }
        let both = [quantize(1, axis), quantize(0, axis)];
        let expected = Some("cuda_swiglu_backward_quantize");
        check(fused(SwiGluBackward {}, &both, &[0, 1]), expected);
    }
    // One gradient alone, or each along another axis.
    check(fused(SwiGluBackward {}, &[quantize(1, Axis::Both)], &[1]), None);
    let differ = [quantize(0, Axis::Row), quantize(1, Axis::Column)];
    check(fused(SwiGluBackward {}, &differ, &[0, 1]), None);
    // The sum before a norm; two operands of one result; a function of a norm's elements.
    check(fused(add(), &[quantize(0, Axis::Row)], &[]), None);
    check(fused(add(), &[quantize(0, Axis::Row), quantize(1, Axis::Row)], &[]), None);
    check(fused(norm(), &[quantize(0, Axis::Row), quantize(0, Axis::Column)], &[0]), None);
    check(fused(norm(), &[gelu(true)], &[0]), None);
    // Nothing behind them: other kernels.
    check(norm().into(), Some("cuda_rms_norm"));
    check(SwiGlu {}.into(), Some("cuda_swiglu"));
}

/// Rows of pairs and activations of experts, quantized where they are made.
#[test]
fn epilogues_of_mixtures_have_a_kernel() {
    let matrix = |columns| operand(DType::Bf16, &[288, columns]);
    let gates = || operand(DType::F32, &[10, 3]);
    let maps = || [operand(DType::I32, &[10, 3]), operand(DType::I32, &[288])];
    let activation = ExpertActivation::SwiGlu;
    let check = |op: Op, columns: usize, expected: Option<&str>| {
        let mut inputs = match op.leading() {
            Op::Permute(_) => vec![operand(DType::Bf16, &[10, columns])],
            Op::AddUnpermute(_) => vec![matrix(columns); 2],
            Op::ExpertSwiGlu(_) => vec![matrix(columns), matrix(columns), gates()],
            _ => vec![matrix(columns), matrix(columns), matrix(columns), gates()],
        };
        inputs.extend(maps());
        for architecture in Architecture::ALL {
            let target = cuda_target(architecture, 132, &[]);
            let what = format!("{} {} on {}", op.name(), op.rule().attributes(), target.arch);
            assert_eq!(chosen(&op, &inputs, &target).ok().as_deref(), expected, "{what}");
        }
    };
    let (swiglu, backward) = (
        || Op::from(ExpertSwiGlu { activation }),
        || Op::from(ExpertSwiGluBackward { activation }),
    );
    for axis in [Axis::Row, Axis::Column, Axis::Both] {
        let one = [quantize(0, axis)];
        check(fused(Permute {}, &one, &[0]), 96, Some("cuda_permute_quantize"));
        check(fused(Permute {}, &one, &[]), 96, Some("cuda_permute_quantize"));
        check(fused(Permute {}, &one, &[0]), 100, None);
        check(fused(swiglu(), &one, &[0]), 96, Some("cuda_expert_swiglu_quantize"));
        check(fused(swiglu(), &one, &[0]), 33, None);
        let both = [quantize(0, axis), quantize(1, axis)];
        let expected = Some("cuda_expert_swiglu_backward_quantize");
        check(fused(backward(), &both, &[0, 1]), 96, expected);
        check(fused(backward(), &one, &[0]), 96, None);
    }
    check(Permute {}.into(), 33, Some("cuda_permute"));
    check(swiglu(), 33, Some("cuda_expert_swiglu"));
    check(AddUnpermute {}.into(), 33, Some("cuda_add_unpermute"));
}

/// A GEMM with what follows it: where there is tcgen05, and for widths that the kernels take.
#[test]
fn epilogues_of_gemms_have_a_kernel_where_their_sizes_allow_it() {
    let spec = QuantFormat::MXFP8;
    let mx = |kind, output| ScaledGemm { kind, output, bias: false, a: spec, b: spec };
    let fprop = || mx(GemmKind::Fprop, DType::Bf16);
    let check = |op: &Op, (columns, k): (usize, usize), expected: Option<&str>| {
        let tokens = 40;
        let scales =
            |rows: usize| operand(DType::E8m0, &[rows.div_ceil(128), k.div_ceil(128), 512]);
        let mut inputs = match op.leading() {
            Op::ScaledGemm(_) => vec![
                operand(DType::E4m3, &[tokens, k]),
                scales(tokens),
                operand(DType::E4m3, &[columns, k]),
                scales(columns),
            ],
            Op::Linear(_) => {
                [tokens, columns].map(|rows| operand(DType::Bf16, &[rows, k])).to_vec()
            }
            _ => {
                let shapes = [[tokens, k], [k, columns]];
                shapes.map(|shape| operand(DType::Bf16, &shape)).to_vec()
            }
        };
        let more: usize = op.epilogue().iter().map(Epilogue::input_count).sum();
        inputs.extend(vec![operand(DType::Bf16, &[tokens, columns]); more]);
        for architecture in Architecture::ALL {
            let here = [Architecture::Sm100a, Architecture::Sm103a].contains(&architecture);
            let target = cuda_target(architecture, 4, &[]);
            let what = format!("{} {columns} of {k} on {target:?}", op.name());
            let kernel = chosen(op, &inputs, &target).ok();
            assert_eq!(kernel.as_deref(), expected.filter(|_| here), "{what}");
        }
    };
    let both = quantize(1, Axis::Both);
    let mx_gelu = |skipped: &[usize]| fused(fprop(), &[gelu(true)], skipped);
    let of_mx = Some("cuda_sm100_mxfp8_gemm_fused");
    let of_bf16 = Some("cuda_sm100_bf16_gemm_fused");
    check(&mx_gelu(&[]), (96, 64), of_mx);
    check(&mx_gelu(&[0]), (72, 48), of_mx);
    // Rows in vectors of 16 bytes, of operands and of results; in groups where they quantize.
    check(&mx_gelu(&[0]), (100, 64), None);
    check(&mx_gelu(&[0]), (96, 40), None);
    let gradient = |more: &[Epilogue], skipped: &[usize]| {
        fused(LinearDgrad {}, &[&[gelu_backward(false)], more].concat(), skipped)
    };
    check(&gradient(&[], &[0]), (96, 64), of_bf16);
    check(&gradient(&[], &[0]), (96, 60), None);
    check(&gradient(std::slice::from_ref(&both), &[0, 1]), (96, 64), of_bf16);
    check(&fused(Linear { bias: false }, &[gelu(true)], &[]), (96, 64), of_bf16);
    let quantized = |spec| fused(fprop(), &[gelu(true), quantize_as(1, spec)], &[0, 1]);
    check(&fused(fprop(), &[gelu(true), both], &[1]), (96, 64), of_mx);
    check(&quantized(spec), (96, 64), of_mx);
    check(&quantized(spec), (72, 64), None);
    check(&fused(fprop(), &[quantize(0, Axis::Both)], &[]), (96, 64), of_mx);
    // The GEMM's own result is no operand of another one here, nor is its gradient's function.
    check(&fused(fprop(), &[gelu(true), quantize(0, Axis::Both)], &[]), (96, 64), None);
    check(&fused(fprop(), &[gelu_backward(true)], &[0]), (96, 64), None);
    check(&fused(mx(GemmKind::Dgrad, DType::Bf16), &[gelu_backward(true)], &[0]), (96, 64), of_mx);
    check(&quantized(spec.with_granularity(Granularity::G128)), (256, 64), None);
    check(&quantized(spec.square()), (256, 64), None);
    check(&fused(mx(GemmKind::Fprop, DType::F32), &[gelu(true)], &[]), (96, 64), None);
}

/// The least predicted time, which measured shares of peaks and assumed ones make.
#[test]
fn the_fastest_gemm_is_taken() {
    let linear = || Op::from(Linear { bias: false });
    let fine = QuantFormat::MXFP8;
    let wide = fine.with_granularity(Granularity::G128);
    let mx = |spec: QuantFormat| -> Op {
        let (kind, output) = (GemmKind::Fprop, DType::Bf16);
        let b = spec.square();
        ScaledGemm { kind, output, bias: false, a: spec, b }.into()
    };
    let library = &[CUBLASLT][..];
    let [hopper, blackwell, consumer] =
        [Architecture::Sm90a, Architecture::Sm100a, Architecture::Sm120a];
    for (op, architecture, libraries, expected) in [
        (linear(), hopper, library, "cublaslt_linear"),
        (linear(), hopper, &[], "cuda_sm90_bf16_gemm"),
        (linear(), blackwell, library, "cublaslt_linear"),
        (linear(), blackwell, &[], "cuda_sm100_bf16_gemm"),
        (linear(), consumer, &[], "cuda_bf16_gemm"),
        (mx(wide), hopper, library, "cublaslt_mx_gemm"),
        (mx(wide), hopper, &[], "cuda_sm90_mxfp8_gemm"),
        (mx(fine), hopper, library, "cublaslt_dequantized_mx_gemm"),
        (mx(fine), hopper, &[], "cuda_sm90_dequantized_mxfp8_gemm"),
        (mx(fine), blackwell, library, "cuda_sm100_mxfp8_gemm"),
        (mx(fine), consumer, &[], "cuda_sm120_mxfp8_gemm"),
    ] {
        // Whole models, and what tests on the emulator are.
        for (m, n, k, sms) in [(16384, 2048, 5632, 132), (1024, 256, 256, 148), (64, 96, 64, 4)] {
            let inputs = match op {
                Op::Linear(_) => [m, n].map(|rows| operand(DType::Bf16, &[rows, k])).to_vec(),
                _ => [m, n]
                    .into_iter()
                    .flat_map(|rows: usize| {
                        let scales = [rows.div_ceil(128), usize::div_ceil(k, 128), 512];
                        [operand(DType::E4m3, &[rows, k]), operand(DType::E8m0, &scales)]
                    })
                    .collect(),
            };
            let target = cuda_target(architecture, sms, libraries);
            let what = format!("{} {m},{n},{k} on {target:?}", op.name());
            // Launches before and behind a GEMM take longer than a small one.
            let is_small = m < 1024 && expected.contains("dequantized");
            let expected = if is_small { "cuda_mxfp8_gemm" } else { expected };
            assert_eq!(chosen(&op, &inputs, &target).unwrap(), expected, "{what}");
        }
    }
}

/// Rows of whole groups of 32 have a kernel, however many there are.
#[test]
fn rows_of_whole_groups_have_a_kernel() {
    let norm = fused(RmsNorm { eps: 1e-5 }, &[quantize(0, Axis::Both)], &[0]);
    let target = cuda_target(Architecture::Sm90a, 132, &[]);
    for (rows, columns) in [(0, 32), (1, 32), (31, 96), (4096, 4096), (1 << 20, 16384)] {
        let inputs = [operand(DType::Bf16, &[rows, columns]), operand(DType::Bf16, &[columns])];
        assert_eq!(chosen(&norm, &inputs, &target).unwrap(), "cuda_rms_norm_quantize");
    }
}

/// The kernels of GEMMs and of quantizations, of matrices and of experts.
#[test]
fn nvfp4_is_served_for_matrices_and_for_experts() {
    let format = QuantFormat::NVFP4;
    let hopper = cuda_target(Architecture::Sm90a, 132, &[CUBLASLT]);
    let served = |role, target: &Target| CudaCatalog.serves(&format, role, target).err();
    let planes_of = |stack: &[usize], [rows, k]: [usize; 2], groups: &[usize]| {
        let scales = [stack, &[rows.div_ceil(128), k.div_ceil(64), 512]].concat();
        let data = operand(DType::E2m1, &[stack, &[rows, k]].concat());
        [data, operand(DType::Ue4m3, &scales), operand(DType::F32, groups)]
    };
    let planes = |rows, k: usize| planes_of(&[], [rows, k], &[1]);
    let (kind, output) = (GemmKind::Fprop, DType::Bf16);
    let gemm = Op::from(ScaledGemm { kind, output, bias: false, a: format, b: format });
    let grouped = |kind| {
        let grouped = GroupedRows::new(4, 128);
        Op::from(ScaledGroupedGemm { kind, grouped, output, a: format, b: format })
    };
    for (architecture, kernel, of_experts) in [
        (
            Architecture::Sm90a,
            "cuda_sm90_dequantized_nvfp4_gemm",
            "cuda_sm90_dequantized_nvfp4_grouped_gemm",
        ),
        (Architecture::Sm100a, "cuda_sm100_nvfp4_gemm", "cuda_sm100_nvfp4_grouped_gemm"),
        (Architecture::Sm103a, "cuda_sm100_nvfp4_gemm", "cuda_sm100_nvfp4_grouped_gemm"),
        (Architecture::Sm120a, "cuda_sm120_nvfp4_gemm", "cuda_sm120_nvfp4_grouped_gemm"),
    ] {
        let target = cuda_target(architecture, 132, &[]);
        assert_eq!(served(Role::Linear, &target), None);
        assert_eq!(served(Role::Expert, &target), None);
        let inputs = [planes(512, 256), planes(384, 256)].concat();
        assert_eq!(chosen(&gemm, &inputs, &target).unwrap(), kernel, "{architecture:?}");
        let rows = planes_of(&[], [512, 256], &[4, 1]);
        for (kind, b) in [
            (GemmKind::Fprop, planes_of(&[4], [384, 256], &[4, 1])),
            (GemmKind::Dgrad, planes_of(&[4], [384, 256], &[4, 1])),
            (GemmKind::Wgrad, planes_of(&[], [384, 256], &[4, 1])),
        ] {
            let inputs = [&rows[..], &b, &[operand(DType::I32, &[5])]].concat();
            assert_eq!(chosen(&grouped(kind), &inputs, &target).unwrap(), of_experts, "{kind}");
        }
    }
    let source = [operand(DType::Bf16, &[128, 128])];
    let quantize = Op::from(Quantize { format, axis: Axis::Both });
    assert_eq!(chosen(&quantize, &source, &hopper).unwrap(), "cuda_quantize_nvfp4");
    // One scale for each group of rows, and a stack of matrices.
    let groups = [operand(DType::Bf16, &[128, 128]), operand(DType::I32, &[5])];
    let stack = [operand(DType::Bf16, &[4, 128, 128])];
    for inputs in [&groups[..], &stack] {
        assert_eq!(chosen(&quantize, inputs, &hopper).unwrap(), "cuda_quantize_nvfp4_groups");
    }
    let transform = format.with_hadamard(Some(Hadamard16::TRAINING));
    let quantize = Op::from(Quantize { format: transform, axis: Axis::Column });
    let short = [operand(DType::Bf16, &[120, 128])];
    let reasons = chosen(&quantize, &short, &hopper).unwrap_err().to_string();
    assert!(reasons.contains("a contraction in multiples of 16, not 120"), "{reasons}");
}

/// A format that no kernel takes is planned as BF16, with this reason.
#[test]
fn formats_that_are_not_served_say_why() {
    let rule = |rule| QuantFormat::MXFP8.with_scale_rule(rule);
    let target = cuda_target(Architecture::Sm100a, 148, &[]);
    let of_rule = "CUDA kernels quantize by the scale rules rceil and floor, not min_error";
    for (format, expected) in [
        (rule(ScaleRule::Rceil), None),
        (rule(ScaleRule::OcpFloor), None),
        (rule(ScaleRule::MinError), Some([of_rule, of_rule])),
        // A kernel does not say which others there are.
        (
            QuantFormat::mx(ElementFormat::E2M1),
            Some(["CUDA kernels take mxfp8 and nvfp4, not mxfp4", "takes mxfp8, not mxfp4"]),
        ),
    ] {
        let served = CudaCatalog.serves(&format, Role::Linear, &target);
        assert_eq!(served.err().as_deref(), expected.map(|[reason, _]| reason), "{format}");
        let op = Op::from(Quantize { format, axis: Axis::Both });
        let refused = chosen(&op, &[operand(DType::Bf16, &[128, 128])], &target).err();
        let reasons = refused.map(|error| error.to_string()).unwrap_or_default();
        let of_kernel = expected.map_or("", |[_, reason]| reason);
        assert!(reasons.contains(of_kernel), "{format}: {reasons}");
        assert_eq!(reasons.is_empty(), expected.is_none(), "{format}: {reasons}");
    }
}

/// What NCCL holds is part of the memory of a GPU with others, and of no other.
#[test]
fn memory_of_nccl() {
    let all_to_all = |group, target: &Target| {
        let op = Collective::new(CollectiveKind::AllToAll, GroupId(group), 4);
        let tokens = (DType::F32, vec![8, 32]);
        let tokens = std::slice::from_ref(&tokens);
        let call = SingleCall::new(op, tokens, tokens);
        let choice = call.select(&CudaCatalog, target).unwrap().choice;
        call.program(choice, target.clone(), 1).calls
    };
    let check = |groups: &[(&str, u32)], sends_in: Option<u32>, mib: usize| {
        let mut target = cuda_target(Architecture::Sm90a, 132, &[COLLECTIVES]);
        let calls = sends_in.map_or_else(Vec::new, |group| all_to_all(group, &target));
        let alone = CudaCatalog.fixed_overhead_bytes(&target, &calls);
        let group = |&(name, ranks): &(&str, u32)| ProcessGroup {
            name: name.to_string(),
            ranks: (0..ranks).collect(),
        };
        target.ranks.groups = groups.iter().map(group).collect();
        let held = CudaCatalog.fixed_overhead_bytes(&target, &calls) - alone;
        assert_eq!(held >> 20, mib, "{groups:?}");
        target.gpu = None;
        let emulated = CudaCatalog.fixed_overhead_bytes(&target, &calls);
        assert_eq!(emulated, crate::runtime::cuda::prepare::RESERVED_BYTES, "{groups:?}");
    };
    check(&[], None, 0);
    check(&[("data", 1)], None, 0);
    check(&[("data", 8)], None, 405 + 486);
    check(&[("data", 2), ("tensor", 4)], None, 405 + 2 * 486);
    check(&[("data", 1), ("pipeline", 2)], None, 405 + 486 + 446);
    check(&[("pipeline", 2), ("embedding", 2)], None, 405 + 2 * 486 + 446);
    check(&[("data", 4), ("expert", 4)], None, 405 + 2 * 486);
    check(&[("data", 4), ("expert", 4)], Some(1), 405 + 2 * 486 + 3 * 446);
}
