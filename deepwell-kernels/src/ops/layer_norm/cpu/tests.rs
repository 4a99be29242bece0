//! Forward and backward against the oracle.

use super::*;
use crate::ops::layer_norm::oracle;
use crate::runtime::cpu::test_support::{
    Random, assert_close, assert_close_each, for_thread_counts, poisoned, to_f64,
};
use half::bf16;

const EPS: f32 = 1e-5;
/// Unit roundoff of `f32`.
const ROUNDOFF: f64 = 1.0 / (1 << 24) as f64;

/// The arithmetic of a row rounds a handful of times in `f32`, and its sum of `hidden` terms in 32
/// lanes as often as `hidden / 32 + 5`; a bound that grows with that, relative to the terms' size.
fn f32_error(hidden: usize) -> f64 {
    (hidden as f64 / 32.0 + 16.0) * ROUNDOFF
}

/// What a row's mean may be off by, and its `rstd` relative to itself.
///
/// Distances from the first element are at most `sqrt(hidden)` standard deviations from those of
/// the mean, twice that between any two; the mean is then rounded once itself. The variance is off
/// by what its own sum is, and by the square of what the mean is.
fn statistics_errors(row: &[f64], mean: f64) -> (f64, f64) {
    let hidden = row.len() as f64;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / hidden;
    let of_sum = f32_error(row.len()) * 2.0 * hidden.sqrt() * variance.sqrt();
    let of_mean = of_sum + ROUNDOFF * mean.abs();
    let of_variance = 2.0 * f32_error(row.len()) * variance + of_mean * of_mean;
    (of_mean, of_variance / 2.0 / (variance + f64::from(EPS)) + 4.0 * ROUNDOFF)
}

/// The output's error past its own rounding: of the distance from the mean, of `rstd`, and of
/// five operations.
fn output_errors(x: &[f64], weight: &[f64], bias: &[f64], exact: &oracle::Forward) -> Vec<f64> {
    let hidden = weight.len();
    let mut errors = Vec::with_capacity(x.len());
    for ((row, &mean), &rstd) in x.chunks_exact(hidden).zip(&exact.mean).zip(&exact.rstd) {
        let (of_mean, of_rstd) = statistics_errors(row, mean);
        for ((x, w), b) in row.iter().zip(weight).zip(bias) {
            let scaled = (x - mean).abs() * rstd * w.abs();
            let of_distance = of_mean * rstd * w.abs();
            errors.push(of_distance + scaled * (of_rstd + 5.0 * ROUNDOFF) + ROUNDOFF * b.abs());
        }
    }
    errors
}

fn check_forward<E: Element>(x: &[E], hidden: usize) {
    let rows = x.len() / hidden;
    let mut random = Random::new(hidden as u64);
    let weight: Vec<E> = random.normals(hidden);
    let bias: Vec<E> = random.normals(hidden);
    let delta: Vec<E> = random.normals(x.len());
    let x_64 = to_f64(x);
    let exact = oracle::forward(&x_64, &to_f64(&weight), &to_f64(&bias), f64::from(EPS));

    for_thread_counts(|| {
        let mut y = poisoned::<E>(x.len());
        let mut mean = poisoned::<f32>(rows);
        let mut rstd = poisoned::<f32>(rows);
        layer_norm_forward(x, &weight, &bias, EPS, &mut y, &mut mean, &mut rstd);
        let errors: Vec<(f64, f64)> = x_64
            .chunks_exact(hidden)
            .zip(&exact.mean)
            .map(|(row, &mean)| statistics_errors(row, mean))
            .collect();
        let of_mean: Vec<f64> = errors.iter().map(|error| error.0).collect();
        assert_close_each("mean", &mean, &exact.mean, 0.0, &of_mean);
        let of_rstd: Vec<f64> =
            errors.iter().zip(&exact.rstd).map(|(error, rstd)| error.1 * rstd).collect();
        assert_close_each("rstd", &rstd, &exact.rstd, 0.0, &of_rstd);
        let absolute = output_errors(&x_64, &to_f64(&weight), &to_f64(&bias), &exact);
        assert_close_each("y", &y, &exact.y, f64::from(E::UNIT_ROUNDOFF), &absolute);
        (y, mean, rstd)
    });
    for_thread_counts(|| {
        let mut sum = poisoned::<E>(x.len());
        let mut y = poisoned::<E>(x.len());
        let mut mean = poisoned::<f32>(rows);
        let mut rstd = poisoned::<f32>(rows);
        add_layer_norm_forward(
            x, &delta, &weight, &bias, EPS, &mut sum, &mut y, &mut mean, &mut rstd,
        );
        let added: Vec<f64> = x_64.iter().zip(to_f64(&delta)).map(|(x, d)| x + d).collect();
        assert_close("sum", &sum, &added, f64::from(E::UNIT_ROUNDOFF), 0.0);
        // The norm of the sum as stored: identical to the plain kernel on it.
        let mut plain = (poisoned::<E>(x.len()), poisoned::<f32>(rows), poisoned::<f32>(rows));
        layer_norm_forward(&sum, &weight, &bias, EPS, &mut plain.0, &mut plain.1, &mut plain.2);
        assert_eq!((&y, &mean, &rstd), (&plain.0, &plain.1, &plain.2));
        (sum, y)
    });
}

