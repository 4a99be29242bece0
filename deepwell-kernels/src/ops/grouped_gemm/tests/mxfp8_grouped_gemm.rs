//! `mxfp8_grouped_gemm.cu`: the GEMMs of groups against f64 sums of what their operands stand for.

use deepwell_ir::ops::{GroupedRows, ScaledGroupedGemm};
use deepwell_ir::{DType, GemmKind, Tile};
use deepwell_kernels::ops::grouped_gemm::oracle;
use deepwell_precision::{Granularity, QuantFormat, scale_tiles};

use crate::bf16_grouped_gemm::offsets_of;
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};
use crate::mx::{MxKind, MxMatrix, assert_close_to_magnitudes};

const KERNEL: &str = "cuda_mxfp8_grouped_gemm";
const BLOCK: usize = 32;
/// The scale that makes NaN of anything.
const POISON: u8 = 0xff;

/// Rows of each group: none, a block, blocks that begin anywhere within a tile, all in one group,
/// more groups than a warp has lanes.
const GROUPS: &[&[usize]] = &[
    &[0, 0, 0],
    &[32],
    &[32, 0, 64, 160],
    &[0, 128, 0, 32],
    &[0, 0, 288],
    &[96, 96, 96, 0],
    &[32; 40],
];

/// A matrix of which `poisoned(row, block)` says where the scales are of somebody else.
fn with_poison(
    [rows, k]: [usize; 2],
    spec: QuantFormat,
    kind: MxKind,
    seed: u64,
    poisoned: impl Fn(usize, usize) -> bool,
) -> MxMatrix {
    let plain = MxMatrix::new(rows, k, spec, kind, seed);
    let blocks = k.div_ceil(BLOCK);
    let scale = |(index, &scale): (usize, &u8)| {
        if poisoned(index / blocks, index % blocks) { POISON } else { scale }
    };
    let scales: Vec<u8> = plain.plain_scales.iter().enumerate().map(scale).collect();
    MxMatrix::from_bytes(rows, k, &plain.data.bytes, &scales)
}

/// Matrices one after the other, as operands and as numbers.
fn stack(matrices: &[MxMatrix], [rows, k]: [usize; 2]) -> (HostTensor, HostTensor, Vec<f64>) {
    let join = |part: fn(&MxMatrix) -> &HostTensor| -> Vec<u8> {
        matrices.iter().flat_map(|matrix| part(matrix).bytes.clone()).collect()
    };
    let count = matrices.len();
    let tiles = scale_tiles::shape(rows, k.div_ceil(BLOCK));
    let data = HostTensor::bytes(DType::E4m3, &[count, rows, k], &join(|it| &it.data));
    let shape = [&[count], &tiles[..]].concat();
    let scales = HostTensor::bytes(DType::E8m0, &shape, &join(|it| &it.scales));
    (data, scales, matrices.iter().flat_map(|it| it.values.clone()).collect())
}

fn transposed(values: &[f64], columns: usize) -> Vec<f64> {
    let rows = values.len() / columns.max(1);
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

/// What a GEMM may be wrong by, as a share of the magnitudes: as `mxfp8_gemm.cu`, whose arithmetic
/// it has.
fn share(contraction: usize, kind: MxKind) -> f64 {
    match kind {
        MxKind::Exact => 0.0,
        _ => (contraction.div_ceil(BLOCK) as f64 + 8.0) * 2f64.powi(-23),
    }
}

pub(crate) struct Case<'a> {
    pub(crate) groups: &'a [usize],
    /// Rows that no group has.
    pub(crate) behind: usize,
    /// Outputs and inputs of the layer.
    pub(crate) sizes: [usize; 2],
    pub(crate) spec: QuantFormat,
    pub(crate) kind: MxKind,
    pub(crate) kernel: &'static str,
    pub(crate) tile: Option<Tile>,
}

