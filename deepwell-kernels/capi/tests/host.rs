//! The exported functions on host memory, beside plain loops.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use deepwell::*;
use half::bf16;

/// Memory of the caller, aligned as the functions ask for.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[allow(dead_code)] [u8; 64]); // read through pointers alone

struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Buffer {
        Buffer { lines: vec![Line([0xAA; 64]); bytes.div_ceil(64).max(1)], bytes }
    }

    fn bf16(values: &[f32]) -> Buffer {
        let mut buffer = Buffer::new(2 * values.len());
        for (place, &value) in buffer.bytes_mut().chunks_exact_mut(2).zip(values) {
            place.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        }
        buffer
    }

    fn f32(values: &[f32]) -> Buffer {
        let mut buffer = Buffer::new(4 * values.len());
        for (place, value) in buffer.bytes_mut().chunks_exact_mut(4).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        buffer
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the lines are that many initialized bytes, one behind the other.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.bytes) }
    }

    fn read_bf16(&mut self) -> Vec<f32> {
        let numbers = self.bytes_mut().chunks_exact(2);
        numbers.map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
    }

    fn read_f32(&mut self) -> Vec<f32> {
        let numbers = self.bytes_mut().chunks_exact(4);
        numbers.map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn read(&self) -> *const c_void {
        self.lines.as_ptr().cast()
    }

    fn write(&mut self) -> *mut c_void {
        self.lines.as_mut_ptr().cast()
    }
}

/// One device for the whole process: tests take turns.
fn on_cpu() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = CString::new("cpu").unwrap();
    // SAFETY: a string that ends with a zero byte.
    assert_eq!(unsafe { dw_set_device(device.as_ptr()) }, DwStatus::Ok);
    turn
}

fn last_error() -> String {
    // SAFETY: the last call of this thread left a string.
    unsafe { CStr::from_ptr(dw_last_error()) }.to_str().unwrap().to_string()
}

/// Numbers in `[-1, 1)`, rounded to BF16, that differ by `seed`.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| bf16::from_f32(draw()).to_f32()).collect()
}

/// The largest distance, as a share of the largest magnitude of what is expected.
fn distance(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    got.iter()
        .zip(expected)
        .map(|(&got, expected)| (f64::from(got) - expected).abs() / largest)
        .fold(0.0, f64::max)
}

/// Rounding a result to BF16 moves it by half a unit, 2^-9 of itself; sums in FP32 add little.
const BF16_TOLERANCE: f64 = 1.0 / 256.0;

fn gemm(a: &[f32], b: &[f32], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| {
        (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[j * k + l])).sum()
    };
    (0..m * n).map(|index| at(index / n, index % n)).collect()
}

#[test]
fn bf16_gemm_of_several_sizes() {
    let _turn = on_cpu();
    for [m, n, k] in [[1, 1, 1], [3, 5, 7], [64, 48, 96]] {
        let (a, b) = (numbers(m * k, 1), numbers(n * k, 2));
        let (of_a, of_b) = (Buffer::bf16(&a), Buffer::bf16(&b));
        let mut out = Buffer::new(2 * m * n);
        let sizes = [m as i32, n as i32, k as i32];
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_bf16_gemm(of_a.read(), of_b.read(), out.write(), sizes[0], sizes[1], sizes[2])
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        let distance = distance(&out.read_bf16(), &gemm(&a, &b, [m, n, k]));
        assert!(distance < BF16_TOLERANCE, "{m} x {n} x {k}: {distance}");
    }
}

