//! The router by hand, by finite differences, and with arguments that do not fit.

use proptest::prelude::*;

use super::*;
use crate::test_support::{check_gradient, dot, settings as config, varied};

#[test]
fn softmax_by_hand() {
    // Scores 1/6, 3/6, 2/6.
    let logits = [1f64.ln(), 3f64.ln(), 2f64.ln()];
    let plain = route(&config(3, 2, RouteScore::Softmax), &logits, None).unwrap();
    assert_eq!(plain.experts(), [1, 2]);
    let expected = [0.5, 1.0 / 3.0];
    assert!(plain.gates().iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-15));

    let settings = Route { normalize: true, scaling: 2.5, ..config(3, 2, RouteScore::Softmax) };
    let scaled = route(&settings, &logits, None).unwrap();
    let expected = [2.5 * 0.6, 2.5 * 0.4];
    assert!(scaled.gates().iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-14));
}

#[test]
fn sigmoid_by_hand() {
    // Scores 3/4, 1/2, 1/4.
    let logits = [3f64.ln(), 0.0, -(3f64.ln())];
    let routing = route(&config(3, 2, RouteScore::Sigmoid), &logits, None).unwrap();
    assert_eq!(routing.experts(), [0, 1]);
    assert!((routing.gates()[0] - 0.75).abs() < 1e-15);
    assert_eq!(routing.gates()[1], 0.5);
}

#[test]
fn the_bias_chooses_but_does_not_weigh() {
    let logits = [3f64.ln(), 0.0, -(3f64.ln())];
    let bias = [0.0, 0.0, 1.0];
    let settings = Route { selection_bias: true, ..config(3, 2, RouteScore::Sigmoid) };
    let routing = route(&settings, &logits, Some(&bias)).unwrap();
    assert_eq!(routing.experts(), [2, 0]);
    assert!((routing.gates()[0] - 0.25).abs() < 1e-15);
    assert!((routing.gates()[1] - 0.75).abs() < 1e-15);
}

/// A gate is the score itself: the choice value less the bias would have lost eight of its digits.
#[test]
fn gates_of_tiny_scores_survive_a_large_bias() {
    // Sigmoids of about 2e-8 and 1e-8; beside a bias of 12 a step of f64 is 1.8e-15.
    let scores = [2e-8, 1e-8];
    let logit = |score: f64| -((1.0 - score) / score).ln();
    let logits = [logit(scores[0]), logit(scores[1]), 4.0];
    let settings =
        Route { selection_bias: true, normalize: true, ..config(3, 2, RouteScore::Sigmoid) };
    let routing = route(&settings, &logits, Some(&[12.0, 12.0, 0.0])).unwrap();
    assert_eq!(routing.experts(), [0, 1]);
    for (gate, score) in routing.gates().iter().zip(scores) {
        // A step of a logit of 18 is 3.6e-15, and DeepSeek adds 1e-20 to the sum.
        assert!((gate - score / 3e-8).abs() < 1e-11, "{gate}");
    }
}

#[test]
fn ties_go_to_the_lower_index() {
    for (logits, expected) in [
        ([1.0f32, 1.0, 1.0, 1.0], [0, 1, 2]),
        ([0.0, 1.0, 0.0, 1.0], [1, 3, 0]),
        ([-5.0, 7.0, 7.0, -5.0], [1, 2, 0]),
        ([0.0, -0.0, 0.0, -0.0], [0, 1, 2]),
    ] {
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            let routing = route(&config(4, 3, score), &logits, None).unwrap();
            assert_eq!(routing.experts(), expected, "{logits:?} {score:?}");
        }
    }
}

#[test]
fn extreme_logits_stay_finite() {
    for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
        for normalize in [false, true] {
            let settings = Route { normalize, ..config(2, 2, score) };
            for logits in [[1e300f64, -1e300], [-1e300, -1e300], [1e300, 1e300], [0.0, 800.0]] {
                let routing = route(&settings, &logits, None).unwrap();
                assert!(routing.gates().iter().all(|g| (0.0..=1.0).contains(g)), "{logits:?}");
                let dlogits = routing.backward(&[1.0, -2.0]).unwrap();
                assert!(dlogits.iter().all(|d| d.is_finite()), "{logits:?}: {dlogits:?}");
            }
        }
    }
}

