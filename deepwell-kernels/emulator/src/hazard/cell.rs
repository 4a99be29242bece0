//! Shadow cell of 16 bytes of memory, or of one column of 32 lanes of tensor memory.

/// Bit of [`Record::who`]: set for an asynchronous operation, clear for a warp.
const OPERATION: u32 = 1 << 31;

/// An access to bytes of a cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    who: u32,
    /// Tick of the warp; unused for operations, whose numbers are in a separate table.
    pub(super) tick: u32,
    /// Lanes that touched all bytes; in a spread record, the lane of byte 0.
    lanes: u32,
    pub(super) step: u32,
    /// One bit per byte of the cell, or per two lanes of tensor memory; 0 for no record.
    pub(super) bytes: u16,
    /// Log2 of the bytes per lane in a spread record; otherwise [`NOT_SPREAD`].
    spread: u8,
    /// 1 + the scope level of a strong access, 0 for a weak one; plus [`LISTED_WRITE`].
    strong: u8,
}

const NOT_SPREAD: u8 = 0xff;

/// Flag of the writes in [`Cell::more`].
const LISTED_WRITE: u8 = 0x80;

impl Record {
    pub(super) fn of_warp(warp: u32, tick: u32, lanes: u32, step: u32, bytes: u16) -> Record {
        Record { who: warp, tick, lanes, step, bytes, spread: NOT_SPREAD, strong: 0 }
    }

    pub(super) fn of_operation(operation: u32, lanes: u32, bytes: u16) -> Record {
        let who = operation | OPERATION;
        Record { who, tick: 0, lanes, step: 0, bytes, spread: NOT_SPREAD, strong: 0 }
    }

    /// Returns the record as a strong access: 1 + the scope level; 0 for a weak access.
    pub(super) fn with_scope(self, strong: u8) -> Record {
        Record { strong, ..self }
    }

    /// Returns 1 + the scope level of a strong access; 0 for a weak one.
    pub(super) fn scope(&self) -> u8 {
        self.strong & !LISTED_WRITE
    }

    fn is_listed_write(&self) -> bool {
        self.strong & LISTED_WRITE != 0
    }

    pub(super) fn operation(&self) -> Option<u32> {
        (self.who & OPERATION != 0).then_some(self.who & !OPERATION)
    }

    /// Returns the warp, or `None` for an operation.
    pub(super) fn warp(&self) -> Option<u32> {
        (self.who & OPERATION == 0).then_some(self.who)
    }

    /// Returns the lanes that touched any of `bytes`.
    pub(super) fn lanes_of(&self, bytes: u16) -> u32 {
        if self.spread == NOT_SPREAD {
            return self.lanes;
        }
        let mut mask = 0;
        let mut left = bytes & self.bytes;
        while left != 0 {
            let byte = left.trailing_zeros();
            mask |= 1 << (self.lanes.wrapping_add(byte >> self.spread) & 31);
            left &= left - 1;
        }
        mask
    }

    pub(super) fn all_lanes(&self) -> u32 {
        self.lanes_of(self.bytes)
    }

    /// Adds another lane's bytes of the same instruction, if a single record can represent both.
    /// Returns whether the lane was added.
    pub(super) fn absorb(&mut self, lane: u32, bytes: u16) -> bool {
        if self.spread == NOT_SPREAD && self.bytes == bytes {
            self.lanes |= 1 << lane;
            return true;
        }
        if self.bytes & bytes != 0 {
            return false;
        }
        let (size, first) = (bytes.count_ones(), bytes.trailing_zeros());
        let regular = |mask: u16| {
            let first = mask.trailing_zeros();
            size.is_power_of_two()
                && first.is_multiple_of(size)
                && u32::from(mask) == ((1 << size) - 1) << first
        };
        let shift = size.trailing_zeros();
        let base = lane.wrapping_sub(first >> shift);
        if self.spread == NOT_SPREAD {
            // The record has a single lane so far; both lanes must fit one linear mapping to bytes.
            let mine = self.lanes.trailing_zeros();
            let fits = self.lanes.is_power_of_two()
                && self.bytes.count_ones() == size
                && regular(self.bytes)
                && regular(bytes)
                && mine.wrapping_sub(self.bytes.trailing_zeros() >> shift) == base;
            if !fits {
                return false;
            }
            (self.spread, self.lanes) = (shift as u8, base);
        } else if u32::from(self.spread) != shift || self.lanes != base || !regular(bytes) {
            return false;
        }
        self.bytes |= bytes;
        true
    }

    /// Whether two records of one warp assign each byte to the same single lane.
    pub(super) fn same_lanes(&self, other: &Record) -> bool {
        let single = self.spread != NOT_SPREAD || self.lanes.is_power_of_two();
        single && self.spread == other.spread && self.lanes == other.lanes
    }

    fn same_event(&self, other: &Record) -> bool {
        self.who == other.who
            && self.tick == other.tick
            && self.lanes == other.lanes
            && self.spread == other.spread
            && self.scope() == other.scope()
    }
}

/// Records of a cell: the last writers and the readers since then.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    write: Record,
    read: Record,
    /// Further readers and writers.
    more: Vec<Record>,
}

/// Queries of a cell during an access.
pub(super) trait Visitor {
    /// Called for a `record` that touched `overlap` before; `write` is its direction.
    fn conflict(&mut self, record: &Record, overlap: u16, write: bool);

    /// Whether every access ordered after the new access is also ordered after `record`.
    fn supersedes(&self, record: &Record) -> bool;
}

