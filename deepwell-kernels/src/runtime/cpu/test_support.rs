//! Shared by the kernel tests: random tensors, comparison with an oracle, thread counts.

use deepwell_precision::random::SplitMix64;

use super::element::Element;

/// A reproducible sequence of random numbers.
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(SplitMix64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1)))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0.draw()
    }

    /// Uniform in `0..1`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..bound`, for a small bound.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }

    /// Approximately normal with mean 0 and variance 1. A sum of twelve uniform numbers could reach
    /// 6; values beyond 4.5 are drawn again.
    pub(crate) fn normal(&mut self) -> f64 {
        loop {
            let sum = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
            if sum.abs() < 4.5 {
                return sum;
            }
        }
    }

    pub(crate) fn normals<E: Element>(&mut self, len: usize) -> Vec<E> {
        (0..len).map(|_| E::from_f32(self.normal() as f32)).collect()
    }
}

/// A tensor of NaN, which makes elements visible that a kernel does not write.
pub(crate) fn poisoned<E: Element>(len: usize) -> Vec<E> {
    vec![E::from_f32(f32::NAN); len]
}

pub(crate) fn to_f64<E: Element>(values: &[E]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

/// Asserts `|got - expected| <= relative * |expected| + absolute` for every element.
#[track_caller]
pub(crate) fn assert_close<E: Element>(
    name: &str,
    got: &[E],
    expected: &[f64],
    relative: f64,
    absolute: f64,
) {
    assert_close_each(name, got, expected, relative, &vec![absolute; expected.len()]);
}

/// [`assert_close`] with an absolute tolerance for each element.
#[track_caller]
pub(crate) fn assert_close_each<E: Element>(
    name: &str,
    got: &[E],
    expected: &[f64],
    relative: f64,
    absolute: &[f64],
) {
    assert_eq!(got.len(), expected.len(), "`{name}` has the wrong length");
    assert_eq!(absolute.len(), expected.len(), "a tolerance for each element of `{name}`");
    for (index, ((got, &expected), absolute)) in got.iter().zip(expected).zip(absolute).enumerate()
    {
        let got = f64::from(got.to_f32());
        let allowed = relative * expected.abs() + absolute;
        // In this form of comparison NaN fails.
        let close = got == expected || (got - expected).abs() <= allowed;
        assert!(
            close,
            "`{name}`[{index}]: got {got:e}, expected {expected:e}, off by {:e}, \
             allowed {allowed:e}",
            (got - expected).abs()
        );
    }
}

/// Runs `work` on 1, 2 and 3 threads and asserts equal results.
///
/// `work` returns plain numbers without NaN; for such numbers, equality means equal bits except for
/// the sign of zero.
#[track_caller]
pub(crate) fn for_thread_counts<R: PartialEq + std::fmt::Debug + Send>(
    work: impl Fn() -> R + Sync,
) {
    use std::sync::OnceLock;
    static POOLS: OnceLock<Vec<rayon::ThreadPool>> = OnceLock::new();
    let pools = POOLS.get_or_init(|| {
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        (1..=3).map(pool).collect()
    });
    let mut results = pools.iter().map(|pool| pool.install(&work));
    let first = results.next().unwrap();
    for (index, result) in results.enumerate() {
        assert!(result == first, "{} threads differ from one", index + 2);
    }
}
