//! `adamw.cu`: against the CPU's kernel, which its own tests compare with the oracle.

use std::ops::Range;

use deepwell_ir::DType;
use deepwell_ir::ops::{self, Cast, CopyKind, WeightCopy};
use deepwell_kernels::ops::adamw::cpu::{AdamwTensor, StepScalars, adamw as cpu_adamw};

use crate::compare::{Tolerance, assert_close};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

const LEARNING_RATE: f32 = 3e-3;
const LARGEST_NORM: f32 = 1.0;

#[derive(Clone)]
struct Parameter {
    master: Vec<f32>,
    first_moment: Vec<f32>,
    second_moment: Vec<f32>,
}

const COEFFICIENTS: ops::AdamWCoefficients =
    ops::AdamWCoefficients { beta1: 0.9, beta2: 0.95, eps: 1e-8, of_bucket: false };

struct State {
    weight_decay: Vec<f32>,
    counters: [u64; 2],
    parameters: Vec<Parameter>,
    /// What is made of every second weight, as it was left.
    copies: Vec<Option<HostTensor>>,
}

/// Whether a parameter is copied to BF16.
fn is_copied(index: usize) -> bool {
    index.is_multiple_of(2)
}

fn bf16(values: &[f32]) -> HostTensor {
    HostTensor::bf16(&[values.len()], values)
}

impl State {
    fn new(lengths: &[usize]) -> State {
        let parameter = |(index, &len): (usize, &usize)| Parameter {
            master: uniform(len, index as u64, 1.0),
            first_moment: vec![0.0; len],
            second_moment: vec![0.0; len],
        };
        let decays = [0.1, 0.0, 0.01];
        State {
            weight_decay: (0..lengths.len()).map(|index| decays[index % 3]).collect(),
            counters: [0, 0],
            parameters: lengths.iter().enumerate().map(parameter).collect(),
            // What nobody would make of a weight.
            copies: (0..lengths.len())
                .map(|index| is_copied(index).then(|| bf16(&vec![777.0; lengths[index]])))
                .collect(),
        }
    }

    /// One step on the GPU, in two buckets, of which one with a single parameter runs
    /// `adamw_single.cu`; the gradients must be left as they are.
    fn step_on(&mut self, gpu: &mut Gpu, gradients: &[Vec<f32>], norm: f32) {
        let options = RunOptions { update: true, ..RunOptions::default() };
        let inputs =
            [HostTensor::f32(&[1], &[norm]), HostTensor::f32(&[2], &[LEARNING_RATE, LARGEST_NORM])];
        // What the coefficients hold before is nobody's business.
        let before = [f32::NAN; ops::AdamWCoefficients::COUNT];
        let updated =
            [HostTensor::u64(&[2], &self.counters), HostTensor::f32(&[before.len()], &before)];
        let made = gpu.run_with(COEFFICIENTS, &inputs, &updated, options);
        let counters = made[0].to_u64();
        self.counters = [counters[0], counters[1]];
        let first = self.parameters.len() / 2;
        for bucket in [0..first, first..self.parameters.len()] {
            self.update_on(gpu, &gradients[bucket.clone()], bucket, &made[1]);
        }
    }

