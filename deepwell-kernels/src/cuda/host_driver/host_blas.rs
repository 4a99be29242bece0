//! Reference GEMMs in a machine's memory, in place of a vendor's library.

use std::sync::{Arc, Mutex};

use deepwell_ir::DType;
use deepwell_precision::e4m3;
use half::bf16;

use super::machine::Machine;
use super::state::{State, Work, no_such};
use crate::runtime::cuda::blas::{Blas, BlockScales, Matmul, MatmulPlan, Matrix};
use crate::runtime::cuda::driver::{DevicePtr, DriverError, DriverResult, Stream};

/// Elements per scale.
const SCALE_BLOCK: usize = 128;
/// Rows of square scales are padded to a multiple of this number.
const SCALE_GROUPS: usize = 4;

/// Reference GEMMs in FP64 on the host, rounded once: for machines without a library. The host
/// executes every multiply-add.
pub struct HostBlas<M> {
    plans: Vec<Matmul>,
    shared: Arc<Mutex<State<M>>>,
}

impl<M: Machine> HostBlas<M> {
    /// Creates GEMMs for the streams of the driver with this state.
    #[cfg(any(test, feature = "emulated"))]
    pub(in crate::cuda) fn new(shared: Arc<Mutex<State<M>>>) -> HostBlas<M> {
        HostBlas { plans: Vec::new(), shared }
    }
}

impl<M: Machine> Blas for HostBlas<M> {
    fn version(&self) -> String {
        "GEMMs by their definition".to_string()
    }

    fn plan(&mut self, matmul: &Matmul) -> DriverResult<MatmulPlan> {
        matmul.check()?;
        self.plans.push(*matmul);
        Ok(MatmulPlan(self.plans.len() - 1))
    }

    fn run(&mut self, plan: MatmulPlan, stream: Stream) -> DriverResult<()> {
        let matmul = self.plans.get(plan.0);
        let matmul = *matmul.ok_or_else(|| no_such("matmul plan", plan.0 as u64))?;
        super::lock(&self.shared).put(stream, Work::HostMatmul(matmul))
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
    }
}

/// Computes a GEMM.
pub(super) fn multiply(machine: &mut impl Machine, matmul: &Matmul) -> DriverResult<()> {
    let (m, n, k) = matmul.sizes();
    let (of_a, of_b) = (matmul.scales.map(|(a, _)| a), matmul.scales.map(|(_, b)| b));
    // Both operands with K along their rows.
    let a = operand(machine, &matmul.a, matmul.a_transposed, of_a)?;
    let b = operand(machine, &matmul.b, !matmul.b_transposed, of_b)?;
    let out = matmul.out;
    let bias = match matmul.bias {
        None => vec![0.0; n],
        Some(pointer) => {
            let row = Matrix { pointer, dtype: out.dtype, rows: 1, columns: n, leading: n };
            numbers(&stored(machine, &row)?, out.dtype)?
        }
    };
    let mut bytes = stored(machine, &out)?;
    let added = match matmul.added {
        Some(pointer) => numbers(&stored(machine, &Matrix { pointer, ..out })?, out.dtype)?,
        None => Vec::new(),
    };
    let width = width(out.dtype);
    for row in 0..m {
        let left = &a[row * k..(row + 1) * k];
        for column in 0..n {
            let right = &b[column * k..(column + 1) * k];
            let at = row * out.leading + column;
            let sum: f64 = left.iter().zip(right).map(|(a, b)| term(a * b)).sum();
            let sum = sum + bias[column] + added.get(at).copied().unwrap_or(0.0);
            let place = &mut bytes[at * width..(at + 1) * width];
            match out.dtype {
                DType::Bf16 => place.copy_from_slice(&bf16::from_f64(sum).to_le_bytes()),
                DType::F32 => place.copy_from_slice(&(sum as f32).to_le_bytes()),
                other => return Err(unknown(other)),
            }
        }
    }
    machine.write(out.pointer, &bytes)
}

/// A product as tensor cores add it: beyond the range of FP32 it becomes an infinity.
fn term(product: f64) -> f64 {
    const LIMIT: f64 = (1u128 << 127) as f64 * 2.0;
    if product.abs() >= LIMIT { f64::INFINITY.copysign(product) } else { product }
}

