//! What the pass makes of attention for ranks that have a part of each sequence each.

use deepwell_ir::capture::{Gpt2Config, LlamaConfig, ModelFamily, capture, capture_gpt2};
use deepwell_ir::ops::{AttentionHeads, CollectiveKind, KeySource, PartPlaces, Zigzag, seen_keys};
use deepwell_ir::{
    Graph, GroupId, Node, Op, Phase, PrecisionPolicy, Recompute, apply_precision, context_parallel,
    differentiate, mask_documents, recompute,
};

fn graph(rule: Recompute) -> Graph {
    let config =
        LlamaConfig { num_layers: 1, ..LlamaConfig::preset("llama-micro").expect("a preset") };
    let graph = differentiate(&capture(&config).expect("a graph")).expect("gradients");
    let graph = recompute(&graph, rule).expect("again");
    apply_precision(&graph, &PrecisionPolicy::bf16()).expect("precision").0
}

fn of_rank(graph: &Graph, place: usize, ranks: usize) -> Graph {
    context_parallel(graph, (GroupId(0), Zigzag { place, ranks })).expect("a rank's part")
}

/// What goes on by how many places (`k>`), and whose keys a rank attends to, in order.
fn steps(graph: &Graph, phase: Phase) -> String {
    let of = |node: &Node| {
        let what = || node.name.rsplit('.').nth(2).unwrap_or_default().to_string();
        match &node.op {
            Op::Collective(op) => match op.kind {
                CollectiveKind::Shift { by } => Some(format!("{}>{by}", what())),
                _ => None,
            },
            Op::AttentionPart(op) => Some(format!("{:?}", op.keys)),
            Op::AttentionPartBackward(op) => Some(format!("{:?}'", op.keys)),
            Op::MergeAttention(_) => Some("merge".to_string()),
            _ => None,
        }
    };
    let nodes = graph.nodes.iter().filter(|node| node.phase == phase);
    nodes.filter_map(of).collect::<Vec<_>>().join(" ")
}

#[test]
fn keys_go_around_the_ring() {
    let graph = graph(Recompute::None);
    let check = |place, ranks, forward: &str, backward: &str| {
        let part = of_rank(&graph, place, ranks);
        assert_eq!(steps(&part, Phase::Forward), forward, "{place} of {ranks}");
        assert_eq!(steps(&part, Phase::Backward), backward, "{place} of {ranks}");
        let is_left = |node: &Node| {
            matches!(
                node.op,
                Op::Attention(_) | Op::AttentionBackward(_) | Op::Rope(_) | Op::RopeBackward(_)
            )
        };
        assert!(!part.nodes.iter().any(is_left));
        let of_part = part.nodes.iter().filter(|node| matches!(node.op, Op::RopeOfPart(_)));
        // Queries and keys, there and back.
        assert_eq!(of_part.count(), 4);
    };
    check(0, 2, "k>1 v>1 Own Later merge", "k>1 v>1 Own' dk>1 dv>1 Later' dk>1 dv>1");
    check(1, 2, "k>1 v>1 Own Earlier merge", "k>1 v>1 Own' dk>1 dv>1 Earlier' dk>1 dv>1");
    check(
        1,
        3,
        "k>1 v>1 Own k>1 v>1 Earlier Later merge",
        "k>1 v>1 Own' dk>1 dv>1 k>1 v>1 Earlier' dk>1 dv>1 Later' dk>1 dv>1",
    );
}

/// Full recomputation attends once more, and sends keys and values for that, too.
#[test]
fn what_is_computed_again_goes_around_again() {
    let part = of_rank(&graph(Recompute::Full), 0, 2);
    let backward = steps(&part, Phase::Backward);
    assert!(backward.starts_with("k>1 v>1 Own Later merge k>1 v>1 Own'"), "{backward}");
}

