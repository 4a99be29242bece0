//! Parameters stored as a part of a tensor of the weight files, or transposed.

use std::ops::Range;

use crate::capture::WeightPacking;

/// Location of a parameter in a tensor of the weight files.
///
/// A weight `[outputs, inputs]` takes some of the outputs of a stored weight: rows of a weight
/// stored as `[outputs, inputs]`, columns of a weight stored as `[inputs, outputs]`. In a stack
/// stored as one tensor, each matrix or vector is a part in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSlice {
    /// The stored tensor, without the `transformer.` prefix of some GPT-2 files.
    pub name: String,
    /// Row-major shape of the stored tensor.
    pub shape: Vec<usize>,
    /// First output (for a vector: element) of the parameter.
    pub start: usize,
    /// Distance between consecutive outputs of the parameter in the stored tensor: 2 if two
    /// projections are interleaved.
    pub step: usize,
    /// Whether the tensor is stored as `[inputs, outputs]`.
    pub transposed: bool,
    /// Whether parameter and stored tensor are both stacked along the first axis.
    pub stacked: bool,
    /// Index of the matrix, if the parameter is a stack of separately stored matrices.
    pub matrix: Option<usize>,
    /// Packing of the stored tensor; `shape` and positions refer to unpacked values.
    pub packing: Option<WeightPacking>,
}

impl StoredSlice {
    /// A parameter stored as is.
    pub fn whole(name: &str, shape: &[usize]) -> StoredSlice {
        let (name, shape) = (name.to_string(), shape.to_vec());
        let (start, step, transposed, stacked) = (0, 1, false, false);
        StoredSlice { name, shape, start, step, transposed, stacked, matrix: None, packing: None }
    }

    /// Matrix `index` of a stack, stored separately and as is.
    pub fn of_stack(name: &str, shape: &[usize], index: usize) -> StoredSlice {
        StoredSlice { matrix: Some(index), ..StoredSlice::whole(name, shape) }
    }