fn check_backward<E: Element>(x: &[E], hidden: usize) {
    let rows = x.len() / hidden;
    let mut random = Random::new(hidden as u64 + 1);
    let weight: Vec<E> = random.normals(hidden);
    let bias: Vec<E> = random.normals(hidden);
    let dy: Vec<E> = random.normals(x.len());
    let residual: Vec<E> = random.normals(x.len());
    let before: Vec<f32> = random.normals(hidden);
    let (mut y, mut mean) = (poisoned::<E>(x.len()), poisoned::<f32>(rows));
    let mut rstd = poisoned::<f32>(rows);
    layer_norm_forward(x, &weight, &bias, EPS, &mut y, &mut mean, &mut rstd);
    let (mean_64, rstd_64) = (to_f64(&mean), to_f64(&rstd));
    let exact = oracle::backward(&to_f64(&dy), &to_f64(x), &to_f64(&weight), &mean_64, &rstd_64);

    for (with_residual, accumulate) in [(false, false), (true, true)] {
        for_thread_counts(|| {
            let mut dx = poisoned::<E>(x.len());
            let start = || if accumulate { before.clone() } else { poisoned(hidden) };
            let (mut dweight, mut dbias) = (start(), start());
            let bytes = layer_norm_backward_workspace_bytes(rows, hidden);
            let mut workspace = poisoned::<f32>(bytes / 4);
            layer_norm_backward(
                &dy,
                x,
                &weight,
                &mean,
                &rstd,
                with_residual.then_some(&residual[..]),
                &mut dx,
                &mut dweight,
                &mut dbias,
                accumulate,
                &mut workspace,
            );
            let mut expected = exact.clone();
            if with_residual {
                expected.dx.iter_mut().zip(to_f64(&residual)).for_each(|(e, r)| *e += r);
            }
            if accumulate {
                for expected in [&mut expected.dweight, &mut expected.dbias] {
                    expected.iter_mut().zip(to_f64(&before)).for_each(|(e, b)| *e += b);
                }
            }
            // The three terms of dx may cancel: the error is relative to their size, which is
            // rstd times a normal number times a weight, both below 5.
            let absolute: Vec<f64> = rstd_64
                .iter()
                .flat_map(|rstd| {
                    std::iter::repeat_n((rstd * 50.0 + 5.0) * f32_error(hidden), hidden)
                })
                .collect();
            let relative = f64::from(E::UNIT_ROUNDOFF);
            assert_close_each("dx", &dx, &expected.dx, relative, &absolute);
            // |dy| < 5 and |normalized| <= sqrt(hidden); one addition a row.
            let terms = rows as f64 + 4.0;
            let size = 5.0 * (hidden as f64).sqrt().min(5.0) * terms.sqrt() + 5.0;
            let absolute = terms * ROUNDOFF * size;
            assert_close("dweight", &dweight, &expected.dweight, 0.0, absolute);
            assert_close("dbias", &dbias, &expected.dbias, 0.0, absolute);
            (dx, dweight, dbias)
        });
    }
}

fn check<E: Element>(x: &[E], hidden: usize) {
    check_forward(x, hidden);
    check_backward(x, hidden);
}

#[test]
fn matches_the_oracle() {
    for (rows, hidden) in [
        (0, 4),
        (1, 1),
        (1, 256),
        (3, 31),
        (5, 32),
        (63, 33),
        (64, 7),
        (65, 64),
        (129, 257),
        (300, 256),
        (2, 4096),
    ] {
        let mut random = Random::new(rows as u64);
        check::<bf16>(&random.normals(rows * hidden), hidden);
        check::<f32>(&random.normals(rows * hidden), hidden);
    }
}

#[test]
fn matches_the_oracle_on_extreme_rows() {
    // A zero row, a row of tiny numbers, one of large ones, one with a single outlier, one far
    // from zero, one whose first element is the outlier.
    let hidden = 48;
    let mut x = vec![0.0f32; 6 * hidden];
    for column in 0..hidden {
        let sign = if column % 3 == 0 { -1.0 } else { 1.0 };
        x[hidden + column] = sign * 1e-30;
        x[2 * hidden + column] = sign * 1e15 * (1.0 + column as f32);
        x[3 * hidden + column] = if column == 17 { 3e4 } else { sign * 1e-3 };
        x[4 * hidden + column] = 1e4 + sign * column as f32;
        x[5 * hidden + column] = if column == 0 { -3e4 } else { sign };
    }
    check(&x, hidden);
    check(&x.iter().map(|&x| Element::from_f32(x)).collect::<Vec<bf16>>(), hidden);
}

#[test]
fn a_row_of_equal_numbers_comes_out_as_the_bias() {
    // Neither 0.1 nor 1e15 times 48 is a number of `f32`.
    for value in [0.1f32, -1e15, 3e38] {
        let (x, bias) = ([value; 48], [0.25f32; 48]);
        let (mut y, mut mean, mut rstd) = ([0.0; 48], [0.0], [0.0]);
        layer_norm_forward(&x, &[3.0; 48], &bias, EPS, &mut y, &mut mean, &mut rstd);
        assert_eq!((y, mean), (bias, [value]));
        assert_eq!(rstd, [1.0 / EPS.sqrt()]);
    }
}

#[test]
fn non_finite_input_is_not_hidden() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = vec![1.0f32; 64];
        x[40] = bad;
        let (mut y, mut mean, mut rstd) = ([0.0; 64], [0.0; 2], [0.0; 2]);
        layer_norm_forward(&x, &[1.0; 32], &[0.0; 32], EPS, &mut y, &mut mean, &mut rstd);
        assert!(y[..32].iter().all(|y| y.is_finite()));
        assert!(y[32..].iter().all(|y| y.is_nan()));
    }
}
