//! Transfer of tokens to the ranks of their experts, and of expert outputs back to the tokens'
//! ranks.

use deepwell_ir::ops::{
    Collective, CollectiveKind, DispatchToRanks, Experts, Permute, Reduction, RowsOf, Unpermute,
};
use deepwell_ir::{Dim, GroupRank, IrError, TensorId};

use super::Expansion;

/// Tokens for the experts of a rank.
pub(super) struct Tokens {
    /// Rows, gates and choices.
    pub(super) operands: [TensorId; 3],
    pub(super) came: Came,
}

/// Origin of the tokens.
#[derive(Clone, Copy)]
pub(super) enum Came {
    /// Tokens of the rank itself, which has all experts.
    Own,
    /// All-gathered from all ranks of the group.
    Gathered(GroupRank),
    /// Sent by the tokens' ranks, one row per pair.
    Sent {
        rank: GroupRank,
        /// Row of each own pair in the send buffer.
        rows: TensorId,
        /// Own pair of each row.
        pairs: TensorId,
        /// Maximum number of rows that all ranks together send for one expert.
        of_expert: Dim,
    },
}

impl Came {
    /// Pairs that have rows on a rank with `groups` experts.
    pub(super) fn rows_of(&self, groups: usize) -> RowsOf {
        match self {
            Came::Own => RowsOf::All,
            Came::Gathered(GroupRank { place, ranks, .. }) => {
                RowsOf::Here { first: place * groups, experts: ranks * groups }
            }
            &Came::Sent { of_expert, .. } => RowsOf::Sent { of_expert },
        }
    }

    /// Capacity factor of the dispatch on this rank: senders have already applied the limit to sent
    /// rows.
    pub(super) fn own_limit(&self, factor: Option<f64>) -> Option<f64> {
        factor.filter(|_| matches!(self, Came::Own))
    }
}

impl Expansion<'_> {
    /// Transfers tokens to this rank's `groups` experts.
    pub(super) fn tokens(
        &mut self,
        op: &Experts,
        rank: Option<GroupRank>,
        groups: usize,
        operands: [TensorId; 3],
    ) -> Result<Tokens, IrError> {
        match rank {
            None => Ok(Tokens { operands, came: Came::Own }),
            Some(rank) if op.capacity_factor.is_some() => self.send(op, rank, groups, operands),
            Some(rank) => self.gather(rank, operands),
        }
    }

    /// Transfers the rows of a dispatch (given as rows of pairs, `rows`, `pairs`) back to the
    /// rank's own tokens.
    pub(super) fn back(&mut self, came: Came, operands: [TensorId; 3]) -> Result<(), IrError> {
        match came {
            Came::Own => self.finish(Unpermute {}, &operands),
            Came::Gathered(rank) => {
                let partial = self.add("unpermute.partial", Unpermute {}, &operands)?;
                let kind = CollectiveKind::ReduceScatter { reduction: Reduction::Sum };
                self.finish(among(rank, kind), &partial)
            }
            Came::Sent { rank, rows, pairs, .. } => {
                let unsorted = self.add("unpermute.received", Unpermute {}, &operands)?;
                let returned = self.exchange("returned", rank, unsorted[0])?;
                self.finish(Unpermute {}, &[returned, rows, pairs])
            }
        }
    }

    fn gather(
        &mut self,
        rank: GroupRank,
        [x, gates, chosen]: [TensorId; 3],
    ) -> Result<Tokens, IrError> {
        // Rows are available before the router runs, so rows are gathered first, then choices.
        let mut gather = |name: &str, x| -> Result<TensorId, IrError> {
            let op = among(rank, CollectiveKind::AllGather);
            Ok(self.add(&format!("all_gather.{name}"), op, &[x])?[0])
        };
        let (x, chosen) = (gather("rows", x)?, gather("chosen", chosen)?);
        let gates = gather("gates", gates)?;
        Ok(Tokens { operands: [x, gates, chosen], came: Came::Gathered(rank) })
    }

    /// All-to-all: slab `q` of place `p` becomes slab `p` of place `q`.
    fn exchange(&mut self, name: &str, rank: GroupRank, x: TensorId) -> Result<TensorId, IrError> {
        let op = among(rank, CollectiveKind::AllToAll);
        Ok(self.add(&format!("all_to_all.{name}"), op, &[x])?[0])
    }

    fn send(
        &mut self,
        op: &Experts,
        rank: GroupRank,
        groups: usize,
        [x, gates, chosen]: [TensorId; 3],
    ) -> Result<Tokens, IrError> {
        let (ranks, capacity_factor) = (rank.ranks, op.capacity_factor);
        let to_ranks = DispatchToRanks { experts: groups * ranks, ranks, capacity_factor };
        let &[tokens, top_k] = self.graph.tensor(chosen).shape.0.as_slice() else {
            unreachable!("experts have checked the rank of their choices");
        };
        let top_k = top_k.as_fixed().unwrap_or_default();
        let of_expert = to_ranks.capacity(tokens, top_k).times(ranks);
        let outputs = self.add("dispatch_to_ranks", to_ranks, &[chosen])?;
        let &[rows, _, pairs, wanted] = outputs.as_slice() else {
            unreachable!("a dispatch to ranks has four outputs");
        };
        let x = self.add("permute.sent", Permute {}, &[x, rows, pairs])?[0];
        // A row carries all gates of its token; the receiver reads the gate of the row's pair.
        let gates = self.add("permute.gates", Permute {}, &[gates, rows, pairs])?[0];
        let operands = [
            self.exchange("rows", rank, x)?,
            self.exchange("gates", rank, gates)?,
            self.exchange("wanted", rank, wanted)?,
        ];
        Ok(Tokens { operands, came: Came::Sent { rank, rows, pairs, of_expert } })
    }
}

fn among(rank: GroupRank, kind: CollectiveKind) -> Collective {
    Collective::new(kind, rank.group, rank.ranks as u32)
}
