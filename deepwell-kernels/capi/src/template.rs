//! Steps of a call with places for addresses. Preparing a call takes tens of microseconds, filling
//! in addresses takes less than one.
//!
//! The places are found by preparing a call twice, with each operand moved by a distance of its
//! own: a word that differs by the distance of an operand is an address within this operand. This
//! holds for pointers and for tensor maps, whose encoding is the driver's. A call that differs in
//! any other way has no template and is prepared at each run.

use deepwell_kernels::cuda::{Argument, Step};

/// A launcher may align an address further. Addresses that are multiples of this number are aligned
/// alike.
pub(crate) const ALIGNMENT_BYTES: usize = 256;

/// Words of a tensor map.
const MAP_WORDS: usize = 16;

/// Distance that an operand is moved by for the second preparation, larger than any memory.
const DISTANCE_BYTES: usize = 1 << 40;

/// Where operand `index` is in the second preparation, if it is at `address` in the first.
pub(crate) fn moved(index: usize, address: usize) -> usize {
    address + (index + 1) * DISTANCE_BYTES
}

/// Prepared steps, and the places of addresses in them.
pub(crate) struct Template {
    steps: Vec<Step>,
    places: Vec<Place>,
}

/// A word of a step that holds an address.
struct Place {
    step: usize,
    slot: usize,
    word: usize,
    operand: usize,
    offset_bytes: u64,
}

impl Template {
    /// The template of a call whose operands were at `addresses` in `steps`, and at [`moved`]
    /// addresses in `moved_steps`.
    pub(crate) fn new(
        mut steps: Vec<Step>,
        mut moved_steps: Vec<Step>,
        addresses: &[usize],
    ) -> Option<Template> {
        let mut places = Vec::new();
        for (index, (first, second)) in steps.iter_mut().zip(&mut moved_steps).enumerate() {
            for slot in 0..slots(first) {
                for word in 0..MAP_WORDS {
                    let (Some(at), Some(moved_at)) =
                        (word_of(first, slot, word), word_of(second, slot, word))
                    else {
                        continue;
                    };
                    let distance = moved_at.wrapping_sub(*at);
                    if distance == 0 {
                        continue;
                    }
                    let operand = operand_of(distance, addresses.len())?;
                    let offset_bytes = at.wrapping_sub(addresses[operand] as u64);
                    places.push(Place { step: index, slot, word, operand, offset_bytes });
                    *moved_at = *at;
                }
            }
        }
        (steps == moved_steps).then_some(Template { steps, places })
    }

    /// The steps at other addresses, all of them multiples of [`ALIGNMENT_BYTES`].
    pub(crate) fn at(&mut self, addresses: &[usize]) -> &[Step] {
        for place in &self.places {
            if let Some(word) = word_of(&mut self.steps[place.step], place.slot, place.word) {
                *word = (addresses[place.operand] as u64).wrapping_add(place.offset_bytes);
            }
        }
        &self.steps
    }
}

/// The operand that was moved by this distance.
fn operand_of(distance: u64, operands: usize) -> Option<usize> {
    let unit = DISTANCE_BYTES as u64;
    let index = (distance / unit).checked_sub(1)? as usize;
    (distance.is_multiple_of(unit) && index < operands).then_some(index)
}

/// Arguments of a launch, or ends of a copy.
fn slots(step: &Step) -> usize {
    match step {
        Step::Launch(launch) => launch.arguments.len(),
        _ => 2,
    }
}

fn word_of(step: &mut Step, slot: usize, word: usize) -> Option<&mut u64> {
    match (step, word) {
        (Step::Launch(launch), _) => match launch.arguments.get_mut(slot)? {
            Argument::Pointer(pointer) if word == 0 => Some(&mut pointer.0),
            Argument::TensorMap(map) => map.0.get_mut(word),
            _ => None,
        },
        (Step::Copy { target, .. } | Step::Fill { target, .. }, 0) if slot == 0 => {
            Some(&mut target.0)
        }
        (Step::Copy { source, .. }, 0) if slot == 1 => Some(&mut source.0),
        _ => None,
    }
}
