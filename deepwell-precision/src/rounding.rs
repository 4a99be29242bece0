//! How a value that a format cannot hold becomes one that it can.

use serde::{Deserialize, Serialize};

/// Which neighbour a value between two representable ones takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Rounding {
    /// The nearer one; of two equally near ones the one with the even code. What casts use.
    #[default]
    NearestEven,
    /// The one of smaller magnitude.
    TowardZero,
    /// The larger one. How the RCEIL rule rounds a scale (`cvt.rp` in PTX).
    TowardPositive,
}

/// What a magnitude beyond the largest finite one becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Overflow {
    /// The largest finite magnitude, for infinities too (`.satfinite` in PTX). What casts use.
    #[default]
    Saturate,
    /// NaN in E4M3 and E8M0, which have no infinity; infinity in E5M2. A finite value that is
    /// rounded toward zero stays at the largest finite magnitude, as in IEEE 754.
    NonFinite,
}
