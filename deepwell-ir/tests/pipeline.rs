//! A graph in stages: what crosses the cuts, what each stage has, and what cannot be cut.

use deepwell_ir::capture::{LlamaConfig, capture};
use deepwell_ir::ops::{Collective, CollectiveKind};
use deepwell_ir::{
    Graph, GroupId, Op, Phase, PrecisionPolicy, Recompute, TensorKind, apply_precision,
    cut_pipeline, differentiate, recompute,
};

const GROUP: GroupId = GroupId(0);

fn graph(layers: usize, tie_word_embeddings: bool) -> Graph {
    let micro = LlamaConfig::preset("llama-micro").unwrap();
    capture(&LlamaConfig { num_layers: layers, tie_word_embeddings, ..micro }).unwrap()
}

fn transfers(graph: &Graph, phase: Phase) -> Vec<(&str, u32)> {
    let of_phase = graph.nodes.iter().filter(|node| node.phase == phase);
    let transfer = |op: &Op| match op {
        Op::Collective(Collective { kind: CollectiveKind::Send { to }, .. }) => Some(("send", *to)),
        Op::Collective(Collective { kind: CollectiveKind::Recv { from, .. }, .. }) => {
            Some(("recv", *from))
        }
        _ => None,
    };
    of_phase.filter_map(|node| transfer(&node.op)).collect()
}

/// The stages of a model after all passes.
fn stages(layers: &[usize], tied: bool, rule: Recompute) -> (Graph, Vec<Graph>) {
    let (cut_graph, cut) =
        cut_pipeline(&graph(layers.iter().sum(), tied), layers, (GROUP, layers.len())).unwrap();
    let backward = recompute(&differentiate(&cut_graph).unwrap(), rule).unwrap();
    let (whole, _) = apply_precision(&backward, &PrecisionPolicy::mxfp8()).unwrap();
    let of = |stage| cut.part(&whole, &[stage]).unwrap();
    let stages = (0..layers.len() as u32).map(of).collect();
    (whole, stages)
}

#[test]
fn stages_receive_and_send_once_each_way() {
    let (forward, backward) = (Phase::Forward, Phase::Backward);
    for rule in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let (whole, stages) = stages(&[1, 2, 1], false, rule);
        assert_eq!(transfers(&stages[0], forward), [("send", 1)]);
        assert_eq!(transfers(&stages[0], backward), [("recv", 1)]);
        assert_eq!(transfers(&stages[1], forward), [("recv", 0), ("send", 2)]);
        assert_eq!(transfers(&stages[1], backward), [("recv", 2), ("send", 0)]);
        assert_eq!(transfers(&stages[2], forward), [("recv", 1)]);
        assert_eq!(transfers(&stages[2], backward), [("send", 1)]);
        // Each node is in one stage, and each parameter.
        let names = |graphs: &[&Graph]| -> Vec<String> {
            let mut names: Vec<String> = graphs
                .iter()
                .flat_map(|graph| graph.nodes.iter().map(|node| node.name.clone()))
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(&stages.iter().collect::<Vec<_>>()), names(&[&whole]), "{rule}");
        let parameters: u64 = stages.iter().map(Graph::parameter_count).sum();
        assert_eq!(parameters, whole.parameter_count());
        let losses: Vec<bool> = stages.iter().map(|stage| stage.loss.is_some()).collect();
        assert_eq!(losses, [false, false, true]);
    }
}

/// Parameters, gradients and copies of a table that two stages have are on both.
#[test]
fn a_tied_table_is_on_the_first_and_the_last_stage() {
    let (_, stages) = stages(&[1, 1, 1], true, Recompute::None);
    let has = |stage: &Graph| {
        let table = stage.find("model.embed_tokens.weight");
        let copy = stage.find("model.embed_tokens.weight.bf16");
        let gradient = stage.parameter_gradients().iter().any(|(parameter, _)| {
            Some(*parameter) == table
                && matches!(stage.tensor(*parameter).kind, TensorKind::Parameter { .. })
        });
        (table.is_some(), copy.is_some(), gradient)
    };
    assert_eq!(has(&stages[0]), (true, true, true));
    assert_eq!(has(&stages[1]), (false, false, false));
    assert_eq!(has(&stages[2]), (true, true, true));
    let (_, cut) = cut_pipeline(&graph(3, true), &[1, 1, 1], (GROUP, 3)).unwrap();
    assert_eq!(cut.stages_with("model.embed_tokens.weight"), [0, 2]);
    assert_eq!(cut.owner("model.embed_tokens.weight"), Some(0));
    // The table and the nine of a layer; in the middle nine, at the end nine and a norm.
    assert_eq!(cut.parameters_of_largest_stage(), 10);
}

#[test]
fn what_cannot_be_cut_is_named() {
    let check = |graph: &Graph, layers: &[usize], expected: &str| {
        let error = cut_pipeline(graph, layers, (GROUP, layers.len())).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let whole = graph(3, false);
    check(&whole, &[1, 1], "expected stages of at least 1 layer each, 3 together, got [1, 1]");
    check(&whole, &[0, 3], "expected stages of at least 1 layer each, 3 together, got [0, 3]");
    let (cut, _) = cut_pipeline(&whole, &[1, 2], (GROUP, 2)).unwrap();
    check(&cut, &[1, 2], "expected a graph that is not cut yet, got one with");
    // A norm that two stages in the middle share.
    let mut shared = graph(4, false);
    let gain = |graph: &Graph, layer: usize| {
        graph.find(&format!("model.layers.{layer}.input_layernorm.weight")).unwrap()
    };
    let (first, second) = (gain(&shared, 1), gain(&shared, 2));
    for input in shared.nodes.iter_mut().flat_map(|node| &mut node.inputs) {
        if *input == second {
            *input = first;
        }
    }
    check(&shared, &[2, 1, 1], "of the first and the last, got `model.layers.1.input_layernorm");
}
