//! Checks of values in host memory: they have a part of the arena of their own, and calls other
//! than copies use them on the device only.

use std::collections::HashMap;

use crate::ops::HostCopyDirection;
use crate::{MemoryKind, Op, Program, ValueId};

/// The offloaded value that each copied value holds for a call.
pub(super) struct Homes(HashMap<ValueId, ValueId>);

impl Homes {
    pub(super) fn of(program: &Program) -> Homes {
        let fetched = program.calls.iter().filter_map(|call| match (&call.op, &*call.operands) {
            (Op::HostCopy(copy), [from, to]) if copy.direction == HostCopyDirection::ToDevice => {
                Some((to.value, from.value))
            }
            _ => None,
        });
        Homes(fetched.collect())
    }

    /// The offloaded value of a copy; any other value itself.
    pub(super) fn home(&self, value: ValueId) -> ValueId {
        self.0.get(&value).copied().unwrap_or(value)
    }
}

/// Checks that offloaded values lie in the host's part of the arena and no other value does, and
/// that each copy has an offloaded value on the side of the host. A copy to the host stores a value
/// where the value was fetched.
pub(super) fn check(program: &Program) -> Result<(), String> {
    let host_bytes = program.arena.host_bytes;
    for value in &program.values {
        let is_offloaded = value.memory == MemoryKind::Offloaded;
        let is_on_host = value.range.end() <= host_bytes;
        if value.range.bytes > 0 && is_offloaded != is_on_host {
            return Err(format!(
                "value `{}` ({}) lies in the wrong part of the arena, of which {host_bytes} bytes \
                 are in host memory",
                value.name,
                value.memory.name()
            ));
        }
    }
    let homes = Homes::of(program);
    let is_offloaded = |value: ValueId| program.value(value).memory == MemoryKind::Offloaded;
    for call in &program.calls {
        let Op::HostCopy(copy) = &call.op else {
            let direct = call.operands.iter().find(|operand| is_offloaded(operand.value));
            if let Some(operand) = direct {
                let (name, value) = (&call.name, &program.value(operand.value).name);
                return Err(format!(
                    "call `{name}` uses `{value}` in host memory, expected a copy"
                ));
            }
            continue;
        };
        let [from, to] = &*call.operands else {
            return Err(format!("call `{}` copies {} values", call.name, call.operands.len()));
        };
        let (host, device) = match copy.direction {
            HostCopyDirection::ToDevice => (from.value, to.value),
            HostCopyDirection::ToHost => (to.value, from.value),
        };
        let [host_type, device_type] =
            [host, device].map(|id| (program.value(id).dtype, &program.value(id).shape));
        let is_copy = is_offloaded(host) && !is_offloaded(device) && homes.home(device) == host;
        if !is_copy || host_type != device_type {
            return Err(format!(
                "call `{}` copies `{}` to `{}`, expected an offloaded value and its copy",
                call.name,
                program.value(from.value).name,
                program.value(to.value).name
            ));
        }
    }
    Ok(())
}
