//! Rectangular regions of a tensor, such as the part of one rank.

use std::ops::Range;

/// A rectangle of elements of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// First element, per dimension.
    pub offset: Vec<usize>,
    /// Sizes, per dimension.
    pub shape: Vec<usize>,
}

impl Region {
    /// The whole of a tensor of this shape.
    #[must_use]
    pub fn whole(shape: &[usize]) -> Region {
        Region { offset: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Splits the elements `range` of a row-major tensor into rectangles, in order, each contiguous
    /// in the tensor. A range of a matrix gives at most three: the end of a row, whole rows, and
    /// the beginning of a row.
    ///
    /// ```
    /// use deepwell_ckpt::Region;
    ///
    /// let regions = Region::of_range(&[4, 10], 7..32);
    /// let offsets: Vec<_> = regions.iter().map(|region| region.offset.clone()).collect();
    /// assert_eq!(offsets, [[0, 7], [1, 0], [3, 0]]);
    /// let shapes: Vec<_> = regions.iter().map(|region| region.shape.clone()).collect();
    /// assert_eq!(shapes, [[1, 3], [2, 10], [1, 2]]);
    /// ```
    ///
    /// # Panics
    /// If the range ends beyond the tensor.
    #[must_use]
    pub fn of_range(shape: &[usize], range: Range<usize>) -> Vec<Region> {
        assert!(range.end <= shape.iter().product(), "{range:?} of {shape:?}");
        let mut regions = Vec::new();
        cut(shape, range, &mut Vec::new(), &mut regions);
        regions
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the region is inside a tensor of this shape.
    pub(crate) fn is_within(&self, shape: &[usize]) -> bool {
        let ends =
            self.offset.iter().zip(&self.shape).map(|(offset, size)| offset.checked_add(*size));
        self.offset.len() == shape.len()
            && self.shape.len() == shape.len()
            && ends.zip(shape).all(|(end, size)| end.is_some_and(|end| end <= *size))
    }

    /// Whether the regions have a common element.
    pub(crate) fn overlaps(&self, other: &Region) -> bool {
        let of = |region: &Region| -> Vec<Range<usize>> {
            let sides = region.offset.iter().zip(&region.shape);
            sides.map(|(&offset, &size)| offset..offset + size).collect()
        };
        of(self).iter().zip(of(other)).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    /// Contiguous elements: the size of the last dimension.
    pub(crate) fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// First element of each row in the tensor, per dimension, in row-major order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Vec<usize>> + '_ {
        let outer = &self.shape[..self.shape.len().saturating_sub(1)];
        let count: usize = if self.elements() == 0 { 0 } else { outer.iter().product() };
        (0..count).map(move |row| {
            let mut at = self.offset.clone();
            let mut rest = row;
            for (dim, size) in outer.iter().enumerate().rev() {
                at[dim] += rest % size;
                rest /= size;
            }
            at
        })
    }

    /// Row-major index in this region of the tensor's element `at`; `None` if outside of the region
    /// in any dimension except the last, which the caller checks.
    pub(crate) fn row_begin(&self, at: &[usize]) -> Option<usize> {
        let mut begin = 0;
        let outer = at.len().saturating_sub(1);
        for ((at, offset), size) in at.iter().zip(&self.offset).zip(&self.shape).take(outer) {
            let within = at.checked_sub(*offset)?;
            if within >= *size {
                return None;
            }
            begin = begin * size + within;
        }
        Some(begin * self.row_elements())
    }
}

/// Adds the rectangles of `range` within the subtensor at index `before`.
fn cut(shape: &[usize], range: Range<usize>, before: &mut Vec<usize>, regions: &mut Vec<Region>) {
    if range.is_empty() {
        return;
    }
    let add =
        |before: &[usize], sides: Range<usize>, inner: &[usize], regions: &mut Vec<Region>| {
            let ones = before.iter().map(|_| 1);
            let zeros = inner.iter().map(|_| 0);
            regions.push(Region {
                offset: before.iter().copied().chain([sides.start]).chain(zeros).collect(),
                shape: ones.chain([sides.len()]).chain(inner.iter().copied()).collect(),
            });
        };
    let Some((_, inner)) = shape.split_first() else {
        regions.push(Region { offset: before.clone(), shape: vec![1; before.len()] });
        return;
    };
    let row: usize = inner.iter().product();
    let (first, last) = (range.start / row, (range.end - 1) / row);
    if first == last && !(range.start.is_multiple_of(row) && range.end.is_multiple_of(row)) {
        before.push(first);
        cut(inner, range.start - first * row..range.end - first * row, before, regions);
        before.pop();
        return;
    }
    if !range.start.is_multiple_of(row) {
        before.push(first);
        cut(inner, range.start % row..row, before, regions);
        before.pop();
    }
    let rows = range.start.div_ceil(row)..range.end / row;
    if !rows.is_empty() {
        add(before, rows.clone(), inner, regions);
    }
    if !range.end.is_multiple_of(row) {
        before.push(rows.end);
        cut(inner, 0..range.end % row, before, regions);
        before.pop();
    }
}

/// Describes why parts do not form a tensor of this shape: missing or overlapping elements.
pub(crate) fn wrong_with(slices: &[Region], shape: &[usize]) -> Option<String> {
    let whole: usize = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size))?;
    if let Some(slice) = slices.iter().find(|slice| !slice.is_within(shape)) {
        return Some(format!("a part {:?} at {:?} of {shape:?}", slice.shape, slice.offset));
    }
    // In the order of the first dimension, only parts that begin before the end of a part overlap
    // it.
    let mut sorted: Vec<&Region> = slices.iter().collect();
    sorted.sort_by_key(|slice| slice.offset.first().copied().unwrap_or(0));
    for (index, slice) in sorted.iter().enumerate() {
        let end = slice.offset.first().map_or(1, |offset| offset + slice.shape[0]);
        let near = sorted[index + 1..].iter();
        let near = near.take_while(|other| other.offset.first().copied().unwrap_or(0) < end);
        if let Some(other) = near.into_iter().find(|other| slice.overlaps(other)) {
            let (a, b) = (&slice.offset, &other.offset);
            return Some(format!("parts at {a:?} and {b:?} of {shape:?} overlap"));
        }
    }
    let covered: usize = slices.iter().map(Region::elements).sum();
    (covered != whole).then(|| format!("parts have {covered} of its {whole} elements"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every range of some shapes the regions have the range's elements, in order.
    #[test]
    fn ranges_are_rectangles() {
        for shape in [vec![], vec![7], vec![3, 4], vec![2, 3, 4], vec![2, 1, 3, 2], vec![1, 5]] {
            let elements: usize = shape.iter().product();
            for start in 0..=elements {
                for end in start..=elements {
                    let regions = Region::of_range(&shape, start..end);
                    let mut seen = Vec::new();
                    let whole = Region::whole(&shape);
                    for region in &regions {
                        assert!(region.is_within(&shape), "{shape:?} {start}..{end}");
                        for row in region.rows() {
                            let begin = whole.row_begin(&row).unwrap();
                            let begin = begin + row.last().copied().unwrap_or(0);
                            seen.extend(begin..begin + region.row_elements());
                        }
                    }
                    assert_eq!(seen, (start..end).collect::<Vec<_>>(), "{shape:?} {start}..{end}");
                    assert!(regions.len() < 2 * shape.len().max(1), "{shape:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn parts_make_up_a_tensor_or_do_not() {
        let check = |shape: &[usize], slices: &[[&[usize]; 2]], expected: Option<&str>| {
            let slices: Vec<Region> = slices
                .iter()
                .map(|[offset, shape]| Region { offset: offset.to_vec(), shape: shape.to_vec() })
                .collect();
            assert_eq!(wrong_with(&slices, shape).as_deref(), expected, "{shape:?} {slices:?}");
        };
        check(&[4, 6], &[[&[0, 0], &[4, 6]]], None);
        check(&[4, 6], &[[&[0, 0], &[4, 2]], [&[0, 2], &[4, 4]]], None);
        check(&[4, 6], &[[&[2, 0], &[2, 6]], [&[0, 3], &[2, 3]], [&[0, 0], &[2, 3]]], None);
        check(&[], &[[&[], &[]]], None);
        check(&[0, 3], &[[&[0, 0], &[0, 3]]], None);
        check(&[4, 6], &[[&[0, 0], &[3, 6]]], Some("parts have 18 of its 24 elements"));
        check(
            &[4, 6],
            &[[&[0, 0], &[3, 6]], [&[2, 5], &[1, 1]], [&[3, 0], &[1, 5]]],
            Some("parts at [0, 0] and [2, 5] of [4, 6] overlap"),
        );
        check(&[4], &[[&[2], &[3]]], Some("a part [3] at [2] of [4]"));
        check(&[4], &[[&[usize::MAX], &[3]]], Some("a part [3] at [18446744073709551615] of [4]"));
        check(&[4], &[[&[0, 0], &[4, 1]]], Some("a part [4, 1] at [0, 0] of [4]"));
    }
}
