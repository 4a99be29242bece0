//! Fused ops built by hand: their types, names, FLOPs, and what they refuse.

use deepwell_precision::QuantFormat;

use super::*;
use crate::ops::{
    AddRmsNorm, DualGemm, GroupedGemm, GroupedRows, LayerNorm, Linear, LinearDgrad, Permute,
    RmsNorm, ScaledGemm, SwiGluBackward,
};
use crate::{Dim, GemmKind};

const GROUPED: GroupedRows = GroupedRows::new(8, 32);

fn quantize(of: usize, axis: Axis) -> Epilogue {
    Epilogue::Quantize { of, quantize: Quantize { format: QuantFormat::MXFP8, axis } }
}

fn gelu(of: usize) -> Epilogue {
    Epilogue::Activation { of, function: Activation::Gelu(Gelu { tanh: true }) }
}

fn gelu_backward(of: usize) -> Epilogue {
    let function = Activation::GeluBackward(GeluBackward { tanh: false });
    Epilogue::Activation { of, function }
}

fn swiglu(of: usize) -> Epilogue {
    Epilogue::Activation { of, function: Activation::SwiGlu(SwiGlu {}) }
}

fn fused(core: impl Into<Op>, epilogue: &[Epilogue], skipped: &[usize]) -> Fused {
    let core = Box::new(core.into());
    Fused { core, epilogue: epilogue.to_vec(), skipped: skipped.to_vec() }
}

fn tensor(dtype: DType, dims: &[Dim]) -> TensorType {
    TensorType { shape: Shape(dims.to_vec()), dtype }
}

fn matrix(columns: usize) -> TensorType {
    tensor(DType::Bf16, &[Dim::TOKENS, columns.into()])
}

fn weight(rows: usize, columns: usize) -> TensorType {
    tensor(DType::Bf16, &[rows.into(), columns.into()])
}

fn vector(length: usize) -> TensorType {
    tensor(DType::Bf16, &[length.into()])
}

/// Name, and suffix and shape of each output.
fn text(op: &Fused, inputs: &[TensorType]) -> String {
    let outputs = op.infer(inputs).unwrap();
    assert_eq!(outputs.len(), OpRule::result_count(op));
    let outputs: Vec<String> =
        outputs.iter().map(|output| format!("{}{}", output.suffix, output.shape)).collect();
    let names: std::collections::HashSet<&String> = outputs.iter().collect();
    assert_eq!(names.len(), outputs.len(), "{outputs:?}");
    format!("{}: {}", op.full_name(), outputs.join(" "))
}

#[test]
fn outputs_are_the_stored_results_in_order() {
    let norm = [matrix(64), matrix(64), vector(64)];
    let both = [quantize(1, Axis::Both)];
    let apart = [quantize(1, Axis::Row), quantize(1, Axis::Column)];
    let linear = || Linear { bias: true };
    let kind = [matrix(64), weight(96, 64), vector(96)];
    let all = [Epilogue::Bias { of: 0 }, gelu(1), Epilogue::Residual { of: 2 }];
    let add = [matrix(64), weight(96, 64), vector(96), matrix(96)];
    let dual = DualGemm { gemm: Box::new(Linear { bias: false }.into()) };
    let text: Vec<String> = [
        (fused(AddRmsNorm { eps: 1e-5 }, &both, &[1]), &norm[..]),
        (fused(AddRmsNorm { eps: 1e-5 }, &apart, &[]), &norm),
        (
            fused(SwiGluBackward {}, &[quantize(0, Axis::Column), quantize(1, Axis::Row)], &[0]),
            &[matrix(32), matrix(32), matrix(32)],
        ),
        (
            fused(Permute {}, &[quantize(0, Axis::Both)], &[0]),
            &[
                matrix(64),
                tensor(DType::I32, &[Dim::TOKENS, 3usize.into()]),
                tensor(DType::I32, &[288usize.into()]),
            ],
        ),
        (fused(linear(), &[gelu(0)], &[]), &kind),
        (fused(linear(), &[gelu(0), quantize(1, Axis::Both)], &[0, 1]), &kind),
        (
            fused(LinearDgrad {}, &[gelu_backward(0)], &[0]),
            &[matrix(96), weight(96, 64), matrix(64)],
        ),
        (fused(Linear { bias: false }, &all, &[0, 1, 2]), &add),
        (
            fused(dual, &[swiglu(0), quantize(2, Axis::Row)], &[0, 1, 2]),
            &[matrix(64), weight(96, 64), weight(96, 64)],
        ),
        (
            fused(GroupedGemm { grouped: GROUPED }, &[gelu(0)], &[0]),
            &[
                matrix(64),
                tensor(DType::Bf16, &[8usize.into(), 96usize.into(), 64usize.into()]),
                tensor(DType::I32, &[9usize.into()]),
            ],
        ),
    ]
    .iter()
    .map(|(op, inputs)| text(op, inputs))
    .collect();
    insta::assert_snapshot!(text.join("\n"));
}

