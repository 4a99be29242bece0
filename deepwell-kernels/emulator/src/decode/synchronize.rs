//! Decoding of barriers, fences and warp-level exchanges.

use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly};
use super::scalar_instruction::ReductionOperation;
use super::types::{Register, Scope, Semantics, Space, Type};
use super::words::Words;
use super::{
    BarrierAction, CtaBarrier, Fence, Instruction, Match, Shuffle, ShuffleMode, Vote, VoteMode,
};
use crate::ptx::Operand;

impl Lowering<'_> {
    /// Decodes `bar` and `barrier`.
    pub(super) fn barrier(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        if words.take("warp") {
            words.expect(&["sync"])?;
            let [mask] = exactly(operands)?;
            return Ok(Instruction::WarpBarrier { mask: self.source(mask, Type::B32)? });
        }
        if name == "barrier" && words.take("cluster") {
            let [] = exactly(operands)?;
            let aligned = words.take("aligned");
            if words.take("arrive") {
                let relaxed = words.take("relaxed");
                words.take("release");
                return Ok(Instruction::ClusterArrive { relaxed, aligned });
            }
            words.expect(&["wait"])?;
            words.take("acquire");
            return Ok(Instruction::ClusterWait { acquire: true, aligned });
        }
        words.take("cta");
        let aligned = words.take("aligned") || name == "bar";
        if words.take("sync") {
            let operands = between(operands, 1, 2)?;
            return self.cta_barrier(operands, BarrierAction::Sync, aligned);
        }
        if words.take("arrive") {
            let operands = between(operands, 2, 2)?;
            return self.cta_barrier(operands, BarrierAction::Arrive, aligned);
        }
        words.expect(&["red"])?;
        let counts = words.take("popc");
        let all = !counts && words.take("and");
        if !counts && !all {
            words.expect(&["or"])?;
        }
        let (destination, rest) =
            between(operands, 3, 4)?.split_first().ok_or("operands are missing")?;
        let (predicate, rest) = rest.split_last().ok_or("operands are missing")?;
        let predicate = self.predicate(predicate)?;
        let action = if counts {
            words.take_type_of(&[Type::U32])?;
            let destination = self.destination(destination, Type::U32)?;
            BarrierAction::CountPredicates { destination, predicate }
        } else {
            words.take_type_of(&[Type::Predicate])?;
            let destination = self.predicate_register(destination)?;
            BarrierAction::CombinePredicates { all, destination, predicate }
        };
        self.cta_barrier(rest, action, aligned)
    }

    fn cta_barrier(
        &mut self,
        operands: &[Operand],
        action: BarrierAction,
        aligned: bool,
    ) -> Decoded {
        let barrier = self.source(&operands[0], Type::U32)?;
        if let Operand::Integer(number) = operands[0]
            && number > 15
        {
            return Err(format!("barrier {number} is none of 0 to 15"));
        }
        let threads = match operands.get(1) {
            Some(operand) => {
                if let Operand::Integer(count) = operand
                    && (*count % 32 != 0 || *count == 0)
                {
                    return Err(format!("{count} threads are no whole warps"));
                }
                Some(self.source(operand, Type::U32)?)
            }
            None => None,
        };
        Ok(Instruction::Barrier(CtaBarrier { barrier, threads, action, aligned }))
    }

    /// Decodes `membar` and `fence`.
    pub(super) fn fence(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        if words.take("proxy") {
            return self.proxy_fence(words, operands);
        }
        let [] = exactly(operands)?;
        if words.take("mbarrier_init") {
            words.expect(&["release", "cluster"])?;
            return Ok(Instruction::Fence(Fence::MbarrierInit));
        }
        if name == "membar" {
            let scope = words
                .take_from(&[("cta", Scope::Cta), ("gl", Scope::Device), ("sys", Scope::System)])
                .ok_or("the level is missing")?;
            // A `membar` is a `fence.sc` of the same scope.
            let semantics = Semantics::SequentiallyConsistent;
            return Ok(Instruction::Fence(Fence::Thread { semantics, scope }));
        }
        let semantics = words.take_semantics().unwrap_or(Semantics::AcquireRelease);
        if let Some(restricted) = sync_restrict(words, semantics, false)? {
            return Ok(restricted);
        }
        let scope = words.take_scope().ok_or("the scope is missing")?;
        match semantics {
            Semantics::SequentiallyConsistent
            | Semantics::AcquireRelease
            | Semantics::Acquire
            | Semantics::Release => Ok(Instruction::Fence(Fence::Thread { semantics, scope })),
            _ => Err("this order is not there for fences".to_string()),
        }
    }

    fn proxy_fence(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        if words.take("alias") {
            let [] = exactly(operands)?;
            return Ok(Instruction::Fence(Fence::ProxyAlias));
        }
        if words.take("async") {
            let [] = exactly(operands)?;
            let space = match words.take_space() {
                Space::Generic => None,
                space @ (Space::Global | Space::Shared | Space::SharedCluster) => Some(space),
                _ => return Err("this space is not there for proxy fences".to_string()),
            };
            return Ok(Instruction::Fence(Fence::ProxyAsync { space }));
        }
        if words.take("async::generic") {
            let [] = exactly(operands)?;
            let semantics = words.take_semantics().ok_or("the order is missing")?;
            return sync_restrict(words, semantics, true)?
                .ok_or_else(|| "`.sync_restrict` is missing".to_string());
        }
        words.expect(&["tensormap::generic"])?;
        let semantics = words.take_semantics().ok_or("the order is missing")?;
        let scope = words.take_scope().ok_or("the scope is missing")?;
        match semantics {
            Semantics::Release => {
                let [] = exactly(operands)?;
                Ok(Instruction::Fence(Fence::TensorMapRelease { scope }))
            }
            Semantics::Acquire => {
                let [address, bytes] = exactly(operands)?;
                if self.immediate(bytes)? != 128 {
                    return Err("a tensor map has 128 bytes".to_string());
                }
                Ok(Instruction::Fence(Fence::TensorMapAcquire {
                    scope,
                    address: self.plain_address(address)?,
                    bytes: self.source(bytes, Type::U32)?,
                }))
            }
            _ => Err("only `.acquire` and `.release` are known here".to_string()),
        }
    }

    /// Decodes `shfl` to `redux`.
    pub(super) fn warp_exchange(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        if name != "activemask" && !words.take("sync") {
            return Err("only the `.sync` form is known".to_string());
        }
        match name {
            "activemask" => {
                words.take_type_of(&[Type::B32])?;
                let [d] = exactly(operands)?;
                Ok(Instruction::ActiveMask { destination: self.destination(d, Type::B32)? })
            }
            "match" => self.match_lanes(words, operands),
            "shfl" => self.shuffle(words, operands),
            "vote" => self.vote(words, operands),
            "elect" => {
                let [d, mask] = exactly(operands)?;
                let (destination, predicate) = self.value_and_predicate(d)?;
                let mask = self.source(mask, Type::B32)?;
                Ok(Instruction::Elect { destination, predicate, mask })
            }
            _ => self.reduce_lanes(words, operands),
        }
    }

    /// Decodes `d` or `d|p`.
    fn value_and_predicate(
        &mut self,
        operand: &Operand,
    ) -> Result<(Option<Register>, Option<u32>), String> {
        let (d, p) = pair(operand);
        let predicate = p.map(|p| self.predicate_destination(p)).transpose()?.flatten();
        Ok((self.destination_wide(d, Type::B32)?, predicate))
    }

    fn match_lanes(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let all = words.either("all", "any")?;
        let value_type = words.take_type_of(&[Type::B32, Type::B64])?;
        let [d, a, mask] = exactly(operands)?;
        let (destination, predicate) = self.value_and_predicate(d)?;
        Ok(Instruction::Match(Match {
            all,
            destination,
            predicate,
            source: self.source(a, value_type)?,
            mask: self.source(mask, Type::B32)?,
        }))
    }

    fn shuffle(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let mode = words
            .take_from(&[
                ("up", ShuffleMode::Up),
                ("down", ShuffleMode::Down),
                ("bfly", ShuffleMode::Butterfly),
                ("idx", ShuffleMode::Index),
            ])
            .ok_or("the mode is missing")?;
        words.take_type_of(&[Type::B32, Type::U32, Type::S32, Type::F32])?;
        let [d, a, lane, control, mask] = exactly(operands)?;
        let (destination, in_range) = self.value_and_predicate(d)?;
        Ok(Instruction::Shuffle(Shuffle {
            mode,
            destination,
            in_range,
            source: self.source(a, Type::B32)?,
            lane: self.source(lane, Type::B32)?,
            control: self.source(control, Type::B32)?,
            mask: self.source(mask, Type::B32)?,
        }))
    }

    fn vote(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let [d, predicate, mask] = exactly(operands)?;
        let mode = if words.take("ballot") {
            words.take_type_of(&[Type::B32])?;
            VoteMode::Ballot(self.destination(d, Type::B32)?)
        } else {
            let choose: fn(u32) -> VoteMode = words
                .take_from(&[
                    ("all", VoteMode::All as fn(u32) -> VoteMode),
                    ("any", VoteMode::Any as fn(u32) -> VoteMode),
                    ("uni", VoteMode::Uniform as fn(u32) -> VoteMode),
                ])
                .ok_or("the mode is missing")?;
            words.take_type_of(&[Type::Predicate])?;
            choose(self.predicate_register(d)?)
        };
        let predicate = self.predicate(predicate)?;
        Ok(Instruction::Vote(Vote { mode, predicate, mask: self.source(mask, Type::B32)? }))
    }

    fn reduce_lanes(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        use ReductionOperation as R;
        let operation = words
            .take_from(&[
                ("add", R::Add),
                ("min", R::Min),
                ("max", R::Max),
                ("and", R::And),
                ("or", R::Or),
                ("xor", R::Xor),
            ])
            .ok_or("the operation is missing")?;
        let absolute = words.take("abs");
        let propagate_nan = words.take("NaN");
        let value_type = words.take_type()?;
        let known: &[R] = match value_type {
            Type::U32 | Type::S32 => &[R::Add, R::Min, R::Max],
            Type::B32 => &[R::And, R::Or, R::Xor],
            Type::F32 => &[R::Min, R::Max],
            _ => &[],
        };
        let is_float_form = absolute || propagate_nan;
        if !known.contains(&operation) || is_float_form && value_type != Type::F32 {
            return Err(format!("type `.{value_type}` is not known for this `redux`"));
        }
        let [d, a, mask] = exactly(operands)?;
        Ok(Instruction::Redux {
            destination: self.destination(d, Type::B32)?,
            source: self.source(a, Type::B32)?,
            mask: self.source(mask, Type::B32)?,
            operation,
            value_type,
            absolute,
            propagate_nan,
        })
    }
}

/// Splits `a|b`; the second part is `None` for `a` alone.
fn pair(operand: &Operand) -> (&Operand, Option<&Operand>) {
    match operand {
        Operand::Pair(first, second) => (first, Some(second)),
        one => (one, None),
    }
}

/// Decodes `.acquire.sync_restrict::shared::cluster.cluster` and the release of `shared::cta`.
/// Returns `None` for a fence without restriction.
fn sync_restrict(
    words: &mut Words<'_>,
    semantics: Semantics,
    async_generic: bool,
) -> Result<Option<Instruction>, String> {
    let space = words.take_from(&[
        ("sync_restrict::shared::cluster", Space::SharedCluster),
        ("sync_restrict::shared::cta", Space::Shared),
    ]);
    let Some(space) = space else { return Ok(None) };
    words.expect(&["cluster"])?;
    match (semantics, space) {
        (Semantics::Acquire, Space::SharedCluster) | (Semantics::Release, Space::Shared) => {
            let scope = Scope::Cluster;
            let fence = Fence::SyncRestrict { semantics, scope, async_generic };
            Ok(Some(Instruction::Fence(fence)))
        }
        _ => Err("acquires are of `shared::cluster`, releases of `shared::cta`".to_string()),
    }
}
