//! `deepwell quantize`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use deepwell_precision::{PrecisionPolicy, ScaleRule};
use deepwell_trainer::quantize_file::{
    FileFormat, QuantizeFileOptions, ScaleLayout, dequantize, quantize,
};

use crate::Outcome;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
IN is a safetensors file, an index of shards, or a folder with either; OUT is a file where IN is a
file, else a folder. A model may be larger than memory: buffers take 160 MiB at most.

Quantized are linear weights of blocks and experts; embeddings, output head, norms, router, biases
and masks stay as they are. A policy file says otherwise: what it gives `mxfp8` is quantized, to the
format of the command line. A tensor `w` becomes its quantized data `w`, the scales
`w_scale` and, for nvfp4, the tensor scale `w_scale_2`.

A config.json beside IN says what each tensor is for, and which are stored as [inputs, outputs], as
those of GPT-2 and the experts of gpt-oss: their blocks lie along the inputs, too. Without one,
names, biases and shapes say it.

SNR is signal to noise: 6 dB are one bit.

Examples:
  deepwell quantize model.safetensors small.safetensors --format mxfp8
  deepwell quantize ./llama ./llama-nvfp4 --format nvfp4 --layout tiled
  deepwell quantize ./llama ./llama-mxfp4 --format mxfp4 --policy policy.toml --json
  deepwell quantize small.safetensors again.safetensors --dequantize

Exit codes: 0 written, 2 an input or the output cannot be used";

/// Turn a model's weights into MXFP8, MXFP6, MXFP4 or NVFP4, or back
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct QuantizeArgs {
    /// Model to read
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// File or folder to write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Format of the quantized tensors
    #[arg(long, required_unless_present = "dequantize")]
    format: Option<FileFormat>,
    /// How MX scales follow from magnitudes [default: rceil]
    #[arg(long, value_name = "RULE", conflicts_with = "dequantize")]
    scale_rule: Option<Rule>,
    /// Policy file in TOML that says which tensors are quantized
    #[arg(long, value_name = "FILE", conflicts_with = "dequantize")]
    policy: Option<PathBuf>,
    /// Layout of the scales [default: plain]
    #[arg(long, conflicts_with = "dequantize")]
    layout: Option<ScaleLayout>,
    /// Bring a quantized model back to the types that it was made from
    #[arg(long, conflicts_with = "format")]
    dequantize: bool,
    /// Write over what is there
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Rules on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rule {
    /// Rounded up: nothing saturates
    Rceil,
    /// Rounded down, of the OCP MX specification
    Floor,
    /// Rounded up, or half of that where it gives the smaller squared error
    MinError,
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<Outcome> {
    let Some(format) = args.format else {
        let report = dequantize(&args.input, &args.output, args.force)?;
        if args.json {
            print_json(&report)?
        } else {
            print(&report)?
        }
        return Ok(Outcome::Success);
    };
    let policy = match &args.policy {
        None => None,
        Some(path) => {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read `{}`", path.display()))?;
            Some(PrecisionPolicy::from_toml(&text, &path.display().to_string())?)
        }
    };
    let options = QuantizeFileOptions {
        scale_rule: match args.scale_rule {
            Some(Rule::Floor) => ScaleRule::OcpFloor,
            Some(Rule::MinError) => ScaleRule::MinError,
            Some(Rule::Rceil) | None => ScaleRule::Rceil,
        },
        policy,
        layout: args.layout.unwrap_or_default(),
        force: args.force,
        ..QuantizeFileOptions::new(args.input.clone(), args.output.clone(), format)
    };
    let report = quantize(&options)?;
    if args.json {
        print_json(&report)?
    } else {
        print(&report)?
    }
    Ok(Outcome::Success)
}
