//! Splitting work over the threads of the global rayon pool, where the feature is on.

/// Elements below which a task is not split any further: some tens of microseconds of work, which
/// is tens of times what handing it to another thread costs.
pub(crate) const ELEMENTS_PER_TASK: usize = 1 << 16;

/// Runs both, at the same time where there are threads for it.
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

/// Threads that [`join`] may use.
pub(crate) fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}
