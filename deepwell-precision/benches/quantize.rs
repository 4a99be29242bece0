//! Speed of quantization of a 4096 x 4096 matrix on one core, beside that of copying memory:
//! `cargo bench -p deepwell-precision`.
//!
//! `read` counts the bytes of the source alone, `moved` what is read and written; `floor` is how
//! long the copy of as many bytes would take, measured here with a copy of 64 MiB.

use std::hint::black_box;
use std::time::Instant;

use deepwell_precision::{
    BlockShape, ElementFormat, Granularity, MxSpec, ScaleRule, Source, dequantize_rows,
    quantize_both, quantize_columns, quantize_rows, scales_len,
};
use half::bf16;

const ROWS: usize = 4096;
const COLS: usize = 4096;
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

    let wide: Vec<f32> = (0..ROWS * COLS as usize).map(noise).collect();
    let narrow: Vec<bf16> = wide.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut copy = vec![0.0_f32; ROWS * COLS];
    let copy_s = time_s(|| black_box(&mut copy).copy_from_slice(black_box(&wide)));
    let copy_bytes_per_s = (2 * size_of_val(&wide[..])) as f64 / copy_s;
    println!("one thread, best of {REPEATS}, {ROWS} x {COLS}");
    println!("copy: {:.2} GB/s read and written", copy_bytes_per_s / 1e9);

    let default = MxSpec::default();
    for (name, spec) in [
        ("e4m3 rceil 32", default),
        ("e4m3 floor 32", MxSpec { scale_rule: ScaleRule::OcpFloor, ..default }),
        ("e4m3 rceil 128", MxSpec { granularity: Granularity::G128, ..default }),
        ("e4m3 rceil 32x32", MxSpec { block: BlockShape::Square, ..default }),
        ("e5m2 rceil 32", MxSpec { element: ElementFormat::E5M2, ..default }),
    ] {
        measure(&format!("f32  {name}"), &wide, spec, copy_bytes_per_s);
        measure(&format!("bf16 {name}"), &narrow, spec, copy_bytes_per_s);
    }

    let mut data = vec![0; ROWS * COLS];
    let mut scales = vec![0; scales_len(ROWS, COLS)];
    quantize_rows(&wide, ROWS, COLS, &default, &mut data, &mut scales).expect("fits");
    let mut out = narrow;
    let element = ElementFormat::E4M3;
    let s =
        time_s(|| dequantize_rows(&data, &scales, ROWS, COLS, element, &mut out).expect("fits"));
    let moved = data.len() + scales.len() + size_of_val(&out[..]);
    report("dequantize to bf16", s, data.len(), moved, copy_bytes_per_s);
    let s =
        time_s(|| dequantize_rows(&data, &scales, ROWS, COLS, element, &mut copy).expect("fits"));
    let moved = data.len() + scales.len() + size_of_val(&copy[..]);
    report("dequantize to f32", s, data.len(), moved, copy_bytes_per_s);
}

/// All three directions of one source.
fn measure<S: Source>(name: &str, src: &[S], spec: MxSpec, copy_bytes_per_s: f64) {
    let len = ROWS * COLS;
    let (mut data, mut data_t) = (vec![0; len], vec![0; len]);
    let mut scales = vec![0; scales_len(ROWS, COLS)];
    let mut scales_t = vec![0; scales_len(COLS, ROWS)];
    let read = size_of_val(src);
    let written = len + scales.len();

    let s = time_s(|| quantize_rows(src, ROWS, COLS, &spec, &mut data, &mut scales).expect("fits"));
    report(&format!("{name} rows"), s, read, read + written, copy_bytes_per_s);
    let s = time_s(|| {
        quantize_columns(src, ROWS, COLS, &spec, &mut data_t, &mut scales_t).expect("fits")
    });
    report(&format!("{name} columns"), s, read, read + written, copy_bytes_per_s);
    let s = time_s(|| {
        let by_row = (&mut data[..], &mut scales[..]);
        let by_column = (&mut data_t[..], &mut scales_t[..]);
        quantize_both(src, ROWS, COLS, &spec, by_row, by_column).expect("fits")
    });
    report(&format!("{name} both"), s, read, read + 2 * written, copy_bytes_per_s);
}

fn report(name: &str, s: f64, read: usize, moved: usize, copy_bytes_per_s: f64) {
    println!(
        "{name:28} {:7.2} ms  read {:6.2} GB/s  moved {:6.2} GB/s  floor {:6.2} ms",
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
