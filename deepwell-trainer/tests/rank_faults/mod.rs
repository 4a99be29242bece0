//! What tests that plant faults between ranks share: exchanges whose results are changed, and how
//! far two runs are apart.

use deepwell_ir::DType;
use deepwell_kernels::{Comm, CommError, Exchange, InProcess};
use deepwell_precision::random::split_mix64;

/// Exchanges between threads, each result of which is handed to `tamper` with this rank, the
/// exchange and what this rank gave.
pub(crate) struct Tampered<F> {
    comm: InProcess,
    tamper: F,
}

impl<F: FnMut(u32, &Exchange, &[u8], &mut [u8]) + Send + 'static> Tampered<F> {
    pub(crate) fn wrap(comm: InProcess, tamper: F) -> Box<dyn Comm> {
        Box::new(Tampered { comm, tamper })
    }
}

impl<F: FnMut(u32, &Exchange, &[u8], &mut [u8]) + Send> Comm for Tampered<F> {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    fn exchange(
        &mut self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.comm.exchange(exchange, input, output)?;
        (self.tamper)(self.comm.rank(), exchange, input, output);
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.comm.abort(reason);
    }
}

/// What the first rank of a gather gave counts for all.
pub(crate) fn first_for_all(input: &[u8], output: &mut [u8]) {
    let first = output[..input.len()].to_vec();
    output.chunks_mut(input.len()).for_each(|chunk| chunk.copy_from_slice(&first));
}

/// What this rank gave counts for all.
#[allow(dead_code, reason = "not every test has ranks with experts")]
pub(crate) fn own_for_all(input: &[u8], output: &mut [u8]) {
    output.chunks_mut(input.len()).for_each(|chunk| chunk.copy_from_slice(input));
}

/// What a rank gets of a scattered sum is its own part alone.
#[allow(dead_code, reason = "not every test has sums")]
pub(crate) fn own_part(rank: u32, exchange: &Exchange, input: &[u8], output: &mut [u8]) {
    let own = exchange.group.position_of(rank).unwrap() * output.len();
    output.copy_from_slice(&input[own..own + output.len()]);
}

/// Draws the last bits of numbers anew, those of `mask`: by their contents, so that ranks with the
/// same numbers keep the same ones.
#[allow(dead_code, reason = "not every test has controls")]
pub(crate) fn flip(dtype: DType, mask: u8, seed: u64, output: &mut [u8]) {
    let start = split_mix64(seed);
    // Arrays and no iterators over bytes: tests are not optimized, and this is what they do most.
    let draw = |bits: u32| match bits {
        0 => 0,
        _ => split_mix64(start ^ u64::from(bits)) as u8 & mask,
    };
    if dtype == DType::Bf16 {
        for number in output.as_chunks_mut().0 {
            number[0] ^= draw(u32::from(u16::from_be_bytes(*number)));
        }
    } else {
        for number in output.as_chunks_mut().0 {
            number[0] ^= draw(u32::from_be_bytes(*number));
        }
    }
}

/// Largest relative difference of two lists; NaN where one is.
#[allow(dead_code, reason = "not every test measures")]
pub(crate) fn furthest(a: &[f32], b: &[f32]) -> f64 {
    let differs = |(a, b): (&f32, &f32)| f64::from((a - b).abs()) / f64::from(b.abs());
    // Not `f64::max`, which leaves what is no number out.
    a.iter().zip(b).map(differs).fold(0.0, |most, it| if it <= most { most } else { it })
}

/// Norm of the difference of two tensors over the norm of the second.
#[allow(dead_code, reason = "not every test measures")]
pub(crate) fn relative_norm(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let differences = &mut a.iter().zip(b).map(|(a, b)| f64::from(a - b));
    norm(differences) / norm(&mut b.iter().map(|&b| f64::from(b))).max(1e-30)
}
