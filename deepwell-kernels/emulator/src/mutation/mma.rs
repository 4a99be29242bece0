//! Mistakes in MMAs of tensor cores and in their companion instructions.

use super::copies::multicast;
use super::operands::{Change, Spare};
use super::{Class, Edit};
use crate::decode::{
    Instruction, Source, Tcgen05, Tcgen05Mma, Tcgen05Operand, WarpGroupMma, WarpGroupOperand,
};

/// One bit of each field of a matrix descriptor: start, leading offset, stride, swizzle.
const MATRIX: [u32; 4] = [0, 16, 32, 62];

const OF_A: [&str; 4] = ["start of A", "leading offset of A", "stride of A", "swizzle of A"];
const OF_B: [&str; 4] = ["start of B", "leading offset of B", "stride of B", "swizzle of B"];
const OF_COPY: [&str; 4] = [
    "start of tcgen05.cp",
    "leading offset of tcgen05.cp",
    "stride of tcgen05.cp",
    "swizzle of tcgen05.cp",
];

/// One bit of each field of the instruction descriptor of a `tcgen05.mma`.
const MMA: [(&str, u32); 8] = [
    ("type of A", 7),
    ("type of B", 10),
    ("sign of A", 13),
    ("sign of B", 14),
    ("direction of A", 15),
    ("direction of B", 16),
    ("N of tcgen05.mma", 17),
    ("M of tcgen05.mma", 27),
];

/// Further fields of MMAs with block scales.
const SCALED: [(&str, u32); 2] = [("scales of A", 29), ("scales of B", 4)];

pub(super) fn edits(instruction: &Instruction, spare: Spare, found: &mut Vec<Edit>) {
    match instruction {
        Instruction::Tcgen05(operation) => of_tcgen05(operation, spare, found),
        Instruction::WarpGroupMma(mma) => of_warp_group(mma, spare, found),
        _ => {}
    }
}

fn matrix(
    names: [&'static str; 4],
    descriptor: Source,
    spare: Spare,
    found: &mut Vec<Edit>,
    put: impl Fn(Source) -> Instruction,
) {
    for (what, bit) in names.into_iter().zip(MATRIX) {
        let change = Change::Invert(1 << bit);
        found.push(spare.edit(Class::Descriptor, what, descriptor, change, &put));
    }
}

fn of_tcgen05(operation: &Tcgen05, spare: Spare, found: &mut Vec<Edit>) {
    if let Some((what, changed)) = other_group(operation) {
        found.push(Edit::new(Class::Group, what, Instruction::Tcgen05(changed)));
    }
    match operation {
        Tcgen05::Mma(mma) => of_mma(mma, spare, found),
        Tcgen05::Copy { group, shape, source_format, target, descriptor } => {
            matrix(OF_COPY, *descriptor, spare, found, |descriptor| {
                Instruction::Tcgen05(Tcgen05::Copy {
                    group: *group,
                    shape: *shape,
                    source_format: *source_format,
                    target: *target,
                    descriptor,
                })
            });
        }
        Tcgen05::Commit { group, barrier, space, multicast: Some(mask) } => {
            let names = ["rank 0 of tcgen05.commit", "rank 1 of tcgen05.commit"];
            multicast(*mask, names, spare, found, |mask| {
                Instruction::Tcgen05(Tcgen05::Commit {
                    group: *group,
                    barrier: *barrier,
                    space: *space,
                    multicast: Some(mask),
                })
            });
        }
        _ => {}
    }
}

/// Returns the instruction with `.cta_group` 1 and 2 exchanged.
fn other_group(operation: &Tcgen05) -> Option<(&'static str, Tcgen05)> {
    let mut changed = operation.clone();
    let (what, group) = match &mut changed {
        Tcgen05::Allocate { group, .. } => ("cta_group of tcgen05.alloc", group),
        Tcgen05::Deallocate { group, .. } => ("cta_group of tcgen05.dealloc", group),
        Tcgen05::Relinquish { group } => ("cta_group of tcgen05.relinquish_alloc_permit", group),
        Tcgen05::Mma(mma) => ("cta_group of tcgen05.mma", &mut mma.group),
        Tcgen05::Copy { group, .. } => ("cta_group of tcgen05.cp", group),
        Tcgen05::Shift { group, .. } => ("cta_group of tcgen05.shift", group),
        Tcgen05::Commit { group, .. } => ("cta_group of tcgen05.commit", group),
        _ => return None,
    };
    *group = 3 - *group;
    Some((what, changed))
}

fn of_mma(mma: &Tcgen05Mma, spare: Spare, found: &mut Vec<Edit>) {
    let put = |mma: Tcgen05Mma| Instruction::Tcgen05(Tcgen05::Mma(Box::new(mma)));
    if let Tcgen05Operand::Descriptor(a) = mma.a {
        matrix(OF_A, a, spare, found, |a| {
            put(Tcgen05Mma { a: Tcgen05Operand::Descriptor(a), ..mma.clone() })
        });
    }
    matrix(OF_B, mma.b, spare, found, |b| put(Tcgen05Mma { b, ..mma.clone() }));
    let scaled: &[_] = if mma.scales.is_some() { &SCALED } else { &[] };
    for (what, bit) in MMA.iter().chain(scaled) {
        let change = Change::Invert(1 << bit);
        let source = mma.instruction_descriptor;
        found.push(spare.edit(Class::Descriptor, what, source, change, |changed| {
            put(Tcgen05Mma { instruction_descriptor: changed, ..mma.clone() })
        }));
    }
}

fn of_warp_group(mma: &WarpGroupMma, spare: Spare, found: &mut Vec<Edit>) {
    let put = |mma: WarpGroupMma| Instruction::WarpGroupMma(mma);
    if let WarpGroupOperand::Descriptor(a) = mma.a {
        matrix(OF_A, a, spare, found, |a| {
            put(WarpGroupMma { a: WarpGroupOperand::Descriptor(a), ..mma.clone() })
        });
    }
    matrix(OF_B, mma.b, spare, found, |b| put(WarpGroupMma { b, ..mma.clone() }));
    let changed = |change: &dyn Fn(&mut WarpGroupMma)| {
        let mut mma = mma.clone();
        change(&mut mma);
        put(mma)
    };
    let edits = [
        ("sign of A", changed(&|mma| mma.negate_a ^= true)),
        ("sign of B", changed(&|mma| mma.negate_b ^= true)),
    ];
    for (what, instruction) in edits {
        found.push(Edit::new(Class::Descriptor, what, instruction));
    }
}
