//! `adamw_quantize.cu` against `adamw.cu` and the CPU's quantization of what that leaves: weights,
//! moments, data, scales and counters are the same to the bit.

use std::slice::from_ref;

use deepwell_ir::ops::{
    AdamW, AdamWCoefficients, Axis, Cast, CopyKind, MomentFormat, Quantize, WeightCopy,
};
use deepwell_ir::{DType, KernelCatalog, KernelRequest, Op, OperandType};
use deepwell_kernels::cuda::{Architecture, CudaCatalog, cuda_target};
use deepwell_precision::moments::Moment;
use deepwell_precision::{BlockShape, Granularity, QuantFormat};

use crate::adamw_fp8::{encoded, with_odd_gradients};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::quantize::{KINDS, assert_same, numbers, stack_reference};

const SQUARE: QuantFormat =
    QuantFormat::MXFP8.with_granularity(Granularity::G128).with_shape(BlockShape::Square);

/// What becomes of a weight beside its update.
#[derive(Clone, Copy, Debug)]
enum Copied {
    Not,
    Bf16,
    Along(Axis),
}

/// A weight of so many matrices, whose numbers are of a kind; how it is copied.
type Case = (usize, [usize; 2], &'static str, Copied);

/// Numbers that an update leaves as they are where the gradient and the moments are zero.
fn is_special(kind: &str) -> bool {
    !matches!(kind, "random" | "wide")
}

/// A moment of these values.
fn moment(dims: &[usize], values: &[f32], of: Moment, format: MomentFormat) -> HostTensor {
    match format {
        MomentFormat::Fp32 => HostTensor::f32(dims, values),
        MomentFormat::Fp8 => encoded(values, of),
    }
}

struct Parameter {
    matrices: usize,
    shape: [usize; 2],
    copied: Copied,
    /// Gradient, master, first and second moment.
    state: [HostTensor; 4],
    /// What is where the copy goes.
    before: Vec<HostTensor>,
}

impl Parameter {
    fn new(
        seed: u64,
        &(matrices, shape, kind, copied): &Case,
        masters: DType,
        moments: MomentFormat,
    ) -> Parameter {
        let [rows, columns] = shape;
        let len = matrices * rows * columns;
        let master: Vec<f32> = (0..matrices).flat_map(|_| numbers(kind, rows, columns)).collect();
        let random = |seed: u64, scale: f32| match is_special(kind) {
            true => vec![0.0; len],
            false => uniform(len, seed, scale),
        };
        let squares: Vec<f32> = random(seed + 2, 0.1).iter().map(|x| x * x).collect();
        let dims = [matrices, rows, columns];
        let dims = if matrices > 1 { &dims[..] } else { &dims[1..] };
        let gradient = match kind {
            "wide" => with_odd_gradients(random(seed, 0.3)),
            _ => random(seed, 0.3),
        };
        let gradient = HostTensor::f32(dims, &gradient);
        let master = match masters {
            DType::Bf16 => HostTensor::bf16(dims, &master),
            _ => HostTensor::f32(dims, &master),
        };
        let first = moment(dims, &random(seed + 1, 0.1), Moment::First, moments);
        let second = moment(dims, &squares, Moment::Second, moments);
        let state = [gradient, master, first, second];
        let mut parameter = Parameter { matrices, shape, copied, state, before: Vec::new() };
        let (mut before, _) = parameter.copies_of(&vec![0.0; len]);
        before.iter_mut().for_each(|tensor| tensor.bytes.fill(0xA5));
        parameter.before = before;
        parameter
    }

    fn kind(&self) -> Option<CopyKind> {
        match self.copied {
            Copied::Not => None,
            Copied::Bf16 => Some(CopyKind::Cast(Cast { to: DType::Bf16 })),
            Copied::Along(axis) => Some(CopyKind::Quantize(Quantize { format: SQUARE, axis })),
        }
    }

    /// The tensors of a copy of such a weight, empty, and their bytes.
    fn copies_of(&self, master: &[f32]) -> (Vec<HostTensor>, Vec<Vec<u8>>) {
        match self.kind() {
            None => (Vec::new(), Vec::new()),
            Some(CopyKind::Cast(_)) => {
                let copy = HostTensor::bf16(&self.state[1].shape, master);
                let bytes = copy.bytes.clone();
                (vec![copy], vec![bytes])
            }
            Some(CopyKind::Quantize(quantize)) => {
                let len = self.shape[0] * self.shape[1];
                let matrices: Vec<Vec<f32>> = master.chunks(len).map(<[f32]>::to_vec).collect();
                let (mut empty, expected) = stack_reference(&matrices, self.shape, &quantize);
                for tensor in empty.iter_mut().filter(|tensor| tensor.dtype != DType::U64) {
                    if self.matrices == 1 {
                        tensor.shape.remove(0);
                    }
                }
                (empty, expected)
            }
        }
    }
}

/// A step over a bucket of such parameters, applied or skipped.
fn check(gpu: &mut Gpu, cases: &[Case], applies: bool, masters: DType, moments: MomentFormat) {
    let parameters: Vec<Parameter> = cases
        .iter()
        .enumerate()
        .map(|(index, case)| Parameter::new(10 * index as u64, case, masters, moments))
        .collect();
    // As of a second step: what 1 / sqrt(1 - 0.95^2) and 1e-3 / (1 - 0.9^2) are near to.
    let coefficients: [f32; AdamWCoefficients::COUNT] =
        [if applies { 2.0 } else { 0.0 }, 1e-3, 0.7, 0.1, 0.95, 0.05, 5.26e-3, 3.2, 1e-8];
    let coefficients = HostTensor::f32(&[coefficients.len()], &coefficients);
    let weight_decay: Vec<f32> = cases
        .iter()
        .enumerate()
        .map(|(index, case)| if is_special(case.2) || index % 3 == 1 { 0.0 } else { 0.1 })
        .collect();
    let copies: Vec<WeightCopy> = parameters
        .iter()
        .enumerate()
        .filter_map(|(parameter, it)| Some(WeightCopy { parameter, kind: it.kind()? }))
        .collect();
    let options = RunOptions { update: true, ..RunOptions::default() };
    let states: Vec<HostTensor> = parameters.iter().flat_map(|it| it.state.clone()).collect();
    // The program has parameters before these.
    let bucket = 3..3 + parameters.len();
    let plain = AdamW { parameters: bucket, weight_decay, copies: Vec::new(), moments };
    let fused = AdamW { copies, ..plain.clone() };
    let expected = gpu.run_with(plain, from_ref(&coefficients), &states, options);
    let before: Vec<HostTensor> = parameters.iter().flat_map(|it| it.before.clone()).collect();
    let got =
        gpu.run_with(fused, from_ref(&coefficients), &[&states[..], &before].concat(), options);
    let mut next = states.len();
    for (index, parameter) in parameters.iter().enumerate() {
        let what = format!("{:?}, {masters}, {moments:?}, applies: {applies}", cases[index]);
        for place in 4 * index..4 * index + 4 {
            let operand = ["gradient", "master", "m", "v"][place % 4];
            assert!(got[place].bytes == expected[place].bytes, "{what}: {operand} differs");
        }
        let count = parameter.before.len();
        let copied = &got[next..next + count];
        next += count;
        let master: Vec<f32> = got[4 * index + 1].to_f64().iter().map(|&x| x as f32).collect();
        let bytes = match applies {
            true => parameter.copies_of(&master).1,
            false => parameter.before.iter().map(|tensor| tensor.bytes.clone()).collect(),
        };
        assert_same(&what, copied, &bytes);
    }
}

const BOTH: Copied = Copied::Along(Axis::Both);
const ROW: Copied = Copied::Along(Axis::Row);
const COLUMN: Copied = Copied::Along(Axis::Column);

fn check_buckets(gpu: &mut Gpu) {
    let buckets: [&[Case]; 3] = [
        &[(1, [128, 128], "random", BOTH)],
        // Experts, each with scales of its own; others before, between and behind.
        &[
            (1, [3, 43], "random", Copied::Bf16),
            (3, [128, 256], "wide", BOTH),
            (1, [256, 128], "random", ROW),
            (1, [5, 7], "random", Copied::Not),
            (2, [256, 128], "wide", COLUMN),
            (1, [128, 384], "random", BOTH),
            (1, [16, 64], "wide", Copied::Bf16),
        ],
        &[(2, [128, 128], "wide", ROW), (1, [384, 256], "wide", COLUMN)],
    ];
    for bucket in buckets {
        for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
            for applies in [true, false] {
                check(gpu, bucket, applies, DType::F32, moments);
            }
        }
    }
    // Masters in BF16 have no copies but quantized ones.
    let narrow: [Case; 4] = [
        (1, [128, 256], "random", BOTH),
        (3, [5, 7], "random", Copied::Not),
        (2, [256, 128], "wide", ROW),
        (1, [128, 128], "wide", COLUMN),
    ];
    for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
        for applies in [true, false] {
            check(gpu, &narrow, applies, DType::Bf16, moments);
        }
    }
}

