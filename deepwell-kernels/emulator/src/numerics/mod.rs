//! Arithmetic of tensor-core MMAs.
//!
//! # Brief overview
//!
//! [`multiply`] adds the GEMM of two [`Operand`]s to an accumulator, in steps of the K of one
//! instruction. An [`MmaSpec`] selects the machine, the kind of instruction and the [`ResultMode`]:
//! the hardware's sum, the exact sum, or another sum that the instruction set also allows.
//!
//! ```
//! use deepwell_emulator::number::Format;
//! use deepwell_emulator::numerics::{
//!     Accumulate, ElementBits, Kind, Operand, MmaSpec, ResultMode, TensorCore, multiply,
//! };
//!
//! let spec = MmaSpec {
//!     model: ResultMode::Hardware,
//!     architecture: TensorCore::Hopper,
//!     kind: Kind::Bf16,
//!     a: Format::BF16,
//!     b: Format::BF16,
//!     accumulate: Accumulate::F32,
//! };
//! // One row of two elements each: 1.5 * 2 + 1 * 4.
//! let a = Operand::new(ElementBits::U16(&[0x3fc0, 0x3f80]));
//! let b = Operand::new(ElementBits::U16(&[0x4000, 0x4080]));
//! let mut sum = [0; 1];
//! multiply(&spec, 1, 1, 2, &a, &b, &mut sum, false, false, false)?;
//! assert_eq!(f32::from_bits(sum[0]), 7.0);
//! # Ok::<(), deepwell_emulator::error::Fault>(())
//! ```

mod doubles;
mod element;
mod exact;
mod fuzz;
mod halves;
mod hardware;
mod integer;
mod model;
mod operand;
mod panel;
mod rounding;
mod scaled_fp4;
mod spec;
mod wide;

pub use model::Model;
pub use operand::{ElementBits, Operand, Scales};
pub use spec::{Accumulate, Kind, MmaSpec, ResultMode, TensorCore};

use crate::error::Fault;

/// Computes `accumulator = a · bᵀ`, or `accumulator += a · bᵀ` with `use_accumulator`.
///
/// - Row-major: `a` is `[m, k]`, `b` is `[n, k]` (B transposed), `accumulator` is `[m, n]`.
/// - Without `use_accumulator`, the accumulator counts as zero.
/// - `negate_a` and `negate_b` negate all elements.
/// - The sum is formed in steps of the K of one instruction ([`Model::step`]). If `k` is not a
///   multiple, the last step is shorter, as in an instruction of a smaller shape.
///
/// Large MMAs run on rayon's current thread pool; results do not depend on the number of threads.
///
/// # Errors
/// Formats, scales or lengths that do not match.
#[expect(clippy::too_many_arguments, reason = "one instruction with its operands and modifiers")]
pub fn multiply(
    spec: &MmaSpec,
    m: usize,
    n: usize,
    k: usize,
    a: &Operand<'_>,
    b: &Operand<'_>,
    accumulator: &mut [u32],
    use_accumulator: bool,
    negate_a: bool,
    negate_b: bool,
) -> Result<(), Fault> {
    spec.check()?;
    if accumulator.len() != m * n {
        return Err(Fault::new(
            "mma-accumulator-size",
            format!("expected an accumulator of {m} x {n}, got {}", accumulator.len()),
        ));
    }
    spec.check_scales("A", a)?;
    spec.check_scales("B", b)?;
    a.check("A", spec.a, m, k)?;
    b.check("B", spec.b, n, k)?;
    if !use_accumulator {
        accumulator.fill(0);
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    let negate = negate_a != negate_b;
    let shape = (m, n, k);
    let model = Model::new(spec, k);
    match (spec.kind, spec.model) {
        (Kind::I8, _) => integer::multiply(spec, shape, a, b, accumulator, negate),
        (_, ResultMode::Exact) => exact::multiply(spec, &model, shape, a, b, accumulator, negate),
        (_, ResultMode::Fuzz(seed)) => {
            fuzz::multiply(spec, &model, seed, shape, a, b, accumulator, negate);
        }
        (Kind::Mxf4nvf4, _) => scaled_fp4::multiply(&model, shape, a, b, accumulator, negate),
        (Kind::F8f6f4, _) if spec.architecture == TensorCore::HopperWarp => {
            halves::multiply(spec, &model, shape, a, b, accumulator, negate);
        }
        _ => hardware::multiply(spec, &model, shape, a, b, accumulator, negate),
    }
    Ok(())
}
