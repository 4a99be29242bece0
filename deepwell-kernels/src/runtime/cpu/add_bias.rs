//! The bias of a linear layer, which epilogues of GEMMs add as well.

use rayon::prelude::*;

use super::element::Element;
use super::parallel::{chunk_elements, vectorized};

/// Adds `bias`, `[columns]`, to each row of `x`, `[rows, columns]`.
///
/// # Panics
///
/// If `bias` is empty or the length of `x` is not whole rows.
pub fn bias_add_forward_in_place<E: Element>(x: &mut [E], bias: &[E]) {
    let columns = bias.len();
    assert!(columns > 0, "`bias` is empty");
    assert_eq!(x.len() % columns, 0, "`x` is not [rows, columns]");
    x.par_chunks_mut(chunk_elements(columns)).for_each(|x| {
        vectorized(
            #[inline(always)]
            || {
                for x in x.chunks_exact_mut(columns) {
                    for (x, &bias) in x.iter_mut().zip(bias) {
                        *x = E::from_f32(x.to_f32() + bias.to_f32());
                    }
                }
            },
        );
    });
}