impl Case<'_> {
    pub(crate) fn check(&self, gpu: &mut Gpu) {
        let Case { groups, behind, sizes: [n, k], spec, kind, kernel, tile } = *self;
        let kernel = Some(kernel);
        let by_rows = spec.with_shape(deepwell_precision::BlockShape::Row);
        let offsets = offsets_of(groups);
        let end = *offsets.last().expect("a group") as usize;
        let (count, rows) = (groups.len(), end + behind);
        let grouped = GroupedRows::new(count, usize::from(spec.block.k).max(BLOCK));
        let places = HostTensor::i32(&[count + 1], &offsets);
        let op = |kind| ScaledGroupedGemm {
            kind,
            grouped,
            output: DType::Bf16,
            a: by_rows,
            b: if kind == GemmKind::Wgrad { by_rows } else { spec },
        };
        let name =
            |what: &str| format!("{what} of {groups:?} + {behind}, {n}x{k} {kind:?} {spec:?}");
        let absolute = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let longest = groups.iter().copied().max().unwrap_or(0);

        // Fprop, and dgrad with outputs and inputs the other way round.
        for (kind_of_gemm, columns, contraction) in
            [(GemmKind::Fprop, n, k), (GemmKind::Dgrad, k, n)]
        {
            let is_behind = |row: usize, _: usize| row >= end;
            let a = with_poison([rows, contraction], by_rows, kind, 1, is_behind);
            let matrix = |index| MxMatrix::new(columns, contraction, spec, kind, 50 + index);
            let matrices: Vec<MxMatrix> = (0..count as u64).map(matrix).collect();
            let (data, scales, values) = stack(&matrices, [columns, contraction]);
            let expected = oracle::forward(&a.values, &values, &offsets, contraction, columns);
            let magnitudes = oracle::forward(
                &absolute(&a.values),
                &absolute(&values),
                &offsets,
                contraction,
                columns,
            );
            let inputs = [a.data, a.scales, data, scales, places.clone()];
            let out = HostTensor::output(DType::Bf16, &[rows, columns]);
            let options = RunOptions { kernel, tile, ..RunOptions::default() };
            let got = gpu.run_with(op(kind_of_gemm), &inputs, &[out], options)[0].to_f64();
            assert_close_to_magnitudes(
                &name(kind_of_gemm.name()),
                &got,
                &expected,
                &magnitudes,
                share(contraction, kind),
                DType::Bf16,
            );
            assert!(got[end * columns..].iter().all(|&y| y == 0.0), "{}", name("rows behind"));
        }

        let is_behind = |_: usize, block: usize| block * BLOCK >= end;
        let a = with_poison([n, rows], by_rows, kind, 7, is_behind);
        let b = with_poison([k, rows], by_rows, kind, 8, is_behind);
        let dy = transposed(&a.values, rows);
        let x = transposed(&b.values, rows);
        let sums = oracle::weight_gradient(&dy, &x, &offsets, k, n);
        let magnitudes = oracle::weight_gradient(&absolute(&dy), &absolute(&x), &offsets, k, n);
        let before = HostTensor::f32(&[count, n, k], &uniform(count * n * k, 5, 8.0));
        let inputs = [a.data, a.scales, b.data, b.scales, places];
        for accumulate in [false, true] {
            let mut expected = sums.clone();
            if accumulate {
                let there = before.to_f64();
                expected.iter_mut().zip(there).for_each(|(sum, there)| *sum += there);
            }
            let options = RunOptions { accumulate, kernel, tile, ..RunOptions::default() };
            let got =
                gpu.run_with(op(GemmKind::Wgrad), &inputs, std::slice::from_ref(&before), options);
            let got = got[0].to_f64();
            let share = share(longest, kind);
            let name = name(&format!("wgrad, accumulate {accumulate},"));
            assert_close_to_magnitudes(&name, &got, &expected, &magnitudes, share, DType::F32);
            for group in (0..count).filter(|&group| groups[group] == 0) {
                let of_group = group * n * k..(group + 1) * n * k;
                let got = &got[of_group.clone()];
                let expected = &expected[of_group];
                let is_same = |(got, expected): (&f64, &f64)| got.to_bits() == expected.to_bits();
                assert!(got.iter().zip(expected).all(is_same), "{name}: group {group}");
            }
        }
    }
}

/// Outputs and inputs for [`check_hard`]; each is a contraction, too.
const SIZES: [[usize; 2]; 4] = [[40, 96], [32, 48], [33, 40], [36, 160]];

pub(crate) fn check_hard(
    gpu: &mut Gpu,
    kernel: &'static str,
    tile: Option<Tile>,
    all_sizes: [[usize; 2]; 4],
    behind_min: usize,
) {
    let (spec, kind) = (QuantFormat::MXFP8, MxKind::Even);
    for (index, &groups) in GROUPS.iter().enumerate() {
        let sizes = all_sizes[index % 3];
        let behind = [0, 32, 160][index % 3].max(behind_min);
        Case { groups, behind, sizes, spec, kind, kernel, tile }.check(gpu);
    }
    for kind in [MxKind::Spread, MxKind::Exact] {
        let (groups, sizes) = (&[32, 0, 96], all_sizes[3]);
        Case { groups, behind: 32, sizes, spec, kind, kernel, tile }.check(gpu);
    }
    let wide = spec.square().with_granularity(Granularity::G128);
    let (groups, sizes) = (&[128, 0, 256], [48, 128]);
    Case { groups, behind: 128, sizes, spec: wide, kind, kernel, tile }.check(gpu);
}

trial!(gemms_of_any_groups);
fn gemms_of_any_groups() {
    let mut gpu = Gpu::open();
    check_hard(&mut gpu, KERNEL, None, SIZES, 0);
    let (kernel, tile) = (KERNEL, None);
    if gpu.runs(1, 0) {
        let groups = &[288, 0, 1024, 32, 128];
        for kind in [MxKind::Even, MxKind::Spread] {
            let spec = QuantFormat::MXFP8;
            let sizes = [392, 1056];
            Case { groups, behind: 320, sizes, spec, kind, kernel, tile }.check(&mut gpu);
        }
    }
}

emulated! {
    mxfp8_grouped_gemm on Sm90a: |gpu| {
        let (kernel, tile) = (KERNEL, None);
        check_hard(gpu, kernel, tile, SIZES, 0);
        for sizes in [[136, 544], [40, 264]] {
            let (spec, kind) = (QuantFormat::MXFP8, MxKind::Even);
            let groups = &[160, 0, 480];
            Case { groups, behind: 32, sizes, spec, kind, kernel, tile }.check(gpu);
        }
    }
}
