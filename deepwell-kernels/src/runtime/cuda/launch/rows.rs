//! Shared by launchers of kernels that work on whole rows: `layout/row_group.cuh` and
//! `common/sum_over_ctas.cuh`.

use deepwell_ir::KernelRequest;

use super::support::all_bf16;
use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};

/// Elements of a vector, 16 bytes of BF16.
const VECTOR: usize = 8;
/// Vectors per thread in a forward kernel, as in the sources.
const FORWARD_VECTORS: usize = 4;
/// Minimum threads per CTA, for short rows.
const FORWARD_THREADS_MIN: u32 = 128;
/// Threads per CTA of a backward kernel, as in the sources.
const BACKWARD_THREADS: u32 = 512;
/// Threads per CTA that processes a row element by element, as in the sources.
const SCALAR_THREADS: u32 = 256;
/// Maximum threads per row.
const THREADS_MAX: usize = 512;
/// Maximum rows and columns that the kernels can index.
const EXTENT_MAX: usize = i32::MAX as usize;

/// Threads that hold a row of `columns` elements in registers, `vectors` vectors each: a power of
/// two of whole warps. `None` if the row is too long or does not consist of whole vectors.
fn threads_per_row(columns: usize, vectors: usize) -> Option<u32> {
    let threads = columns.div_ceil(vectors * VECTOR).next_power_of_two().max(32);
    let fits = columns > 0 && columns.is_multiple_of(VECTOR) && threads <= THREADS_MAX;
    fits.then_some(threads as u32)
}

/// Rejects floats other than BF16 (except `f32s`, the FP32 statistics and gradients of parameters)
/// and an operand 0 that is too large to index.
pub(crate) fn reject(request: &KernelRequest<'_>, f32s: &[usize]) -> Option<String> {
    let floats: Vec<usize> =
        (0..request.operands.len()).filter(|index| !f32s.contains(index)).collect();
    all_bf16(request, &floats).or_else(|| {
        let shape = &request.operands[0].shape;
        let too_large = shape.iter().any(|&extent| extent > EXTENT_MAX);
        too_large.then(|| format!("takes at most {EXTENT_MAX} rows and columns, not {shape:?}"))
    })
}

/// Rows and columns of operand 0.
pub(crate) fn matrix_of(call: &CallView<'_>) -> Result<[usize; 2], KernelError> {
    let shape = call.input(0).shape;
    shape.as_slice().try_into().map_err(|_| call.refuse("expected a matrix"))
}

/// Prepares a normalization of a matrix's rows by `<entry>_rows` or `<entry>_scalar` of
/// `<file>.cu`. The kernels take the call's operands in order, then rows, columns, threads per row,
/// and eps.
pub(crate) fn prepare_forward(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    [rows, columns]: [usize; 2],
    file: &'static str,
    entry: &str,
    eps: f64,
) -> Result<Vec<Step>, KernelError> {
    let (suffix, threads, per_row) = match threads_per_row(columns, FORWARD_VECTORS) {
        Some(per_row) => ("rows", per_row.max(FORWARD_THREADS_MIN), per_row),
        None => ("scalar", SCALAR_THREADS, SCALAR_THREADS),
    };
    let function = device.function(file, &format!("{entry}_{suffix}"), 0)?;
    let ctas = (rows as u32).div_ceil(threads / per_row).max(1);
    let operands = 0..call.call.operands.len();
    let mut arguments: Vec<_> = operands.map(|index| call.operand(index).argument()).collect();
    arguments.extend([
        Argument::U32(rows as u32),
        Argument::U32(columns as u32),
        Argument::U32(per_row),
        Argument::F32(eps as f32),
    ]);
    Ok(vec![Device::launch(function, ctas, threads, 0, arguments)])
}

/// The backward of a normalization, by `<file>_rows` or `<file>_scalar` of `<file>.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Backward {
    /// Name of the `.cu` file and prefix of its kernels.
    pub(crate) file: &'static str,
    /// Vectors per thread, as in the source.
    pub(crate) vectors: usize,
    /// Number of parameter gradients.
    pub(crate) gradients: usize,
}

impl Backward {
    /// Division of the rows among CTAs.
    fn division(&self, shape: &[usize], workers: usize) -> CtaColumns {
        let per_row = threads_per_row(shape[1], self.vectors);
        let rows_per_cta = per_row.map_or(1, |threads| BACKWARD_THREADS / threads);
        CtaColumns::new(shape[0], rows_per_cta as usize, workers)
    }

