//! Layout of block scales for tensor cores and cuBLAS: tiles of 128 rows x 4 scales.
//!
//! One tile holds 512 scales in 512 bytes: of 128 rows x 128 elements if 32 share a scale (E8M0, MX
//! formats), and of 128 rows x 64 elements if 16 do (UE4M3, NVFP4). The layout counts blocks, not
//! elements, and is the same for both. Inside a tile the scale of row `r` and block `k` is at
//!
//! ```text
//! (r % 32) * 16 + (r / 32) * 4 + k        r in 0..128, k in 0..4
//! ```
//!
//! and tiles are ordered along the blocks first. Tile (R, K) starts at byte `512 * (R * ceil(blocks
//! / 4) + K)`. Missing rows and blocks are padded with 0x00, never 0xFF: 0xFF is NaN in E8M0 (as is
//! 0x7F in UE4M3), and NaN times a zero element makes an accumulator NaN. Sources: cuBLAS
//! documentation, "1D block scaling factors layout"; the PTX ISA on `tcgen05.mma` with block
//! scaling.
//!
//! A CTA that quantizes 128 x 128 elements writes one whole tile, whereas plain scales would be a
//! few bytes of a line for each of its rows. So all values of a program have this layout, on every
//! device. The quantizers of this crate write plain scales, which [`tile_in_place`] converts, and
//! files contain plain scales unless tiles are requested.

use crate::error::{QuantizeError, Shape};

/// Rows of one tile.
pub const TILE_ROWS: usize = 128;
/// Scales along the contraction in one tile.
pub const TILE_BLOCKS: usize = 4;
/// Bytes of one tile. On a device, a buffer of tiles must be aligned to 16 bytes.
pub const TILE_BYTES: usize = TILE_ROWS * TILE_BLOCKS;

const _: () = assert!(offset(127, 3, 4) == TILE_BYTES - 1);
const _: () = assert!(offset(0, 4, 5) == TILE_BYTES);

/// Bytes of the tiled form of plain [rows, blocks] scales, full tiles included.
#[must_use]
pub const fn tiled_len(rows: usize, blocks: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * blocks.div_ceil(TILE_BLOCKS) * TILE_BYTES
}

/// Tiles down the rows, tiles along the blocks, and bytes of a tile: the shape of the tiled form.
#[must_use]
pub const fn shape(rows: usize, blocks: usize) -> [usize; 3] {
    [rows.div_ceil(TILE_ROWS), blocks.div_ceil(TILE_BLOCKS), TILE_BYTES]
}

/// Byte offset of the scale of `row` and `block` in the tiled form of [rows, blocks] scales.
#[must_use]
pub const fn offset(row: usize, block: usize, blocks: usize) -> usize {
    let tile = (row / TILE_ROWS) * blocks.div_ceil(TILE_BLOCKS) + block / TILE_BLOCKS;
    let row = row % TILE_ROWS;
    tile * TILE_BYTES + (row % 32) * 16 + (row / 32) * 4 + block % TILE_BLOCKS
}

/// Converts plain row-major [rows, blocks] scales to tiles of [`tiled_len`] bytes. Every byte of
/// `tiles` is written; padding is 0x00.
///
/// ```
/// use deepwell_precision::scale_tiles;
/// let plain = [1, 2, 3, 4, 5, 6]; // 2 rows of 3 scales
/// let mut tiles = vec![0xEE; scale_tiles::tiled_len(2, 3)];
/// scale_tiles::to_tiles(&plain, 2, 3, &mut tiles)?;
/// assert_eq!(tiles[..4], [1, 2, 3, 0]);
/// assert_eq!(tiles[16..20], [4, 5, 6, 0]);
///
/// // NVFP4: 70 columns have 5 scales a row, in two tiles.
/// use deepwell_precision::nvfp4;
/// let plain = vec![0x38; nvfp4::scales_len(2, 70)];
/// let mut tiles = vec![0xEE; scale_tiles::tiled_len(2, 5)];
/// scale_tiles::to_tiles(&plain, 2, 5, &mut tiles)?;
/// assert_eq!((tiles[3], tiles[512], tiles[513]), (0x38, 0x38, 0));
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn to_tiles(
    plain: &[u8],
    rows: usize,
    blocks: usize,
    tiles: &mut [u8],
) -> Result<(), QuantizeError> {
    check(plain.len(), rows, blocks, tiles.len())?;
    tiles.fill(0);
    if blocks == 0 {
        return Ok(());
    }
    for (row, scales) in plain.chunks_exact(blocks).enumerate() {
        for (tile, four) in scales.chunks(TILE_BLOCKS).enumerate() {
            let start = offset(row, tile * TILE_BLOCKS, blocks);
            tiles[start..start + four.len()].copy_from_slice(four);
        }
    }
    Ok(())
}

