//! Gradients of scores that one launch of a backward stores and the next reads.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use deepwell_ir::ops::AttentionHeads;

use super::cuda::Sizes;
use super::part_tokens::PartTokens;

/// Rows of a tile, of keys or of queries.
pub(super) const TILE_ROWS: usize = 128;
/// Bytes of a stored tile of 128 queries and 128 keys in BF16.
pub(super) const TILE_BYTES: usize = TILE_ROWS * TILE_ROWS * 2;

/// What is stored for the key heads of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    /// Key heads of all sequences, and query heads of each.
    pub(super) key_heads: usize,
    pub(super) group: usize,
    /// Tiles of 128 keys of a sequence.
    pub(super) tiles: usize,
    /// Tiles of queries stored for a tile of keys, unless these are all on and below the diagonal.
    pub(super) band: usize,
    pub(super) causal: bool,
}

impl Stored {
    pub(super) fn of(heads: &AttentionHeads, lse: &[usize]) -> Stored {
        let sizes = Sizes::new(heads, lse);
        let group = sizes.heads / sizes.kv_heads.max(1);
        let tiles = sizes.seq.div_ceil(TILE_ROWS);
        // The keys that 128 queries see through a window. More than half of a row of tiles takes
        // more memory than the triangle.
        let seen = |window: usize| 1 + window.saturating_sub(1).div_ceil(TILE_ROWS);
        let band = heads.window.map(seen).filter(|&band| 2 * band <= tiles).unwrap_or(tiles);
        Stored { key_heads: sizes.key_heads(), group, tiles, band, causal: heads.causal }
    }

    /// What is stored for a part of the keys.
    pub(super) fn of_part(part: &PartTokens) -> Stored {
        let tiles = part.keys.div_ceil(TILE_ROWS);
        let band = part.queries().div_ceil(TILE_ROWS);
        let key_heads = part.sizes.key_heads();
        Stored { key_heads, group: part.group(), tiles, band, causal: part.causal }
    }

    /// Bytes of the tiles of a key head.
    pub(super) fn head_bytes(&self) -> usize {
        let is_triangle = self.causal && self.band == self.tiles;
        let tiles =
            if is_triangle { self.tiles * (self.tiles + 1) / 2 } else { self.tiles * self.band };
        tiles * self.group * TILE_BYTES
    }

    /// Key heads per pair of launches on a GPU of `sms` SMs, with at most `bytes_max` of tiles or
    /// one head: of the counts with few launches, the one with the least time of the launch that
    /// stores. The last tiles of each launch leave SMs idle.
    pub(super) fn heads_of_launch(&self, sms: usize, bytes_max: usize) -> usize {
        let most = (bytes_max / self.head_bytes().max(1)).max(1);
        let fewest = self.key_heads.div_ceil(most).max(1);
        if fewest == 1 {
            return self.key_heads;
        }
        let heads = (fewest..=2 * fewest).map(|launches| self.key_heads.div_ceil(launches));
        let time = |&heads: &usize| {
            let (whole, rest) = (self.key_heads / heads, self.key_heads % heads);
            whole * self.launch_blocks(heads, sms) + self.launch_blocks(rest, sms)
        };
        heads.min_by_key(time).expect("at least two counts")
    }

