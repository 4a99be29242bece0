//! Grouped GEMMs beside the oracle: sizes of groups, types of operands, and what lies behind them.

use deepwell_precision::{quantize_columns, quantize_rows, scales_len};

use super::*;
use crate::ops::dequantize::oracle as mx;
use crate::ops::grouped_gemm::oracle;
use crate::runtime::cpu::element::Element;
use crate::runtime::cpu::gemm::workspace_bytes;
use crate::runtime::cpu::test_support::{
    Random, assert_close_each, for_thread_counts, poisoned, to_f64,
};

/// Groups of so many pairs, each padded to whole blocks, and 64 rows behind them.
struct Groups {
    offsets: Vec<i32>,
    /// Whether a row has a pair.
    is_pair: Vec<bool>,
    used: usize,
}

impl Groups {
    fn new(counts: &[usize]) -> Groups {
        let (mut offsets, mut is_pair) = (vec![0], Vec::new());
        for &count in counts {
            is_pair.extend((0..count.next_multiple_of(BLOCK)).map(|row| row < count));
            offsets.push(is_pair.len() as i32);
        }
        let used = is_pair.len();
        is_pair.extend([false; 64]);
        Groups { offsets, is_pair, used }
    }

    fn rows(&self) -> usize {
        self.is_pair.len()
    }

    /// Random rows of pairs, zero elsewhere.
    fn matrix<E: Element>(&self, random: &mut Random, columns: usize) -> Vec<E> {
        let row = |is_pair: bool| match is_pair {
            true => random.normals::<E>(columns),
            false => vec![E::from_f32(0.0); columns],
        };
        self.is_pair.iter().copied().flat_map(row).collect()
    }

    /// NaN behind the groups.
    fn poison<E: Element>(&self, matrix: &mut [E], columns: usize) {
        matrix[self.used * columns..].fill(E::from_f32(f32::NAN));
    }
}

const COUNTS: [&[usize]; 8] = [
    &[0, 0, 0],
    &[1, 0, 31],
    &[0, 33, 0],
    &[32, 0, 0],
    &[0, 0, 127],
    &[129, 1, 64],
    &[40],
    &[5, 0, 0, 7, 32, 1, 0],
];

/// `(k + 2) 2^-24` of the sum of magnitudes, twice where the call adds.
fn allowed(sizes: &[f64], k: usize) -> Vec<f64> {
    sizes.iter().map(|size| (k + 4) as f64 * 2f64.powi(-23) * size).collect()
}

fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

/// The three GEMMs on a tier; what lies behind the groups is as it comes.
struct Case<'a> {
    tier: Tier,
    sizes: Sizes,
    offsets: &'a [i32],
}

impl Case<'_> {
    fn workspace(&self) -> Vec<u8> {
        let Sizes { rows, n, k } = self.sizes;
        let kinds =
            [crate::runtime::cpu::gemm::DataKind::F32, crate::runtime::cpu::gemm::DataKind::Bf16];
        let kinds = kinds.into_iter().chain([crate::runtime::cpu::gemm::DataKind::Mx]);
        let sizes = [[rows, n, k], [rows, k, n], [n, k, rows]];
        let bytes = kinds.flat_map(|kind| {
            sizes.map(|[m, n, k]| workspace_bytes(self.tier, m, n, k, kind, kind))
        });
        vec![0; bytes.max().unwrap_or(0)]
    }

    fn run(&self, kind: GemmKind, operands: [Matrix<'_>; 2], out: Output<'_>) {
        let (mut out, mut workspace) = (out, self.workspace());
        let Case { tier, sizes, offsets } = self;
        grouped_gemm(*tier, kind, *sizes, operands, offsets, &mut out, &mut workspace).unwrap();
    }
}

fn of<E: Element>(data: &[E]) -> Matrix<'_> {
    match crate::runtime::cpu::gemm::DataKind::of::<E>() {
        crate::runtime::cpu::gemm::DataKind::Bf16 => Matrix::Bf16(bytemuck::cast_slice(data)),
        _ => Matrix::F32(bytemuck::cast_slice(data)),
    }
}