#[test]
fn no_tokens_give_an_empty_routing() {
    let routing = route::<f32>(&config(3, 2, RouteScore::Softmax), &[], None).unwrap();
    assert_eq!(routing.token_count(), 0);
    assert_eq!(routing.expert_counts(), [0, 0, 0]);
    assert!(routing.backward(&[]).unwrap().is_empty());
}

#[test]
fn backward_agrees_with_finite_differences() {
    for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
        for normalize in [false, true] {
            for (tokens, experts, top_k) in [(1, 1, 1), (4, 5, 1), (3, 8, 3), (2, 4, 4)] {
                let settings = Route {
                    normalize,
                    scaling: 1.7,
                    selection_bias: true,
                    ..config(experts, top_k, score)
                };
                let logits: Vec<f64> =
                    varied(tokens * experts, 5).iter().map(|x| 3.0 * x).collect();
                let bias = varied(experts, 6);
                let dgates = varied(tokens * top_k, 7);
                let routing = route(&settings, &logits, Some(&bias)).unwrap();
                let dlogits = routing.backward(&dgates).unwrap();
                check_gradient("dlogits", &logits, &dlogits, |logits| {
                    let moved = route(&settings, logits, Some(&bias)).unwrap();
                    assert_eq!(moved.experts(), routing.experts(), "the step chose anew");
                    dot(moved.gates(), &dgates)
                });
            }
        }
    }
}

#[test]
fn f32_is_f64_rounded() {
    let settings = Route { normalize: true, ..config(6, 2, RouteScore::Softmax) };
    let narrow: Vec<f32> = varied(30, 9).iter().map(|&x| x as f32).collect();
    let wide: Vec<f64> = narrow.iter().map(|&x| f64::from(x)).collect();
    let (narrow, wide) =
        (route(&settings, &narrow, None).unwrap(), route(&settings, &wide, None).unwrap());
    assert_eq!(narrow.experts(), wide.experts());
    assert!(narrow.gates().iter().zip(wide.gates()).all(|(&n, &w)| n == w as f32));
}