    /// Bytes of scratch for the sums over rows.
    pub(crate) fn workspace_bytes(&self, shape: &[usize], workers: usize) -> usize {
        self.division(shape, workers).scratch_bytes(self.gradients * shape[1])
    }

    /// Prepares a launch over the rows of `matrix`. The kernels take the inputs in order, the
    /// residual last or null, the outputs in order, then rows, columns, threads per row, whether to
    /// accumulate, and the arguments of sums over CTAs.
    pub(crate) fn prepare(
        &self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        matrix: [usize; 2],
        residual: bool,
    ) -> Result<Vec<Step>, KernelError> {
        let [rows, columns] = matrix;
        // The same division as in the plan, which sized the scratch.
        let division = self.division(&matrix, call.program.target.workers);
        let shared_bytes = (self.gradients * columns * size_of::<f32>()) as u32;
        let (suffix, threads, per_row, shared_bytes) = match threads_per_row(columns, self.vectors)
        {
            Some(per_row) => ("rows", BACKWARD_THREADS, per_row, shared_bytes),
            None => ("scalar", SCALAR_THREADS, SCALAR_THREADS, 0),
        };
        let function =
            device.function(self.file, &format!("{}_{suffix}", self.file), shared_bytes)?;
        let mut arguments: Vec<_> =
            (0..call.call.input_count).map(|index| call.input(index).argument()).collect();
        if !residual {
            arguments.push(Argument::Pointer(DevicePtr(0)));
        }
        arguments.extend((0..=self.gradients).map(|index| call.output(index).argument()));
        arguments.extend([
            Argument::U32(rows as u32),
            Argument::U32(columns as u32),
            Argument::U32(per_row),
            Argument::U32(u32::from(call.accumulate())),
            Argument::Pointer(call.workspace().0),
            Argument::Pointer(device.arrival_counters(division.arrival_counters())?),
            Argument::U32(division.members as u32),
        ]);
        let ctas = division.ctas as u32;
        Ok(vec![Device::launch(function, ctas, threads, shared_bytes, arguments)])
    }
}

/// Two-level sums over all rows: every CTA has a row of partial sums, teams of neighbouring CTAs
/// add theirs, and the last CTA adds the rows of the teams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CtaColumns {
    /// CTAs of the launch.
    pub(crate) ctas: usize,
    /// CTAs per team.
    pub(crate) members: usize,
}

impl CtaColumns {
    /// One CTA per SM, but no more than the rows need at `rows_per_cta` each; team sizes balance
    /// the number of rows that the two levels add.
    pub(crate) fn new(rows: usize, rows_per_cta: usize, workers: usize) -> CtaColumns {
        let ctas = rows.div_ceil(rows_per_cta.max(1)).clamp(1, workers.max(1));
        let root = ctas.isqrt();
        let members = if root * root == ctas { root } else { root + 1 };
        CtaColumns { ctas, members }
    }

    /// Number of teams.
    fn teams(self) -> usize {
        self.ctas.div_ceil(self.members)
    }

    /// Number of arrival counters: a counter per team, and a last counter for all teams.
    pub(crate) fn arrival_counters(self) -> usize {
        self.teams() + 1
    }

    /// Bytes of scratch for `width` FP32 sums.
    pub(crate) fn scratch_bytes(self, width: usize) -> usize {
        (self.ctas + self.teams()) * width * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_their_threads() {
        let expected = [
            (0, None),
            (8, Some(32)),
            (12, None),
            (768, Some(32)),
            (1024, Some(32)),
            (1032, Some(64)),
            (4096, Some(128)),
            (5120, Some(256)),
            (16384, Some(512)),
            (16392, None),
        ];
        for (columns, threads) in expected {
            assert_eq!(threads_per_row(columns, 4), threads, "{columns}");
        }
    }

    #[test]
    fn every_cta_has_a_team_and_every_team_a_cta() {
        for rows in [0, 1, 2, 3, 15, 16, 17, 130, 5000] {
            for workers in [0, 1, 78, 132, 148] {
                let division = CtaColumns::new(rows, 4, workers);
                let CtaColumns { ctas, members } = division;
                assert!(ctas >= 1 && ctas <= workers.max(1), "{division:?}");
                assert!(members >= 1 && members * members >= ctas, "{division:?}");
                assert!((division.teams() - 1) * members < ctas, "{division:?}");
                let scratch = division.scratch_bytes(8);
                assert_eq!(scratch, 32 * (ctas + division.teams()));
            }
        }
    }
}
