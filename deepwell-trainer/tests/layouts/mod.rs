//! How many layouts of ranks a test runs: a covering set, or all.

/// Set where every layout is run.
const VARIABLE: &str = "DEEPWELL_ALL_LAYOUTS";

/// Rows of a table: those of the covering set, in which each degree of parallelism occurs with each
/// other one; and `others` as well where the environment asks for all.
pub(crate) fn rows<T: Clone>(covering: &[T], others: &[T]) -> Vec<T> {
    let is_all = std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty());
    let others = if is_all { others } else { &[] };
    [covering, others].concat()
}
