//! How many rows buffers of experts have with a capacity factor.

use deepwell_ir::ops::{Dispatch, DispatchToRanks, GroupedRows, RowsOf, capacity};
use deepwell_ir::{Binding, Dim};

/// A layer, and the tokens of each of the ranks that have its experts.
#[derive(Clone, Copy, Debug)]
struct Layer {
    tokens: usize,
    experts: usize,
    top_k: usize,
    ranks: usize,
    align: usize,
}

/// Rows of a rank's experts and rows that it sends, of which one rank with all experts has none.
#[derive(Debug, PartialEq)]
struct Rows {
    buffer: usize,
    sent: usize,
}

impl Layer {
    fn rows(&self, capacity_factor: Option<f64>) -> Rows {
        let Layer { tokens, experts, top_k, ranks, align } = *self;
        // Sizes that depend on the tokens, so that nothing is a known number before it is bound.
        let binding = Binding { batch: 1, seq: tokens };
        let grouped = GroupedRows::new(experts / ranks, align);
        let to_ranks = DispatchToRanks { experts, ranks, capacity_factor };
        let sent = to_ranks.rows(Dim::TOKENS, top_k);
        let of_expert = to_ranks.capacity(Dim::TOKENS, top_k).times(ranks);
        let (rows_of, came, capacity_factor) = match ranks {
            1 => (RowsOf::All, Dim::TOKENS, capacity_factor),
            _ => (RowsOf::Sent { of_expert }, sent, None),
        };
        let dispatch = Dispatch { grouped, capacity_factor, rows_of };
        let buffer = dispatch.buffer_rows(came, top_k).expect("tokens one by one");
        let sent = if ranks == 1 { 0 } else { sent.bind(&binding) };
        Rows { buffer: buffer.bind(&binding), sent }
    }

    /// What a kernel gives an expert.
    fn capacity(&self, factor: f64) -> usize {
        let Layer { tokens, experts, top_k, .. } = *self;
        let share = factor * tokens as f64 * top_k as f64 / experts as f64;
        (share.ceil() as usize).min(tokens)
    }
}

#[test]
fn rows_by_hand() {
    let check = |[tokens, experts, top_k, ranks, align]: [usize; 5], factor, buffer, sent| {
        let layer = Layer { tokens, experts, top_k, ranks, align };
        assert_eq!(layer.rows(factor), Rows { buffer, sent }, "{layer:?}, {factor:?}");
    };
    // One rank: 512 for each of eight experts are 4096 pairs; without a factor 8 x 31 more rows.
    let one = [2048, 8, 2, 1, 32];
    check(one, None, 4096 + 256, 0);
    check(one, Some(1.0), 4096, 0);
    check(one, Some(1.25), 4096 + 256, 0);
    check(one, Some(0.5), 2048, 0);
    check(one, Some(1e-300), 8 * 32, 0);
    check(one, Some(1e300), 4096 + 256, 0);
    // 75 % of 33 x 2 / 8 pairs are 7; five times as many as there are tokens are all tokens.
    check([33, 8, 2, 1, 1], Some(0.75), 56, 0);
    check([33, 2, 2, 1, 1], Some(5.0), 66, 0);
    check([0, 8, 2, 1, 32], Some(1.0), 0, 0);
    // Eight ranks with an expert each: all tokens of all ranks, or two in eight of them.
    let mixtral = [4096, 8, 2, 8, 128];
    check(mixtral, None, 8 * 4096, 8 * 4096);
    check(mixtral, Some(1.0), 8 * 1024, 8 * 1024);
    check(mixtral, Some(1.25), 8 * 1280, 8 * 1280);
    check(mixtral, Some(4.0), 8 * 4096, 8 * 4096);
    check(mixtral, Some(100.0), 8 * 4096, 8 * 4096);
    // Two of eight experts on a rank, of which a token has two at most: one and a half shares of
    // ten tokens are four for an expert; more than 2.5 shares want no fewer rows than without.
    check([10, 8, 2, 4, 1], Some(1.5), 4 * 2 * 4, 4 * 2 * 4);
    check([10, 8, 2, 4, 1], Some(4.0), 4 * 2 * 10, 4 * 2 * 10);
    // Each of three ranks has two experts, which get a pair of each rank's token at most.
    check([1, 6, 4, 3, 32], Some(0.01), 2 * 32, 3 * 2);
}

/// A buffer has no more rows than groups that are all full, nor more than without a factor, and as
/// many as any choice of the tokens wants.
#[test]
fn rows_are_between_what_is_wanted_and_what_is_known() {
    const FACTORS: [f64; 12] = [1e-9, 0.1, 0.3, 0.5, 0.9, 1.0, 1.1, 1.25, 1.3333333, 2.0, 4.5, 1e9];
    const LAYERS: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (8, 1, 1),
        (8, 2, 1),
        (8, 2, 2),
        (8, 2, 8),
        (8, 8, 4),
        (6, 4, 3),
        (64, 8, 8),
        (33, 6, 3),
    ];
    for (experts, top_k, ranks) in LAYERS {
        for tokens in [0, 1, 2, 31, 32, 33, 100, 127, 1000, 4096] {
            for align in [1, 32, 128] {
                let layer = Layer { tokens, experts, top_k, ranks, align };
                let without = layer.rows(None);
                for factor in FACTORS {
                    let Rows { buffer, sent } = layer.rows(Some(factor));
                    let what = format!("{layer:?} with {factor}: {buffer} and {sent} rows");
                    assert!(buffer <= without.buffer && sent <= without.sent, "{what}");
                    // Of factors that are no multiple of 2^-16 a pair more.
                    let of_ir = capacity(factor, experts, Dim::fixed(tokens), top_k);
                    let (of_ir, of_kernel) = (of_ir.as_fixed().unwrap(), layer.capacity(factor));
                    let is_exact = (factor * 65_536.0).fract() == 0.0;
                    let slack = usize::from(!is_exact);
                    assert!((of_kernel..=of_kernel + slack).contains(&of_ir), "{what}: {of_ir}");
                    let here = experts / ranks;
                    let full = (ranks * of_ir).next_multiple_of(align) * here;
                    assert!(buffer <= full, "{what}: {full} where all groups are full");
                    assert!(ranks == 1 || sent <= ranks * here * of_ir, "{what}");
                    // All choose the first `top_k` of a rank's experts.
                    let most = ranks * of_kernel;
                    let wanted = most.next_multiple_of(align) * top_k.min(here);
                    assert!(wanted <= buffer, "{what}: {wanted} for all tokens alike");
                }
            }
        }
    }
}
