//! Calls that depend on the heads or the positions of tokens: norms of heads, learned positions.

use deepwell_ir::{DType, ops};
use deepwell_kernels::SingleCall;

use super::shapes::{self, TokenSize};

/// Epsilon of norms that belong to no model.
const EPS: f64 = 1e-6;

/// Norms of the heads of queries, and position embeddings of tokens, each with its gradients.
pub(super) fn calls(is_gpu: bool) -> Vec<SingleCall> {
    let mut calls = Vec::new();
    for &TokenSize { batch, seq, heads, head_dim } in shapes::tokens(is_gpu) {
        let (tokens, width) = (batch * seq, heads * head_dim);
        let x = || (DType::Bf16, vec![tokens, width]);
        let gain = || (DType::Bf16, vec![head_dim]);
        let rstd = || (DType::F32, vec![tokens * heads]);
        let table = |dtype| (dtype, vec![seq, width]);
        let norm = ops::HeadRmsNorm { eps: EPS };
        calls.push(SingleCall::new(norm, &[x(), gain()], &[x(), rstd()]));
        let given = [x(), x(), gain(), rstd()];
        let gradients = [x(), (DType::F32, vec![head_dim])];
        calls.push(SingleCall::new(ops::HeadRmsNormBackward {}, &given, &gradients));
        let inputs = [x(), table(DType::Bf16)];
        let added = SingleCall::new(ops::AddPositions {}, &inputs, &[x()]);
        let backward = ops::AddPositionsBackward { positions: Some(seq) };
        let summed = SingleCall::new(backward, &[x()], &[table(DType::F32)]);
        calls.extend([added, summed].map(|call| SingleCall { batch, seq, ..call }));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_those_that_the_rules_give() {
        for call in calls(true).iter().chain(&calls(false)) {
            let inputs = &call.operands[..call.input_count];
            let expected = call.op.outputs_of(inputs).unwrap();
            assert_eq!(call.operands[call.input_count..], expected, "{}", call.op.name());
        }
    }
}