impl Cell {
    /// Records a read, after showing the visitor all conflicting writes.
    #[inline]
    pub(super) fn read(&mut self, new: Record, reads_max: usize, visitor: &mut impl Visitor) {
        let bytes = new.bytes;
        if self.read.same_event(&new) && bytes & !self.read.bytes == 0 {
            return;
        }
        self.visit_writes(bytes, visitor);
        if self.read.bytes & bytes != 0 && visitor.supersedes(&self.read) {
            self.read.bytes &= !bytes;
        }
        self.more.retain_mut(|record| {
            let met = !record.is_listed_write() && record.bytes & bytes != 0;
            if met && visitor.supersedes(record) {
                record.bytes &= !bytes;
            }
            record.bytes != 0
        });
        if self.read.bytes == 0 {
            self.read = new;
        } else if self.read.same_event(&new) {
            self.read.bytes |= bytes;
        } else {
            // Beyond the limit, keep the first readers: synchronization of the first readers
            // usually orders all readers.
            self.list(new, reads_max);
        }
    }

    /// Records a write, after showing the visitor all conflicting records. A strong write does not
    /// replace other strong writes unless it is ordered after them.
    #[inline]
    pub(super) fn write(&mut self, new: Record, visitor: &mut impl Visitor) {
        let bytes = new.bytes;
        let again = self.write.same_event(&new) && bytes & !self.write.bytes == 0;
        if again && self.more.is_empty() && self.read.bytes & bytes == 0 {
            return;
        }
        self.visit(bytes, visitor);
        self.read.bytes &= !bytes;
        let stays = |record: &Record, visitor: &mut dyn FnMut(&Record) -> bool| {
            new.strong != 0 && record.scope() != 0 && !visitor(record)
        };
        let mut supersedes = |record: &Record| visitor.supersedes(record);
        if !stays(&self.write, &mut supersedes) {
            self.write.bytes &= !bytes;
        }
        self.more.retain_mut(|record| {
            let stays = record.is_listed_write() && stays(record, &mut supersedes);
            if !stays {
                record.bytes &= !bytes;
            }
            record.bytes != 0
        });
        if self.write.bytes == 0 {
            self.write = new;
        } else if self.write.same_event(&new) {
            self.write.bytes |= bytes;
        } else {
            let limit = if new.strong == 0 { usize::MAX } else { STRONG_WRITES_MAX };
            self.list(Record { strong: new.strong | LISTED_WRITE, ..new }, limit);
        }
    }

    #[cold]
    fn list(&mut self, new: Record, limit: usize) {
        let of_kind = |record: &&mut Record| record.is_listed_write() == new.is_listed_write();
        let mut count = 0;
        for record in self.more.iter_mut().filter(of_kind) {
            if record.same_event(&new) {
                record.bytes |= new.bytes;
                return;
            }
            count += 1;
        }
        if count < limit {
            if self.more.capacity() == 0 {
                self.more.reserve_exact(2);
            }
            self.more.push(new);
        }
    }

    /// Shows the visitor all records that conflict with a write to `bytes`, without recording the
    /// write.
    #[inline]
    pub(super) fn visit(&self, bytes: u16, visitor: &mut impl Visitor) {
        self.visit_writes(bytes, visitor);
        if self.read.bytes & bytes != 0 {
            visitor.conflict(&self.read, self.read.bytes & bytes, false);
        }
        for record in self.more.iter().filter(|record| !record.is_listed_write()) {
            if record.bytes & bytes != 0 {
                visitor.conflict(record, record.bytes & bytes, false);
            }
        }
    }

    /// Returns the first of the last writers.
    pub(super) fn last_write(&self) -> &Record {
        &self.write
    }

    /// Returns all records, and whether each is a write.
    pub(super) fn records(&self) -> impl Iterator<Item = (&Record, bool)> {
        let more = self.more.iter().map(|record| (record, record.is_listed_write()));
        [(&self.write, true), (&self.read, false)]
            .into_iter()
            .chain(more)
            .filter(|(record, _)| record.bytes != 0)
    }

    /// Shows the visitor the writes to `bytes`.
    #[inline]
    pub(super) fn visit_writes(&self, bytes: u16, visitor: &mut impl Visitor) {
        if self.write.bytes & bytes != 0 {
            visitor.conflict(&self.write, self.write.bytes & bytes, true);
        }
        for record in self.more.iter().filter(|record| record.is_listed_write()) {
            if record.bytes & bytes != 0 {
                visitor.conflict(record, record.bytes & bytes, true);
            }
        }
    }
}

/// Most strong writes in [`Cell::more`]. Of many unordered atomic operations on one location, the
/// first suffice to find conflicts. Weak writes are unlimited; their bytes are disjoint.
const STRONG_WRITES_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighboring_lanes_are_one_record() {
        let mut record = Record::of_warp(0, 1, 1 << 4, 0, 0x000f);
        assert!(record.absorb(5, 0x00f0) && record.absorb(6, 0x0f00));
        assert_eq!(record.lanes_of(0x0010), 1 << 5);
        assert_eq!(record.lanes_of(0x0f01), 1 << 4 | 1 << 6);
        assert!(!record.absorb(9, 0xf000));
        let mut same = Record::of_warp(0, 1, 1, 0, 0xffff);
        assert!(same.absorb(1, 0xffff) && same.absorb(2, 0xffff));
        assert_eq!(same.lanes_of(1), 7);
        let mut odd = Record::of_warp(0, 1, 1, 0, 0x00ff);
        assert!(!odd.absorb(1, 0x0f00));
    }
}
