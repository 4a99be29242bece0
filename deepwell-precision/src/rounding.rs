//! Conversion of values that a format cannot represent.

use serde::{Deserialize, Serialize};

/// Rounding of a value between two representable neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Rounding {
    /// To the nearer neighbour, ties to the even code. Used by casts.
    #[default]
    NearestEven,
    /// To the neighbour of smaller magnitude.
    TowardZero,
    /// To the larger neighbour. Used by the RCEIL rule for scales (`cvt.rp` in PTX).
    TowardPositive,
}

/// Conversion of a magnitude beyond the largest finite magnitude.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Overflow {
    /// The largest finite magnitude, for infinities too (`.satfinite` in PTX). Used by casts.
    #[default]
    Saturate,
    /// NaN in E4M3 and E8M0, which have no infinity; infinity in E5M2. A finite value that is
    /// rounded toward zero stays at the largest finite magnitude, as in IEEE 754.
    NonFinite,
}
