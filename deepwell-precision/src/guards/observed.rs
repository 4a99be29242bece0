//! Kinds of operands, for the limits that apply to their counters.

/// Kind of an observed operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Whether forward GEMMs read the operand as an activation. Its amax is kept for
    /// [`super::Guards::activation_amax`].
    pub is_activation: bool,
    /// Whether the backward pass quantizes the operand.
    pub is_backward: bool,
    /// Whether the format has a tensor scale, and elements of four bits. Of its counters two cause
    /// nothing:
    /// - Saturations: block scales are rounded to nearest, so that about half of them are too small
    ///   for the largest element.
    /// - Clamped scales: a block whose largest element is below 2^-18.8 of the tensor's amax has a
    ///   scale of 0. Healthy gradients of queries and keys have up to a tenth of such blocks, and
    ///   their elements count as underflows.
    pub has_tensor_scale: bool,
}
