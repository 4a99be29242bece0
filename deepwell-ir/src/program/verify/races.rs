//! Checks that two calls that use the same bytes are ordered.

use std::collections::BTreeMap;

use crate::{Access, ByteRange, Order, Program};

/// Last users of some bytes.
#[derive(Clone, Debug, Default)]
struct Users {
    writer: Option<usize>,
    /// Last reader on each stream since the last write, with the stream: there are few.
    readers: Vec<(usize, usize)>,
}

/// The arena in stretches of bytes with the same users, by offset; each stretch ends at the begin
/// of the next.
struct Stretches {
    by_offset: BTreeMap<usize, Users>,
}

impl Stretches {
    /// Splits the stretch at `offset`.
    fn split(&mut self, offset: usize) {
        let users = match self.by_offset.range(..=offset).next_back() {
            Some((&first, _)) if first == offset => return,
            Some((_, users)) => users.clone(),
            None => Users::default(),
        };
        self.by_offset.insert(offset, users);
    }

    fn within(&mut self, range: ByteRange) -> impl Iterator<Item = &mut Users> {
        self.split(range.offset);
        self.split(range.end());
        self.by_offset.range_mut(range.offset..range.end()).map(|(_, users)| users)
    }

    fn write(&mut self, range: ByteRange, call: usize) {
        self.split(range.offset);
        self.split(range.end());
        let within = range.offset + 1..range.end();
        while let Some((&offset, _)) = self.by_offset.range(within.clone()).next() {
            self.by_offset.remove(&offset);
        }
        let users = Users { writer: Some(call), readers: Vec::new() };
        self.by_offset.insert(range.offset, users);
    }
}

/// Walks the calls in issue order and compares each access with the last users of the same bytes.
/// Calls on a single stream cannot race.
pub(super) fn check(program: &Program, order: &Order) -> Result<(), String> {
    if order.streams() < 2 {
        return Ok(());
    }
    let mut stretches = Stretches { by_offset: BTreeMap::new() };
    for (index, call) in program.calls.iter().enumerate() {
        let operands = call
            .operands
            .iter()
            .map(|operand| (program.value(operand.value).range, operand.access == Access::Read));
        let used: Vec<(ByteRange, bool)> = operands
            .chain([(call.workspace, false)])
            .filter(|(range, _)| range.bytes > 0)
            .collect();
        for &(range, only_reads) in &used {
            for users in stretches.within(range) {
                let readers = users.readers.iter().map(|(_, call)| call).filter(|_| !only_reads);
                let beside = users
                    .writer
                    .iter()
                    .chain(readers)
                    .find(|&&other| other != index && !order.is_before(other, index));
                if let Some(&other) = beside {
                    return Err(format!(
                        "calls `{}` and `{}` use bytes {}..{} and no event orders them",
                        program.calls[other].name,
                        call.name,
                        range.offset,
                        range.end()
                    ));
                }
                if only_reads {
                    let stream = order.stream(index);
                    match users.readers.iter_mut().find(|reader| reader.0 == stream) {
                        Some(reader) => reader.1 = index,
                        None => users.readers.push((stream, index)),
                    }
                }
            }
        }
        for (range, _) in used.into_iter().filter(|(_, only_reads)| !only_reads) {
            stretches.write(range, index);
        }
    }
    Ok(())
}