trial!(quantizes_as_the_cpu_does);
fn quantizes_as_the_cpu_does() {
    check_buckets(&mut Gpu::open());
}

trial!(hard_numbers_are_quantized_as_the_cpu_does);
fn hard_numbers_are_quantized_as_the_cpu_does() {
    let mut gpu = Gpu::open();
    for kind in KINDS {
        let bucket = [BOTH, ROW, COLUMN].map(|copied| (1, [128, 256], kind, copied));
        for masters in [DType::F32, DType::Bf16] {
            check(&mut gpu, &bucket, true, masters, MomentFormat::Fp32);
        }
    }
    if gpu.runs(1 << 24, 1 << 18) {
        // More squares than a GPU holds at a time.
        let bucket = [(8, [1408, 2048], "random", BOTH), (1, [640, 128], "wide", BOTH)];
        for masters in [DType::F32, DType::Bf16] {
            for moments in [MomentFormat::Fp32, MomentFormat::Fp8] {
                check(&mut gpu, &bucket, true, masters, moments);
            }
        }
    }
}

trial!(other_copies_are_refused_with_a_reason);
fn other_copies_are_refused_with_a_reason() {
    let target = cuda_target(Architecture::Sm90a, 132, &[]);
    let quantize = |format| CopyKind::Quantize(Quantize { format, axis: Axis::Both });
    let cast = |to| CopyKind::Cast(Cast { to });
    let square = || quantize(SQUARE);
    let cases: [(&[usize], Vec<CopyKind>, Option<&str>); 8] = [
        (&[256, 128], vec![square()], None),
        (&[4, 256, 128], vec![square()], None),
        (&[7], vec![cast(DType::Bf16)], None),
        (&[256, 96], vec![square()], Some("whole squares of 128 x 128, not [256, 96]")),
        (&[256, 128], vec![quantize(QuantFormat::MXFP8)], Some("in squares of 128 x 128 by")),
        (&[256, 128], vec![quantize(QuantFormat::NVFP4)], Some("takes mxfp8, not nvfp4")),
        (&[256, 128], vec![cast(DType::Bf16), square()], Some("one copy of a weight")),
        (&[7], vec![cast(DType::F32)], Some("copies in bf16, not f32")),
    ];
    for (shape, kinds, expected) in cases {
        let weight = OperandType { dtype: DType::F32, shape: shape.to_vec() };
        let copies = kinds.into_iter().map(|kind| WeightCopy { parameter: 0, kind }).collect();
        let moments = MomentFormat::Fp32;
        let op = Op::from(AdamW { parameters: 0..1, weight_decay: vec![0.0], copies, moments });
        let coefficients = vec![AdamWCoefficients::COUNT];
        let coefficients = OperandType { dtype: DType::F32, shape: coefficients };
        let inputs = [vec![coefficients], vec![weight; 4]].concat();
        let outputs = op.outputs_of(&inputs).unwrap();
        let operands = [inputs, outputs].concat();
        let request = KernelRequest { op: &op, operands: &operands, input_count: 5 };
        let selection = CudaCatalog.select(&request, &target);
        match expected {
            None => assert_eq!(selection.unwrap().choice.kernel, "cuda_adamw"),
            Some(reason) => {
                let got = selection.unwrap_err().to_string();
                assert!(got.contains(reason), "expected `{reason}` in: {got}");
            }
        }
    }
}

emulated! {
    adamw_quantize on Sm90a: check_buckets
}