fn unknown(dtype: DType) -> DriverError {
    DriverError::new("matmul", format!("expected bf16, f32 or e4m3, got {dtype}"))
}

/// Bytes of an element, for the types of [`numbers`].
fn width(dtype: DType) -> usize {
    dtype.bits() as usize / 8
}

/// The bytes of a matrix from the first to the last element, gaps included.
fn stored(machine: &mut impl Machine, matrix: &Matrix) -> DriverResult<Vec<u8>> {
    let elements = (matrix.rows - 1) * matrix.leading + matrix.columns;
    let mut bytes = vec![0; elements * width(matrix.dtype)];
    machine.read(&mut bytes, matrix.pointer)?;
    Ok(bytes)
}

fn numbers(bytes: &[u8], dtype: DType) -> DriverResult<Vec<f64>> {
    Ok(match dtype {
        DType::E4m3 => bytes.iter().map(|&code| e4m3::decode(code).into()).collect(),
        DType::Bf16 => {
            let pairs = bytes.as_chunks::<2>().0;
            pairs.iter().map(|&pair| bf16::from_le_bytes(pair).to_f64()).collect()
        }
        DType::F32 => {
            let words = bytes.as_chunks::<4>().0;
            words.iter().map(|&word| f32::from_le_bytes(word).into()).collect()
        }
        other => return Err(unknown(other)),
    })
}

/// The scaled elements of a matrix, without gaps, transposed if `turned`.
fn operand(
    machine: &mut impl Machine,
    matrix: &Matrix,
    turned: bool,
    scales: Option<BlockScales>,
) -> DriverResult<Vec<f64>> {
    let all = numbers(&stored(machine, matrix)?, matrix.dtype)?;
    let (rows, columns) = (matrix.rows, matrix.columns);
    let scale_of = factors(machine, matrix, scales)?;
    let number =
        |row: usize, column: usize| all[row * matrix.leading + column] * scale_of(row, column);
    Ok(match turned {
        false => (0..rows * columns).map(|at| number(at / columns, at % columns)).collect(),
        true => (0..rows * columns).map(|at| number(at % rows, at / rows)).collect(),
    })
}

