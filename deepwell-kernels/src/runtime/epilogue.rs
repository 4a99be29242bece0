//! The epilogues that kernels take.

use deepwell_ir::Op;
use deepwell_ir::ops::{Epilogue, Fused};

/// The epilogues that a kernel supports, independent of shapes: a matrix added to the core's first
/// result, or an activation of that result; then block quantizations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpilogueSet {
    /// Names of the supported activations; an epilogue has at most one.
    pub activations: &'static [&'static str],
    /// The results of the core that are quantized if the epilogue has no activation: all together,
    /// along one axis. After an activation, its result is quantized.
    pub quantizes: &'static [usize],
    /// Whether the kernel adds a matrix to its result, and supports no other epilogue.
    pub residual: bool,
}

impl EpilogueSet {
    /// No epilogue: a kernel of the core alone.
    pub const NONE: EpilogueSet = EpilogueSet { activations: &[], quantizes: &[], residual: false };

    /// Adds a matrix, and returns only the sum.
    pub const RESIDUAL: EpilogueSet = EpilogueSet { residual: true, ..EpilogueSet::NONE };

    /// Quantizes these results, without an activation.
    pub const fn quantizing(quantizes: &'static [usize]) -> EpilogueSet {
        EpilogueSet { quantizes, ..EpilogueSet::NONE }
    }

    /// Why a kernel does not serve `op`, given that the kernel computes the core of `op`; `None` if
    /// the kernel serves it. A kernel with an epilogue always requires an epilogue: another kernel
    /// computes the core alone.
    pub fn reject(&self, op: &Op) -> Option<String> {
        let name = op.leading().name();
        let Op::Fused(fused) = op else {
            let is_plain = *self == EpilogueSet::NONE;
            return (!is_plain).then(|| format!("makes more of `{name}` than the op alone"));
        };
        if *self == EpilogueSet::NONE {
            return Some(format!("computes `{name}` alone"));
        }
        self.reject_steps(fused)
    }

    fn reject_steps(&self, fused: &Fused) -> Option<String> {
        let name = fused.core.name();
        if self.residual {
            let is_sum = matches!(fused.epilogue.as_slice(), [Epilogue::Residual { of: 0 }]);
            let is_alone = is_sum && fused.skipped == [0];
            return (!is_alone).then(|| format!("gives `{name}` with a matrix added, that alone"));
        }
        let (activation, steps) = match fused.epilogue.split_first() {
            Some((step @ Epilogue::Activation { .. }, rest)) => (Some(step), rest),
            _ => (None, fused.epilogue.as_slice()),
        };
        if let Some(step) = activation
            && (step.reads() != (0..1) || !self.activations.contains(&step.name()))
        {
            let supported = self.activations.join(", ");
            let supported =
                if supported.is_empty() { "no function of elements" } else { &supported };
            return Some(format!("has {supported} behind `{name}`, not `{step}`"));
        }
        let result = [fused.results_of(0).start];
        let supported = if activation.is_some() { &result[..] } else { self.quantizes };
        let mut axes = Vec::with_capacity(steps.len());
        let mut seen = Vec::with_capacity(steps.len());
        for step in steps {
            let Epilogue::Quantize { of, quantize } = step else {
                return Some(format!("quantizes behind `{name}`, and has no `{step}`"));
            };
            if !supported.contains(of) {
                return Some(format!("quantizes results {supported:?} of `{name}`, not {of}"));
            }
            if seen.contains(of) {
                return Some(format!("quantizes result {of} of `{name}` in one way, not in more"));
            }
            seen.push(*of);
            axes.push(quantize.axis);
        }
        axes.dedup();
        let is_whole = seen.len() == supported.len() && axes.len() == 1;
        let is_alone = steps.is_empty() && activation.is_some();
        (!is_whole && !is_alone).then(|| {
            format!("quantizes results {supported:?} of `{name}` together, along one axis")
        })
    }
}

