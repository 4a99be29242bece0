//! AdamW with moments in eight bits on a CPU, see [`deepwell_precision::moments`].

use deepwell_ir::ops::AdamWCoefficients;
use deepwell_precision::Philox;
use deepwell_precision::moments::{self, BLOCK, BLOCK_BYTES, Moment};
use rayon::prelude::*;

use super::cpu::{Coefficients, update};
use crate::runtime::cpu::parallel::{ELEMENTS_PER_CHUNK, vectorized};

const _: () = assert!(ELEMENTS_PER_CHUNK.is_multiple_of(BLOCK));

/// One step on one parameter, from the coefficients of [`AdamWCoefficients`]. `moments` are blocks
/// of first and second moments, `index` is the parameter's among those of the program.
///
/// # Panics
/// If the lengths differ.
pub fn adamw_fp8(
    param: &mut [f32],
    grad: &[f32],
    moments: [&mut [u8]; 2],
    index: usize,
    weight_decay: f64,
    coefficients: &[f32; AdamWCoefficients::COUNT],
) {
    assert_eq!(param.len(), grad.len(), "`grad` differs in length");
    let bytes = moments::blocks(param.len()) * BLOCK_BYTES;
    assert!(moments.iter().all(|it| it.len() == bytes), "expected {bytes} bytes of each moment");
    let coefficients = Coefficients::from_array(*coefficients);
    if coefficients.step() > 0 {
        let decay = coefficients.decay(weight_decay);
        apply(param, grad, moments, index, decay, coefficients);
    }
}

/// Updates one parameter with blocks of first and second moments. `index` is the parameter's among
/// those of the program.
pub(super) fn apply(
    param: &mut [f32],
    grad: &[f32],
    [first, second]: [&mut [u8]; 2],
    index: usize,
    decay: f32,
    coefficients: Coefficients,
) {
    const CHUNK_BYTES: usize = ELEMENTS_PER_CHUNK / BLOCK * BLOCK_BYTES;
    let random = Philox { seed: coefficients.step(), stream: index as u64 };
    param
        .par_chunks_mut(ELEMENTS_PER_CHUNK)
        .zip(grad.par_chunks(ELEMENTS_PER_CHUNK))
        .zip(first.par_chunks_mut(CHUNK_BYTES))
        .zip(second.par_chunks_mut(CHUNK_BYTES))
        .enumerate()
        .for_each(|(chunk, (((param, grad), first), second))| {
            let begin = chunk * ELEMENTS_PER_CHUNK;
            vectorized(
                #[inline(always)]
                || update_chunk(param, grad, [first, second], (random, begin), decay, coefficients),
            );
        });
}

#[inline(always)]
fn update_chunk(
    param: &mut [f32],
    grad: &[f32],
    [first, second]: [&mut [u8]; 2],
    (random, begin): (Philox, usize),
    decay: f32,
    coefficients: Coefficients,
) {
    let first = first.as_chunks_mut::<BLOCK_BYTES>().0;
    let second = second.as_chunks_mut::<BLOCK_BYTES>().0;
    let blocks = param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK)).zip(first).zip(second);
    for (block, (((param, grad), first), second)) in blocks.enumerate() {
        let (mut m, mut v, mut words) = ([0.0; BLOCK], [0.0; BLOCK], [0; BLOCK]);
        moments::decode(first, Moment::First, &mut m);
        moments::decode(second, Moment::Second, &mut v);
        let len = param.len();
        update(param, grad, &mut m[..len], &mut v[..len], decay, coefficients);
        random.fill((begin + block * BLOCK) as u64, &mut words);
        moments::encode(&m, Moment::First, &words, first);
        moments::encode(&v, Moment::Second, &words, second);
    }
}
