//! Decoding of branches, exits and launch control.

use super::Instruction;
use super::lower::{Decoded, Lowering};
use super::operands::{between, exactly, parts};
use super::types::{Space, Type};
use super::words::Words;
use crate::ptx::Operand;

impl Lowering<'_> {
    /// Decodes `bra` to `nanosleep`.
    pub(super) fn control(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "bra" => {
                let uniform = words.take("uni");
                let [target] = exactly(operands)?;
                let Operand::Name(target) = target else {
                    return Err(format!("`{target}` is no label"));
                };
                Ok(Instruction::Branch { target: self.label(target)?, uniform })
            }
            "brx" => {
                words.expect(&["idx"])?;
                let uniform = words.take("uni");
                let [index, table] = exactly(operands)?;
                let Operand::Name(table) = table else {
                    return Err(format!("`{table}` is no table"));
                };
                let targets = self.table(table)?;
                let index = self.source(index, Type::U32)?;
                Ok(Instruction::BranchIndexed { targets, index, uniform })
            }
            "ret" => {
                words.take("uni");
                let [] = exactly(operands)?;
                Ok(match self.return_label() {
                    Some(target) => Instruction::Branch { target, uniform: false },
                    None => Instruction::Exit,
                })
            }
            "exit" => {
                let [] = exactly(operands)?;
                Ok(Instruction::Exit)
            }
            "trap" | "brkpt" => {
                let [] = exactly(operands)?;
                Ok(Instruction::Trap)
            }
            "nanosleep" => {
                words.take_type_of(&[Type::U32])?;
                let [time] = exactly(operands)?;
                self.source(time, Type::U32)?;
                Ok(Instruction::Hint)
            }
            _ => {
                words.take("mask");
                let [event] = exactly(operands)?;
                self.immediate(event)?;
                Ok(Instruction::Hint)
            }
        }
    }

    /// Decodes `setmaxnreg`, `griddepcontrol` and `clusterlaunchcontrol`.
    pub(super) fn launch_control(
        &mut self,
        name: &str,
        words: &mut Words<'_>,
        operands: &[Operand],
    ) -> Decoded {
        match name {
            "setmaxnreg" => {
                let increase = words.take("inc");
                if !increase {
                    words.expect(&["dec"])?;
                }
                words.expect(&["sync", "aligned", "u32"])?;
                let [count] = exactly(operands)?;
                let count = self.immediate(count)?;
                if !(24..=256).contains(&count) || count % 8 != 0 {
                    return Err(format!("{count} registers are not 24 to 256 in steps of 8"));
                }
                Ok(Instruction::SetMaxRegisters { increase, count: count as u32 })
            }
            "griddepcontrol" => {
                let [] = exactly(operands)?;
                if words.take("launch_dependents") {
                    return Ok(Instruction::LaunchDependents);
                }
                words.expect(&["wait"])?;
                Ok(Instruction::DependencyWait)
            }
            _ if words.take("try_cancel") => {
                words.expect(&["async", "mbarrier::complete_tx::bytes", "b128"])?;
                let space = words.take_space();
                if !matches!(space, Space::Generic | Space::Shared) {
                    return Err("only `.shared::cta` is known here".to_string());
                }
                let multicast = words.take("multicast::cluster::all");
                let [response, barrier] = exactly(operands)?;
                Ok(Instruction::TryCancel {
                    response: self.plain_address(response)?,
                    space,
                    barrier: self.plain_address(barrier)?,
                    multicast,
                })
            }
            _ => {
                words.expect(&["query_cancel"])?;
                if words.take("is_canceled") {
                    words.expect(&["pred", "b128"])?;
                    let [p, response] = exactly(operands)?;
                    return Ok(Instruction::QueryCanceled {
                        destination: self.predicate_register(p)?,
                        response: self.wide_source(response)?,
                    });
                }
                let axis = words
                    .take_from(&[
                        ("get_first_ctaid", None),
                        ("get_first_ctaid::x", Some(0)),
                        ("get_first_ctaid::y", Some(1)),
                        ("get_first_ctaid::z", Some(2)),
                    ])
                    .ok_or("what is asked is missing")?;
                words.expect(&["b32", "b128"])?;
                let mut destinations = [None; 4];
                let [d, response] = exactly(operands)?;
                match axis {
                    Some(axis) => {
                        let axis: usize = axis;
                        destinations[axis] = Some(self.destination(d, Type::B32)?);
                    }
                    None => {
                        words.expect(&["v4"])?;
                        let targets = between(parts(d), 4, 4)?;
                        for (place, target) in destinations.iter_mut().zip(targets) {
                            *place = self.destination_wide(target, Type::B32)?;
                        }
                    }
                }
                let response = self.wide_source(response)?;
                Ok(Instruction::QueryFirstCta { destinations, response })
            }
        }
    }
}
