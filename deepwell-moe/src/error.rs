//! What can be wrong with the arguments.

/// Why a router, a dispatch or a loss cannot be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// A number of experts outside `1..=u32::MAX`.
    #[error("expected between 1 and {} experts, got {experts}", u32::MAX)]
    ExpertCount {
        /// The number given.
        experts: usize,
    },

    /// More experts a token than there are, or none.
    #[error(
        "expected `top_k` between 1 and the {experts} experts, got {top_k}\n\
         hint: a token visits an expert at most once"
    )]
    TopK {
        /// The `top_k` given.
        top_k: usize,
        /// Experts there are.
        experts: usize,
    },

    /// Settings of a router that do not fit each other.
    #[error(transparent)]
    Router(#[from] deepwell_ir::OpError),

    /// A selection bias that the settings do not have, or none where they have one.
    #[error(
        "expected {} selection bias, as the router's settings say",
        if *expected { "a" } else { "no" }
    )]
    SelectionBias {
        /// Whether there should be one.
        expected: bool,
    },

    /// A slice whose length does not fit the others.
    #[error("`{name}`: expected {expected} numbers ({layout}), got {got}")]
    Length {
        /// Which argument.
        name: &'static str,
        /// Its shape in words.
        layout: &'static str,
        /// The length that fits.
        expected: usize,
        /// The length given.
        got: usize,
    },

    /// Logits that are not whole rows.
    #[error("`{name}`: expected rows of {columns} numbers, got {got} numbers in all")]
    PartialRow {
        /// Which argument.
        name: &'static str,
        /// Numbers in a row.
        columns: usize,
        /// The length given.
        got: usize,
    },

    /// NaN or infinity where only finite numbers have a meaning.
    #[error(
        "`{name}`: expected finite numbers, got {value} at row {row}, column {column}\n\
         hint: check the layers before the router for overflow"
    )]
    NonFinite {
        /// Which argument.
        name: &'static str,
        /// The token, or 0 for a vector.
        row: usize,
        /// The expert or choice.
        column: usize,
        /// The number found.
        value: f64,
    },

    /// A scalar setting outside its range.
    #[error("`{name}`: expected {expected}, got {value}")]
    Setting {
        /// Which setting.
        name: &'static str,
        /// The range in words.
        expected: &'static str,
        /// The number given.
        value: f64,
    },

    /// An expert that does not exist.
    #[error("assignment {index} names expert {expert}, but there are {experts}")]
    ExpertOutOfRange {
        /// Place in the list of assignments.
        index: usize,
        /// The expert named.
        expert: u32,
        /// Experts there are.
        experts: usize,
    },

    /// More assignments than a `u32` counts.
    #[error("expected fewer than {} assignments of tokens to experts, got {got}", u32::MAX)]
    TooManyAssignments {
        /// Tokens times `top_k`.
        got: usize,
    },
}

/// Requires `slice` to hold `expected` numbers.
pub(crate) fn check_length<T>(
    name: &'static str,
    layout: &'static str,
    slice: &[T],
    expected: usize,
) -> Result<(), MoeError> {
    if slice.len() == expected {
        return Ok(());
    }
    Err(MoeError::Length { name, layout, expected, got: slice.len() })
}

/// Requires `slice` to be whole rows of finite numbers, and returns how many rows.
pub(crate) fn check_rows<T: crate::Real>(
    name: &'static str,
    slice: &[T],
    columns: usize,
) -> Result<usize, MoeError> {
    if !slice.len().is_multiple_of(columns) {
        return Err(MoeError::PartialRow { name, columns, got: slice.len() });
    }
    check_finite(name, slice, columns)?;
    Ok(slice.len() / columns)
}

/// Requires every number of `slice`, rows of `columns`, to be finite.
pub(crate) fn check_finite<T: crate::Real>(
    name: &'static str,
    slice: &[T],
    columns: usize,
) -> Result<(), MoeError> {
    match slice.iter().position(|value| !value.to_f64().is_finite()) {
        None => Ok(()),
        Some(index) => Err(MoeError::NonFinite {
            name,
            row: index / columns,
            column: index % columns,
            value: slice[index].to_f64(),
        }),
    }
}

/// Requires a number of experts that ids of `u32` can name.
pub(crate) fn check_expert_count(experts: usize) -> Result<(), MoeError> {
    if experts == 0 || u32::try_from(experts).is_err() {
        return Err(MoeError::ExpertCount { experts });
    }
    Ok(())
}

/// Requires `1 <= top_k <= experts`.
pub(crate) fn check_top_k(top_k: usize, experts: usize) -> Result<(), MoeError> {
    check_expert_count(experts)?;
    if top_k == 0 || top_k > experts {
        return Err(MoeError::TopK { top_k, experts });
    }
    Ok(())
}
