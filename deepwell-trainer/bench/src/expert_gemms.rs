//! GEMMs of the experts of mixtures: how many tokens each gets, and the calls.

use deepwell_ir::ops::{self, Axis, GroupedRows};
use deepwell_ir::{DType, GemmKind, Op, PrecisionPolicy};
use deepwell_kernels::SingleCall;
use deepwell_precision::QuantFormat;

use super::cases::planes;
use super::peer_task::PeerTask;
use super::shapes::{self, ExpertSize};

/// Distribution of pairs of a token and an expert over the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// The same number of pairs for each expert.
    Balanced,
    /// By Zipf's law: the load of rank `r` is `1 / (r + 1)` of the most popular expert's, and no
    /// expert gets more than all tokens.
    Zipf,
}

impl Load {
    pub(super) const ALL: [Load; 2] = [Load::Balanced, Load::Zipf];

    pub(super) fn name(self) -> &'static str {
        match self {
            Load::Balanced => "balanced",
            Load::Zipf => "zipf",
        }
    }

    /// Pairs of each expert, for `tokens` tokens that choose `top_k` experts each.
    pub(super) fn pairs(self, experts: usize, tokens: usize, top_k: usize) -> Vec<usize> {
        let share = |rank: usize| match self {
            Load::Balanced => 1.0,
            Load::Zipf => 1.0 / (rank + 1) as f64,
        };
        let mut pairs = vec![0; experts];
        let mut left = tokens * top_k;
        let mut shares = (0..experts).map(share).sum::<f64>();
        for rank in 0..experts {
            let fair = (left as f64 * share(rank) / shares).round() as usize;
            // At most the pairs left, and at least the pairs that the other experts cannot take.
            let least = left.saturating_sub((experts - rank - 1) * tokens);
            let count = fair.min(tokens).max(least).min(left);
            // Spread popular experts: an odd step visits all experts if their number is a power of
            // two.
            pairs[(rank * 5 + experts / 2) % experts] += count;
            left -= count;
            shares -= share(rank);
        }
        pairs
    }
}

/// Routing of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Routing {
    pub(super) load: Load,
    /// Experts of a token.
    pub(super) top_k: usize,
}

impl Routing {
    /// Routing of calls without a specified routing.
    pub(super) const UNKNOWN: Routing = Routing { load: Load::Balanced, top_k: 1 };

    /// The pairs of each group of a buffer of `rows`.
    fn pairs(self, grouped: GroupedRows, rows: usize) -> Vec<usize> {
        self.load.pairs(grouped.groups, grouped.pairs_of(rows) / self.top_k, self.top_k)
    }

    /// The first row of each group, and the end of the last group.
    pub(super) fn offsets(self, grouped: GroupedRows, rows: usize) -> Vec<i32> {
        let mut offsets = vec![0];
        let mut end = 0;
        for pairs in self.pairs(grouped, rows) {
            end += pairs.next_multiple_of(grouped.align) as i32;
            offsets.push(end);
        }
        offsets
    }
}

/// A grouped GEMM: kind, groups, rows of the buffer, and outputs and inputs of the layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grouped {
    pub(super) kind: GemmKind,
    pub(super) grouped: GroupedRows,
    pub(super) rows: usize,
    n: usize,
    k: usize,
    is_quantized: bool,
}

impl Grouped {
    /// The grouped GEMM of a call, if the call is one.
    pub(super) fn of(call: &SingleCall) -> Option<Grouped> {
        let shape = |index: usize| call.operands[index].shape.as_slice();
        let last = |index: usize| shape(index).last().copied().unwrap_or(0);
        let plain = |kind, grouped, n, k| {
            let rows = shape(0)[0];
            Some(Grouped { kind, grouped, rows, n, k, is_quantized: false })
        };
        match &call.op {
            Op::GroupedGemm(op) => plain(GemmKind::Fprop, op.grouped, shape(1)[1], shape(1)[2]),
            Op::GroupedGemmDgrad(op) => {
                plain(GemmKind::Dgrad, op.grouped, shape(1)[1], shape(1)[2])
            }
            Op::GroupedGemmWgrad(op) => plain(GemmKind::Wgrad, op.grouped, last(0), last(1)),
            Op::ScaledGroupedGemm(op) => {
                let (a, b) = (shape(0), shape(op.b_input()));
                let (rows, n, k) = match op.kind {
                    GemmKind::Fprop => (a[0], b[1], b[2]),
                    GemmKind::Dgrad => (a[0], b[2], b[1]),
                    GemmKind::Wgrad => (a[1], a[0], b[0]),
                };
                let (kind, grouped) = (op.kind, op.grouped);
                Some(Grouped { kind, grouped, rows, n, k, is_quantized: true })
            }
            _ => None,
        }
    }

    /// Text of the experts, their matrices, the pairs and their distribution.
    pub(super) fn shape_text(&self, routing: Routing) -> String {
        let Grouped { grouped, rows, n, k, .. } = self;
        let pairs = grouped.pairs_of(*rows);
        format!("{} of {n}x{k}, {pairs} rows {}", grouped.groups, routing.load.name())
    }

    pub(super) fn peer_task(&self, routing: Routing) -> PeerTask {
        PeerTask::GroupedGemm {
            gemm: self.kind.name().to_string(),
            rows: routing.pairs(self.grouped, self.rows),
            n: self.n,
            k: self.k,
            fp8: self.is_quantized,
        }
    }
}