/// Returns an empty set for every core.
pub fn no_epilogue(_core: &Op) -> EpilogueSet {
    EpilogueSet::NONE
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{
        Activation, AddRmsNorm, Axis, Gelu, Linear, Quantize, SwiGlu, SwiGluBackward,
    };
    use deepwell_precision::QuantFormat;

    use super::*;

    fn quantize(of: usize, axis: Axis) -> Epilogue {
        Epilogue::Quantize { of, quantize: Quantize { format: QuantFormat::MXFP8, axis } }
    }

    fn gelu(of: usize) -> Epilogue {
        Epilogue::Activation { of, function: Activation::Gelu(Gelu { tanh: true }) }
    }

    #[test]
    fn what_a_kernel_takes() {
        let gemm = EpilogueSet { activations: &["gelu"], ..EpilogueSet::quantizing(&[0]) };
        let sum = EpilogueSet::RESIDUAL;
        let norm = EpilogueSet::quantizing(&[1]);
        let both = EpilogueSet::quantizing(&[0, 1]);
        let linear = || Op::from(Linear { bias: false });
        let add = || Op::from(AddRmsNorm { eps: 1e-5 });
        let (row, column) = (|of| quantize(of, Axis::Row), |of| quantize(of, Axis::Column));
        let residual = Epilogue::Residual { of: 0 };
        let swiglu = Epilogue::Activation { of: 0, function: Activation::SwiGlu(SwiGlu {}) };
        for (set, core, epilogue, expected) in [
            (EpilogueSet::NONE, linear(), vec![], None),
            (EpilogueSet::NONE, linear(), vec![row(0)], Some("computes `linear` alone")),
            (gemm, linear(), vec![], Some("makes more of `linear`")),
            (gemm, linear(), vec![gelu(0)], None),
            (gemm, linear(), vec![row(0)], None),
            (gemm, linear(), vec![gelu(0), column(1)], None),
            (gemm, linear(), vec![gelu(0), column(0)], Some("results [1] of `linear`, not 0")),
            (gemm, linear(), vec![swiglu], Some("has gelu behind `linear`, not `swiglu of 0")),
            (
                gemm,
                linear(),
                vec![gelu(0), Epilogue::Residual { of: 1 }],
                Some("has no `residual of 1`"),
            ),
            (sum, linear(), vec![], Some("makes more of `linear`")),
            (sum, linear(), vec![residual.clone()], None),
            (sum, linear(), vec![residual.clone(), row(1)], Some("that alone")),
            (sum, linear(), vec![gelu(0)], Some("that alone")),
            (gemm, linear(), vec![residual.clone()], Some("has no `residual of 0`")),
            (gemm, linear(), vec![Epilogue::Bias { of: 0 }], Some("has no `bias of 0`")),
            (norm, add(), vec![row(1)], None),
            (norm, add(), vec![row(0)], Some("results [1] of `add_rms_norm`, not 0")),
            (norm, add(), vec![row(1), column(1)], Some("in one way, not in more")),
            (norm, add(), vec![gelu(0)], Some("has no function of elements")),
            (both, SwiGluBackward {}.into(), vec![row(1), row(0)], None),
            (both, SwiGluBackward {}.into(), vec![row(1)], Some("together, along one axis")),
            (both, SwiGluBackward {}.into(), vec![row(0), column(1)], Some("along one axis")),
        ] {
            let op = match epilogue.is_empty() {
                true => core,
                false => {
                    // A kernel with a residual returns only the sum.
                    let skipped = if set.residual { vec![0] } else { vec![] };
                    Fused { core: Box::new(core), epilogue, skipped }.into()
                }
            };
            let reason = set.reject(&op);
            let what = format!("{set:?} {}: {reason:?}", op.rule().attributes());
            match expected {
                None => assert_eq!(reason, None, "{what}"),
                Some(part) => assert!(reason.is_some_and(|r| r.contains(part)), "{what}"),
            }
        }
    }
}
