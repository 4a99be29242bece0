//! Which experts tokens choose in the tests of a mixture's kernels, and the rows that this makes.

use deepwell_ir::Dim;
use deepwell_ir::ops::GroupedRows;
use deepwell_kernels::ops::dispatch::oracle::{self, Grouped};

use crate::harness::{HostTensor, uniform};

/// What tokens choose.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choice {
    /// Any experts.
    Spread,
    /// All the same: this one, and for further choices those behind it.
    AllOn(usize),
}

/// A batch of tokens and its experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixture {
    pub(crate) tokens: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) choice: Choice,
    /// Rows of a group are a multiple of it.
    pub(crate) align: usize,
}

const fn mixture(tokens: usize, experts: usize, top_k: usize, choice: Choice) -> Mixture {
    Mixture { tokens, experts, top_k, choice, align: 32 }
}

/// No token, one, around a block of rows; experts with everything, first, between and last, beside
/// empty ones; more experts than tokens; more experts than a warp has lanes; as many choices as
/// experts.
pub(crate) const HARD: [Mixture; 10] = [
    mixture(0, 8, 2, Choice::Spread),
    mixture(1, 8, 2, Choice::Spread),
    mixture(1, 1, 1, Choice::AllOn(0)),
    mixture(31, 8, 1, Choice::AllOn(0)),
    mixture(33, 8, 1, Choice::AllOn(7)),
    mixture(33, 4, 2, Choice::AllOn(1)),
    mixture(33, 3, 3, Choice::Spread),
    mixture(31, 8, 2, Choice::Spread),
    Mixture { align: 128, ..mixture(33, 40, 6, Choice::Spread) },
    Mixture { align: 1, ..mixture(129, 5, 2, Choice::Spread) },
];

impl Mixture {
    pub(crate) fn grouped_rows(&self) -> GroupedRows {
        GroupedRows::new(self.experts, self.align)
    }

    /// Rows of a buffer as the op has it.
    pub(crate) fn rows(&self) -> usize {
        let pairs = Dim::fixed(self.tokens * self.top_k);
        self.grouped_rows().rows(pairs).and_then(|rows| rows.as_fixed()).expect("fixed sizes")
    }

    /// `[tokens, top_k]`, experts of a token differ.
    pub(crate) fn chosen(&self) -> Vec<i32> {
        let Mixture { tokens, experts, top_k, .. } = *self;
        let draws = uniform(tokens, (tokens * 31 + experts) as u64, 0.5);
        let first = |token: usize| match self.choice {
            Choice::Spread => ((draws[token] + 0.5) * experts as f32) as usize % experts,
            Choice::AllOn(expert) => expert,
        };
        let of_token =
            |token| (0..top_k).map(move |choice| ((first(token) + choice) % experts) as i32);
        (0..tokens).flat_map(of_token).collect()
    }

    /// The maps, with at most `capacity` pairs of an expert.
    pub(crate) fn grouped(&self, capacity: usize) -> Grouped {
        oracle::forward(&self.chosen(), self.experts, self.align, capacity, self.rows())
    }

    /// `rows` and `pairs` as operands.
    pub(crate) fn maps(&self, grouped: &Grouped) -> [HostTensor; 2] {
        [
            HostTensor::i32(&[self.tokens, self.top_k], &grouped.rows),
            HostTensor::i32(&[self.rows()], &grouped.pairs),
        ]
    }
}

/// The numbers of an i32 tensor.
pub(crate) fn to_i32(tensor: &HostTensor) -> Vec<i32> {
    assert_eq!(tensor.dtype, deepwell_ir::DType::I32);
    bytemuck::pod_collect_to_vec(&tensor.bytes)
}
