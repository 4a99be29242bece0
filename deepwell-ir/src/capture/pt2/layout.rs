//! Layout of a view in its base tensor.
//!
//! Reshaping, permuting, slicing and expanding move no values: only the mapping from coordinates to
//! elements of the base changes. An axis is a list of atoms, outermost first; an atom of size `n`
//! and stride `s` takes `n` steps of `s` elements of the base. A contiguous axis is one atom, an
//! axis of merged heads is two atoms, an expanded axis has stride 0. Lists of atoms are closed
//! under all these ops as long as sizes divide, so views need no copies.

/// Maximum number of elements of a tensor, far more than any model has. The limit keeps sizes and
/// offsets of views from overflowing for any file.
const ELEMENTS_MAX: usize = 1 << 48;

/// Number of elements of a shape, counting an empty axis as size 1; `None` above `elements_max`.
/// The sizes of any subset of the axes then multiply without overflow.
pub(super) fn elements(shape: &[usize], elements_max: usize) -> Option<usize> {
    let known = shape.iter().try_fold(1_usize, |count, &size| count.checked_mul(size.max(1)));
    known.filter(|&count| count <= elements_max)
}

/// Whether a shape is nonempty and within the limit.
pub(super) fn is_plausible(shape: &[usize]) -> bool {
    !shape.contains(&0) && elements(shape, ELEMENTS_MAX).is_some()
}

/// One level of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Atom {
    pub(super) size: usize,
    pub(super) stride: usize,
}

/// A view of a base with row-major elements. No axis is empty, and the view has at most
/// [`ELEMENTS_MAX`] elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    axes: Vec<Vec<Atom>>,
    pub(super) offset: usize,
}

/// Merges contiguous atoms and drops atoms of size 1.
fn normalized(atoms: impl IntoIterator<Item = Atom>) -> Vec<Atom> {
    let mut result: Vec<Atom> = Vec::new();
    for atom in atoms {
        if atom.size == 1 {
            continue;
        }
        match result.last_mut() {
            Some(last) if last.stride == atom.size * atom.stride => {
                *last = Atom { size: last.size * atom.size, stride: atom.stride };
            }
            _ => result.push(atom),
        }
    }
    result
}

/// Resolves a single `-1` in a shape; `None` if the shape does not match `count` elements.
pub(super) fn resolved(shape: &[i64], count: usize) -> Option<Vec<usize>> {
    let known: usize = shape
        .iter()
        .filter(|&&size| size != -1)
        .map(|&size| usize::try_from(size).ok())
        .try_fold(1_usize, |known, size| known.checked_mul(size?))?;
    let open = shape.iter().filter(|&&size| size == -1).count();
    let missing = match open {
        0 if known == count => 0,
        1 if known > 0 && count.is_multiple_of(known) => count / known,
        _ => return None,
    };
    let shape: Vec<usize> =
        shape.iter().map(|&size| if size == -1 { missing } else { size as usize }).collect();
    elements(&shape, ELEMENTS_MAX).map(|_| shape)
}

/// Resolves an axis that may be negative.
pub(super) fn axis(index: i64, rank: usize) -> Option<usize> {
    let index = if index < 0 { index + rank as i64 } else { index };
    usize::try_from(index).ok().filter(|&index| index < rank)
}

impl Layout {
    /// The view of a whole base, whose shape [`is_plausible`].
    pub(super) fn whole(shape: &[usize]) -> Layout {
        let mut stride = 1;
        let mut axes: Vec<Vec<Atom>> = shape
            .iter()
            .rev()
            .map(|&size| {
                let atom = Atom { size, stride };
                stride *= size;
                normalized([atom])
            })
            .collect();
        axes.reverse();
        Layout { axes, offset: 0 }
    }

