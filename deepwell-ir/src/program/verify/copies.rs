//! Weight copies that the optimizer's calls write: a step skips exactly the separate calls that
//! make these copies.

use std::collections::HashMap;

use super::offloaded::Homes;
use crate::ops::{AdamW, CopyKind};
use crate::{Access, Call, Op, Operand, Phase, Program, ValueId};

/// A copy of a weight: source, conversion and destination.
#[derive(PartialEq)]
struct Made {
    master: ValueId,
    kind: CopyKind,
    outputs: Vec<Operand>,
}

/// Checks that copies written by updates and calls skipped by a step correspond one to one: same
/// master, same conversion, same destination.
pub(super) fn check(program: &Program, homes: &Homes) -> Result<(), String> {
    let mut left_out: HashMap<ValueId, (&Call, Made)> = HashMap::new();
    for call in program.calls.iter().filter(|call| call.alone_only && !is_host_copy(call)) {
        let name = &call.name;
        let (Some(made), Phase::Weights) = (by_itself(call, homes), call.phase) else {
            let phase = call.phase;
            return Err(format!(
                "call `{name}` of {phase} is left out of a step, expected a copy of a weight"
            ));
        };
        let Some(first) = made.outputs.first() else { continue };
        left_out.insert(first.value, (call, made));
    }
    for call in &program.calls {
        let Op::AdamW(op) = &call.op else { continue };
        for made in by_update(call, op, homes)? {
            let name = &call.name;
            let master = &program.value(made.master).name;
            let first = made.outputs.first().map(|output| output.value);
            match first.and_then(|first| left_out.remove(&first)) {
                Some((_, expected)) if made == expected => {}
                Some((other, _)) => {
                    let other = &other.name;
                    return Err(format!(
                        "call `{name}` copies `{master}` otherwise than `{other}` does"
                    ));
                }
                None => {
                    return Err(format!(
                        "call `{name}` writes a copy of `{master}` that no call makes alone, or \
                         that a step makes again"
                    ));
                }
            }
        }
    }
    let mut rest: Vec<&str> = left_out.values().map(|(call, _)| call.name.as_str()).collect();
    rest.sort_unstable();
    match rest.first() {
        Some(name) => Err(format!("call `{name}` is left out of a step, and no update copies")),
        None => Ok(()),
    }
}

/// Copies of offloaded masters are left out with the calls that read them.
fn is_host_copy(call: &Call) -> bool {
    matches!(call.op, Op::HostCopy(_))
}

fn by_itself(call: &Call, homes: &Homes) -> Option<Made> {
    let kind = CopyKind::of(&call.op)?;
    let master = homes.home(call.inputs().first()?.value);
    Some(Made { master, kind, outputs: call.outputs().to_vec() })
}

fn by_update(call: &Call, op: &AdamW, homes: &Homes) -> Result<Vec<Made>, String> {
    let of_copy = |(copy, places): (&crate::ops::WeightCopy, std::ops::Range<usize>)| {
        let outputs = call.outputs().get(places)?.to_vec();
        let is_written = outputs.iter().all(|output| output.access == Access::Write);
        let master = homes.home(call.inputs().get(AdamW::master(copy.parameter))?.value);
        is_written.then(|| Made { master, kind: copy.kind.clone(), outputs })
    };
    let made: Option<Vec<Made>> = op.copies_with_outputs().map(of_copy).collect();
    made.ok_or_else(|| format!("call `{}`: expected an output for each copy", call.name))
}