#[test]
fn wrong_arguments_are_named() {
    let settings = config(3, 2, RouteScore::Softmax);
    let nan = route(&settings, &[0.0, 1.0, 2.0, 0.0, f64::NAN, 0.0], None);
    let infinite_bias = [0.0, 0.0, f64::INFINITY];
    let biased = Route { selection_bias: true, ..settings.clone() };
    for (error, expected) in [
        (route(&config(3, 4, settings.score), &[0.0f64; 3], None), "got 4"),
        (route(&config(3, 0, settings.score), &[0.0; 3], None), "got 0"),
        (route(&config(0, 0, settings.score), &[], None), "expected 1 to 0 experts"),
        (route(&settings, &[0.0; 7], None), "expected rows of 3 numbers, got 7"),
        (nan, "`logits`: expected finite numbers, got NaN at row 1, column 1"),
        (route(&biased, &[0.0; 3], Some(&[0.0; 2])), "`selection_bias`: expected 3"),
        (route(&biased, &[0.0; 3], Some(&infinite_bias)), "got inf at row 0, column 2"),
        (route(&biased, &[0.0; 3], None), "expected a selection bias"),
        (route(&settings, &[0.0; 3], Some(&[0.0; 3])), "expected no selection bias"),
        (
            route(&Route { scaling: f64::NAN, ..settings.clone() }, &[0.0; 3], None),
            "expected a scaling over 0, got NaN",
        ),
        (
            route(
                &Route { groups: Some(RouteGroups { count: 2, chosen: 1 }), ..settings.clone() },
                &[0.0; 3],
                None,
            ),
            "expected groups that divide 3 experts, got 2",
        ),
    ] {
        let message = error.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let routing = route(&settings, &[0.0, 1.0, 2.0], None).unwrap();
    assert!(matches!(routing.backward(&[1.0]), Err(MoeError::Length { expected: 2, .. })));
    assert!(matches!(
        routing.backward(&[1.0, f64::NAN]),
        Err(MoeError::NonFinite { row: 0, column: 1, .. })
    ));
}

/// Of 3 groups of 3 experts the 2 whose two best scores have the largest sum are open: the best
/// expert of all stands alone in its group.
#[test]
fn groups_limit_the_choice() {
    let logits = [4.0, -4.0, -4.0, 2.0, 2.0, 2.0, 3.0, 1.0, 1.0];
    let groups = |count, chosen| Route {
        groups: Some(RouteGroups { count, chosen }),
        ..config(9, 3, RouteScore::Sigmoid)
    };
    for (settings, expected) in [
        (config(9, 3, RouteScore::Sigmoid), [0, 6, 3]),
        (groups(3, 3), [0, 6, 3]),
        (groups(3, 2), [6, 3, 4]),
        (groups(3, 1), [3, 4, 5]),
        // Groups of one are as good as their expert.
        (groups(9, 4), [0, 6, 3]),
    ] {
        let routing = route(&settings, &logits, None).unwrap();
        assert_eq!(routing.experts(), expected, "{settings:?}");
    }
    // The bias opens a group and weighs nothing.
    let settings = Route { selection_bias: true, ..groups(3, 1) };
    let bias = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let routing = route(&settings, &logits, Some(&bias)).unwrap();
    assert_eq!(routing.experts(), [1, 2, 0]);
    assert!(routing.gates()[0] < 0.02 && routing.gates()[2] > 0.98);
}

/// A token at a time is the batch at once, and numbers that are not finite end in the gates.
#[test]
fn one_token_at_a_time() {
    let settings = Route { normalize: true, ..config(6, 2, RouteScore::Softmax) };
    let (logits, dgates) = (varied(18, 3), varied(6, 4));
    let routing = route(&settings, &logits, None).unwrap();
    let expected = routing.backward(&dgates).unwrap();
    let mut router = TokenRouter::new::<f64>(&settings, None).unwrap();
    let (mut chosen, mut gates, mut dlogits) = ([0; 2], [0.0; 2], [0.0; 6]);
    for token in 0..3 {
        let row = &logits[token * 6..][..6];
        router.choose(row, &mut chosen, &mut gates);
        assert_eq!(chosen, routing.experts()[token * 2..][..2]);
        assert_eq!(gates, routing.gates()[token * 2..][..2]);
        router.backward(row, &chosen, &dgates[token * 2..][..2], &mut dlogits);
        assert_eq!(dlogits, expected[token * 6..][..6]);
    }
    for value in [f64::NAN, f64::INFINITY] {
        let mut row = [0.0; 6];
        row[3] = value;
        router.choose(&row, &mut chosen, &mut gates);
        assert!(gates.iter().all(|gate| gate.is_nan()), "{gates:?}");
        assert!(chosen[0] != chosen[1] && chosen.iter().all(|&expert| expert < 6));
    }
}

proptest! {
    #[test]
    fn the_chosen_are_the_best_and_distinct(
        (experts, top_k) in (1usize..12).prop_flat_map(|n| (Just(n), 1..=n)),
        seed in any::<u64>(),
        coarse in any::<bool>(),
    ) {
        // Coarse logits make ties common.
        let logits: Vec<f64> = varied(5 * experts, seed)
            .iter()
            .map(|x| if coarse { (2.0 * x).round() } else { 4.0 * x })
            .collect();
        let settings = Route {
            normalize: true,
            ..config(experts, top_k, RouteScore::Softmax)
        };
        let routing = route(&settings, &logits, None).unwrap();
        prop_assert_eq!(routing.expert_counts().iter().sum::<usize>(), 5 * top_k);
        for token in 0..5 {
            let scores = &routing.scores()[token * experts..][..experts];
            let chosen = &routing.experts()[token * top_k..][..top_k];
            let total: f64 = scores.iter().sum();
            prop_assert!((total - 1.0).abs() < 1e-12);
            let gates: f64 = routing.gates()[token * top_k..][..top_k].iter().sum();
            prop_assert!((gates - 1.0).abs() < 1e-12);
            // The order of a stable sort by descending score.
            let mut order: Vec<u32> = (0..experts as u32).collect();
            order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
            prop_assert_eq!(chosen, &order[..top_k]);
        }
    }
}