fn check<E: Element>(tier: Tier, counts: &[usize], n: usize, k: usize) {
    let groups = Groups::new(counts);
    let mut random = Random::new((n + k + groups.rows()) as u64);
    let (mut x, mut dy): (Vec<E>, Vec<E>) =
        (groups.matrix(&mut random, k), groups.matrix(&mut random, n));
    let w: Vec<E> = random.normals(counts.len() * n * k);
    let (wide_x, wide_dy, wide_w) = (to_f64(&x), to_f64(&dy), to_f64(&w));
    let of_x = magnitudes(&wide_x);
    let of_dy = magnitudes(&wide_dy);
    let of_w = magnitudes(&wide_w);
    groups.poison(&mut x, k);
    groups.poison(&mut dy, n);
    let offsets = groups.offsets.as_slice();
    let case = Case { tier, sizes: Sizes { rows: groups.rows(), n, k }, offsets };
    let relative = f64::from(E::UNIT_ROUNDOFF);
    let expected = [
        oracle::forward(&wide_x, &wide_w, offsets, k, n),
        oracle::data_gradient(&wide_dy, &wide_w, offsets, k, n),
    ];
    let sizes = [
        allowed(&oracle::forward(&of_x, &of_w, offsets, k, n), k),
        allowed(&oracle::data_gradient(&of_dy, &of_w, offsets, k, n), n),
    ];
    let dw = oracle::weight_gradient(&wide_dy, &wide_x, offsets, k, n);
    let of_dw = allowed(&oracle::weight_gradient(&of_dy, &of_x, offsets, k, n), groups.used);
    for_thread_counts(|| {
        let mut y = poisoned::<E>(groups.rows() * n);
        let mut dx = poisoned::<E>(groups.rows() * k);
        case.run(GemmKind::Fprop, [of(&x), of(&w)], Output::overwrite(&mut y));
        case.run(GemmKind::Dgrad, [of(&dy), of(&w)], Output::overwrite(&mut dx));
        // Behind the groups both are zero, whatever lay there and was read from there.
        assert_close_each("y", &y, &expected[0], relative, &sizes[0]);
        assert_close_each("dx", &dx, &expected[1], relative, &sizes[1]);
        let mut dw_out = poisoned::<f32>(dw.len());
        for accumulate in [false, true] {
            let out = Output::F32 { data: &mut dw_out, accumulate };
            case.run(GemmKind::Wgrad, [of(&dy), of(&x)], out);
            let times = if accumulate { 2.0 } else { 1.0 };
            let expected: Vec<f64> = dw.iter().map(|dw| times * dw).collect();
            let of_dw: Vec<f64> = of_dw.iter().map(|size| times * size).collect();
            assert_close_each("dw", &dw_out, &expected, 0.0, &of_dw);
            for (count, dw) in counts.iter().zip(dw_out.chunks(n * k)) {
                assert!(*count > 0 || dw.iter().all(|dw| dw.to_bits() == 0), "exactly 0");
            }
        }
        (y, dx, dw_out)
    });
}

/// Quantized data, scales in tiles, and its values.
struct Quantized {
    element: ElementFormat,
    data: Vec<u8>,
    tiles: Vec<u8>,
    values: Vec<f64>,
}