    fn update_on(
        &mut self,
        gpu: &mut Gpu,
        gradients: &[Vec<f32>],
        bucket: Range<usize>,
        coefficients: &HostTensor,
    ) {
        let options = RunOptions { update: true, ..RunOptions::default() };
        let vector = |values: &[f32]| HostTensor::f32(&[values.len()], values);
        let parameters = &mut self.parameters[bucket.clone()];
        let copied: Vec<usize> = bucket.clone().filter(|&index| is_copied(index)).collect();
        let mut updated: Vec<HostTensor> = parameters
            .iter()
            .zip(gradients)
            .flat_map(|(parameter, gradient)| {
                let Parameter { master, first_moment, second_moment } = parameter;
                [gradient, master, first_moment, second_moment].map(|values| vector(values))
            })
            .collect();
        updated.extend(copied.iter().filter_map(|&index| self.copies[index].clone()));
        let weight_decay = self.weight_decay[bucket.clone()].to_vec();
        let to_bf16 = |index: &usize| WeightCopy {
            parameter: index - bucket.start,
            kind: CopyKind::Cast(Cast { to: DType::Bf16 }),
        };
        let copies = copied.iter().map(to_bf16).collect();
        let moments = ops::MomentFormat::Fp32;
        let op = ops::AdamW { parameters: bucket, weight_decay, copies, moments };
        let first_copy = 4 * parameters.len();
        let got = gpu.run_with(op, std::slice::from_ref(coefficients), &updated, options);
        for (index, copy) in copied.iter().zip(&got[first_copy..]) {
            self.copies[*index] = Some(copy.clone());
        }
        let floats = |index: usize| -> Vec<f32> { bytemuck::pod_collect_to_vec(&got[index].bytes) };
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let first = 4 * index;
            assert_eq!(got[first].bytes, updated[first].bytes, "gradient {index} was written");
            *parameter = Parameter {
                master: floats(first + 1),
                first_moment: floats(first + 2),
                second_moment: floats(first + 3),
            };
        }
    }

    /// After a step: copies are of the new weights, or, where it was skipped, what they were.
    fn check_copies(&self, before: &[Option<HostTensor>], norm: f32) {
        for (index, copy) in self.copies.iter().enumerate() {
            let Some(copy) = copy else { continue };
            let expected = match &before[index] {
                Some(before) if !norm.is_finite() => before.clone(),
                _ => bf16(&self.parameters[index].master),
            };
            assert_eq!(copy.bytes, expected.bytes, "copy of tensor {index}, norm {norm}");
        }
    }

    /// The same step by the CPU's kernel, from the same state.
    fn step_on_cpu(&mut self, gradients: &[Vec<f32>], norm: f32) {
        if !norm.is_finite() {
            self.counters[1] += 1;
            return;
        }
        self.counters[0] += 1;
        let scalars = StepScalars {
            learning_rate: LEARNING_RATE.into(),
            beta1: COEFFICIENTS.beta1.into(),
            beta2: COEFFICIENTS.beta2.into(),
            eps: COEFFICIENTS.eps.into(),
            max_grad_norm: LARGEST_NORM.into(),
            step: self.counters[0],
            grad_norm: norm,
        };
        let tensors = self.parameters.iter_mut().zip(gradients).zip(&self.weight_decay);
        let mut tensors: Vec<AdamwTensor<'_>> = tensors
            .map(|((parameter, grad), &decay)| AdamwTensor {
                param: &mut parameter.master,
                grad,
                m: &mut parameter.first_moment,
                v: &mut parameter.second_moment,
                weight_decay: decay.into(),
            })
            .collect();
        assert!(!cpu_adamw(&mut tensors, &scalars).skipped);
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

fn compare(what: &str, gpu: &State, cpu: &State) {
    assert_eq!(gpu.counters, cpu.counters, "{what}");
    for (index, (a, b)) in gpu.parameters.iter().zip(&cpu.parameters).enumerate() {
        let what = format!("{what}, tensor {index}");
        // Every operation is rounded as on the CPU, and so are the coefficients of the moments.
        let exact = Tolerance { absolute: 0.0, relative: 0.0 };
        let (m, v) = (wide(&b.first_moment), wide(&b.second_moment));
        assert_close(&format!("{what}: m"), &wide(&a.first_moment), &m, exact);
        assert_close(&format!("{what}: v"), &wide(&a.second_moment), &v, exact);
        // The corrections of the moments come from FP64 powers, whose last bit may differ and
        // turn one rounding to FP32: an ulp of two coefficients on the update, at most 10 learning
        // rates, and one of the result.
        let absolute = 10.0 * f64::from(LEARNING_RATE) * 2f64.powi(-22);
        let tolerance = Tolerance { absolute, relative: 2f64.powi(-23) };
        assert_close(&format!("{what}: master"), &wide(&a.master), &wide(&b.master), tolerance);
    }
}

trial!(several_steps_as_on_the_cpu);
fn several_steps_as_on_the_cpu() {
    let mut gpu = Gpu::open();
    let tables: [&[usize]; 7] = [
        &[],
        &[1],
        &[0, 3, 4, 5, 0],
        &[1023, 1024, 1025, 1],
        &[4095, 4096, 4097, 1],
        &[2049, 1023, 7, 100_001, 64, 12_289],
        // More CTAs than a GPU holds.
        &[3, 2_500_003],
    ];
    for lengths in tables {
        if gpu.runs(lengths.iter().sum(), 1 << 18) {
            check_steps(&mut gpu, lengths);
        }
    }
}

/// Steps of tensors of these lengths: clipped, not clipped, skipped twice, applied again.
pub(crate) fn check_steps(gpu: &mut Gpu, lengths: &[usize]) {
    let (mut on_gpu, mut on_cpu) = (State::new(lengths), State::new(lengths));
    for (step, norm) in [3.0, 0.5, f32::NAN, f32::INFINITY, 1.0].into_iter().enumerate() {
        let gradients: Vec<Vec<f32>> = lengths
            .iter()
            .enumerate()
            .map(|(index, &len)| uniform(len, (100 * step + index) as u64, 0.3))
            .collect();
        let copies = on_gpu.copies.clone();
        on_gpu.step_on(gpu, &gradients, norm);
        on_gpu.check_copies(&copies, norm);
        on_cpu.step_on_cpu(&gradients, norm);
        compare(&format!("{} tensors, step {step}", lengths.len()), &on_gpu, &on_cpu);
        // From here on the same again: differences do not add up.
        on_gpu.parameters.clone_from(&on_cpu.parameters);
    }
    assert_eq!(on_gpu.counters, [3, 2]);
}

trial!(late_steps_and_extreme_gradients_as_on_the_cpu);
fn late_steps_and_extreme_gradients_as_on_the_cpu() {
    let mut gpu = Gpu::open();
    let gradients = vec![vec![0.0, -0.0, 1e-45, -1e-38, 1e-20, 1e18, -1e18, 3e38, 1.0]];
    for applied in [0, 1, 9, 999, 100_000, u64::from(u32::MAX) + 5] {
        let (mut on_gpu, mut on_cpu) = (State::new(&[9]), State::new(&[9]));
        on_gpu.counters = [applied, 7];
        on_cpu.counters = [applied, 7];
        on_gpu.step_on(&mut gpu, &gradients, 3e38);
        on_cpu.step_on_cpu(&gradients, 3e38);
        compare(&format!("after {applied} steps"), &on_gpu, &on_cpu);
    }
}

/// Coefficients of a bucket that is updated before the norm of its step is known: they clip by a
/// finite norm, skip a bucket with a sum that is not finite, and count nothing.
fn check_bucket_coefficients(gpu: &mut Gpu) {
    let finite = [1.5, 0.0, 1e300];
    for (norm, sums, step, clip) in [
        (0.0, &finite[..1], 8.0, 1.0),
        (4.0, &finite[..], 8.0, 0.25),
        (f32::NAN, &finite[..], 8.0, 1.0),
        (f32::INFINITY, &finite[..], 8.0, 1.0),
        (4.0, &[1.0, f64::NAN][..], 0.0, 0.25),
        (4.0, &[f64::INFINITY, 1.0][..], 0.0, 0.25),
    ] {
        let bits: Vec<u64> = sums.iter().map(|sum| sum.to_bits()).collect();
        let inputs = [
            HostTensor::f32(&[1], &[norm]),
            HostTensor::f32(&[2], &[LEARNING_RATE, LARGEST_NORM]),
            HostTensor::u64(&[2], &[7, 3]),
            HostTensor::u64(&[bits.len()], &bits),
        ];
        let op = ops::AdamWCoefficients { of_bucket: true, ..COEFFICIENTS };
        let before = [f32::NAN; ops::AdamWCoefficients::COUNT];
        let output = HostTensor::f32(&[before.len()], &before);
        let made = gpu.run(op, &inputs, &[output], false, 1);
        let made: Vec<f32> = bytemuck::pod_collect_to_vec(&made[0].bytes);
        let what = format!("norm {norm}, sums {sums:?}");
        assert_eq!(made[0], step, "{what}: number of the step");
        assert!((made[2] - clip).abs() < 1e-6, "{what}: clips by {}", made[2]);
    }
}

trial!(coefficients_of_a_bucket);
fn coefficients_of_a_bucket() {
    check_bucket_coefficients(&mut Gpu::open());
}

fn check_row(gpu: &mut Gpu) {
    check_steps(gpu, &[5, 3, 36 * 1024 + 7, 9]);
    check_bucket_coefficients(gpu);
}

emulated! {
    adamw on Sm100a: check_row
}

emulated! {
    adamw_single on Sm90a: |gpu| check_steps(gpu, &[5, 36 * 1024 + 7])
}
