//! Use of the buffers of experts' rows, whose size is the largest that any routing needs.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ExpertLoad;

/// The buffers of a layer's rows over the steps of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRows {
    /// The layer, counted from 0.
    pub layer: u32,
    /// Rows used in the fullest micro-batch: pairs of a token and an expert, rounded up for each
    /// expert to the alignment of its group.
    pub used: u64,
    /// Rows of a buffer.
    pub planned: u64,
}

impl ExpertRows {
    /// Used fraction of the buffer, 0 to 1; 0 for an empty buffer.
    pub fn share(&self) -> f64 {
        if self.planned == 0 { 0.0 } else { self.used as f64 / self.planned as f64 }
    }

    /// Adds the loads of a step.
    pub(crate) fn add(rows: &mut Vec<ExpertRows>, loads: &[ExpertLoad]) {
        for load in loads.iter().filter(|load| load.rows_planned > 0) {
            let (layer, used, planned) = (load.layer, load.rows_used, load.rows_planned);
            match rows.iter_mut().find(|known| known.layer == layer) {
                Some(known) => known.used = known.used.max(used),
                None => rows.push(ExpertRows { layer, used, planned }),
            }
        }
    }

    /// Describes the layer with the fullest buffers; none without experts.
    pub(crate) fn fullest(rows: &[ExpertRows]) -> Option<String> {
        let fullest = rows.iter().max_by(|a, b| a.share().total_cmp(&b.share()))?;
        Some(format!("rows of experts: at most {fullest}, where their buffers were fullest"))
    }
}

impl fmt::Display for ExpertRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertRows { layer, used, planned } = self;
        write!(f, "{used} of {planned} ({:.1} %) in layer {layer}", 100.0 * self.share())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_step_of_each_layer_counts() {
        let load = |layer, rows_used, rows_planned| ExpertLoad {
            layer,
            rows_used,
            rows_planned,
            ..ExpertLoad::default()
        };
        let mut rows = Vec::new();
        ExpertRows::add(&mut rows, &[load(0, 64, 128), load(2, 96, 128)]);
        ExpertRows::add(&mut rows, &[load(0, 32, 128), load(2, 120, 128), load(3, 0, 0)]);
        let expected =
            [(0, 64), (2, 120)].map(|(layer, used)| ExpertRows { layer, used, planned: 128 });
        assert_eq!(rows, expected);
        assert_eq!(
            ExpertRows::fullest(&rows).unwrap(),
            "rows of experts: at most 120 of 128 (93.8 %) in layer 2, where their buffers were \
             fullest"
        );
        assert_eq!(ExpertRows::fullest(&[]), None);
    }
}