#[test]
fn mxfp8_gemm_of_what_was_quantized() {
    let _turn = on_cpu();
    let [m, n, k] = [96usize, 64, 160];
    let (a, b) = (numbers(m * k, 3), numbers(n * k, 4));
    let quantize = |x: &[f32], rows: usize, square: i32| {
        let source = Buffer::f32(x);
        let mut data = Buffer::new(rows * k);
        let mut scales = Buffer::new(dw_mxfp8_scale_bytes(rows as i32, k as i32));
        let none = std::ptr::null_mut();
        let (to, scales_to) = (data.write(), scales.write());
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_mxfp8_quantize(
                source.read(),
                1,
                rows as i32,
                k as i32,
                32,
                square,
                to,
                scales_to,
                none,
                none,
            )
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        (data, scales)
    };
    let ((qa, sa), (qb, sb)) = (quantize(&a, m, 0), quantize(&b, n, 1));
    let run = |out: &mut Buffer, out_dtype: i32, accumulate: i32| {
        let (to, sizes) = (out.write(), [m as i32, n as i32, k as i32]);
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_mxfp8_gemm(
                qa.read(),
                sa.read(),
                qb.read(),
                sb.read(),
                to,
                out_dtype,
                sizes[0],
                sizes[1],
                sizes[2],
                32,
                32,
                1,
                accumulate,
            )
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
    };
    let expected = gemm(&a, &b, [m, n, k]);
    let mut out = Buffer::new(2 * m * n);
    run(&mut out, 0, 0);
    // E4M3 rounds each element by at most 2^-4 of itself; over 160 products that average out.
    let distance_once = distance(&out.read_bf16(), &expected);
    assert!(distance_once < 0.05, "{distance_once}");
    let mut sums = Buffer::f32(&vec![0.0; m * n]);
    run(&mut sums, 1, 0);
    let once = sums.read_f32();
    run(&mut sums, 1, 1);
    let twice: Vec<f32> = sums.read_f32();
    assert!(once.iter().zip(&twice).all(|(once, twice)| *twice == 2.0 * once), "added once");
}

/// Groups of 32, no and 64 rows, and 32 rows behind them.
const OFFSETS: [i32; 4] = [0, 32, 32, 96];
const GROUP_ROWS: i32 = 128;

fn offsets() -> Buffer {
    let mut buffer = Buffer::new(4 * OFFSETS.len());
    let bytes: Vec<u8> = OFFSETS.iter().flat_map(|offset| offset.to_le_bytes()).collect();
    buffer.bytes_mut().copy_from_slice(&bytes);
    buffer
}

/// The rows of each group and its number.
fn groups() -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    OFFSETS.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).enumerate()
}

/// `[rows, columns]` turned around.
fn transposed(x: &[f32], columns: usize) -> Vec<f32> {
    let rows = x.len() / columns;
    (0..x.len()).map(|index| x[index % rows * columns + index / rows]).collect()
}

/// fprop: rows of each group by the transpose of its matrix.
fn grouped_gemm(x: &[f32], w: &[f32], n: usize, k: usize) -> Vec<f64> {
    let mut out = vec![0.0; x.len() / k * n];
    for (group, rows) in groups() {
        let (x, w) = (&x[rows.start * k..rows.end * k], &w[group * n * k..][..n * k]);
        out[rows.start * n..rows.end * n].copy_from_slice(&gemm(x, w, [rows.len(), n, k]));
    }
    out
}

/// wgrad: the matrix of each group.
fn grouped_wgrad(dy: &[f32], x: &[f32], n: usize, k: usize) -> Vec<f64> {
    let of = |(_, rows): (usize, std::ops::Range<usize>)| {
        let dy = transposed(&dy[rows.start * n..rows.end * n], n);
        let x = transposed(&x[rows.start * k..rows.end * k], k);
        gemm(&dy, &x, [n, k, rows.len()])
    };
    groups().flat_map(of).collect()
}

