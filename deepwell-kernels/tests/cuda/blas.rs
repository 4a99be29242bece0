//! GEMMs of cuBLASLt against plain loops in f64 on the numbers that it was given.

use deepwell_ir::DType;
use deepwell_kernels::cuda::{
    Blas, BlockScales, CublasLt, CudarcDriver, DevicePtr, Driver, Matmul, Matrix, Priority, Stream,
};
use deepwell_precision::e4m3;
use deepwell_trials::skip;
use half::bf16;
use rayon::prelude::*;

use crate::compare::assert_biased_within;
use crate::device::open_driver;
use crate::harness::{HostTensor, uniform};

const WORKSPACE_BYTES: usize = 32 << 20;
const NO_SCALES: [Scaling; 2] = [Scaling::None; 2];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaling {
    None,
    Row,
    Square,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    out: DType,
    accumulate: bool,
    bias: bool,
    scaling: [Scaling; 2],
}

/// An operand: what is uploaded, and the numbers it stands for as `[outer, k]`.
struct Operand {
    bytes: Vec<u8>,
    scales: Vec<f32>,
    numbers: Vec<f64>,
}

fn bf16_operand(outer: usize, k: usize, k_is_inner: bool, seed: u64) -> Operand {
    let stored: Vec<bf16> = uniform(outer * k, seed, 1.0).into_iter().map(bf16::from_f32).collect();
    let at = |row: usize, i: usize| if k_is_inner { row * k + i } else { i * outer + row };
    let numbers = (0..outer * k).map(|index| stored[at(index / k, index % k)].to_f64()).collect();
    Operand { bytes: bytemuck::cast_slice(&stored).to_vec(), scales: Vec::new(), numbers }
}

/// Elements of all finite magnitudes up to 32, with scales that differ from block to block by up to
/// a factor of 16, so that one taken from elsewhere cannot go unseen.
fn fp8_operand(outer: usize, k: usize, scaling: Scaling, seed: u64) -> Operand {
    let random = uniform(outer * k, seed, 1.0);
    let bytes: Vec<u8> = random
        .iter()
        .map(|&x| ((x.abs() * 96.0) as u8).min(95) | if x < 0.0 { 0x80 } else { 0 })
        .collect();
    let blocks = k.div_ceil(128);
    let (rows, columns) = match scaling {
        Scaling::Row => (blocks, outer),
        _ => (outer.div_ceil(128), blocks.next_multiple_of(4)),
    };
    let scales: Vec<f32> =
        uniform(rows * columns, seed + 100, 2.0).into_iter().map(|x| x.exp2() / 32.0).collect();
    let scale_of = |row: usize, i: usize| match scaling {
        Scaling::Row => scales[i / 128 * columns + row],
        _ => scales[row / 128 * columns + i / 128],
    };
    let numbers = (0..outer * k)
        .map(|index| {
            let scale = scale_of(index / k, index % k);
            f64::from(e4m3::decode(bytes[index])) * f64::from(scale)
        })
        .collect();
    Operand { bytes, scales, numbers }
}

struct Library {
    driver: CudarcDriver,
    blas: CublasLt,
    stream: Stream,
    workspace: DevicePtr,
}

impl Library {
    fn open() -> Library {
        let mut driver = open_driver();
        let blas = CublasLt::open(&driver).unwrap_or_else(|error| panic!("{error}"));
        assert!(blas.version().starts_with("cuBLASLt 1"), "{}", blas.version());
        let stream = driver.stream(Priority::Middle).unwrap();
        let workspace = driver.allocate(WORKSPACE_BYTES).unwrap();
        Library { driver, blas, stream, workspace }
    }

    fn put(&mut self, bytes: &[u8]) -> DevicePtr {
        let pointer = self.driver.allocate(bytes.len()).unwrap();
        self.driver.upload(pointer, bytes).unwrap();
        pointer
    }

    fn operand(&mut self, case: Case, index: usize) -> (Operand, Matrix, Option<BlockScales>) {
        let outer = [case.m, case.n][index];
        let k_is_inner = [!case.transposed.0, case.transposed.1][index];
        let seed = 1 + index as u64;
        let operand = match case.scaling[index] {
            Scaling::None => bf16_operand(outer, case.k, k_is_inner, seed),
            scaling => fp8_operand(outer, case.k, scaling, seed),
        };
        let pointer = self.put(&operand.bytes);
        let (rows, columns) = if k_is_inner { (outer, case.k) } else { (case.k, outer) };
        let scales = bytemuck::cast_slice(&operand.scales);
        let (dtype, scales) = match case.scaling[index] {
            Scaling::None => (DType::Bf16, None),
            Scaling::Row => (DType::E4m3, Some(BlockScales::Row128(self.put(scales)))),
            Scaling::Square => (DType::E4m3, Some(BlockScales::Square128(self.put(scales)))),
        };
        (operand, Matrix { pointer, dtype, rows, columns, leading: columns }, scales)
    }

