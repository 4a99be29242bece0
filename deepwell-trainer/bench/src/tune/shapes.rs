//! The tuned calls: the GEMMs, grouped GEMMs and attentions of models' steps, and GEMMs of given
//! sizes.

use std::fmt;
use std::slice::from_ref;
use std::str::FromStr;

use deepwell_ir::ops::{self, Axis};
use deepwell_ir::{DType, GemmKind, KernelCatalog, PrecisionPolicy, Role, Target};
use deepwell_kernels::SingleCall;
use deepwell_kernels::cuda::CudaCatalog;
use deepwell_probe::Hardware;

use super::super::Settings;
use super::super::cases::{is_matrix, knows_sequences, planes};
use deepwell_trainer::{Device, TrainError};

/// Models and sizes to tune.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneSettings {
    /// The GPU.
    pub device: Device,
    /// Presets, config.json files or model folders.
    pub models: Vec<String>,
    /// Names of precision presets.
    pub precisions: Vec<String>,
    /// Sequences of a step.
    pub batch_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Linear layers whose three GEMMs are tuned.
    pub shapes: Vec<GemmSize>,
}

/// A linear layer: M tokens, N outputs, K inputs, as `16384x2048x5632`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmSize {
    m: usize,
    n: usize,
    k: usize,
}

impl FromStr for GemmSize {
    type Err = String;

    fn from_str(text: &str) -> Result<GemmSize, String> {
        let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
        match sizes.as_deref() {
            Some(&[m, n, k]) if m > 0 && n > 0 && k > 0 => Ok(GemmSize { m, n, k }),
            _ => Err(format!(
                "expected tokens, outputs and inputs of a linear layer as MxNxK, got `{text}`"
            )),
        }
    }
}

impl fmt::Display for GemmSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}

/// Returns each distinct call that has several kernels, or a kernel with several tiles.
///
/// # Errors
/// The model or precision is unknown, or the model does not fit.
pub fn calls_of(
    settings: &TuneSettings,
    hardware: &Hardware,
    target: &Target,
) -> Result<Vec<SingleCall>, TrainError> {
    let mut calls: Vec<SingleCall> = Vec::new();
    let mut add = |call: SingleCall| {
        let is_listed = calls.iter().any(|other| {
            other.op == call.op
                && other.operands == call.operands
                && other.input_count == call.input_count
        });
        if !is_listed && CudaCatalog.choices(&call.request(), target).len() > 1 {
            calls.push(call);
        }
    };
    for model in &settings.models {
        for precision in &settings.precisions {
            let bench = Settings {
                device: settings.device,
                model: model.clone(),
                precision: precision.clone(),
                beside_bf16: false,
                batch_size: settings.batch_size,
                seq_len: settings.seq_len,
                iterations: 1,
                copy_gbps: None,
                kernels: Vec::new(),
                mixtures: Vec::new(),
                mixture_tokens: 0,
            };
            let program = bench.plan(precision, hardware)?;
            for call in program.calls.iter().filter(|call| is_matrix(&call.op)) {
                let mut single = SingleCall::of(&program, call);
                if !knows_sequences(&single.op) {
                    (single.batch, single.seq) = (1, 1);
                }
                add(single);
            }
        }
    }
    for &size in &settings.shapes {
        for precision in &settings.precisions {
            let policy = PrecisionPolicy::preset(precision)?;
            let formats = [policy.activation_format(), policy.weight_format()];
            let is_quantized = policy.format().quantized().is_some();
            let unserved = || {
                let serves = |it| CudaCatalog.serves(it, Role::Linear, target);
                formats.iter().find_map(|it| serves(it).err())
            };
            if let Some(reason) = unserved().filter(|_| is_quantized) {
                return Err(TrainError::Setting {
                    setting: "precision",
                    expected: "one that has GEMMs to be tuned".to_string(),
                    got: format!("`{precision}`: {reason}"),
                    hint: None,
                });
            }
            match is_quantized {
                true => scaled(size, &policy).into_iter().for_each(&mut add),
                false => plain(size).into_iter().for_each(&mut add),
            }
        }
    }
    Ok(calls)
}

/// Fprop, dgrad and wgrad in BF16.
fn plain(GemmSize { m, n, k }: GemmSize) -> [SingleCall; 3] {
    let bf16 = |rows: usize, columns: usize| (DType::Bf16, vec![rows, columns]);
    let (x, w, y) = (bf16(m, k), bf16(n, k), bf16(m, n));
    let dw = (DType::F32, vec![n, k]);
    [
        SingleCall::new(ops::Linear { bias: false }, &[x.clone(), w.clone()], from_ref(&y)),
        SingleCall::new(ops::LinearDgrad {}, &[y.clone(), w], from_ref(&x)),
        SingleCall::new(ops::LinearWgrad {}, &[y, x], &[dw]),
    ]
}

/// The same GEMMs with quantized operands, each quantized along the contraction.
fn scaled(GemmSize { m, n, k }: GemmSize, policy: &PrecisionPolicy) -> [SingleCall; 3] {
    let activation = policy.activation_format();
    let weight = policy.weight_format();
    let call = |kind, b, [rows, columns, sum]: [usize; 3]| {
        // The output of wgrad is FP32, whatever type the others store.
        let dtype = if kind == GemmKind::Wgrad { DType::F32 } else { DType::Bf16 };
        let op = ops::ScaledGemm { kind, output: DType::Bf16, bias: false, a: activation, b };
        let a = planes(activation, Axis::Row, rows, sum);
        let inputs = [a, planes(b, Axis::Row, columns, sum)].concat();
        SingleCall::new(op, &inputs, &[(dtype, vec![rows, columns])])
    };
    [
        call(GemmKind::Fprop, weight, [m, n, k]),
        call(GemmKind::Dgrad, weight, [m, k, n]),
        call(GemmKind::Wgrad, activation, [n, k, m]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_layers() {
        let check = |text: &str, expected: Option<&str>| {
            let found = text.parse::<GemmSize>().ok().map(|size| size.to_string());
            assert_eq!(found.as_deref(), expected, "{text}");
        };
        check("16384x2048x5632", Some("16384x2048x5632"));
        for refused in ["", "1x2", "1x2x3x4", "0x1x1", "1x1x-1", "axbxc"] {
            check(refused, None);
        }
    }

    /// `--shapes` times the calls of a model with such a layer.
    #[test]
    fn given_sizes_are_those_of_a_model() {
        let hardware = Hardware::preset("h200-x2").unwrap();
        let device = Device::Cuda(0);
        let target = device.target(&hardware).unwrap();
        let calls = |models: &[&str], shapes: &[&str]| {
            let settings = TuneSettings {
                device,
                models: models.iter().map(ToString::to_string).collect(),
                precisions: vec!["bf16".to_string(), "mxfp8-128".to_string()],
                batch_size: 2,
                seq_len: 256,
                shapes: shapes.iter().map(|text| text.parse().unwrap()).collect(),
            };
            calls_of(&settings, &hardware, &target).unwrap()
        };
        let of_model = calls(&["parity-3m"], &[]);
        assert!(of_model.len() > 20, "{}", of_model.len());
        // An output projection of every layer is hidden by hidden.
        let hidden = 256;
        let given = calls(&[], &[&format!("512x{hidden}x{hidden}")]);
        assert_eq!(given.len(), 6);
        for call in &given {
            let is_it =
                |known: &&SingleCall| known.op == call.op && known.operands == call.operands;
            assert!(of_model.iter().any(|known| is_it(&known)), "{call:?}");
        }
    }
}
