//! Statistics against sums written a second way.

use approx::{assert_abs_diff_eq, relative_eq};

use super::*;
use crate::{
    ElementFormat, QuantStats, ScaleRule, dequantize_rows, e8m0, quantize_rows, scales_len, ue4m3,
};

fn matrix(elements: usize) -> Vec<f32> {
    (0..elements)
        .map(|i| match i % 1009 {
            0 => 0.0,
            1 if i > 2000 => f32::NAN,
            2 if i > 2000 => f32::INFINITY,
            _ => (i as f32 * 0.713).sin() * 2.0_f32.powi((i / 100 % 9) as i32 - (i % 7) as i32),
        })
        .collect()
}

/// One block at a time, as the fields are documented.
fn by_hand(src: &[f32], back: &[f32], block: usize, cols: usize, largest: &[f32]) -> BlockSums {
    let mut sums = BlockSums::default();
    for (row, (src, back)) in src.chunks(cols).zip(back.chunks(cols)).enumerate() {
        for (k, (src, back)) in src.chunks(block).zip(back.chunks(block)).enumerate() {
            if src.iter().chain(back).any(|x| !x.is_finite()) {
                sums.blocks_not_finite += 1;
                continue;
            }
            let largest = largest[row * cols.div_ceil(block) + k];
            sums.blocks += 1;
            sums.elements += src.len() as u64;
            for (&x, &y) in src.iter().zip(back) {
                sums.underflows += u64::from(x != 0.0 && y == 0.0);
                let beyond = f64::from(x.abs()) > f64::from(largest) * (1.0 + 1e-6);
                sums.saturations += u64::from(beyond && largest > 0.0);
                sums.signal += f64::from(x).powi(2);
                sums.noise += (f64::from(x) - f64::from(y)).powi(2);
            }
        }
    }
    sums
}

fn assert_close(got: &BlockSums, expected: &BlockSums, what: &str) {
    // Products and sums of sixteen positive numbers in f32, four roundings deep.
    let max_relative = 8.0 * f64::from(f32::EPSILON);
    let close = |a: f64, b: f64| relative_eq!(a, b, epsilon = 0.0, max_relative = max_relative);
    assert!(close(got.signal, expected.signal) && close(got.noise, expected.noise), "{what}");
    let expected = BlockSums { signal: got.signal, noise: got.noise, ..*expected };
    assert_eq!(*got, expected, "{what}");
}

#[test]
fn statistics_are_the_sums() {
    for (rows, cols) in [(0, 3), (3, 0), (1, 1), (7, 70), (40, 128), (500, 161)] {
        let src = matrix(rows * cols);
        for &element in ElementFormat::ALL {
            for &scale_rule in ScaleRule::ALL {
                let spec = QuantFormat::mx(element).with_scale_rule(scale_rule);
                let mut data = vec![0; rows * cols];
                let mut scales = vec![0; scales_len(rows, cols)];
                let mut back = vec![0.0; rows * cols];
                let stats = quantize_rows(&src, rows, cols, &spec, &mut data, &mut scales).unwrap();
                dequantize_rows(&data, &scales, rows, cols, &spec, &mut back).unwrap();
                let got = BlockStatistics::of_mx(&src, &data, &scales, rows, cols, &spec).unwrap();
                let largest: Vec<f32> =
                    scales.iter().map(|&code| element.max() * e8m0::decode(code)).collect();
                let expected = by_hand(&src, &back, 32, cols.max(1), &largest);
                assert_close(&got.total(), &expected, &format!("{spec:?} {rows} x {cols}"));
                if stats.nonfinite == 0 {
                    let QuantStats { underflows, saturations, .. } = stats;
                    let total = got.total();
                    assert_eq!((total.underflows, total.saturations), (underflows, saturations));
                }
                for (code, bin) in got.by_scale() {
                    let blocks = scales.iter().filter(|&&scale| scale == code).count() as u64;
                    assert_eq!(bin.blocks + bin.blocks_not_finite, blocks);
                }
            }
        }
        let amax = nvfp4::amax(&src);
        let mut bytes = vec![0; crate::packed::fp4_len(rows, cols)];
        let mut scales = vec![0; nvfp4::scales_len(rows, cols)];
        let mut back = vec![0.0; rows * cols];
        let (format, common) = (QuantFormat::NVFP4, nvfp4::Common::nearest(amax));
        let (scale, _) =
            nvfp4::quantize_rows(&src, rows, cols, &format, &common, &mut bytes, &mut scales)
                .unwrap();
        nvfp4::dequantize_rows(&bytes, &scales, scale, rows, cols, &mut back).unwrap();
        let got = BlockStatistics::of_nvfp4(&src, &bytes, &scales, scale, rows, cols).unwrap();
        let largest: Vec<f32> =
            scales.iter().map(|&code| 6.0 * ue4m3::decode(code) * scale).collect();
        let expected = by_hand(&src, &back, 16, cols.max(1), &largest);
        assert_close(&got.total(), &expected, &format!("nvfp4 {rows} x {cols}"));
    }
}

/// SNR of uniform numbers: a step of size s has a noise power of s^2 / 12.
#[cfg(feature = "std")]
#[test]
fn decibels() {
    let src: Vec<f32> = (0..1 << 16).map(|i| 1.0 + i as f32 / (1 << 16) as f32 * 0.749).collect();
    let (mut data, mut scales) = (vec![0; 1 << 16], vec![0; 1 << 11]);
    let spec = QuantFormat::MXFP8;
    quantize_rows(&src, 1, 1 << 16, &spec, &mut data, &mut scales).unwrap();
    let total = BlockStatistics::of_mx(&src, &data, &scales, 1, 1 << 16, &spec).unwrap().total();
    let signal = src.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 65536.0;
    let expected = 10.0 * (signal / ((1.0 / 8.0_f64).powi(2) / 12.0)).log10();
    assert_abs_diff_eq!(total.snr_db(), expected, epsilon = 0.05);
    assert_eq!(BlockSums::default().snr_db(), f64::INFINITY);
    assert_eq!(total.saturation_fraction() + total.underflow_fraction(), 0.0);
}

#[cfg(feature = "rayon")]
#[test]
fn no_bit_depends_on_the_number_of_threads() {
    let src = matrix(700 * 300);
    let (mut data, mut scales) = (vec![0; src.len()], vec![0; scales_len(700, 300)]);
    let spec = QuantFormat::MXFP8;
    quantize_rows(&src, 700, 300, &spec, &mut data, &mut scales).unwrap();
    let of = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| BlockStatistics::of_mx(&src, &data, &scales, 700, 300, &spec).unwrap())
    };
    assert_eq!(of(1), of(3));
}

#[test]
fn they_serialize() {
    let (data, scales) = ([0x38; 32], [127]);
    let statistics =
        BlockStatistics::of_mx(&[1.0_f32; 32], &data, &scales, 1, 32, &QuantFormat::MXFP8).unwrap();
    let json = serde_json::to_string(&statistics).unwrap();
    assert_eq!(serde_json::from_str::<BlockStatistics>(&json).unwrap(), statistics);
    let error = serde_json::from_str::<BlockStatistics>("[]").unwrap_err().to_string();
    assert_eq!(error, "`bins` of a 1 x 256 matrix: expected 256 elements, got 0");
}