#[test]
fn numbers_of_results_places_and_inputs() {
    let op = fused(
        LinearDgrad {},
        &[gelu_backward(0), Epilogue::Residual { of: 1 }, quantize(2, Axis::Both)],
        &[0, 2],
    );
    let places: Vec<Option<usize>> = (0..9).map(|result| op.position(result)).collect();
    let stored = (2..=6).map(Some);
    let expected: Vec<_> =
        [None, Some(0), None].into_iter().chain(stored.map(|p| p.map(|p| p - 1))).collect();
    assert_eq!(places, [expected, vec![None]].concat());
    assert_eq!((op.result_count(), OpRule::result_count(&op)), (8, 6));
    assert_eq!((op.core_input_count(4), op.inputs_of(0, 4), op.inputs_of(1, 4)), (2, 2..3, 3..4));
    let steps: Vec<_> = op.quantizations().map(|step| (step.of, step.positions)).collect();
    assert_eq!(steps, [(2, 1..6)]);
}

#[test]
fn work_is_that_of_all_parts() {
    let (tokens, width) = (64, 96);
    let column = || [vec![width, tokens], vec![1, 1, 512], vec![6]];
    let matrix = || vec![tokens, width];
    let elements = (tokens * width) as u64;
    // Inputs, then outputs; the shape of what is skipped comes from what is made of it.
    for (op, shapes, expected) in [
        (
            fused(SwiGlu {}, &[quantize(0, Axis::Column)], &[0]),
            [&[matrix(), matrix()][..], &column()].concat(),
            (5 + 3) * elements,
        ),
        (
            fused(Linear { bias: false }, &[gelu(0)], &[]),
            vec![vec![tokens, 32], vec![width, 32], matrix(), matrix()],
            (2 * 32 + 8) * elements,
        ),
        (
            fused(Linear { bias: false }, &[gelu(0), quantize(1, Axis::Column)], &[0, 1]),
            [&[vec![tokens, 32], vec![width, 32]][..], &column()].concat(),
            (2 * 32 + 8 + 3) * elements,
        ),
        (
            fused(
                DualGemm { gemm: Box::new(Linear { bias: false }.into()) },
                &[swiglu(0), Epilogue::Residual { of: 2 }],
                &[0, 1, 2],
            ),
            vec![vec![tokens, 32], vec![width, 32], vec![width, 32], matrix(), matrix()],
            (2 * 2 * 32 + 5 + 1) * elements,
        ),
    ] {
        // DualGemm counts by its inputs and two results.
        assert_eq!(op.flops(&shapes), expected, "{}", op.full_name());
    }
}

#[test]
fn attributes_say_what_reads_what() {
    let mx = ScaledGemm {
        kind: GemmKind::Fprop,
        output: DType::Bf16,
        bias: true,
        a: QuantFormat::MXFP8,
        b: QuantFormat::MXFP8,
    };
    let op = fused(mx, &[gelu(0), quantize(1, Axis::Both)], &[1]);
    assert_eq!(
        op.attributes(),
        "fprop bias; gelu of 0: tanh; quantize of 1: axis=both mxfp8 1x32; skips 1"
    );
    let op = Op::from(fused(RmsNorm { eps: 0.5 }, &[quantize(0, Axis::Row)], &[0]));
    assert_eq!(op.name(), "rms_norm_quantize");
    assert_eq!(op.leading().name(), "rms_norm");
    let json = serde_json::to_string(&op).unwrap();
    assert_eq!(serde_json::from_str::<Op>(&json).unwrap(), op);
}

#[test]
fn wrong_ones_are_refused() {
    let two = [matrix(32), matrix(32)];
    let norm = [matrix(32), vector(32)];
    let row = |of| quantize(of, Axis::Row);
    for (op, inputs, expected) in [
        (fused(SwiGlu {}, &[], &[]), &two[..], "at least one step behind the core, got none"),
        (fused(SwiGlu {}, &[row(1)], &[]), &two, "results below 1 for `quantize of 1"),
        (fused(SwiGlu {}, &[row(0)], &[1]), &two, "skipped results that a step reads, got 1"),
        (fused(SwiGlu {}, &[row(0), row(0)], &[0, 0]), &two, "ascending skipped results"),
        (
            fused(RmsNorm { eps: 1e-5 }, &[row(1)], &[]),
            &norm,
            "an activation as result 1 for `quantize of 1",
        ),
        // Quantized data are no operand of a step.
        (fused(SwiGlu {}, &[row(0), row(1)], &[]), &two, "an activation as result 1"),
        (
            fused(fused(SwiGlu {}, &[row(0)], &[]), &[row(0)], &[]),
            &two,
            "a core that is not fused itself, got swiglu_quantize",
        ),
        (fused(LayerNorm { eps: 1e-5 }, &[gelu(0)], &[0]), &norm, "`layer_norm`: expected 3"),
        // The gradient of a gelu reads what went into it: as wide as what it gets.
        (
            fused(LinearDgrad {}, &[gelu_backward(0)], &[0]),
            &[matrix(96), weight(96, 64), matrix(96)],
            "`gelu_backward`: expected operand 1",
        ),
        (
            fused(Linear { bias: false }, &[Epilogue::Bias { of: 0 }], &[0]),
            &[matrix(64), weight(96, 64), vector(64)],
            "`bias`: expected operand 1 [96]",
        ),
        (
            fused(DualGemm { gemm: Box::new(SwiGlu {}.into()) }, &[swiglu(0)], &[0, 1]),
            &two,
            "two of `linear`",
        ),
        (
            fused(DualGemm { gemm: Box::new(Linear { bias: false }.into()) }, &[swiglu(0)], &[]),
            &two,
            "as many operands for either GEMM, got 2",
        ),
    ] {
        let message = op.infer(inputs).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