/// The three GEMMs of a projection of each mixture of the table, in BF16 and in a policy's format,
/// for each load.
pub(super) fn calls(is_gpu: bool, policy: &PrecisionPolicy) -> Vec<(SingleCall, Routing)> {
    let mut calls = Vec::new();
    for size in shapes::experts(is_gpu) {
        let (a, b) = (policy.activation_format(), policy.weight_format());
        for call in [plain(size), quantized(size, a, b)].concat() {
            let routing = |load| Routing { load, top_k: size.top_k };
            calls.extend(Load::ALL.map(|load| (call.clone(), routing(load))));
        }
    }
    calls
}

/// Groups aligned so that their rows can share scales of `format`, and rows of the buffer.
fn groups_of(size: &ExpertSize, align: usize) -> (GroupedRows, usize) {
    let grouped = GroupedRows::new(size.experts, align);
    let rows = size.tokens * size.top_k + grouped.padding_max();
    (grouped, rows.next_multiple_of(align))
}

fn plain(size: &ExpertSize) -> Vec<SingleCall> {
    let &ExpertSize { experts, n, k, .. } = size;
    let (grouped, rows) = groups_of(size, usize::from(QuantFormat::MXFP8.block.k));
    let bf16 = |shape: &[usize]| (DType::Bf16, shape.to_vec());
    let x = bf16(&[rows, k]);
    let dy = bf16(&[rows, n]);
    let w = bf16(&[experts, n, k]);
    let offsets = (DType::I32, vec![experts + 1]);
    let dw = (DType::F32, vec![experts, n, k]);
    let call = |op: Op, a: &(DType, Vec<usize>), b: &(DType, Vec<usize>), out| {
        SingleCall::new(op, &[a.clone(), b.clone(), offsets.clone()], &[out])
    };
    vec![
        call(ops::GroupedGemm { grouped }.into(), &x, &w, dy.clone()),
        call(ops::GroupedGemmDgrad { grouped }.into(), &dy, &w, x.clone()),
        call(ops::GroupedGemmWgrad { grouped }.into(), &dy, &x, dw),
    ]
}

fn quantized(size: &ExpertSize, a: QuantFormat, b: QuantFormat) -> Vec<SingleCall> {
    let &ExpertSize { experts, n, k, .. } = size;
    let (grouped, rows) = groups_of(size, usize::from(a.block.k));
    let stack = |rows: usize, columns: usize| -> Vec<(DType, Vec<usize>)> {
        let stacked =
            |(dtype, shape): (DType, Vec<usize>)| (dtype, [vec![experts], shape].concat());
        planes(b, Axis::Row, rows, columns).into_iter().map(stacked).collect()
    };
    let of = |rows: usize, columns: usize| planes(a, Axis::Row, rows, columns);
    let output = DType::Bf16;
    let call = |kind, b, of_a: Vec<_>, of_b: Vec<_>, out: (DType, Vec<usize>)| {
        let op = ops::ScaledGroupedGemm { kind, grouped, output, a, b };
        let inputs = [of_a, of_b, vec![(DType::I32, vec![experts + 1])]].concat();
        SingleCall::new(op, &inputs, &[out])
    };
    vec![
        call(GemmKind::Fprop, b, of(rows, k), stack(n, k), (output, vec![rows, n])),
        call(GemmKind::Dgrad, b, of(rows, n), stack(k, n), (output, vec![rows, k])),
        call(GemmKind::Wgrad, a, of(n, rows), of(k, rows), (DType::F32, vec![experts, n, k])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_an_expert_and_no_token_one_twice() {
        for size in shapes::experts(true).iter().chain(shapes::experts(false)) {
            let &ExpertSize { tokens, experts, top_k, .. } = size;
            for load in Load::ALL {
                let pairs = load.pairs(experts, tokens, top_k);
                assert_eq!(pairs.iter().sum::<usize>(), tokens * top_k, "{size:?} {load:?}");
                assert!(pairs.iter().all(|&pairs| pairs <= tokens), "{size:?} {pairs:?}");
                let least = pairs.iter().min().unwrap();
                let most = pairs.iter().max().unwrap();
                match load {
                    Load::Balanced => assert!(most - least <= 1, "{pairs:?}"),
                    Load::Zipf => assert!(*most > 3 * least && *least > 0, "{pairs:?}"),
                }
            }
        }
    }

    #[test]
    fn operands_are_those_that_the_rules_give() {
        for policy in [PrecisionPolicy::mxfp8(), PrecisionPolicy::preset("mxfp8-128").unwrap()] {
            for (call, routing) in calls(true, &policy).iter().chain(&calls(false, &policy)) {
                let inputs = &call.operands[..call.input_count];
                let expected = call.op.outputs_of(inputs).unwrap();
                assert_eq!(call.operands[call.input_count..], expected, "{}", call.op.name());
                let of = Grouped::of(call).unwrap();
                let flops = 2 * of.grouped.pairs_of(of.rows) * of.n * of.k;
                assert_eq!(call.cost().flops, flops as u64, "{}", call.op.name());
                let offsets = routing.offsets(of.grouped, of.rows);
                assert!(offsets.is_sorted() && offsets.len() == of.grouped.groups + 1);
                assert!(*offsets.last().unwrap() as usize <= of.rows);
            }
        }
    }
}