/// Over all steps a query sees the keys of its window in the whole sequence, each once.
#[test]
fn windows_of_parts_are_those_of_the_sequence() {
    for (ranks, chunk) in [(1, 4), (2, 1), (2, 8), (3, 5)] {
        let (seq, own) = (2 * ranks * chunk, 2 * chunk);
        for window in [1, 2, chunk, chunk + 1, own, seq - 1, seq, 2 * seq] {
            let heads =
                AttentionHeads { causal: true, window: Some(window), ..AttentionHeads::default() };
            for place in 0..ranks {
                let queries = Zigzag { place, ranks };
                for token in 0..own {
                    let position = queries.position(token, own);
                    let mut seen = Vec::new();
                    for step in 0..ranks {
                        let source = match step {
                            0 => KeySource::Own,
                            step if step <= place => KeySource::Earlier,
                            _ => KeySource::Later,
                        };
                        let places = PartPlaces { queries, keys: (place + ranks - step) % ranks };
                        let keys = seen_keys(&heads, source, Some(places), token, own);
                        seen.extend(keys.map(|key| places.key_tokens().position(key, own)));
                    }
                    seen.sort_unstable();
                    let expected: Vec<usize> =
                        ((position + 1).saturating_sub(window)..=position).collect();
                    assert_eq!(seen, expected, "{window} at {position} of {ranks} x {chunk}");
                }
            }
        }
    }
}

#[test]
fn parts_with_windows_have_places() {
    let micro = LlamaConfig::preset("llama-micro").expect("a preset");
    let (family, sliding_window) = (ModelFamily::Mistral, Some(9));
    let config = LlamaConfig { family, sliding_window, num_layers: 2, ..micro };
    let graph = differentiate(&capture(&config).expect("a graph")).expect("a derivative");
    let graph = apply_precision(&graph, &PrecisionPolicy::bf16()).expect("precision").0;
    let queries = Zigzag { place: 1, ranks: 3 };
    let part = context_parallel(&graph, (GroupId(0), queries)).expect("a part");
    let mut counts = [0; 2];
    let mut check = |heads: &AttentionHeads, keys, places: Option<PartPlaces>, is_back: bool| {
        assert_eq!(heads.window, config.sliding_window);
        let expected = match keys {
            KeySource::Own => 1,
            KeySource::Earlier => 0,
            KeySource::Later => 2,
        };
        assert_eq!(places, Some(PartPlaces { queries, keys: expected }));
        counts[usize::from(is_back)] += 1;
    };
    for node in &part.nodes {
        match &node.op {
            Op::AttentionPart(op) => check(&op.heads, op.keys, op.places, false),
            Op::AttentionPartBackward(op) => check(&op.heads, op.keys, op.places, true),
            _ => {}
        }
    }
    assert_eq!(counts, [3 * config.num_layers; 2]);
}

/// Each token of a sequence is one rank's, and all ranks have equally many scores.
#[test]
fn parts_are_the_sequence_and_equal_in_work() {
    for (ranks, chunk) in [(1, 4), (2, 1), (2, 8), (3, 2), (8, 16)] {
        let seq = 2 * ranks * chunk;
        let tokens: Vec<usize> = (0..2 * seq).collect();
        let mut all = Vec::new();
        let mut scores = Vec::new();
        for place in 0..ranks {
            let part = Zigzag { place, ranks }.part_of(&tokens, seq);
            assert_eq!(part.len(), 2 * 2 * chunk);
            let own = &part[..2 * chunk];
            // Token by token the keys that it sees of the whole sequence are those of all steps.
            for (token, position) in own.iter().enumerate() {
                let seen = (0..ranks).map(|step| {
                    let source = match step {
                        0 => KeySource::Own,
                        step if step <= place => KeySource::Earlier,
                        _ => KeySource::Later,
                    };
                    source.seen(token, 2 * chunk, true)
                });
                assert_eq!(seen.sum::<usize>(), position + 1, "{position} of rank {place}");
            }
            scores.push(own.iter().map(|position| position + 1).sum::<usize>());
            all.extend(part);
        }
        all.sort_unstable();
        assert_eq!(all, tokens);
        assert!(scores.iter().all(|it| *it == scores[0]), "{scores:?}");
    }
}

#[test]
fn what_wants_whole_sequences_is_refused() {
    let check = |graph: &Graph, expected: &str| {
        let part = (GroupId(0), Zigzag { place: 0, ranks: 2 });
        let error = context_parallel(graph, part).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let llama = |name| capture(&LlamaConfig::preset(name).expect("a preset")).expect("a graph");
    let documents = mask_documents(&llama("llama-micro")).expect("documents");
    check(&documents, "for 2 context-parallel ranks: expected joined ones, as a rank has parts");
    let gpt2 = capture_gpt2(&Gpt2Config::preset("gpt2").expect("a preset")).expect("a graph");
    check(&gpt2, "expected rotary positions, which a rank has of its own tokens, got a table of");
}