    pub(super) fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.iter().map(|atom| atom.size).product()).collect()
    }

    pub(super) fn count(&self) -> usize {
        self.shape().iter().product()
    }

    /// The atoms of all axes in one list.
    pub(super) fn flat(&self) -> Vec<Atom> {
        normalized(self.axes.iter().flatten().copied())
    }

    /// Atoms of an axis.
    pub(super) fn atoms(&self, axis: usize) -> &[Atom] {
        &self.axes[axis]
    }

    pub(super) fn rank(&self) -> usize {
        self.axes.len()
    }

    /// Whether the view covers a base of `count` elements in order, in any shape.
    pub(super) fn is_whole(&self, count: usize) -> bool {
        let flat = self.flat();
        let in_order = match flat.as_slice() {
            [] => count == 1,
            [atom] => *atom == Atom { size: count, stride: 1 },
            _ => false,
        };
        in_order && self.offset == 0
    }

    /// The same elements in another shape; `None` if an axis would not be a list of atoms.
    pub(super) fn reshaped(&self, shape: &[i64]) -> Option<Layout> {
        let shape = resolved(shape, self.count())?;
        let mut atoms: std::collections::VecDeque<Atom> = self.flat().into();
        let mut axes = Vec::with_capacity(shape.len());
        for mut size in shape {
            let mut taken = Vec::new();
            while size > 1 {
                let atom = atoms.pop_front()?;
                if size.is_multiple_of(atom.size) {
                    size /= atom.size;
                    taken.push(atom);
                } else if atom.size.is_multiple_of(size) {
                    let inner = atom.size / size;
                    taken.push(Atom { size, stride: atom.stride * inner });
                    atoms.push_front(Atom { size: inner, stride: atom.stride });
                    size = 1;
                } else {
                    return None;
                }
            }
            axes.push(taken);
        }
        Some(Layout { axes, offset: self.offset })
    }

    pub(super) fn permuted(&self, order: &[i64]) -> Option<Layout> {
        let order: Vec<usize> =
            order.iter().map(|&at| axis(at, self.rank())).collect::<Option<_>>()?;
        if order.len() != self.rank() || (0..self.rank()).any(|at| !order.contains(&at)) {
            return None;
        }
        let axes = order.iter().map(|&at| self.axes[at].clone()).collect();
        Some(Layout { axes, offset: self.offset })
    }

    pub(super) fn swapped(&self, first: i64, second: i64) -> Option<Layout> {
        let mut result = self.clone();
        result.axes.swap(axis(first, self.rank())?, axis(second, self.rank())?);
        Some(result)
    }

    /// Broadcast to `shape`; `-1` keeps an axis.
    pub(super) fn expanded(&self, shape: &[i64]) -> Option<Layout> {
        let new = shape.len().checked_sub(self.rank())?;
        let own = self.shape();
        let mut axes = Vec::with_capacity(shape.len());
        for (at, &size) in shape.iter().enumerate() {
            let old = at.checked_sub(new).map(|at| (own[at], &self.axes[at]));
            match (old, size) {
                (Some((_, atoms)), -1) => axes.push(atoms.clone()),
                (Some((own, atoms)), size) if own as i64 == size => axes.push(atoms.clone()),
                (Some((1, _)) | None, size) if size > 0 => {
                    axes.push(normalized([Atom { size: size as usize, stride: 0 }]));
                }
                _ => return None,
            }
        }
        let result = Layout { axes, offset: self.offset };
        let sizes = result.axes.iter().flatten().map(|atom| atom.size);
        elements(&sizes.collect::<Vec<_>>(), ELEMENTS_MAX).map(|_| result)
    }

    pub(super) fn unsqueezed(&self, at: i64) -> Option<Layout> {
        let mut result = self.clone();
        result.axes.insert(axis(at, self.rank() + 1)?, Vec::new());
        Some(result)
    }

    /// Removes the axis `at` if of size 1, or all axes of size 1.
    pub(super) fn squeezed(&self, at: Option<i64>) -> Option<Layout> {
        let at = at.map(|at| axis(at, self.rank()).ok_or(())).transpose().ok()?;
        let shape = self.shape();
        let keeps = |index: usize| shape[index] != 1 || at.is_some_and(|at| at != index);
        let axes = (0..self.rank()).filter(|&index| keeps(index));
        let axes = axes.map(|index| self.axes[index].clone()).collect();
        Some(Layout { axes, offset: self.offset })
    }

    /// Elements `start..end` of an axis; negative bounds count from the end.
    pub(super) fn sliced(&self, at: i64, start: i64, end: i64) -> Option<Layout> {
        let at = axis(at, self.rank())?;
        let size = self.shape()[at] as i64;
        let bound = |index: i64| if index < 0 { index + size } else { index }.clamp(0, size);
        let (start, end) = (bound(start) as usize, bound(end) as usize);
        let mut result = self.clone();
        if (start, end) == (0, size as usize) {
            return Some(result);
        }
        let length = end.checked_sub(start).filter(|&length| length > 0)?;
        let [first, rest @ ..] = self.axes[at].as_slice() else { return None };
        // Only multiples of a whole step of the outermost atom.
        let inner: usize = rest.iter().map(|atom| atom.size).product();
        if !start.is_multiple_of(inner) || !length.is_multiple_of(inner) {
            return None;
        }
        let outer = Atom { size: length / inner, stride: first.stride };
        result.axes[at] = normalized([outer].into_iter().chain(rest.iter().copied()));
        result.offset += start / inner * first.stride;
        Some(result)
    }

    /// Selects one element of an axis and removes the axis.
    pub(super) fn selected(&self, at: i64, index: i64) -> Option<Layout> {
        let at = axis(at, self.rank())?;
        let size = self.shape()[at];
        let index = axis(index, size)? as i64;
        let mut result =
            if size == 1 { self.clone() } else { self.sliced(at as i64, index, index + 1)? };
        result.axes.remove(at);
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Base elements in the order of the view's coordinates.
    fn elements(layout: &Layout) -> Vec<usize> {
        let mut all = vec![layout.offset];
        for atom in layout.axes.iter().flatten() {
            let step = |&at: &usize| (0..atom.size).map(move |index| at + index * atom.stride);
            all = all.iter().flat_map(step).collect();
        }
        all
    }

    #[test]
    fn heads_are_split_swapped_and_merged_again() {
        // [B, S, H·D] to [B, H, S, D] and back.
        let flat = Layout::whole(&[2, 3, 8]);
        let heads = flat.reshaped(&[2, 3, -1, 4]).unwrap().swapped(1, 2).unwrap();
        assert_eq!(heads.shape(), [2, 2, 3, 4]);
        assert_eq!(elements(&heads)[..8], [0, 1, 2, 3, 8, 9, 10, 11]);
        let merged = heads.swapped(1, 2).unwrap().reshaped(&[2, 3, 8]).unwrap();
        assert!(merged.is_whole(48));
        // As one matrix of all heads, and apart again.
        let matrix = heads.reshaped(&[4, 3, 4]).unwrap();
        assert_eq!(elements(&matrix), elements(&heads));
        assert_eq!(matrix.reshaped(&[2, 2, 3, 4]).unwrap(), heads);
    }

    #[test]
    fn slices_are_parts_of_columns() {
        let packed = Layout::whole(&[2, 3, 6]);
        let second = packed.sliced(-1, 2, 4).unwrap();
        assert_eq!(elements(&second)[..6], [2, 3, 8, 9, 14, 15]);
        assert_eq!(
            (second.offset, second.flat()),
            (2, vec![Atom { size: 6, stride: 6 }, Atom { size: 2, stride: 1 },])
        );
        assert_eq!(packed.sliced(2, 4, i64::MAX).unwrap().offset, 4);
        assert_eq!(packed.sliced(2, -6, 6).unwrap(), packed);
        assert_eq!(packed.sliced(2, 3, 3), None);
        assert_eq!(packed.selected(1, -1).unwrap().shape(), [2, 6]);
        assert_eq!(packed.sliced(5, 0, 1), None);
    }

    #[test]
    fn expanded_axes_do_not_step() {
        let keys = Layout::whole(&[2, 3, 4]).unsqueezed(2).unwrap();
        let repeated = keys.expanded(&[-1, 3, 5, 4]).unwrap();
        assert_eq!(repeated.atoms(2), [Atom { size: 5, stride: 0 }]);
        assert_eq!(elements(&repeated)[..8], [0, 1, 2, 3, 0, 1, 2, 3]);
        assert!(!repeated.is_whole(120));
        assert_eq!(keys.squeezed(Some(2)).unwrap(), Layout::whole(&[2, 3, 4]));
        assert_eq!(keys.squeezed(None).unwrap().rank(), 3);
        assert_eq!(keys.expanded(&[2, 2, 1, 4]), None);
    }

    #[test]
    fn shapes_that_do_not_fit_are_no_views() {
        let layout = Layout::whole(&[4, 6]);
        for shape in [vec![5, 5], vec![-1, -1], vec![-1, 7], vec![-2, 12]] {
            assert_eq!(layout.reshaped(&shape), None, "{shape:?}");
        }
        let swapped = layout.swapped(0, 1).unwrap();
        assert_eq!(swapped.reshaped(&[8, 3]), None);
        assert_eq!(swapped.permuted(&[0, 0]), None);
        assert!(swapped.permuted(&[1, 0]).unwrap().is_whole(24));
        assert!(Layout::whole(&[]).is_whole(1));
    }
}
