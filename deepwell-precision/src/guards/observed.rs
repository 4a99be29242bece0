//! Kinds of operands, for the limits that apply to their counters.

use crate::ElementFormat;

/// Kind of an observed operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Whether forward GEMMs read the operand as an activation. Its amax is kept for
    /// [`super::Guards::activation_amax`].
    pub is_activation: bool,
    /// Whether the backward pass quantizes the operand.
    pub is_backward: bool,
    /// Format of the elements. Those with two exponent bits, E2M1 and E2M3, have a small range, so
    /// that many elements of a healthy tensor underflow.
    pub element: ElementFormat,
    /// Whether the format has a tensor scale. Of its counters two cause nothing:
    /// - Saturations: block scales are rounded to nearest, so that about half of them are too small
    ///   for the largest element.
    /// - Clamped scales: a block whose largest element is below 2^-18.8 of the tensor's amax has a
    ///   scale of 0. Healthy gradients of queries and keys have up to a tenth of such blocks, and
    ///   their elements count as underflows.
    pub has_tensor_scale: bool,
}

impl Observed {
    /// Whether elements are a few binades below the largest of their block when they underflow: 24
    /// times for E2M1, 120 times for E2M3.
    pub(super) fn has_small_range(self) -> bool {
        matches!(self.element, ElementFormat::E2M1 | ElementFormat::E2M3)
    }
}
