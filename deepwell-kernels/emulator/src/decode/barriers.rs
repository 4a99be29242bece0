//! Decoding of `mbarrier`.

use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly};
use super::types::{Barrier64, Scope, Semantics, Space, Type};
use super::words::Words;
use super::{Instruction, Mbarrier, MbarrierPhase};
use crate::ptx::Operand;

impl Lowering<'_> {
    /// Decodes the address of an mbarrier in shared memory.
    pub(super) fn barrier_at(
        &mut self,
        space: Space,
        operand: &Operand,
    ) -> Result<Barrier64, String> {
        if !matches!(space, Space::Generic | Space::Shared | Space::SharedCluster) {
            return Err("barriers live in shared memory".to_string());
        }
        let (address, variable) = self.address(operand)?;
        let space = match variable {
            Some(Space::Shared) => Space::Shared,
            Some(_) => return Err("barriers live in shared memory".to_string()),
            None => space,
        };
        Ok(Barrier64 { space, address })
    }

    /// Decodes all `mbarrier` instructions.
    pub(super) fn mbarrier(&mut self, words: &mut Words<'_>, operands: &[Operand]) -> Decoded {
        let action = words.peek().ok_or("the action is missing")?;
        words.take(action);
        words.take_type_of(&[Type::B64])?;
        let parity = words.take("parity");
        let expects = action.starts_with("arrive") && words.take("expect_tx");
        let no_complete = action.starts_with("arrive") && words.take("noComplete");
        let semantics = words.take_semantics();
        let scope = words.take_scope();
        let space = words.take_space();
        if semantics.is_some() != scope.is_some() && semantics != Some(Semantics::Relaxed) {
            return Err("order and scope come together".to_string());
        }
        let scope = scope.unwrap_or(Scope::Cta);
        let is_own = |space: Space| {
            if space == Space::SharedCluster {
                return Err("`.shared::cluster` is not there for this action".to_string());
            }
            Ok(())
        };
        Ok(Instruction::Mbarrier(match action {
            "init" => {
                is_own(space)?;
                let [barrier, count] = exactly(operands)?;
                Mbarrier::Init {
                    barrier: self.barrier_at(space, barrier)?,
                    count: self.source(count, Type::U32)?,
                }
            }
            "inval" => {
                is_own(space)?;
                let [barrier] = exactly(operands)?;
                Mbarrier::Invalidate { barrier: self.barrier_at(space, barrier)? }
            }
            "expect_tx" | "complete_tx" => {
                if semantics.is_some_and(|semantics| semantics != Semantics::Relaxed) {
                    return Err("only `.relaxed` is known here".to_string());
                }
                let [barrier, bytes] = exactly(operands)?;
                let barrier = self.barrier_at(space, barrier)?;
                let bytes = self.source(bytes, Type::U32)?;
                if action == "expect_tx" {
                    Mbarrier::ExpectTransaction { barrier, bytes }
                } else {
                    Mbarrier::CompleteTransaction { barrier, bytes }
                }
            }
            "arrive" | "arrive_drop" => {
                let semantics = semantics.unwrap_or(Semantics::Release);
                if !matches!(semantics, Semantics::Release | Semantics::Relaxed) {
                    return Err("an arrival releases or is relaxed".to_string());
                }
                // Without a state operand, for an mbarrier of another CTA.
                let operands = between(operands, 1, 3)?;
                let (state, operands) = match &operands[0] {
                    Operand::Address { .. } => (None, operands),
                    Operand::Sink => (None, &operands[1..]),
                    state => {
                        is_own(space)?;
                        (Some(self.destination(state, Type::B64)?), &operands[1..])
                    }
                };
                let operands = between(operands, 1, 2)?;
                let barrier = self.barrier_at(space, &operands[0])?;
                let amount = match operands.get(1) {
                    Some(operand) => Some(self.source(operand, Type::U32)?),
                    None => None,
                };
                if (expects || no_complete) && amount.is_none() {
                    return Err("the count is missing".to_string());
                }
                Mbarrier::Arrive {
                    barrier,
                    state,
                    count: amount.filter(|_| !expects),
                    expect_bytes: amount.filter(|_| expects),
                    drop: action == "arrive_drop",
                    no_complete,
                    semantics,
                    scope,
                }
            }
            "test_wait" | "try_wait" => {
                is_own(space)?;
                let semantics = semantics.unwrap_or(Semantics::Acquire);
                if !matches!(semantics, Semantics::Acquire | Semantics::Relaxed) {
                    return Err("a wait acquires or is relaxed".to_string());
                }
                let may_block = action == "try_wait";
                let operands = between(operands, 3, 3 + usize::from(may_block))?;
                let destination = self.predicate_register(&operands[0])?;
                let barrier = self.barrier_at(space, &operands[1])?;
                let phase = if parity {
                    MbarrierPhase::Parity(self.source(&operands[2], Type::U32)?)
                } else {
                    MbarrierPhase::State(self.source(&operands[2], Type::B64)?)
                };
                if let Some(hint) = operands.get(3) {
                    self.source(hint, Type::U32)?;
                }
                Mbarrier::Wait { barrier, destination, phase, may_block, semantics, scope }
            }
            "pending_count" => {
                let [count, state] = exactly(operands)?;
                Mbarrier::PendingCount {
                    destination: self.destination(count, Type::U32)?,
                    state: self.source(state, Type::B64)?,
                }
            }
            _ => return Err(format!("`{action}` is not known for `mbarrier`")),
        }))
    }
}
