//! Throughput of each format compared with memory bandwidth, with one and with two threads, for a
//! 4096 x 4096 matrix in memory and a 512 x 512 matrix in cache: `cargo bench -p
//! deepwell-precision`. Words after `--` select the lines that contain all of them.
//!
//! `read` counts the bytes of the source alone. `of copy` is the kernel's share of memory
//! bandwidth: bytes read and written per second, relative to a copy of the f32 matrix with the same
//! number of threads in the same run. A value above 100 % means that the kernel writes less than it
//! reads, which memory handles faster than a copy.

use std::hint::black_box;
use std::time::Instant;

use deepwell_precision::{
    BlockStatistics, ElementFormat, ElementRounding, Hadamard16, Philox, QuantFormat, ScaleRule,
    Source, dequantize_rows, nvfp4, packed, quantize_both, quantize_columns, quantize_rows,
    quantize_rows_stochastic, scale_tiles, scales_len,
};
use half::bf16;

const REPEATS: usize = 15;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo test --benches` also runs this, without the flag; no tests here.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    for side in [4096, 512] {
        for threads in [1, 2] {
            in_pool(threads, || Bench::new(threads, side, side).run())?;
        }
    }
    Ok(())
}

#[cfg(feature = "rayon")]
fn in_pool(threads: usize, work: impl FnOnce() + Send) -> Result<(), rayon::ThreadPoolBuildError> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build()?.install(work);
    Ok(())
}

#[cfg(not(feature = "rayon"))]
fn in_pool(threads: usize, work: impl FnOnce()) -> Result<(), std::convert::Infallible> {
    if threads == 1 {
        work();
    }
    Ok(())
}

/// A matrix with the buffers shared by all measurements.
struct Bench {
    rows: usize,
    cols: usize,
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    copy: Vec<f32>,
    copy_bytes_per_s: f64,
}

impl Bench {
    fn new(threads: usize, rows: usize, cols: usize) -> Self {
        let wide: Vec<f32> = (0..rows * cols).map(noise).collect();
        let narrow = wide.iter().map(|&x| bf16::from_f32(x)).collect();
        let mut copy = vec![0.0_f32; rows * cols];
        let copy_s = time_s(|| copy_in_parts(black_box(&wide), black_box(&mut copy), threads));
        let copy_bytes_per_s = (2 * size_of_val(&wide[..])) as f64 / copy_s;
        println!(
            "\n{rows} x {cols}, {threads} threads, best of {REPEATS}; copy: {:.2} GB/s",
            copy_bytes_per_s / 1e9
        );
        Self { rows, cols, wide, narrow, copy, copy_bytes_per_s }
    }

    fn run(mut self) {
        let (wide, narrow) = (std::mem::take(&mut self.wide), std::mem::take(&mut self.narrow));
        let default = QuantFormat::MXFP8;
        for &element in ElementFormat::ALL {
            let spec = QuantFormat::mx(element);
            self.quantize_mx(&format!("f32  mx {element} rceil 32"), &wide, spec);
            self.quantize_mx(&format!("bf16 mx {element} rceil 32"), &narrow, spec);
            self.dequantize_mx(element);
        }
        for (name, spec) in [
            ("floor 32", default.with_scale_rule(ScaleRule::OcpFloor)),
            ("min_error 32", default.with_scale_rule(ScaleRule::MinError)),
            ("rceil 128", QuantFormat::MXFP8_128),
            ("rceil 32x32", default.square()),
        ] {
            self.quantize_mx(&format!("f32  mx e4m3 {name}"), &wide, spec);
            self.quantize_mx(&format!("bf16 mx e4m3 {name}"), &narrow, spec);
        }
        let nvfp4 = QuantFormat::NVFP4;
        for (name, spec) in [
            ("1x16", nvfp4),
            ("16x16", nvfp4.square()),
            ("1x16 stochastic", nvfp4.with_rounding(ElementRounding::Stochastic)),
        ] {
            self.quantize_nvfp4(&format!("f32  nvfp4 {name}"), &wide, spec);
            self.quantize_nvfp4(&format!("bf16 nvfp4 {name}"), &narrow, spec);
        }
        self.dequantize_nvfp4(&wide);
        self.others(&wide, &narrow);
    }

    /// Rows, columns and both, of one source.
    fn quantize_mx<S: Source>(&self, name: &str, src: &[S], spec: QuantFormat) {
        let (rows, cols) = (self.rows, self.cols);
        let (mut data, mut data_t) = (vec![0; src.len()], vec![0; src.len()]);
        let mut scales = vec![0; scales_len(rows, cols)];
        let mut scales_t = vec![0; scales_len(cols, rows)];
        let (read, written) = (size_of_val(src), src.len() + scales.len());
        self.report(&format!("{name} rows"), read, written, || {
            quantize_rows(src, rows, cols, &spec, &mut data, &mut scales).expect("fits")
        });
        self.report(&format!("{name} columns"), read, written, || {
            quantize_columns(src, rows, cols, &spec, &mut data_t, &mut scales_t).expect("fits")
        });
        self.report(&format!("{name} both"), read, 2 * written, || {
            let by_row = (&mut data[..], &mut scales[..]);
            let by_column = (&mut data_t[..], &mut scales_t[..]);
            quantize_both(src, rows, cols, &spec, by_row, by_column).expect("fits")
        });
    }

    fn dequantize_mx(&self, element: ElementFormat) {
        let (rows, cols, format) = (self.rows, self.cols, QuantFormat::mx(element));
        // All codes except NaN and infinity.
        let limit = if element.bits() == 8 { 0x78 } else { 1 << element.bits() };
        let data: Vec<u8> = (0..rows * cols).map(|i| (i % limit) as u8).collect();
        let scales = vec![127; scales_len(rows, cols)];
        let read = data.len() + scales.len();
        let (mut wide, mut narrow) = (vec![0.0_f32; data.len()], vec![bf16::ZERO; data.len()]);
        self.report(&format!("dequantize mx {element} to f32"), read, 4 * data.len(), || {
            dequantize_rows(&data, &scales, rows, cols, &format, &mut wide).expect("fits");
        });
        self.report(&format!("dequantize mx {element} to bf16"), read, 2 * data.len(), || {
            dequantize_rows(&data, &scales, rows, cols, &format, &mut narrow).expect("fits");
        });
    }

    /// Rows and columns, without the search for the largest magnitude.
    fn quantize_nvfp4<S: Source>(&self, name: &str, src: &[S], spec: QuantFormat) {
        let (rows, cols) = (self.rows, self.cols);
        let philox = spec.is_stochastic().then_some(Philox { seed: 1, stream: 2 });
        let common = nvfp4::Common { amax: nvfp4::amax(src), philox, words: None };
        let mut bytes = vec![0; packed::fp4_len(rows, cols)];
        let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
        let (read, written) = (size_of_val(src), bytes.len() + scales.len());
        self.report(&format!("{name} rows"), read, written, || {
            nvfp4::quantize_rows(src, rows, cols, &spec, &common, &mut bytes, &mut scales)
                .expect("fits")
        });
        let mut bytes = vec![0; packed::fp4_len(cols, rows)];
        let mut scales = vec![0; nvfp4::scales_len(cols, rows)];
        self.report(&format!("{name} columns"), read, written, || {
            nvfp4::quantize_columns(src, rows, cols, &spec, &common, &mut bytes, &mut scales)
                .expect("fits")
        });
    }

    fn dequantize_nvfp4(&self, src: &[f32]) {
        let (rows, cols) = (self.rows, self.cols);
        let mut bytes = vec![0; packed::fp4_len(rows, cols)];
        let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
        let (spec, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(nvfp4::amax(src)));
        let (scale, _) =
            nvfp4::quantize_rows(src, rows, cols, &spec, &common, &mut bytes, &mut scales)
                .expect("fits");
        let read = bytes.len() + scales.len();
        let (mut wide, mut narrow) = (vec![0.0_f32; src.len()], vec![bf16::ZERO; src.len()]);
        self.report("dequantize nvfp4 to f32", read, 4 * src.len(), || {
            nvfp4::dequantize_rows(&bytes, &scales, scale, rows, cols, &mut wide).expect("fits");
        });
        self.report("dequantize nvfp4 to bf16", read, 2 * src.len(), || {
            nvfp4::dequantize_rows(&bytes, &scales, scale, rows, cols, &mut narrow).expect("fits");
        });
    }

    /// Operations around quantization: amax, statistics, packing, tiles, Hadamard, stochastic MX.
    fn others(&mut self, wide: &[f32], narrow: &[bf16]) {
        let (rows, cols) = (self.rows, self.cols);
        self.report("f32  amax", size_of_val(wide), 0, || nvfp4::amax(wide));
        self.report("bf16 amax", size_of_val(narrow), 0, || nvfp4::amax(narrow));
        let spec = QuantFormat::mx(ElementFormat::E2M1);
        let (mut data, mut scales) = (vec![0; wide.len()], vec![0; scales_len(rows, cols)]);
        let philox = Philox { seed: 1, stream: 2 };
        let written = data.len() + scales.len();
        self.report("bf16 mx e2m1 stochastic rows", size_of_val(narrow), written, || {
            quantize_rows_stochastic(narrow, rows, cols, &spec, philox, &mut data, &mut scales)
                .expect("fits")
        });
        let read = size_of_val(narrow) + data.len() + scales.len();
        self.report("bf16 mx e2m1 statistics", read, 0, || {
            BlockStatistics::of_mx(narrow, &data, &scales, rows, cols, &spec).expect("fits")
        });
        let mut fp4 = vec![0; packed::fp4_len(rows, cols)];
        let mut fp6 = vec![0; packed::fp6_len(rows, cols)];
        self.report("pack fp4", data.len(), fp4.len(), || {
            packed::pack_fp4(&data, rows, cols, &mut fp4).expect("fits");
        });
        self.report("pack fp6", data.len(), fp6.len(), || {
            packed::pack_fp6(&data, rows, cols, &mut fp6).expect("fits");
        });
        self.report("unpack fp4", fp4.len(), data.len(), || {
            packed::unpack_fp4(&fp4, rows, cols, &mut data).expect("fits");
        });
        self.report("unpack fp6", fp6.len(), data.len(), || {
            packed::unpack_fp6(&fp6, rows, cols, &mut data).expect("fits");
        });
        let blocks = cols / 32;
        let mut tiles = vec![0; scale_tiles::tiled_len(rows, blocks)];
        self.report("scale tiles", scales.len(), tiles.len(), || {
            scale_tiles::to_tiles(&scales, rows, blocks, &mut tiles).expect("fits");
        });
        let mut copy = std::mem::take(&mut self.copy);
        let bytes = size_of_val(&copy[..]);
        self.report("hadamard f32 in place", bytes, bytes, || {
            Hadamard16::from_seed(1).forward_rows(&mut copy, rows, cols).expect("fits");
        });
    }

    /// Times `work` and prints a line, if selected on the command line.
    fn report<T>(&self, name: &str, read: usize, written: usize, work: impl FnMut() -> T) {
        if !std::env::args().skip(1).all(|word| word.starts_with('-') || name.contains(&word)) {
            return;
        }
        let s = time_s(work);
        let moved = (read + written) as f64;
        println!(
            "{name:34} {:9.3} ms  read {:6.2} GB/s  moved {:6.2} GB/s  {:4.0} % of copy",
            s * 1e3,
            read as f64 / s / 1e9,
            moved / s / 1e9,
            moved / s / self.copy_bytes_per_s * 100.0,
        );
    }
}

/// Copies with one thread per part.
fn copy_in_parts(source: &[f32], target: &mut [f32], threads: usize) {
    let part = source.len().div_ceil(threads);
    #[cfg(feature = "rayon")]
    if threads > 1 {
        rayon::scope(|scope| {
            for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
                scope.spawn(|_| target.copy_from_slice(source));
            }
        });
        return;
    }
    for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
        target.copy_from_slice(source);
    }
}

/// Returns the shortest of `REPEATS` runs in seconds, after a warm-up run.
fn time_s<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut best_s = f64::INFINITY;
    for _ in 0..=REPEATS {
        let start = Instant::now();
        black_box(work());
        best_s = best_s.min(start.elapsed().as_secs_f64());
    }
    best_s
}

/// Values distributed like a trained tensor: a sum of four uniform numbers.
fn noise(i: usize) -> f32 {
    let mut state = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    state ^= state >> 29;
    (0..4).map(|part| ((state >> (part * 16)) & 0xFFFF) as f32 / 65536.0 - 0.5).sum()
}