    /// Range of elements in a parameter of shape `shape`, and the shape of these elements.
    ///
    /// ```
    /// use deepwell_ir::capture::StoredSlice;
    ///
    /// let expert = StoredSlice::of_stack("experts.2.w1.weight", &[4, 3], 2);
    /// assert_eq!(expert.elements_of(&[8, 4, 3]), (24..36, &[4, 3][..]));
    /// ```
    pub fn elements_of<'a>(&self, shape: &'a [usize]) -> (Range<usize>, &'a [usize]) {
        match (self.matrix, shape) {
            (Some(index), [_, matrix @ ..]) => {
                let elements: usize = matrix.iter().product();
                (index * elements..(index + 1) * elements, matrix)
            }
            _ => (0..shape.iter().product(), shape),
        }
    }

    /// Extracts the parameter of shape `shape` from the stored tensor's values; `None` if the
    /// lengths do not fit.
    pub fn extract(&self, stored: &[f32], shape: &[usize]) -> Option<Vec<f32>> {
        if stored.len() != self.shape.iter().product::<usize>() {
            return None;
        }
        let places = self.places(shape)?;
        Some(places.map(|at| stored[at]).collect())
    }

    /// Inverse of [`StoredSlice::extract`]: writes the parameter's values into the stored tensor;
    /// `None` if the lengths do not fit.
    pub fn insert(&self, values: &[f32], shape: &[usize], stored: &mut [f32]) -> Option<()> {
        let fits = stored.len() == self.shape.iter().product::<usize>()
            && values.len() == shape.iter().product::<usize>();
        let places = self.places(shape).filter(|_| fits)?;
        for (at, &value) in places.zip(values) {
            stored[at] = value;
        }
        Some(())
    }

    /// Indices of the parameter's elements in the stored tensor, in order.
    fn places(&self, shape: &[usize]) -> Option<impl Iterator<Item = usize> + use<>> {
        let (stack, shape, stored) = if self.stacked {
            let ((&stack, shape), (&stored_stack, stored)) =
                (shape.split_first()?, self.shape.split_first()?);
            (Some(stack).filter(|&stack| stack == stored_stack)?, shape, stored)
        } else {
            (1, shape, self.shape.as_slice())
        };
        let (&outputs, inner) = shape.split_first()?;
        let inputs: usize = inner.iter().product();
        let stored: (usize, usize) = match (self.transposed, stored) {
            (true, &[inputs, outputs]) => (outputs, inputs),
            (true, _) => return None,
            (false, stored) => (*stored.first()?, stored[1..].iter().product()),
        };
        let reach = outputs.checked_sub(1).map_or(Some(0), |last| last.checked_mul(self.step))?;
        let end = self.start.checked_add(reach)?.checked_add(outputs.min(1))?;
        let fits = stored.1 == inputs && end <= stored.0;
        // Strides to the next output, the next input and the next matrix.
        let (step, turn) = if self.transposed { (1, stored.0) } else { (inputs, 1) };
        let (start, every, matrix) = (self.start, self.step, stored.0 * stored.1);
        let row = move |first: usize| (0..inputs).map(move |i| first + i * turn);
        let rows = move |index: usize| {
            (0..outputs).map(move |output| index * matrix + (start + output * every) * step)
        };
        fits.then(|| (0..stack).flat_map(rows).flat_map(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_lie_where_their_outputs_are() {
        for (stored, start, transposed, shape, expected) in [
            (vec![4, 2], 1, false, vec![2, 2], Some(vec![2.0, 3.0, 4.0, 5.0])),
            (vec![2, 4], 1, true, vec![2, 2], Some(vec![1.0, 5.0, 2.0, 6.0])),
            (vec![8], 5, false, vec![3], Some(vec![5.0, 6.0, 7.0])),
            (vec![2, 2, 2], 1, false, vec![1, 2, 2], Some(vec![4.0, 5.0, 6.0, 7.0])),
            // One output, one input too many; vectors are never transposed.
            (vec![4, 2], 3, false, vec![2, 2], None),
            (vec![2, 4], 0, true, vec![2, 3], None),
            (vec![8], 0, true, vec![8], None),
            (vec![4, 2], usize::MAX, false, vec![2, 2], None),
        ] {
            let whole = StoredSlice::whole("w", &stored);
            let slice = StoredSlice { start, transposed, ..whole };
            let values: Vec<f32> = (0..8).map(|value| value as f32).collect();
            assert_eq!(slice.extract(&values, &shape), expected, "{slice:?}");
            let mut back = vec![-1.0; 8];
            let inserted = slice.insert(&expected.clone().unwrap_or_default(), &shape, &mut back);
            assert_eq!(inserted.is_some(), expected.is_some(), "{slice:?}");
            assert_eq!(inserted.and_then(|()| slice.extract(&back, &shape)), expected, "{slice:?}");
            assert_eq!(slice.extract(&values[1..], &shape), None, "{slice:?}");
        }
    }

    /// Two experts in the layout of gpt-oss, with gate and up projection (or biases) interleaved.
    #[test]
    fn slices_of_stacks_take_turns() {
        for (stored, start, step, transposed, shape, expected) in [
            // Two inputs, two outputs, interleaved along the last axis.
            (vec![2, 2, 2], 0, 2, true, vec![2, 1, 2], Some(vec![0.0, 2.0, 4.0, 6.0])),
            (vec![2, 2, 2], 1, 2, true, vec![2, 1, 2], Some(vec![1.0, 3.0, 5.0, 7.0])),
            // Outputs first, as in packed weights.
            (vec![2, 2, 2], 1, 2, false, vec![2, 1, 2], Some(vec![2.0, 3.0, 6.0, 7.0])),
            // A square projection, transposed: the shape alone does not show the transposition.
            (
                vec![2, 2, 2],
                0,
                1,
                true,
                vec![2, 2, 2],
                Some(vec![0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]),
            ),
            (vec![2, 4], 1, 2, false, vec![2, 2], Some(vec![1.0, 3.0, 5.0, 7.0])),
            // One output too many, another number of matrices.
            (vec![2, 4], 1, 2, false, vec![2, 3], None),
            (vec![2, 4], 0, 2, false, vec![1, 2], None),
        ] {
            let whole = StoredSlice::whole("w", &stored);
            let slice = StoredSlice { start, step, transposed, stacked: true, ..whole };
            let values: Vec<f32> = (0..8).map(|value| value as f32).collect();
            assert_eq!(slice.extract(&values, &shape), expected, "{slice:?}");
            let mut back = vec![-1.0; 8];
            let inserted = slice.insert(&expected.clone().unwrap_or_default(), &shape, &mut back);
            assert_eq!(inserted.and_then(|()| slice.extract(&back, &shape)), expected, "{slice:?}");
        }
    }
}
