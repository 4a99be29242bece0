//! Counts of chosen experts, and the update of selection biases as
//! [`deepwell_moe::update_selection_bias`] defines.

use deepwell_ir::Op;

use crate::KernelError;
use crate::runtime::cpu::operands::{Operands, Run};

/// Counts each expert's occurrences in `chosen` into `counts` `[experts]`, or accumulates. Counts
/// are exact up to 2^24.
///
/// # Errors
/// For an expert that does not exist.
pub fn count_experts(
    chosen: &[i32],
    accumulate: bool,
    counts: &mut [f32],
) -> Result<(), deepwell_moe::MoeError> {
    if !accumulate {
        counts.fill(0.0);
    }
    let experts = counts.len();
    for (index, &expert) in chosen.iter().enumerate() {
        let Some(count) = usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert))
        else {
            let expert = expert as u32;
            return Err(deepwell_moe::MoeError::ExpertOutOfRange { index, expert, experts });
        };
        *count += 1.0;
    }
    Ok(())
}

pub(super) fn prepare_counts(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::CountExperts(_) = op else { return Err(operands.unknown_kernel()) };
    let chosen = operands.input::<i32>(0)?;
    let counts = operands.target::<f32>(1)?;
    let adds = operands.adds();
    Ok(Box::new(move |arena| {
        count_experts(chosen.of(arena), adds, counts.of(arena)).map_err(|error| error.to_string())
    }))
}

pub(super) fn prepare_update(operands: &Operands<'_>, op: &Op) -> Result<Run, KernelError> {
    let Op::SelectionBiasUpdate(op) = op else { return Err(operands.unknown_kernel()) };
    let rate = f64::from(op.rate);
    let coefficients = operands.input::<f32>(0)?;
    let counts = operands.input::<f32>(1)?;
    let bias = operands.target::<f32>(2)?;
    Ok(Box::new(move |arena| {
        // A skipped step changes nothing.
        if coefficients.of(arena)[0] == 0.0 {
            return Ok(());
        }
        let counts: Vec<usize> = counts.of(arena).iter().map(|&count| count as usize).collect();
        deepwell_moe::update_selection_bias(bias.of(arena), &counts, rate)
            .map_err(|error| error.to_string())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::selection_bias::oracle;
    use crate::runtime::cpu::test_support::{Random, assert_close, poisoned, to_f64};

    #[test]
    fn matches_the_oracle() {
        for (pairs, experts) in [(0, 3), (1, 1), (7, 4), (512, 8), (999, 100)] {
            let mut random = Random::new((pairs + experts) as u64);
            let chosen: Vec<i32> = (0..pairs).map(|_| random.below(experts) as i32).collect();
            let mut counts = poisoned::<f32>(experts);
            count_experts(&chosen, false, &mut counts).unwrap();
            let expected = oracle::counts(&chosen, experts);
            assert_eq!(to_f64(&counts), expected);
            count_experts(&chosen, true, &mut counts).unwrap();
            let twice: Vec<f64> = expected.iter().map(|count| 2.0 * count).collect();
            assert_eq!(to_f64(&counts), twice);

            let mut bias: Vec<f32> = random.normals(experts);
            let moved = oracle::updated(&to_f64(&bias), &expected, 0.25);
            let counts: Vec<usize> = expected.iter().map(|&count| count as usize).collect();
            deepwell_moe::update_selection_bias(&mut bias, &counts, 0.25).unwrap();
            // One sum, rounded to FP32.
            assert_close("bias", &bias, &moved, 2f64.powi(-24), 0.0);
        }
        let error = count_experts(&[0, 2], false, &mut [0.0; 2]).unwrap_err().to_string();
        assert!(error.contains("assignment 1 names expert 2, but there are 2"), "{error}");
    }
}