#[test]
fn bf16_gemms_of_groups() {
    let _turn = on_cpu();
    let (n, k, rows, count) = (40usize, 24usize, GROUP_ROWS as usize, OFFSETS.len() - 1);
    let (x, dy, w) = (numbers(rows * k, 13), numbers(rows * n, 14), numbers(count * n * k, 15));
    let (of_x, of_dy, of_w) = (Buffer::bf16(&x), Buffer::bf16(&dy), Buffer::bf16(&w));
    let offsets = offsets();
    let (mut y, mut dx) = (Buffer::new(2 * rows * n), Buffer::new(2 * rows * k));
    let mut dw = Buffer::f32(&vec![7.0; count * n * k]);
    let sizes = (count as i32, 32, GROUP_ROWS, n as i32, k as i32);
    let (groups, align, all, n_size, k_size) = sizes;
    let fprop = dw_grouped_gemm_bf16;
    let dgrad = dw_grouped_gemm_bf16_dgrad;
    let (a, b, at, to) = (of_x.read(), of_w.read(), offsets.read(), y.write());
    // SAFETY: the buffers have these sizes.
    let status = unsafe { fprop(a, b, at, to, groups, align, all, n_size, k_size) };
    assert_eq!(status, DwStatus::Ok, "{}", last_error());
    let (a, to) = (of_dy.read(), dx.write());
    // SAFETY: the buffers have these sizes.
    let status = unsafe { dgrad(a, b, at, to, groups, align, all, n_size, k_size) };
    assert_eq!(status, DwStatus::Ok, "{}", last_error());
    let expected = grouped_gemm(&x, &w, n, k);
    assert!(distance(&y.read_bf16(), &expected) < BF16_TOLERANCE);
    let turned: Vec<f32> = w.chunks(n * k).flat_map(|w| transposed(w, k)).collect();
    assert!(distance(&dx.read_bf16(), &grouped_gemm(&dy, &turned, k, n)) < BF16_TOLERANCE);

    let expected = grouped_wgrad(&dy, &x, n, k);
    for accumulate in [0, 1] {
        let (a, b, to) = (of_dy.read(), of_x.read(), dw.write());
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_grouped_gemm_bf16_wgrad(a, b, at, to, groups, align, all, n_size, k_size, accumulate)
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        let times = f64::from(1 + accumulate);
        let expected: Vec<f64> = expected.iter().map(|x| times * x).collect();
        let got = dw.read_f32();
        assert!(distance(&got, &expected) < BF16_TOLERANCE, "accumulate {accumulate}");
        // Nobody came to the second group.
        assert!(got[n * k..2 * n * k].iter().all(|x| x.to_bits() == 0));
    }
}

#[test]
fn mxfp8_gemms_of_groups() {
    let _turn = on_cpu();
    let (n, k, rows, count) = (64usize, 96usize, GROUP_ROWS as usize, OFFSETS.len() - 1);
    let (x, dy, w) = (numbers(rows * k, 16), numbers(rows * n, 17), numbers(count * n * k, 18));
    // Quantized along its rows: `columns` is the contraction.
    let quantize = |x: &[f32], columns: usize, square: i32| {
        let (source, rows) = (Buffer::f32(x), x.len() / columns);
        let (rows_size, columns_size) = (rows as i32, columns as i32);
        let mut data = Buffer::new(x.len());
        let mut scales = Buffer::new(dw_mxfp8_scale_bytes(rows_size, columns_size));
        let (from, to, scales_to) = (source.read(), data.write(), scales.write());
        let none = std::ptr::null_mut();
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_mxfp8_quantize(
                from,
                1,
                rows_size,
                columns_size,
                32,
                square,
                to,
                scales_to,
                none,
                none,
            )
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        (data, scales)
    };
    let (mut of_w, mut of_w_scales) = (Vec::new(), Vec::new());
    for matrix in w.chunks(n * k) {
        let (mut data, mut scales) = quantize(matrix, k, 1);
        of_w.extend_from_slice(data.bytes_mut());
        of_w_scales.extend_from_slice(scales.bytes_mut());
    }
    let stack = |bytes: Vec<u8>| {
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(&bytes);
        buffer
    };
    let (of_w, of_w_scales) = (stack(of_w), stack(of_w_scales));
    let (of_x, of_x_scales) = quantize(&x, k, 0);
    let (turned_x, turned_dy) = (transposed(&x, k), transposed(&dy, n));
    let (along_x, along_x_scales) = quantize(&turned_x, rows, 0);
    let (along_dy, along_dy_scales) = quantize(&turned_dy, rows, 0);
    let offsets = offsets();
    let mut y = Buffer::new(2 * rows * n);
    let to = y.write();
    // SAFETY: the buffers have these sizes.
    let status = unsafe {
        dw_grouped_gemm_mxfp8(
            of_x.read(),
            of_x_scales.read(),
            of_w.read(),
            of_w_scales.read(),
            offsets.read(),
            to,
            0,
            count as i32,
            32,
            GROUP_ROWS,
            n as i32,
            k as i32,
            32,
            1,
        )
    };
    assert_eq!(status, DwStatus::Ok, "{}", last_error());
    // As of `mxfp8_gemm_of_what_was_quantized`.
    let of_y = distance(&y.read_bf16(), &grouped_gemm(&x, &w, n, k));
    assert!(of_y < 0.05, "{of_y}");
    let mut dw = Buffer::f32(&vec![7.0; count * n * k]);
    let mut wgrad = |align: i32| {
        // SAFETY: the buffers have these sizes.
        unsafe {
            dw_grouped_gemm_mxfp8_wgrad(
                along_dy.read(),
                along_dy_scales.read(),
                along_x.read(),
                along_x_scales.read(),
                offsets.read(),
                dw.write(),
                count as i32,
                align,
                GROUP_ROWS,
                n as i32,
                k as i32,
                32,
                0,
            )
        }
    };
    assert_eq!(wgrad(48), DwStatus::InvalidArgument);
    assert_eq!(last_error(), "`align`: expected a multiple of `granularity`, 32, got 48");
    assert_eq!(wgrad(32), DwStatus::Ok, "{}", last_error());
    let of_dw = distance(&dw.read_f32(), &grouped_wgrad(&dy, &x, n, k));
    assert!(of_dw < 0.05, "{of_dw}");
}