    /// Time of the launch that stores, for some key heads, in blocks of 64 queries: the longest
    /// tiles first, each to the first free SM. Overheads are measured on an H200: 2 blocks per
    /// tile, 8 per launch.
    pub(super) fn launch_blocks(&self, heads: usize, sms: usize) -> usize {
        const BLOCKS_OF_TILE: usize = 2;
        const OF_TILE: usize = 2;
        const OF_LAUNCH: usize = 8;
        if heads == 0 {
            return 0;
        }
        let mut free_at: BinaryHeap<_> = vec![Reverse(0_usize); sms.max(1)].into();
        for tile in 0..self.tiles {
            let below = if self.causal { self.tiles - tile } else { self.band };
            let blocks = OF_TILE + below.min(self.band) * BLOCKS_OF_TILE * self.group;
            for _ in 0..heads {
                let mut first = free_at.peek_mut().expect("an SM");
                first.0 += blocks;
            }
        }
        OF_LAUNCH + free_at.into_iter().map(|Reverse(at)| at).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::KeySource;

    use super::*;

    #[test]
    fn windows_store_the_tiles_that_queries_see() {
        // (seq, causal, window, tiles of a head)
        for (seq, causal, window, expected) in [
            (0, true, None, 0),
            (1, true, None, 1),
            (129, true, None, 3),
            (129, false, None, 4),
            (1024, true, Some(1), 8),
            (1024, true, Some(2), 16),
            (1024, true, Some(129), 16),
            (1024, true, Some(130), 24),
            (1024, true, Some(385), 32),
            (1024, true, Some(386), 36),
            (1024, true, Some(5000), 36),
            (896, true, Some(386), 28),
        ] {
            let heads = AttentionHeads {
                heads: 4,
                kv_heads: 2,
                head_dim: 64,
                causal,
                window,
                ..AttentionHeads::default()
            };
            let got = Stored::of(&heads, &[3, 4, seq]);
            assert_eq!(got.head_bytes(), expected * 2 * TILE_BYTES, "{seq} {causal} {window:?}");
            assert_eq!(got.key_heads, 6);
        }
    }

    fn stored(key_heads: usize, group: usize, seq: usize, causal: bool) -> Stored {
        let tiles = seq.div_ceil(TILE_ROWS);
        Stored { key_heads, group, tiles, band: tiles, causal }
    }

    #[test]
    fn a_head_has_tiles_on_and_below_the_diagonal() {
        for (group, seq, causal, tiles) in [
            (1, 0, true, 0),
            (1, 1, true, 1),
            (1, 128, false, 1),
            (2, 129, true, 6),
            (2, 129, false, 8),
            (1, 16384, true, 8256),
        ] {
            let got = stored(4, group, seq, causal).head_bytes();
            assert_eq!(got, tiles * TILE_BYTES, "{group} {seq} {causal}");
        }
    }

    #[test]
    fn a_part_has_tiles_of_the_tokens_that_take_part() {
        // (source, seq, tiles of a head, time of the launch on as many SMs as tiles of keys)
        for (source, seq, tiles, blocks) in [
            (KeySource::Own, 256, 3, 8 + 2 + 2 * 2 * 2),
            (KeySource::Earlier, 256, 2, 8 + 2 + 2 * 2 * 2),
            (KeySource::Later, 256, 2, 8 + 2 + 2 * 2),
            (KeySource::Later, 258, 6, 8 + 2 + 2 * 2 * 2),
            (KeySource::Earlier, 1, 0, 8),
        ] {
            let heads = AttentionHeads {
                heads: 4,
                kv_heads: 2,
                head_dim: 128,
                causal: true,
                ..AttentionHeads::default()
            };
            let stored = Stored::of_part(&PartTokens::of(source, &heads, &[3, 4, seq]));
            assert_eq!(stored.head_bytes(), tiles * 2 * TILE_BYTES, "{source:?} {seq}");
            let got = stored.launch_blocks(1, stored.tiles);
            assert_eq!(got, blocks, "{source:?} {seq}");
            assert_eq!(stored.key_heads, 6);
        }
    }

    #[test]
    fn launches_have_heads_that_fill_the_gpu() {
        for (key_heads, group, seq, causal, expected) in [
            (64, 1, 2048, true, 64),
            (16, 1, 16384, true, 4),
            (1, 1, 16384, true, 1),
            (8, 4, 16384, true, 1),
            (0, 1, 2048, true, 0),
        ] {
            let stored = stored(key_heads, group, seq, causal);
            let heads = stored.heads_of_launch(132, 5 << 28);
            assert_eq!(heads, expected, "{key_heads} {group} {seq} {causal}");
        }
        // Three heads leave SMs idle at the end.
        let long = stored(16, 1, 16384, true);
        let per_head = |heads| long.launch_blocks(heads, 132) as f64 / heads as f64;
        assert!(per_head(3) > 1.05 * per_head(4));
    }
}
