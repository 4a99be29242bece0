//! Splits work over the threads of the current rayon pool (feature `rayon`).

/// Largest task, in elements, that is not split further: some tens of microseconds of work, tens of
/// times the cost of moving it to another thread.
pub(crate) const ELEMENTS_PER_TASK: usize = 1 << 16;

/// Runs both, in parallel if threads are available.
pub(crate) fn join<A: Send, B: Send>(
    a: impl FnOnce() -> A + Send,
    b: impl FnOnce() -> B + Send,
) -> (A, B) {
    #[cfg(feature = "rayon")]
    if threads() > 1 {
        return rayon::join(a, b);
    }
    (a(), b())
}

/// Number of threads that [`join`] may use.
pub(crate) fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
