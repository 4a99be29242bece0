//! `swiglu_quantize.cu` and `gelu_quantize.cu`: the bits of the activation alone, and of the CPU's
//! quantization of what it stores.

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, Op, ops};
use deepwell_precision::{Granularity, QuantFormat, ScaleRule};

use crate::fused_quantize::check_fused;
use crate::harness::{Gpu, HostTensor, uniform};
use crate::quantize::{numbers, specs};

/// An op that is a function of elements.
struct Producer {
    op: Op,
    inputs: usize,
    outputs: usize,
    /// Name of the fused op.
    fused: &'static str,
}

fn producers() -> Vec<Producer> {
    let producer = |op, inputs, outputs, fused| Producer { op, inputs, outputs, fused };
    let mut producers = vec![
        producer(ops::SwiGlu {}.into(), 2, 1, "swiglu_quantize"),
        producer(ops::SwiGluBackward {}.into(), 3, 2, "swiglu_backward_quantize"),
    ];
    for tanh in [false, true] {
        producers.push(producer(ops::Gelu { tanh }.into(), 1, 1, "gelu_quantize"));
        let backward = ops::GeluBackward { tanh }.into();
        producers.push(producer(backward, 2, 1, "gelu_backward_quantize"));
    }
    producers
}

/// The inputs: of one kind of number where they are gradients and factors, and moderate where an
/// activation bends.
fn inputs(count: usize, rows: usize, columns: usize, kind: &str) -> Vec<HostTensor> {
    let shape = [rows, columns];
    (0..count)
        .map(|index| match index {
            0 => HostTensor::bf16(&shape, &numbers(kind, rows, columns)),
            _ => HostTensor::bf16(&shape, &uniform(rows * columns, index as u64, 6.0)),
        })
        .collect()
}

fn check_one(
    gpu: &mut Gpu,
    producer: &Producer,
    size: (usize, usize),
    kind: &str,
    entries: &[Quantize],
) {
    let (rows, columns) = size;
    let inputs = inputs(producer.inputs, rows, columns, kind);
    let empty = HostTensor::output(DType::Bf16, &[rows, columns]);
    let of_core = vec![empty; producer.outputs];
    let entries = &entries[..producer.outputs];
    let what = format!("{rows}x{columns} {kind}");
    check_fused(gpu, &producer.op, producer.fused, &inputs, &of_core, entries, &what);
}

fn check(gpu: &mut Gpu, size: (usize, usize), kind: &str, entries: &[Quantize; 2]) {
    for producer in &producers() {
        check_one(gpu, producer, size, kind, entries);
    }
}

/// The fused ops of a file, `gelu_quantize` for example, along each axis, on four by three tiles of
/// 128, whole ones and the rest.
pub(crate) fn check_file(gpu: &mut Gpu, file: &str) {
    let (activation, _) = file.split_once('_').expect("an activation and what follows");
    let of_file = |producer: &&Producer| producer.fused.starts_with(activation);
    for producer in producers().iter().filter(of_file) {
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            let quantize = Quantize { format: QuantFormat::MXFP8, axis };
            check_one(gpu, producer, (390, 264), "wide", &[quantize.clone(), quantize]);
        }
    }
}

/// The gradients of SwiGLU in whole tiles: fewer than an emulated device holds CTAs for, and more,
/// by a factor that is not whole; and every kind of number.
pub(crate) fn check_gradients_of_whole_tiles(gpu: &mut Gpu) {
    let op = ops::SwiGluBackward {};
    let producers = producers();
    let producer = producers.iter().find(|producer| producer.op == op.clone().into());
    let producer = producer.expect("the op is among the producers");
    let rows = [
        ((128, 256), "wide", Granularity::G32, Axis::Both),
        ((384, 640), "special", Granularity::G128, Axis::Both),
        ((384, 640), "wide", Granularity::G32, Axis::Both),
        ((1280, 128), "wide", Granularity::G128, Axis::Both),
        ((256, 1408), "random", Granularity::G128, Axis::Row),
        ((256, 1408), "random", Granularity::G32, Axis::Row),
        ((384, 384), "wide", Granularity::G128, Axis::Column),
        ((384, 384), "special", Granularity::G32, Axis::Column),
    ];
    for (size, kind, granularity, axis) in rows {
        let format = QuantFormat::MXFP8.with_granularity(granularity);
        let quantize = Quantize { format, axis };
        check_one(gpu, producer, size, kind, &[quantize.clone(), quantize]);
    }
}

trial!(gradients_of_whole_tiles);
fn gradients_of_whole_tiles() {
    let mut gpu = Gpu::open();
    check_gradients_of_whole_tiles(&mut gpu);
    if gpu.runs(1, 0) {
        let format = QuantFormat::MXFP8.with_granularity(Granularity::G128);
        let quantize = Quantize { format, axis: Axis::Both };
        let entries = [quantize.clone(), quantize];
        let producer = &producers()[1];
        check_one(&mut gpu, producer, (2048, 5632), "wide", &entries);
    }
}

trial!(every_way_to_quantize);
fn every_way_to_quantize() {
    let mut gpu = Gpu::open();
    let specs = specs();
    for (index, &spec) in specs.iter().enumerate() {
        // The second of two gradients is quantized in another way than the first.
        let other = specs[(index + 3) % specs.len()];
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            let entries = [Quantize { format: spec, axis }, Quantize { format: other, axis }];
            for kind in ["wide", "special"] {
                let size = gpu.pick((160, 264), (34, 40));
                check(&mut gpu, size, kind, &entries);
            }
        }
    }
}

trial!(every_size);
fn every_size() {
    let mut gpu = Gpu::open();
    // Nothing, one, tile - 1 and + 1 in both directions.
    let sizes =
        [(0, 256), (3, 0), (1, 8), (31, 136), (127, 128), (129, 120), (257, 384), (33, 1000)];
    for size in sizes {
        if !gpu.runs(size.0 * size.1, 1 << 15) {
            continue;
        }
        for granularity in [Granularity::G32, Granularity::G128] {
            let spec = QuantFormat::MXFP8.with_granularity(granularity);
            let quantize = Quantize { format: spec, axis: Axis::Both };
            check(&mut gpu, size, "random", &[quantize.clone(), quantize]);
        }
    }
}

trial!(more_tiles_than_the_device_holds);
fn more_tiles_than_the_device_holds() {
    let mut gpu = Gpu::open();
    let rule = |scale_rule| QuantFormat::MXFP8.with_scale_rule(scale_rule);
    let entry = |scale_rule| Quantize { format: rule(scale_rule), axis: Axis::Both };
    // An emulated device holds 20 or so.
    // Some 700 tiles, of which a GPU holds some 500.
    let size = gpu.pick((2692, 4096), (516, 776));
    check(&mut gpu, size, "random", &[entry(ScaleRule::Rceil), entry(ScaleRule::OcpFloor)]);
}
