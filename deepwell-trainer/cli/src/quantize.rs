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
IN is a safetensors file, an index of shards, or a folder with either. OUT is a file if IN is a
file, otherwise a folder. The model may be larger than memory: buffers take at most 160 MiB.

By default the linear weights of blocks and experts are quantized; embeddings, output head, norms,
routers, biases and masks are not. With a policy file, the tensors to which it gives a block-scaled
format are quantized, to the format of --format. A tensor `w` becomes quantized data `w`, scales
`w_scale` and, for nvfp4, the tensor scale `w_scale_2`.

A config.json next to IN determines the role of each tensor and which tensors are stored as [inputs,
outputs] (GPT-2, experts of gpt-oss); blocks always lie along the inputs. Without config.json,
names, biases and shapes determine both.

MXFP6 has E2M3 elements. Files with E5M2 or E3M2 elements are not written: weights gain nothing from
their range.

SNR is the signal-to-noise ratio; 6 dB are one bit.

Examples:
  deepwell quantize model.safetensors small.safetensors --format mxfp8
  deepwell quantize ./llama ./llama-nvfp4 --format nvfp4 --layout tiled
  deepwell quantize ./llama ./llama-mxfp4 --format mxfp4 --policy policy.toml --json
  deepwell quantize small.safetensors again.safetensors --dequantize

Exit codes: 0 written, 2 an input or the output cannot be used";

/// Quantize the weights of a model to MXFP8, MXFP6, MXFP4 or NVFP4, or dequantize them
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct QuantizeArgs {
    /// Model to read: safetensors file, index of shards, or folder
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// File or folder to write
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Format of the quantized tensors
    #[arg(long, required_unless_present = "dequantize")]
    format: Option<FileFormat>,
    /// Rule for MX scales [default: rceil]
    #[arg(long, value_name = "RULE", conflicts_with = "dequantize")]
    scale_rule: Option<Rule>,
    /// Policy file in TOML that selects the tensors to quantize
    #[arg(long, value_name = "FILE", conflicts_with = "dequantize")]
    policy: Option<PathBuf>,
    /// Layout of the scales [default: plain]
    #[arg(long, conflicts_with = "dequantize")]
    layout: Option<ScaleLayout>,
    /// Dequantize a quantized model to its original element types
    #[arg(long, conflicts_with = "format")]
    dequantize: bool,
    /// Overwrite existing output
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Rules on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rule {
    /// Scale rounded up, so that no element saturates
    Rceil,
    /// Scale rounded down, as in the OCP MX specification
    Floor,
    /// Scale rounded up or half of it, whichever has the smaller squared error
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
