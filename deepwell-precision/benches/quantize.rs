//! Speed of quantization on one core, of a 4096 x 4096 matrix in memory and of a 512 x 512 one in
//! cache, beside that of copying memory:
//! `cargo bench -p deepwell-precision`; words behind `--` choose the lines that contain them all.
//!
//! `read` counts the bytes of the source alone, `moved` what is read and written; `floor` is how
//! long the copy of as many bytes would take, measured here with a copy of the f32 source.

use std::hint::black_box;
use std::time::Instant;

use deepwell_precision::{
    BlockShape, ElementFormat, Granularity, MxSpec, ScaleRule, Source, dequantize_rows,
    quantize_both, quantize_columns, quantize_rows, scales_len,
};
use half::bf16;

const REPEATS: usize = 15;

fn main() {
    // `cargo test --benches` runs this too, without the flag: there is nothing to test.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    #[cfg(feature = "rayon")]
    if let Err(error) = rayon::ThreadPoolBuilder::new().num_threads(1).build_global() {
        eprintln!("cannot limit the pool to one thread: {error}");
        std::process::exit(1);
    }

    println!("one thread, best of {REPEATS}");
    measure_all(4096, 4096);
    measure_all(512, 512);
}

fn measure_all(rows: usize, cols: usize) {
    let len = rows * cols;
    let wide: Vec<f32> = (0..len).map(noise).collect();
    let narrow: Vec<bf16> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut copy = vec![0.0_f32; len];
    let copy_s = time_s(|| black_box(&mut copy).copy_from_slice(black_box(&wide)));
    let copy_bytes_per_s = (2 * size_of_val(&wide[..])) as f64 / copy_s;
    println!("{rows} x {cols}; copy: {:.2} GB/s read and written", copy_bytes_per_s / 1e9);

    let default = MxSpec::default();
    for (name, spec) in [
        ("e4m3 rceil 32", default),
        ("e4m3 floor 32", MxSpec { scale_rule: ScaleRule::OcpFloor, ..default }),
        ("e4m3 rceil 128", MxSpec { granularity: Granularity::G128, ..default }),
        ("e4m3 rceil 32x32", MxSpec { block: BlockShape::Square, ..default }),
        ("e5m2 rceil 32", MxSpec { element: ElementFormat::E5M2, ..default }),
    ] {
        measure(&format!("f32  {name}"), &wide, (rows, cols), spec, copy_bytes_per_s);
        measure(&format!("bf16 {name}"), &narrow, (rows, cols), spec, copy_bytes_per_s);
    }

    let mut data = vec![0; len];
    let mut scales = vec![0; scales_len(rows, cols)];
    quantize_rows(&wide, rows, cols, &default, &mut data, &mut scales).expect("fits");
    let mut out = narrow;
    let element = ElementFormat::E4M3;
    let moved = data.len() + scales.len() + size_of_val(&out[..]);
    report("dequantize to bf16", data.len(), moved, copy_bytes_per_s, || {
        dequantize_rows(&data, &scales, rows, cols, element, &mut out).expect("fits");
    });
    let moved = data.len() + scales.len() + size_of_val(&copy[..]);
    report("dequantize to f32", data.len(), moved, copy_bytes_per_s, || {
        dequantize_rows(&data, &scales, rows, cols, element, &mut copy).expect("fits");
    });
}

/// All three directions of one source.
fn measure<S: Source>(
    name: &str,
    src: &[S],
    shape: (usize, usize),
    spec: MxSpec,
    copy_bytes_per_s: f64,
) {
    let (rows, cols) = shape;
    let len = rows * cols;
    let (mut data, mut data_t) = (vec![0; len], vec![0; len]);
    let mut scales = vec![0; scales_len(rows, cols)];
    let mut scales_t = vec![0; scales_len(cols, rows)];
    let read = size_of_val(src);
    let written = len + scales.len();

    report(&format!("{name} rows"), read, read + written, copy_bytes_per_s, || {
        quantize_rows(src, rows, cols, &spec, &mut data, &mut scales).expect("fits")
    });
    report(&format!("{name} columns"), read, read + written, copy_bytes_per_s, || {
        quantize_columns(src, rows, cols, &spec, &mut data_t, &mut scales_t).expect("fits")
    });
    report(&format!("{name} both"), read, read + 2 * written, copy_bytes_per_s, || {
        let by_row = (&mut data[..], &mut scales[..]);
        let by_column = (&mut data_t[..], &mut scales_t[..]);
        quantize_both(src, rows, cols, &spec, by_row, by_column).expect("fits")
    });
}

/// Whether the words on the command line ask for this line.
fn is_wanted(name: &str) -> bool {
    std::env::args().skip(1).all(|word| word.starts_with('-') || name.contains(&word))
}

/// Times `work` and prints a line.
fn report<T>(
    name: &str,
    read: usize,
    moved: usize,
    copy_bytes_per_s: f64,
    work: impl FnMut() -> T,
) {
    if !is_wanted(name) {
        return;
    }
    let s = time_s(work);
    println!(
        "{name:28} {:8.3} ms  read {:6.2} GB/s  moved {:6.2} GB/s  floor {:7.3} ms",
        s * 1e3,
        read as f64 / s / 1e9,
        moved as f64 / s / 1e9,
        moved as f64 / copy_bytes_per_s * 1e3,
    );
}

/// The shortest of some runs, the first of which warms up, seconds.
fn time_s<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut best_s = f64::INFINITY;
    for _ in 0..=REPEATS {
        let start = Instant::now();
        black_box(work());
        best_s = best_s.min(start.elapsed().as_secs_f64());
    }
    best_s
}

/// Numbers spread like those of a trained tensor: a sum of four uniform ones.
fn noise(i: usize) -> f32 {
    let mut state = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    state ^= state >> 29;
    (0..4).map(|part| ((state >> (part * 16)) & 0xFFFF) as f32 / 65536.0 - 0.5).sum()
}
