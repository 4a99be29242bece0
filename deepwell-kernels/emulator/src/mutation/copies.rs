//! Mistakes in bulk and tensor copies.

use super::operands::{Change, Spare};
use super::{Class, Edit};
use crate::decode::{
    Address, BulkCompletion, BulkCopy, BulkDirection, Instruction, Source, TensorCopy,
};

/// Offset of a wrong coordinate, in elements: at most a tile, and not zero in any tensor.
const OFF: i64 = 32;

const COORDINATES: [&str; 5] = [
    "coordinate 0 of cp.async.bulk.tensor",
    "coordinate 1 of cp.async.bulk.tensor",
    "coordinate 2 of cp.async.bulk.tensor",
    "coordinate 3 of cp.async.bulk.tensor",
    "coordinate 4 of cp.async.bulk.tensor",
];

pub(super) fn edits(instruction: &Instruction, spare: Spare, found: &mut Vec<Edit>) {
    match instruction {
        Instruction::BulkCopy(copy) if copy.direction != BulkDirection::Prefetch => {
            of_bulk(copy, spare, found);
        }
        Instruction::TensorCopy(copy) if copy.direction != BulkDirection::Prefetch => {
            of_tensor(copy, spare, found);
        }
        _ => {}
    }
}

/// Edits of a multicast mask: flips the bit of rank 0 or of rank 1.
pub(super) fn multicast(
    mask: Source,
    names: [&'static str; 2],
    spare: Spare,
    found: &mut Vec<Edit>,
    put: impl Fn(Source) -> Instruction,
) {
    for (what, bit) in names.into_iter().zip([1, 2]) {
        found.push(spare.edit(Class::Mask, what, mask, Change::Invert(bit), &put));
    }
}

fn of_bulk(copy: &BulkCopy, spare: Spare, found: &mut Vec<Edit>) {
    let put = |copy: BulkCopy| Instruction::BulkCopy(copy);
    for (what, by) in [("16 more of cp.async.bulk", 16), ("16 less of cp.async.bulk", -16)] {
        found.push(spare.edit(Class::Bytes, what, copy.bytes, Change::Add(by), |bytes| {
            put(BulkCopy { bytes, ..copy.clone() })
        }));
    }
    let beyond = |address: Address| Address { offset: address.offset + 16, ..address };
    let from = BulkCopy { source: beyond(copy.source), ..copy.clone() };
    found.push(Edit::new(Class::Coordinate, "source of cp.async.bulk", put(from)));
    let to = BulkCopy { target: beyond(copy.target), ..copy.clone() };
    found.push(Edit::new(Class::Coordinate, "target of cp.async.bulk", put(to)));
    if let Some(mask) = copy.multicast {
        let names = ["rank 0 of cp.async.bulk", "rank 1 of cp.async.bulk"];
        multicast(mask, names, spare, found, |mask| {
            put(BulkCopy { multicast: Some(mask), ..copy.clone() })
        });
    }
}

fn of_tensor(copy: &TensorCopy, spare: Spare, found: &mut Vec<Edit>) {
    let put = |copy: TensorCopy| Instruction::TensorCopy(copy);
    for (at, (what, coordinate)) in COORDINATES.into_iter().zip(&copy.coordinates).enumerate() {
        found.push(spare.edit(Class::Coordinate, what, *coordinate, Change::Add(OFF), |changed| {
            let mut copy = copy.clone();
            copy.coordinates[at] = changed;
            put(copy)
        }));
    }
    if copy.coordinates.len() > 1 && copy.coordinates[0] != copy.coordinates[1] {
        let mut swapped = copy.clone();
        swapped.coordinates.swap(0, 1);
        let what = "swapped coordinates of cp.async.bulk.tensor";
        found.push(Edit::new(Class::Coordinate, what, put(swapped)));
    }
    if let Some(mask) = copy.multicast {
        let names = ["rank 0 of cp.async.bulk.tensor", "rank 1 of cp.async.bulk.tensor"];
        multicast(mask, names, spare, found, |mask| {
            put(TensorCopy { multicast: Some(mask), ..copy.clone() })
        });
    }
    // With `.cta_group::2`, the mbarrier of a copy may be in the pair's other CTA.
    if let BulkCompletion::Mbarrier(_) = copy.completion {
        let group = Some(if copy.cta_group == Some(2) { 1 } else { 2 });
        let other = TensorCopy { cta_group: group, ..copy.clone() };
        found.push(Edit::new(Class::Group, "cta_group of cp.async.bulk.tensor", put(other)));
    }
}