impl Quantized {
    /// `[rows, columns]` along its rows, or turned around along its columns.
    fn new(
        element: ElementFormat,
        source: &[f32],
        rows: usize,
        columns: usize,
        along_columns: bool,
    ) -> Quantized {
        let (outer, k) = if along_columns { (columns, rows) } else { (rows, columns) };
        let mut codes = vec![0; rows * columns];
        let mut scales = vec![0; scales_len(outer, k)];
        let format = QuantFormat::mx(element);
        let quantize = if along_columns { quantize_columns } else { quantize_rows };
        quantize(source, rows, columns, &format, &mut codes, &mut scales).unwrap();
        let mut data = vec![0; packed::len(element, outer, k)];
        packed::pack(element, &codes, outer, k, &mut data).unwrap();
        let blocks = k.div_ceil(BLOCK);
        let mut tiles = vec![0xEE; scale_tiles::tiled_len(outer, blocks)];
        scale_tiles::to_tiles(&scales, outer, blocks, &mut tiles).unwrap();
        let values = mx::dequantize_elements(element, &codes, &scales, outer, k);
        let values = if along_columns { mx::transpose(&values, rows, columns) } else { values };
        Quantized { element, data, tiles, values }
    }

    /// Each matrix of a stack by itself.
    fn stack(
        element: ElementFormat,
        source: &[f32],
        rows: usize,
        columns: usize,
        along_columns: bool,
    ) -> Quantized {
        let (data, tiles, values) = (Vec::new(), Vec::new(), Vec::new());
        let mut all = Quantized { element, data, tiles, values };
        for matrix in source.chunks_exact(rows * columns) {
            let one = Quantized::new(element, matrix, rows, columns, along_columns);
            all.data.extend(one.data);
            all.tiles.extend(one.tiles);
            all.values.extend(one.values);
        }
        all
    }

    /// NaN in data and scales of what lies behind row `used` of `rows`.
    fn poisoned(mut self, used: usize, rows: usize, along_columns: bool) -> Quantized {
        let columns = self.values.len() / rows;
        let (outer, k) = if along_columns { (columns, rows) } else { (rows, columns) };
        let blocks = k.div_ceil(BLOCK);
        for row in 0..outer {
            for at in 0..k {
                if (if along_columns { at } else { row }) >= used {
                    let start = packed::len(self.element, row, k);
                    self.data[start + packed::len(self.element, 1, at / BLOCK * BLOCK)] = 0xFF;
                    self.tiles[scale_tiles::offset(row, at / BLOCK, blocks)] = 0xFF;
                }
            }
        }
        self
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::Mx { element: self.element, data: &self.data, scales: &self.tiles }
    }
}

/// With elements of weights and activations, and of gradients.
fn check_quantized(
    tier: Tier,
    counts: &[usize],
    n: usize,
    k: usize,
    [forward, gradient]: [ElementFormat; 2],
) {
    let groups = Groups::new(counts);
    let mut random = Random::new((n + k + groups.rows()) as u64);
    let (x, dy): (Vec<f32>, Vec<f32>) =
        (groups.matrix(&mut random, k), groups.matrix(&mut random, n));
    let w: Vec<f32> = random.normals(counts.len() * n * k);
    let rows = groups.rows();
    let along = |element: ElementFormat, source: &[f32], columns: usize, along_columns: bool| {
        Quantized::new(element, source, rows, columns, along_columns).poisoned(
            groups.used,
            rows,
            along_columns,
        )
    };
    let [x_row, x_column] = [false, true].map(|columns| along(forward, &x, k, columns));
    let [dy_row, dy_column] = [false, true].map(|columns| along(gradient, &dy, n, columns));
    let [w_row, w_column] =
        [false, true].map(|columns| Quantized::stack(forward, &w, n, k, columns));
    let offsets = groups.offsets.as_slice();
    let case = Case { tier, sizes: Sizes { rows, n, k }, offsets };
    let of = magnitudes;
    let y = oracle::forward(&x_row.values, &w_row.values, offsets, k, n);
    let of_y = oracle::forward(&of(&x_row.values), &of(&w_row.values), offsets, k, n);
    let dx = oracle::data_gradient(&dy_row.values, &w_column.values, offsets, k, n);
    let of_dx = oracle::data_gradient(&of(&dy_row.values), &of(&w_column.values), offsets, k, n);
    let dw = oracle::weight_gradient(&dy_column.values, &x_column.values, offsets, k, n);
    let of_dw =
        oracle::weight_gradient(&of(&dy_column.values), &of(&x_column.values), offsets, k, n);
    for_thread_counts(|| {
        let mut own_y = poisoned::<bf16>(rows * n);
        let mut own_dx = poisoned::<bf16>(rows * k);
        let mut own_dw = poisoned::<f32>(dw.len());
        let out = Output::overwrite(&mut own_y);
        case.run(GemmKind::Fprop, [x_row.matrix(), w_row.matrix()], out);
        let out = Output::overwrite(&mut own_dx);
        case.run(GemmKind::Dgrad, [dy_row.matrix(), w_column.matrix()], out);
        let out = Output::F32 { data: &mut own_dw, accumulate: false };
        case.run(GemmKind::Wgrad, [dy_column.matrix(), x_column.matrix()], out);
        let relative = 2f64.powi(-8);
        assert_close_each("y", &own_y, &y, relative, &allowed(&of_y, k));
        assert_close_each("dx", &own_dx, &dx, relative, &allowed(&of_dx, n));
        assert_close_each("dw", &own_dw, &dw, 0.0, &allowed(&of_dw, groups.used));
        for (count, dw) in counts.iter().zip(own_dw.chunks(n * k)) {
            assert!(*count > 0 || dw.iter().all(|dw| dw.to_bits() == 0), "exactly 0");
        }
        (own_y, own_dx, own_dw)
    });
}