/// Returns the scale of an element as a function of row and column.
fn factors(
    machine: &mut impl Machine,
    matrix: &Matrix,
    scales: Option<BlockScales>,
) -> DriverResult<Box<dyn Fn(usize, usize) -> f64>> {
    let (rows, groups) = (matrix.rows, matrix.columns.div_ceil(SCALE_BLOCK));
    let mut read = |pointer: DevicePtr, rows: usize, columns: usize| {
        let matrix = Matrix { pointer, dtype: DType::F32, rows, columns, leading: columns };
        numbers(&stored(machine, &matrix)?, DType::F32)
    };
    let padded = groups.next_multiple_of(SCALE_GROUPS);
    let (table, of_row, of_group, rows_per_scale) = match scales {
        None => (vec![1.0], 0, 0, 1),
        Some(BlockScales::Row128(at)) => (read(at, groups, rows)?, 1, rows, 1),
        Some(BlockScales::Square128(at)) => {
            (read(at, rows.div_ceil(SCALE_BLOCK), padded)?, padded, 1, SCALE_BLOCK)
        }
    };
    Ok(Box::new(move |row, column| {
        table[row / rows_per_scale * of_row + column / SCALE_BLOCK * of_group]
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake_driver::FakeDriver;
    use crate::runtime::cuda::driver::{Driver, Priority};

    /// `[2, 3]` times `[3, 2]` with every operand stored both ways, in rows with gaps.
    #[test]
    fn gemms_by_hand() {
        let check = |a_transposed: bool, b_transposed: bool, accumulate: bool| {
            let mut driver = FakeDriver::h200();
            let mut blas = HostBlas::new(Arc::clone(driver.shared()));
            let stream = driver.stream(Priority::Middle).unwrap();
            let pointer = driver.allocate(1024).unwrap();
            let mut store = |offset: usize, values: &[[f32; 3]], turned: bool| {
                let (rows, columns) = (values.len(), 3);
                let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
                let mut stored = vec![99.0f32; rows * 4];
                for (row, values) in values.iter().enumerate() {
                    for (column, value) in values.iter().enumerate() {
                        let (row, column) = if turned { (column, row) } else { (row, column) };
                        stored[row * 4 + column] = *value;
                    }
                }
                driver.upload(pointer.offset(offset), bytemuck::cast_slice(&stored)).unwrap();
                let pointer = pointer.offset(offset);
                Matrix { pointer, dtype: DType::F32, rows, columns, leading: 4 }
            };
            let a = store(0, &[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], a_transposed);
            // Columns of the right operand.
            let b = store(256, &[[1.0, 0.0, -1.0], [2.0, 1.0, 0.5]], !b_transposed);
            let out = store(512, &[[10.0, 20.0, 0.0], [30.0, 40.0, 0.0]], false);
            driver.upload(pointer.offset(768), bytemuck::cast_slice(&[0.5f32, 0.25])).unwrap();
            let matmul = Matmul {
                a,
                a_transposed,
                b,
                b_transposed,
                out: Matrix { columns: 2, ..out },
                added: accumulate.then_some(out.pointer),
                bias: Some(pointer.offset(768)),
                scales: None,
                workspace: pointer,
                workspace_bytes: 0,
            };
            let plan = blas.plan(&matmul).unwrap();
            blas.run(plan, stream).unwrap();
            let mut bytes = [0; 24];
            driver.download(&mut bytes, pointer.offset(512)).unwrap();
            let got: &[f32] = &bytemuck::pod_collect_to_vec::<u8, f32>(&bytes);
            let there = if accumulate { [10.0, 20.0, 30.0, 40.0] } else { [0.0; 4] };
            let sums = [-2.0 + 0.5, 5.5 + 0.25, -2.0 + 0.5, 16.0 + 0.25];
            let expected: Vec<f32> = sums.iter().zip(there).map(|(a, b)| a + b).collect();
            assert_eq!((&got[..2], &got[4..]), (&expected[..2], &expected[2..]));
            // The gaps between rows are unchanged.
            assert_eq!(got[3], 99.0);
        };
        for a_transposed in [false, true] {
            for b_transposed in [false, true] {
                check(a_transposed, b_transposed, false);
                check(a_transposed, b_transposed, true);
            }
        }
    }

    #[test]
    fn elements_are_scaled_by_groups() {
        let mut driver = FakeDriver::h200();
        let mut blas = HostBlas::new(Arc::clone(driver.shared()));
        let stream = driver.stream(Priority::Middle).unwrap();
        let pointer = driver.allocate(1 << 12).unwrap();
        // 0x38 is 1.0: each result is the sum of K's scales.
        driver.upload(pointer, &[0x38; 3 * 144]).unwrap();
        let upload = |driver: &mut FakeDriver, offset: usize, values: &[f32]| {
            driver.upload(pointer.offset(offset), bytemuck::cast_slice(values)).unwrap();
        };
        // Two rows of `a` with a scale per group, group by group; a square of `b` and its padding.
        upload(&mut driver, 1024, &[1.0, 2.0, 0.5, 4.0]);
        upload(&mut driver, 2048, &[1.0, 8.0, f32::NAN, f32::NAN]);
        let data = |offset: usize, rows: usize| Matrix {
            pointer: pointer.offset(offset),
            dtype: DType::E4m3,
            rows,
            columns: 144,
            leading: 144,
        };
        let out = Matrix {
            pointer: pointer.offset(3072),
            dtype: DType::Bf16,
            rows: 2,
            columns: 1,
            leading: 1,
        };
        let matmul = Matmul {
            a: data(0, 2),
            a_transposed: false,
            b: data(288, 1),
            b_transposed: true,
            out,
            added: None,
            bias: None,
            scales: Some((
                BlockScales::Row128(pointer.offset(1024)),
                BlockScales::Square128(pointer.offset(2048)),
            )),
            workspace: pointer,
            workspace_bytes: 0,
        };
        let plan = blas.plan(&matmul).unwrap();
        blas.run(plan, stream).unwrap();
        let mut bytes = [0; 4];
        driver.download(&mut bytes, out.pointer).unwrap();
        let got: Vec<f64> = numbers(&bytes, DType::Bf16).unwrap();
        assert_eq!(got, [128.0 + 16.0 * 0.5 * 8.0, 256.0 + 16.0 * 4.0 * 8.0]);
        assert_eq!(driver.counts().read().matmuls, 1);
    }
}