    /// Runs a case twice, directly and from a graph with another GEMM before it in one group.
    fn check(&mut self, case: Case) {
        let (a, a_matrix, a_scales) = self.operand(case, 0);
        let (b, b_matrix, b_scales) = self.operand(case, 1);
        let bias = HostTensor::from_f32(case.out, &[case.n], &uniform(case.n, 3, 8.0));
        let len = case.m * case.n;
        let before = match case.accumulate {
            true => HostTensor::from_f32(case.out, &[len], &uniform(len, 4, 8.0)),
            // Never read: it would spoil every sum.
            false => HostTensor::from_f32(case.out, &[len], &vec![f32::NAN; len]),
        };
        let out = self.put(&before.bytes);
        let bias_at = case.bias.then(|| self.put(&bias.bytes));
        let matmul = Matmul {
            a: a_matrix,
            a_transposed: case.transposed.0,
            b: b_matrix,
            b_transposed: case.transposed.1,
            out: Matrix {
                pointer: out,
                dtype: case.out,
                rows: case.m,
                columns: case.n,
                leading: case.n,
            },
            added: case.accumulate.then_some(out),
            bias: bias_at,
            scales: a_scales.zip(b_scales),
            workspace: self.workspace,
            workspace_bytes: WORKSPACE_BYTES,
        };
        let plan = self.blas.plan(&matmul).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        self.blas.run(plan, self.stream).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let mut got = HostTensor::output(case.out, &[len]);
        self.driver.download(&mut got.bytes, out).unwrap();

        let elsewhere = self.put(&before.bytes);
        // Adds what lies elsewhere, too, where there is something to add.
        let added = case.accumulate.then(|| self.put(&before.bytes));
        let other = Matmul { out: Matrix { pointer: elsewhere, ..matmul.out }, added, ..matmul };
        let other = self.blas.plan(&other).unwrap();
        self.driver.upload(out, &before.bytes).unwrap();
        self.driver.begin_capture(self.stream).unwrap();
        self.driver.begin_group(self.stream).unwrap();
        self.blas.run(other, self.stream).unwrap();
        self.blas.run(plan, self.stream).unwrap();
        self.driver.end_group(self.stream).unwrap();
        let graph = self.driver.end_capture(self.stream).unwrap();
        assert_eq!(self.driver.graph_nodes(graph).unwrap(), 1, "{case:?}");
        self.driver.launch_graph(graph, self.stream).unwrap();
        for pointer in [out, elsewhere] {
            let mut again = HostTensor::output(case.out, &[len]);
            self.driver.download(&mut again.bytes, pointer).unwrap();
            // What adds a matrix of another place may go by another algorithm.
            if pointer == elsewhere && case.accumulate {
                let again = again.to_f64();
                compare(case, &a.numbers, &b.numbers, &before.to_f64(), &bias.to_f64(), &again);
            } else {
                assert!(again == got, "{case:?} differs from run to run");
            }
        }
        self.driver.free_graph(graph).unwrap();
        compare(case, &a.numbers, &b.numbers, &before.to_f64(), &bias.to_f64(), &got.to_f64());
    }
}

fn compare(case: Case, a: &[f64], b: &[f64], before: &[f64], bias: &[f64], got: &[f64]) {
    // Tensor cores add products of BF16 in FP32 without its last rounding bits, a few of them at a
    // time. Of FP8 each of the 33 terms of a step of 32 is cut at 2^-13 of the largest of them, and
    // four steps follow each other: with a largest term of an eighth of the magnitudes, 2^-9.
    let per_magnitude = if case.scaling == NO_SCALES { 2f64.powi(-20) } else { 2f64.powi(-9) };
    let rounding = if case.out == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-22) };
    let of_element = |(index, &before): (usize, &f64)| {
        let (row, column) = (index / case.n, index % case.n);
        let row_of_a = &a[row * case.k..][..case.k];
        let row_of_b = &b[column * case.k..][..case.k];
        let product: f64 = row_of_a.iter().zip(row_of_b).map(|(x, y)| x * y).sum();
        let magnitude: f64 = row_of_a.iter().zip(row_of_b).map(|(x, y)| (x * y).abs()).sum();
        let added =
            if case.accumulate { before } else { 0.0 } + if case.bias { bias[column] } else { 0.0 };
        let expected = product + added;
        // A product may be rounded before something is added to it.
        let rounded = expected.abs() + if added == 0.0 { 0.0 } else { product.abs() + added.abs() };
        (expected, magnitude * per_magnitude + rounded * rounding)
    };
    let (sums, bounds): (Vec<f64>, Vec<f64>) =
        before.par_iter().enumerate().map(of_element).unzip();
    // What is cut off has the sign of what it is cut from.
    assert_biased_within(&format!("{case:?}"), got, &sums, &bounds, per_magnitude);
}