#[test]
fn matches_the_oracle() {
    for counts in COUNTS {
        for (n, k) in [(1, 1), (33, 31), (64, 96)] {
            check::<f32>(Tier::F32, counts, n, k);
            for tier in Tier::ALL.into_iter().filter(|tier| tier.is_available()) {
                check::<bf16>(tier, counts, n, k);
            }
        }
    }
}

#[test]
fn quantized_operands_match_the_oracle() {
    for counts in COUNTS {
        for (n, k) in [(32, 32), (64, 160), (96, 64)] {
            for tier in Tier::ALL.into_iter().filter(|tier| tier.is_available()) {
                for elements in [
                    [ElementFormat::E4M3, ElementFormat::E4M3],
                    [ElementFormat::E4M3, ElementFormat::E5M2],
                    [ElementFormat::E2M3, ElementFormat::E3M2],
                    [ElementFormat::E2M1, ElementFormat::E2M1],
                ] {
                    check_quantized(tier, counts, n, k, elements);
                }
            }
        }
    }
}

#[test]
fn one_group_is_a_plain_gemm() {
    let (rows, n, k) = (64, 48, 32);
    let mut random = Random::new(3);
    let (x, w): (Vec<bf16>, Vec<bf16>) = (random.normals(rows * k), random.normals(n * k));
    let tier = crate::runtime::cpu::gemm::best_tier();
    let case = Case { tier, sizes: Sizes { rows, n, k }, offsets: &[0, rows as i32] };
    let mut grouped = poisoned::<bf16>(rows * n);
    let mut plain = poisoned::<bf16>(rows * n);
    case.run(GemmKind::Fprop, [of(&x), of(&w)], Output::overwrite(&mut grouped));
    let (a, b) = (Operand::rows_bf16(&x, k), Operand::rows_bf16(&w, k));
    let out = Output::overwrite(&mut plain);
    gemm(tier, rows, n, k, a, b, out, &mut case.workspace()).unwrap();
    assert_eq!(grouped, plain);
}

#[test]
fn offsets_that_do_not_fit_are_refused() {
    for (offsets, multiple) in [
        (vec![1, 2], 1),
        (vec![0, 5, 4], 1),
        (vec![0, 65], 1),
        (vec![0, -1, 4], 1),
        (vec![0, 16, 64], 32),
        (vec![], 1),
    ] {
        let error = check_offsets(&offsets, 64, multiple).unwrap_err();
        assert!(error.starts_with("expected offsets that ascend from 0 to 64"), "{error}");
    }
    assert_eq!(check_offsets(&[0, 0, 64], 64, 32).unwrap(), [0..0, 0..64]);
}
