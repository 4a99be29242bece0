//! Live bytes at the ends of each body, which grow linearly with the layers in between.
//!
//! The peak of a body does not: with few layers it may be at the loss, with many at the first
//! layers, as each place gains other bytes per layer.

use std::collections::BTreeMap;

use deepwell_ir::Program;

/// Layers at each end of a body with a place of their own.
const ENDS: u32 = 2;

/// Place of calls in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Calls of no layer before the layers, or of a body without layers.
    Before,
    /// Layers counted from the first layer of the body.
    FromFirst(u32),
    /// Layers counted from the last layer of the body.
    FromLast(u32),
    /// Layers between these, present in programs that are lowered whole.
    Between,
    /// Calls of no layer after the layers.
    After,
}

/// The most live bytes in each place of each body.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Landmarks(BTreeMap<(usize, Place), i64>);

impl Landmarks {
    /// `alive_bytes` has the live bytes at each call of `program`, up to the last that has any.
    pub(super) fn of(program: &Program, alive_bytes: &[usize]) -> Landmarks {
        let mut most = BTreeMap::new();
        for (index, body) in program.bodies.iter().enumerate() {
            let calls = &program.calls[body.calls.clone()];
            let layers = calls.iter().filter_map(|call| call.layer);
            let (first, last) = (layers.clone().min(), layers.max());
            let begin = calls.iter().position(|call| call.layer.is_some());
            for (at, call) in calls.iter().enumerate() {
                let place = match (call.layer, first, last) {
                    (Some(layer), Some(first), Some(last)) => place(layer, [first, last]),
                    _ if begin.is_some_and(|begin| at > begin) => Place::After,
                    _ => Place::Before,
                };
                let bytes = alive_bytes.get(body.calls.start + at).copied().unwrap_or(0) as i64;
                let known = most.entry((index, place)).or_insert(bytes);
                *known = bytes.max(*known);
            }
        }
        Landmarks(most)
    }

    pub(super) fn peak(&self) -> i64 {
        self.0.values().copied().max().unwrap_or(0)
    }

    /// Adds `times` the difference of `to` and `from`, which differ by `layers`.
    pub(super) fn grown(
        mut self,
        from: &Landmarks,
        to: &Landmarks,
        times: i64,
        layers: i64,
    ) -> Self {
        for (place, bytes) in &mut self.0 {
            if let (Some(from), Some(to)) = (from.0.get(place), to.0.get(place)) {
                *bytes += times * (to - from) / layers;
            }
        }
        self
    }
}

fn place(layer: u32, [first, last]: [u32; 2]) -> Place {
    match (layer - first, last - layer) {
        (_, from_last) if from_last < ENDS => Place::FromLast(from_last),
        (from_first, _) if from_first < ENDS => Place::FromFirst(from_first),
        _ => Place::Between,
    }
}