/// [`to_tiles`] within one buffer of [`tiled_len`] bytes, which begins with the plain scales.
///
/// ```
/// use deepwell_precision::scale_tiles;
/// let mut scales = vec![0xEE; scale_tiles::tiled_len(2, 3)];
/// scales[..6].copy_from_slice(&[1, 2, 3, 4, 5, 6]); // 2 rows of 3 scales
/// scale_tiles::tile_in_place(&mut scales, 2, 3)?;
/// assert_eq!((&scales[..4], &scales[16..20]), (&[1, 2, 3, 0][..], &[4, 5, 6, 0][..]));
/// # Ok::<(), deepwell_precision::QuantizeError>(())
/// ```
///
/// # Errors
///
/// [`QuantizeError::Length`] when the buffer does not fit the shape.
pub fn tile_in_place(scales: &mut [u8], rows: usize, blocks: usize) -> Result<(), QuantizeError> {
    check(rows.saturating_mul(blocks), rows, blocks, scales.len())?;
    if rows == 0 || blocks == 0 {
        return Ok(());
    }
    // From the last 128 rows to the first: tiles never precede their plain scales, nor the plain
    // scales of earlier rows.
    let mut plain = alloc::vec![0; TILE_ROWS * blocks];
    for first in (0..rows).step_by(TILE_ROWS).rev() {
        let count = (rows - first).min(TILE_ROWS);
        let plain = &mut plain[..count * blocks];
        plain.copy_from_slice(&scales[first * blocks..][..count * blocks]);
        let tiles = &mut scales[offset(first, 0, blocks)..][..tiled_len(count, blocks)];
        to_tiles(plain, count, blocks, tiles)?;
    }
    Ok(())
}

/// The inverse of [`to_tiles`]; padding is not read.
///
/// # Errors
///
/// [`QuantizeError::Length`] when a slice does not fit the shape.
pub fn from_tiles(
    tiles: &[u8],
    rows: usize,
    blocks: usize,
    plain: &mut [u8],
) -> Result<(), QuantizeError> {
    check(plain.len(), rows, blocks, tiles.len())?;
    if blocks == 0 {
        return Ok(());
    }
    for (row, scales) in plain.chunks_exact_mut(blocks).enumerate() {
        for (tile, four) in scales.chunks_mut(TILE_BLOCKS).enumerate() {
            let start = offset(row, tile * TILE_BLOCKS, blocks);
            four.copy_from_slice(&tiles[start..start + four.len()]);
        }
    }
    Ok(())
}

fn check(plain: usize, rows: usize, blocks: usize, tiles: usize) -> Result<(), QuantizeError> {
    let shape = Shape::new(rows, blocks)?;
    // Padding must not overflow either.
    let padded = |n: usize, to: usize| n.checked_next_multiple_of(to);
    if blocks > 0 {
        padded(rows, TILE_ROWS)
            .zip(padded(blocks, TILE_BLOCKS))
            .and_then(|(rows, blocks)| rows.checked_mul(blocks))
            .ok_or(QuantizeError::TooLarge { rows, cols: blocks })?;
    }
    shape.expect("plain", rows * blocks, plain)?;
    shape.expect("tiles", tiled_len(rows, blocks), tiles)
}