const PLAIN: Case = Case {
    m: 64,
    n: 64,
    k: 64,
    transposed: (false, true),
    out: DType::Bf16,
    accumulate: false,
    bias: false,
    scaling: NO_SCALES,
};

trial!(bf16_gemms_of_all_orientations);
fn bf16_gemms_of_all_orientations() {
    let mut library = Library::open();
    for transposed in [(false, false), (false, true), (true, false), (true, true)] {
        for (m, n, k) in [(8, 16, 24), (128, 256, 64), (120, 136, 264), (264, 72, 1032)] {
            for (out, accumulate) in
                [(DType::Bf16, false), (DType::F32, false), (DType::F32, true), (DType::Bf16, true)]
            {
                library.check(Case { m, n, k, transposed, out, accumulate, ..PLAIN });
            }
        }
    }
    library.blas.forget_plans();
}

trial!(bf16_gemms_of_any_size);
fn bf16_gemms_of_any_size() {
    let mut library = Library::open();
    for (m, n, k) in [(1, 1, 1), (1, 8, 5), (3, 5, 7), (17, 33, 65), (257, 1, 129), (31, 1000, 2)] {
        for out in [DType::Bf16, DType::F32] {
            library.check(Case { m, n, k, out, ..PLAIN });
        }
    }
}

trial!(a_bias_is_added_to_each_row);
fn a_bias_is_added_to_each_row() {
    let mut library = Library::open();
    for (m, n, k) in [(8, 16, 24), (128, 256, 64), (120, 136, 264)] {
        library.check(Case { m, n, k, bias: true, ..PLAIN });
    }
}

trial!(fp8_gemms_with_scales_per_128);
fn fp8_gemms_with_scales_per_128() {
    let mut library = Library::open();
    if library.driver.properties().capability != (9, 0) {
        skip("scales per 128 elements are Hopper's");
    }
    let pairs = [
        [Scaling::Row, Scaling::Row],
        [Scaling::Row, Scaling::Square],
        [Scaling::Square, Scaling::Row],
    ];
    for scaling in pairs {
        for (m, n, k) in [(128, 128, 128), (256, 384, 128), (384, 256, 640), (128, 512, 1024)] {
            for (out, accumulate) in [(DType::Bf16, false), (DType::F32, false), (DType::F32, true)]
            {
                library.check(Case { m, n, k, out, accumulate, scaling, ..PLAIN });
            }
        }
    }
    // Rows that fill no square: those of activations.
    library.check(Case {
        m: 80,
        n: 256,
        k: 384,
        scaling: [Scaling::Row, Scaling::Square],
        ..PLAIN
    });
}

trial!(what_the_library_does_not_take_is_refused_with_the_reason);
fn what_the_library_does_not_take_is_refused_with_the_reason() {
    let mut library = Library::open();
    let pointer = library.workspace;
    let matrix = |dtype, rows, columns| Matrix { pointer, dtype, rows, columns, leading: columns };
    let square = |dtype| matrix(dtype, 128, 128);
    let good = Matmul {
        a: square(DType::Bf16),
        a_transposed: false,
        b: square(DType::Bf16),
        b_transposed: true,
        out: square(DType::F32),
        added: None,
        bias: None,
        scales: None,
        workspace: pointer,
        workspace_bytes: WORKSPACE_BYTES,
    };
    let squares = BlockScales::Square128(pointer);
    let fp8 = Matmul {
        a: square(DType::E4m3),
        b: square(DType::E4m3),
        scales: Some((squares, squares)),
        ..good
    };
    let rows_and_squares = Some((BlockScales::Row128(pointer), squares));
    for (matmul, words) in [
        (Matmul { a: square(DType::F32), ..good }, "expected bf16 or e4m3"),
        (Matmul { out: matrix(DType::F32, 128, 64), ..good }, "expected a result"),
        (fp8, "per"),
        (Matmul { scales: rows_and_squares, b_transposed: false, ..fp8 }, "expected"),
    ] {
        let error = library.blas.plan(&matmul).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    library.blas.plan(&good).unwrap();
}
