//! The kernels beside the oracle.

use super::*;
use crate::ops::rms_norm::oracle;
use crate::runtime::cpu::test_support::{
    Random, assert_close, assert_close_each, for_thread_counts, poisoned, to_f64,
};
use half::bf16;

const EPS: f32 = 1e-5;

/// The arithmetic of a row rounds a handful of times in `f32`, and its sum of `hidden` terms
/// in 32 lanes as often as `hidden / 32 + 5`; a bound that grows with that, relative to the
/// terms' size.
fn f32_error(hidden: usize) -> f64 {
    (hidden as f64 / 32.0 + 12.0) * 2f64.powi(-24)
}

fn check_forward<E: Element>(x: &[E], hidden: usize) {
    let rows = x.len() / hidden;
    let mut random = Random::new(hidden as u64);
    let weight: Vec<E> = random.normals(hidden);
    let delta: Vec<E> = random.normals(x.len());
    let rounding = f64::from(E::UNIT_ROUNDOFF) + f32_error(hidden);

    for_thread_counts(|| {
        let mut y = poisoned::<E>(x.len());
        let mut rstd = poisoned::<f32>(rows);
        rms_norm_forward(x, &weight, EPS, &mut y, &mut rstd);
        let expected = oracle::forward(&to_f64(x), &to_f64(&weight), f64::from(EPS));
        assert_close("rstd", &rstd, &expected.rstd, f32_error(hidden), 0.0);
        // 2^-134: half the smallest BF16 subnormal.
        assert_close("y", &y, &expected.y, rounding, 2f64.powi(-134));
        (y, rstd)
    });
    for_thread_counts(|| {
        let mut sum = poisoned::<E>(x.len());
        let mut y = poisoned::<E>(x.len());
        let mut rstd = poisoned::<f32>(rows);
        add_rms_norm_forward(x, &delta, &weight, EPS, &mut sum, &mut y, &mut rstd);
        let added: Vec<f64> = to_f64(x).iter().zip(to_f64(&delta)).map(|(x, d)| x + d).collect();
        assert_close("sum", &sum, &added, f64::from(E::UNIT_ROUNDOFF), 0.0);
        // The norm of the sum as stored: identical to the plain kernel on it.
        let mut y_plain = poisoned::<E>(x.len());
        let mut rstd_plain = poisoned::<f32>(rows);
        rms_norm_forward(&sum, &weight, EPS, &mut y_plain, &mut rstd_plain);
        assert_eq!(y, y_plain);
        assert_eq!(rstd, rstd_plain);
        (sum, y)
    });
}

fn check_backward<E: Element>(x: &[E], hidden: usize) {
    let rows = x.len() / hidden;
    let mut random = Random::new(hidden as u64 + 1);
    let weight: Vec<E> = random.normals(hidden);
    let dy: Vec<E> = random.normals(x.len());
    let residual: Vec<E> = random.normals(x.len());
    let before: Vec<f32> = random.normals(hidden);
    let (mut y, mut rstd) = (poisoned::<E>(x.len()), poisoned::<f32>(rows));
    rms_norm_forward(x, &weight, EPS, &mut y, &mut rstd);
    let exact = oracle::backward(&to_f64(&dy), &to_f64(x), &to_f64(&weight), &to_f64(&rstd));

    for (with_residual, accumulate) in [(false, false), (true, true)] {
        for_thread_counts(|| {
            let mut dx = poisoned::<E>(x.len());
            let mut dweight = if accumulate { before.clone() } else { poisoned(hidden) };
            let bytes = rms_norm_backward_workspace_bytes(rows, hidden);
            let mut workspace = poisoned::<f32>(bytes / 4);
            rms_norm_backward(
                &dy,
                x,
                &weight,
                &rstd,
                with_residual.then_some(&residual[..]),
                &mut dx,
                &mut dweight,
                accumulate,
                &mut workspace,
            );
            let mut expected_dx = exact.dx.clone();
            let mut expected_dweight = exact.dweight.clone();
            if with_residual {
                expected_dx.iter_mut().zip(to_f64(&residual)).for_each(|(e, r)| *e += r);
            }
            if accumulate {
                expected_dweight.iter_mut().zip(to_f64(&before)).for_each(|(e, b)| *e += b);
            }
            // The two terms of dx may cancel: the error is relative to their size, which is
            // rstd times a normal number times a weight, both below 5.
            let absolute: Vec<f64> = rstd
                .iter()
                .flat_map(|&rstd| {
                    let size = f64::from(rstd) * 25.0 + 5.0;
                    std::iter::repeat_n(size * f32_error(hidden), hidden)
                })
                .collect();
            let relative = f64::from(E::UNIT_ROUNDOFF);
            assert_close_each("dx", &dx, &expected_dx, relative, &absolute);
            // |dy| < 5 and |normalized| <= sqrt(hidden); one addition a row.
            let terms = rows as f64 + 4.0;
            let size = 5.0 * (hidden as f64).sqrt().min(5.0) * terms.sqrt() + 5.0;
            assert_close("dweight", &dweight, &expected_dweight, 0.0, {
                terms * 2f64.powi(-24) * size
            });
            (dx, dweight)
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
    // A zero row, a row of tiny numbers, one of large ones, one with a single outlier.
    let hidden = 48;
    let mut x = vec![0.0f32; 4 * hidden];
    for column in 0..hidden {
        let sign = if column % 3 == 0 { -1.0 } else { 1.0 };
        x[hidden + column] = sign * 1e-30;
        x[2 * hidden + column] = sign * 1e15 * (1.0 + column as f32);
        x[3 * hidden + column] = if column == 17 { 3e4 } else { sign * 1e-3 };
    }
    let narrow: Vec<bf16> = x.iter().map(|&x| Element::from_f32(x)).collect();
    check_forward(&x, hidden);
    check_forward(&narrow, hidden);
    check_backward(&x, hidden);
    check_backward(&narrow, hidden);
}

#[test]
fn non_finite_input_is_not_hidden() {
    let mut x = vec![1.0f32; 64];
    x[40] = f32::NAN;
    let (mut y, mut rstd) = ([0.0; 64], [0.0; 2]);
    rms_norm_forward(&x, &[1.0; 32], EPS, &mut y, &mut rstd);
    assert!(y[..32].iter().all(|y| y.is_finite()));
    assert!(y[32..].iter().all(|y| y.is_nan()));
}