/// Attention of one head as plain loops: o and the logarithm of the sums.
fn attention(q: &[f32], k: &[f32], v: &[f32], seq: usize, dim: usize, causal: bool) -> Vec<f64> {
    let scale = 1.0 / (dim as f64).sqrt();
    let row = |x: &[f32], i: usize| x[i * dim..][..dim].to_vec();
    let mut out = Vec::new();
    for i in 0..seq {
        let seen = if causal { i + 1 } else { seq };
        let scores: Vec<f64> = (0..seen)
            .map(|j| {
                let products = row(q, i).into_iter().zip(row(k, j));
                scale * products.map(|(a, b)| f64::from(a) * f64::from(b)).sum::<f64>()
            })
            .collect();
        let largest = scores.iter().fold(f64::MIN, |largest, &x| largest.max(x));
        let weights: Vec<f64> = scores.iter().map(|x| (x - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for d in 0..dim {
            let sum: f64 =
                weights.iter().enumerate().map(|(j, w)| w * f64::from(v[j * dim + d])).sum();
            out.push(sum / total);
        }
    }
    out
}

#[test]
fn fmha_of_heads_one_behind_the_other() {
    let _turn = on_cpu();
    let (batch, heads, seq, dim) = (2, 3, 37, 64);
    let len = batch * heads * seq * dim;
    let (q, k, v) = (numbers(len, 5), numbers(len, 6), numbers(len, 7));
    for causal in [false, true] {
        let (of_q, of_k, of_v) = (Buffer::bf16(&q), Buffer::bf16(&k), Buffer::bf16(&v));
        let mut o = Buffer::new(2 * len);
        let (to, seq_len) = (o.write(), seq as i32);
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_fmha_bf16_forward(
                of_q.read(),
                of_k.read(),
                of_v.read(),
                to,
                batch as i32,
                heads as i32,
                seq_len,
                seq_len,
                dim as i32,
                i32::from(causal),
            )
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        let expected: Vec<f64> = (0..batch * heads)
            .flat_map(|head| {
                let part = head * seq * dim..(head + 1) * seq * dim;
                let (q, k, v) = (&q[part.clone()], &k[part.clone()], &v[part]);
                attention(q, k, v, seq, dim, causal)
            })
            .collect();
        // The weights are rounded to BF16 as well.
        let distance = distance(&o.read_bf16(), &expected);
        assert!(distance < 2.0 * BF16_TOLERANCE, "causal {causal}: {distance}");
    }
}

/// Through a directional derivative: the change of `sum(dout · o)` along a direction of q, k and v.
#[test]
fn gradients_of_grouped_heads() {
    let _turn = on_cpu();
    let (batch, seq, heads, kv_heads, dim) = (2, 21, 4, 2, 32);
    let (q_len, kv_len) = (batch * seq * heads * dim, batch * seq * kv_heads * dim);
    let sizes = [batch, seq, heads, kv_heads, dim].map(|size| size as i32);
    let forward = |q: &[f32], k: &[f32], v: &[f32]| {
        let (of_q, of_k, of_v) = (Buffer::bf16(q), Buffer::bf16(k), Buffer::bf16(v));
        let (mut o, mut lse) = (Buffer::new(2 * q_len), Buffer::new(4 * batch * heads * seq));
        let (to, lse_to) = (o.write(), lse.write());
        // SAFETY: the buffers have these sizes.
        let status = unsafe {
            dw_attention_bf16_forward(
                of_q.read(),
                of_k.read(),
                of_v.read(),
                to,
                lse_to,
                sizes[0],
                sizes[1],
                sizes[2],
                sizes[3],
                sizes[4],
                0.0,
                1,
            )
        };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        (of_q, of_k, of_v, o, lse)
    };
    let (q, k, v) = (numbers(q_len, 8), numbers(kv_len, 9), numbers(kv_len, 10));
    let dout = numbers(q_len, 11);
    let (of_q, of_k, of_v, o, lse) = forward(&q, &k, &v);
    let of_dout = Buffer::bf16(&dout);
    let mut gradients = [q_len, kv_len, kv_len].map(|len| Buffer::new(2 * len));
    let [dq, dk, dv] = gradients.each_mut().map(Buffer::write);
    // SAFETY: the buffers have these sizes.
    let status = unsafe {
        dw_attention_bf16_backward(
            of_dout.read(),
            of_q.read(),
            of_k.read(),
            of_v.read(),
            o.read(),
            lse.read(),
            dq,
            dk,
            dv,
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            sizes[4],
            0.0,
            1,
        )
    };
    assert_eq!(status, DwStatus::Ok, "{}", last_error());
    let [dq, dk, dv] = gradients.each_mut().map(Buffer::read_bf16);
    // sum(dout · o) is linear in v, so that sum(dv · v) is the sum itself.
    let total = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let mut o = o;
    let (direct, by_gradient) = (total(&dout, &o.read_bf16()), total(&dv, &v));
    assert!((direct - by_gradient).abs() < 0.02 * direct.abs().max(1.0), "{direct} {by_gradient}");
    // A score does not change when q grows and k shrinks by the same factor.
    let (by_q, by_k) = (total(&dq, &q), total(&dk, &k));
    assert!((by_q - by_k).abs() < 0.05 * by_q.abs().max(1.0), "{by_q} {by_k}");
    assert!(dq.iter().any(|&x| x != 0.0) && dk.iter().any(|&x| x != 0.0));
}

#[test]
fn what_is_wrong_is_said() {
    let _turn = on_cpu();
    let buffer = Buffer::bf16(&numbers(64, 12));
    let mut out = Buffer::new(128);
    let off = buffer.read().wrapping_byte_add(2);
    let mut gemm = |a: *const c_void, m: i32| {
        // SAFETY: nothing is read: the arguments are refused before.
        unsafe { dw_bf16_gemm(a, buffer.read(), out.write(), m, 8, 8) }
    };
    let mut check = |a, m, expected: &str| {
        assert_eq!(gemm(a, m), DwStatus::InvalidArgument);
        assert!(last_error().contains(expected), "{}", last_error());
    };
    check(std::ptr::null(), 8, "`a`: expected memory of the device, got a null pointer");
    check(buffer.read(), 0, "`m`: expected a size of at least 1, got 0");
    check(buffer.read(), -3, "got -3");
    check(off, 8, "`a`: expected an address that is a multiple of 64 bytes");
    assert_eq!(gemm(buffer.read(), 8), DwStatus::Ok);
    assert_eq!(last_error(), "");

    for device in ["gpu", "cuda:x", ""] {
        let name = CString::new(device).unwrap();
        // SAFETY: a string that ends with a zero byte.
        assert_eq!(unsafe { dw_set_device(name.as_ptr()) }, DwStatus::InvalidArgument);
        let expected = format!("expected `cpu`, `cuda` or `cuda:N` as device, got `{device}`");
        assert_eq!(last_error(), expected);
    }
}
