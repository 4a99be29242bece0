//! The two number types that this crate accepts.

/// `f32` or `f64`: element type of slices. Arithmetic is done in `f64`.
pub trait Real:
    sealed::Sealed + Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static
{
    /// The value as `f64`, exactly.
    fn to_f64(self) -> f64;

    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;
}

impl Real for f32 {
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Real for f64 {
    fn to_f64(self) -> f64 {
        self
    }

    fn from_f64(value: f64) -> Self {
        value
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}
