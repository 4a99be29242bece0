//! Errors in arguments.

/// Why a router, a dispatch or a loss cannot be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// A number of experts outside `1..=u32::MAX`.
    #[error("expected between 1 and {} experts, got {experts}", u32::MAX)]
    ExpertCount {
        /// The actual number.
        experts: usize,
    },

    /// `top_k` of zero, or above the number of experts.
    #[error(
        "expected `top_k` between 1 and the {experts} experts, got {top_k}\n\
         hint: a token visits an expert at most once"
    )]
    TopK {
        /// The actual `top_k`.
        top_k: usize,
        /// Number of experts.
        experts: usize,
    },

    /// Inconsistent settings of a router.
    #[error(transparent)]
    Router(#[from] deepwell_ir::OpError),

    /// A selection bias without the corresponding setting, or the reverse.
    #[error(
        "expected {} selection bias, as the router's settings say",
        if *expected { "a" } else { "no" }
    )]
    SelectionBias {
        /// Whether the settings have a selection bias.
        expected: bool,
    },

    /// A slice whose length does not match other arguments.
    #[error("`{name}`: expected {expected} numbers ({layout}), got {got}")]
    Length {
        /// Name of the argument.
        name: &'static str,
        /// Its shape in words.
        layout: &'static str,
        /// The expected length.
        expected: usize,
        /// The actual length.
        got: usize,
    },

    /// Logits that are not a whole number of rows.
    #[error("`{name}`: expected rows of {columns} numbers, got {got} numbers in all")]
    PartialRow {
        /// Name of the argument.
        name: &'static str,
        /// Elements per row.
        columns: usize,
        /// The actual length.
        got: usize,
    },

    /// NaN or infinity in an argument that must be finite.
    #[error(
        "`{name}`: expected finite numbers, got {value} at row {row}, column {column}\n\
         hint: check the layers before the router for overflow"
    )]
    NonFinite {
        /// Name of the argument.
        name: &'static str,
        /// The token, or 0 for a vector.
        row: usize,
        /// The expert or choice.
        column: usize,
        /// The value.
        value: f64,
    },

    /// A scalar setting outside its range.
    #[error("`{name}`: expected {expected}, got {value}")]
    Setting {
        /// Name of the setting.
        name: &'static str,
        /// The valid range in words.
        expected: &'static str,
        /// The actual value.
        value: f64,
    },

    /// An invalid expert.
    #[error("assignment {index} names expert {expert}, but there are {experts}")]
    ExpertOutOfRange {
        /// Index in the list of assignments.
        index: usize,
        /// The expert.
        expert: u32,
        /// Number of experts.
        experts: usize,
    },

    /// More assignments than a `u32` can count.
    #[error("expected fewer than {} assignments of tokens to experts, got {got}", u32::MAX)]
    TooManyAssignments {
        /// Tokens times `top_k`.
        got: usize,
    },
}

/// Checks that `slice` has `expected` elements.
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

/// Checks that `slice` is whole rows of finite numbers, and returns the number of rows.
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

/// Checks that all numbers of `slice`, with rows of `columns`, are finite.
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

/// Checks that the number of experts fits into `u32` ids.
pub(crate) fn check_expert_count(experts: usize) -> Result<(), MoeError> {
    if experts == 0 || u32::try_from(experts).is_err() {
        return Err(MoeError::ExpertCount { experts });
    }
    Ok(())
}

/// Checks `1 <= top_k <= experts`.
pub(crate) fn check_top_k(top_k: usize, experts: usize) -> Result<(), MoeError> {
    check_expert_count(experts)?;
    if top_k == 0 || top_k > experts {
        return Err(MoeError::TopK { top_k, experts });
    }
    Ok(())
}
