//! Parameters split into one slice per rank of a group.

use serde::{Deserialize, Serialize};

/// Group over whose ranks a parameter is split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitOver {
    /// Tensor-parallel group: columns or rows of a weight.
    #[default]
    Tensor,
    /// Expert-parallel group: some of the experts of a layer.
    Expert,
}

impl SplitOver {
    fn is_tensor(&self) -> bool {
        *self == SplitOver::Tensor
    }
}

/// A rank's slice of a parameter, one of several equal slices along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Split {
    /// The dimension that is split.
    pub dim: usize,
    /// Index of the slice, counted from 0.
    pub place: usize,
    /// Number of slices.
    pub parts: usize,
    /// Group that the slices are distributed over.
    #[serde(default, skip_serializing_if = "SplitOver::is_tensor")]
    pub over: SplitOver,
}

impl Split {
    /// Shape of the whole parameter.
    pub fn whole_shape(&self, slice: &[usize]) -> Vec<usize> {
        let mut shape = slice.to_vec();
        if let Some(size) = shape.get_mut(self.dim) {
            *size *= self.parts;
        }
        shape
    }

    /// Copies this rank's slice, of shape `slice`, out of the row-major values of the whole.
    ///
    /// ```
    /// use deepwell_ir::{Split, SplitOver};
    ///
    /// let columns = Split { dim: 1, place: 1, parts: 2, over: SplitOver::Tensor };
    /// assert_eq!(columns.extract(&[0, 1, 2, 3, 4, 5, 6, 7], &[2, 2]), [2, 3, 6, 7]);
    /// ```
    pub fn extract<T: Copy>(&self, whole: &[T], slice: &[usize]) -> Vec<T> {
        let (own, stride) = self.runs(slice);
        whole
            .chunks_exact(stride)
            .flat_map(|run| &run[self.place * own..][..own])
            .copied()
            .collect()
    }

    /// Copies this rank's slice into its place in the values of the whole.
    pub fn insert<T: Copy>(&self, values: &[T], slice: &[usize], whole: &mut [T]) {
        let (own, stride) = self.runs(slice);
        for (run, values) in whole.chunks_exact_mut(stride).zip(values.chunks_exact(own)) {
            run[self.place * own..][..own].copy_from_slice(values);
        }
    }

    /// Contiguous elements of a slice, and the stride between two such runs in the whole.
    fn runs(&self, slice: &[usize]) -> (usize, usize) {
        let own: usize = slice[self.dim.min(slice.len())..].iter().product();
        (own.max(1), own.max(1) * self.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_make_the_whole_again() {
        for (dim, parts, slice) in [
            (0, 1, vec![3]),
            (0, 2, vec![3]),
            (0, 3, vec![2, 5]),
            (1, 4, vec![3, 2]),
            (1, 2, vec![2, 3, 4]),
            (2, 2, vec![2, 3, 1]),
            (1, 2, vec![0, 3]),
        ] {
            let at = |place| Split { dim, place, parts, over: SplitOver::Tensor };
            let shape = at(0).whole_shape(&slice);
            let elements: usize = shape.iter().product();
            let whole: Vec<usize> = (0..elements).collect();
            let mut again = vec![usize::MAX; elements];
            for place in 0..parts {
                let own = at(place).extract(&whole, &slice);
                assert_eq!(own.len(), slice.iter().product::<usize>());
                at(place).insert(&own, &slice, &mut again);
            }
            assert_eq!(again, whole, "{dim} {parts} {slice:?}");
        }
    }
}
