//! The state machine of the guards as tables.

use approx::assert_abs_diff_eq;

use super::*;
use GuardEventKind::{BackToLow, NonFiniteStep, Offence, ProbationPassed, ToBf16};

/// Short times, so that a table can show a whole life.
fn config() -> GuardConfig {
    GuardConfig {
        underflow_fraction_max: 0.05,
        strikes_max: 2,
        backoff_steps: 3,
        probation_steps: 4,
        fallbacks_max: 3,
        amax_history_len: 2,
        loss_window: 8,
        loss_warmup: 4,
        nonfinite_steps_max: 3,
        ..GuardConfig::default()
    }
}

fn guards(fallback: Fallback) -> Guards {
    Guards::new(config(), vec!["up".into(), "down".into()], fallback)
}

fn good() -> QuantStats {
    QuantStats { amax: 1.0, elements: 1000, ..QuantStats::default() }
}

fn bad() -> QuantStats {
    QuantStats { underflows: 51, ..good() }
}

fn nonfinite() -> QuantStats {
    QuantStats { nonfinite: 1, underflows: 900, ..good() }
}

/// One step: what layer 1 counted (none while it is in BF16) and a calm loss.
fn step(guards: &mut Guards, step: u64, stats: QuantStats) -> Vec<GuardEventKind> {
    guards.observe_tensor(step, 0, &good());
    if guards.state(1) != Some(LayerState::Bf16 { until_step: None })
        && guards.in_fallback().is_empty()
    {
        guards.observe_tensor(step, 1, &stats);
    }
    guards.observe_loss(step, 2.0, 1.0);
    let events = guards.decide(step).unwrap();
    assert!(events.iter().all(|event| event.layer == "down" && event.step == step));
    // State survives a checkpoint at any boundary.
    let json = serde_json::to_string(guards).unwrap();
    *guards = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_string(guards).unwrap(), json);
    events.into_iter().map(|event| event.kind).collect()
}

#[test]
fn a_whole_life() {
    let mut guards = guards(Fallback::Safe);
    let (b, g) = (bad as fn() -> QuantStats, good as fn() -> QuantStats);
    // Step, what the layer does, what is decided after it.
    for (now, stats, expected) in [
        (1, b, None),
        (2, g, None), // a good step clears the record
        (3, b, None),
        (4, b, Some(ToBf16 { until_step: Some(7), fallbacks: 1 })),
        (5, b, None),
        (6, b, None),
        (7, b, Some(BackToLow { probation_until_step: 11 })),
        (8, g, None),
        (9, b, None),
        (10, b, Some(ToBf16 { until_step: Some(16), fallbacks: 2 })), // relapse: doubled
        (15, b, None),
        (16, b, Some(BackToLow { probation_until_step: 20 })),
        (17, g, None),
        (20, g, Some(ProbationPassed)),
        (21, b, None),
        (22, b, Some(ToBf16 { until_step: None, fallbacks: 3 })), // the last one allowed
        (1000, b, None),
    ] {
        assert_eq!(step(&mut guards, now, stats()), Vec::from_iter(expected), "step {now}");
    }
    assert_eq!(guards.in_fallback(), [1]);
    assert_eq!(guards.events().len(), 6);
    assert_eq!(guards.events()[0].layer, "down");
}

#[test]
fn backoff_starts_again_after_probation() {
    let mut guards = Guards::new(
        GuardConfig { fallbacks_max: 9, ..config() },
        vec!["up".into(), "down".into()],
        Fallback::Safe,
    );
    let mut events = Vec::new();
    for now in 1..=30 {
        let stats = if [1, 2, 12, 13].contains(&now) { bad() } else { good() };
        events.extend(step(&mut guards, now, stats));
    }
    let expected = [
        ToBf16 { until_step: Some(5), fallbacks: 1 },
        BackToLow { probation_until_step: 9 },
        ProbationPassed,
        ToBf16 { until_step: Some(16), fallbacks: 2 },
        BackToLow { probation_until_step: 20 },
        ProbationPassed,
    ];
    assert_eq!(events, expected);
}

#[test]
fn thresholds() {
    let base = good();
    for (stats, expected) in [
        (base, None),
        (QuantStats { underflows: 50, ..base }, None),
        (
            QuantStats { underflows: 51, ..base },
            Some("5.100 % of the elements of a tensor underflowed to zero, more than 5.000 %"),
        ),
        (QuantStats { saturations: 30, ..base }, None),
        (
            QuantStats { saturations: 31, ..base },
            Some("3.100 % of the elements of a tensor saturated, more than 3.000 %"),
        ),
        (
            QuantStats { scale_clamps: 1, ..base }, // one of 32 blocks
            Some("3.125 % of the scales of a tensor fell below 2^-127, more than 1.000 %"),
        ),
        (QuantStats { amax: 65536.0, ..base }, None),
        (
            QuantStats { amax: 65537.0, ..base },
            Some("amax 6.5537e4 is more than 65536 times its median 1e0"),
        ),
        (QuantStats::default(), None),
    ] {
        let mut guards = guards(Fallback::Off);
        for now in 1..=2 {
            assert_eq!(step(&mut guards, now, good()), [], "the history fills");
        }
        let mut reasons = Vec::new();
        for now in 3..=4 {
            guards.observe_tensor(now, 1, &stats);
            reasons.extend(guards.decide(now).unwrap().into_iter().map(|event| event.reason));
        }
        // An outlier of amax is in the history by the second step: its median still is the low one.
        let expected = expected.map(|reason| format!("{reason}, 2 steps in a row"));
        assert_eq!(reasons, Vec::from_iter(expected), "{stats:?}");
    }
}

#[test]
fn strict_is_an_error_and_off_only_records() {
    for (fallback, expected) in [
        (
            Fallback::Strict,
            Err("step 2: layer `down` is not safe in low precision: 5.100 % of the elements of a \
                 tensor underflowed to zero, more than 5.000 %, 2 steps in a row\nhint: \
                 `fallback = \"safe\"` computes it in `bf16` instead, or give it a rule"),
        ),
        (Fallback::Off, Ok(vec![Offence])),
        (Fallback::Safe, Ok(vec![ToBf16 { until_step: Some(5), fallbacks: 1 }])),
    ] {
        let mut guards = guards(fallback);
        step(&mut guards, 1, bad());
        guards.observe_tensor(2, 1, &bad());
        let got = guards.decide(2).map_err(|error| error.to_string());
        let got = got.map(|events| events.into_iter().map(|event| event.kind).collect());
        assert_eq!(got, expected.map_err(str::to_owned), "{fallback}");
        assert_eq!(guards.in_fallback().is_empty(), fallback != Fallback::Safe);
        assert_eq!(guards.events().len(), 1, "recorded under every fallback");
    }
}

#[test]
fn the_first_layer_with_nan_is_responsible() {
    let mut guards = guards(Fallback::Safe);
    step(&mut guards, 1, bad());
    guards.observe_tensor(2, 1, &nonfinite());
    guards.observe_tensor(2, 0, &nonfinite());
    guards.observe_loss(2, f32::NAN, f32::INFINITY);
    let kinds: Vec<_> = guards.decide(2).unwrap().into_iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [NonFiniteStep, ToBf16 { until_step: Some(5), fallbacks: 1 }]);
    assert_eq!(guards.in_fallback(), [1]);
    assert_eq!(guards.events()[0].reason, "the loss is NaN and the gradient norm inf");
    assert_eq!(guards.events()[1].reason, "1 NaN or infinite values were to be quantized");
    // The followers' evidence is gone with the step.
    guards.observe_loss(3, 2.0, 1.0);
    assert_eq!(guards.decide(3).unwrap(), []);
    let json = serde_json::to_string(&guards).unwrap();
    assert_eq!(serde_json::from_str::<Guards>(&json).unwrap(), guards);
}

#[test]
fn nonfinite_steps_in_a_row() {
    let diverged = "step 3: 3 steps in a row were not finite, the last because the gradient norm \
                    is inf\nhint: lower the learning rate, or resume from an earlier checkpoint";
    let alone = "step 1: the gradient norm is inf, and no quantized tensor was to blame";
    for (fallback, expected) in [
        (Fallback::Safe, [None, None, Some(diverged)]),
        (Fallback::Off, [None, None, None]),
        (Fallback::Strict, [Some(alone), Some("step 2"), Some(diverged)]),
    ] {
        let mut guards = guards(fallback);
        for (now, expected) in (1..).zip(expected) {
            guards.observe_loss(now, 2.0, f32::INFINITY);
            let error = guards.decide(now).err().map(|error| error.to_string());
            match expected {
                None => assert_eq!(error, None),
                Some(start) => assert!(error.as_ref().unwrap().starts_with(start), "{error:?}"),
            }
        }
        assert_eq!(guards.events().len(), 3);
        // A finite step ends the row.
        guards.observe_loss(4, 2.0, 1.0);
        assert_eq!(guards.decide(4), Ok(vec![]));
        guards.observe_loss(5, 2.0, f32::NAN);
        assert_eq!(guards.decide(5).is_err(), fallback == Fallback::Strict);
    }
}

#[test]
fn loss_spikes() {
    let noise = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0];
    for (window, loss, expected) in [
        (&noise[..], 2.2, None),
        (&noise[..], 2.5, None), // deviation 0.05, so the limit is 2 + 8 * 1.4826 * 0.05 = 2.593
        (&noise[..], 2.7, Some(2.593_04)),
        (&noise[..3], 9.0, None),      // warm-up
        (&noise[..4], 9.0, Some(2.2)), // deviation 0 (lower of two), 10 % of the median
        (&[2.0; 7][..], 2.19, None),
        (&[2.0; 7][..], 2.21, Some(2.2)),
        (&[2.0, 2.0, 2.0, 2.0, 900.0][..], 3.0, Some(2.2)), // a spike does not raise the limit
        (&[-2.0; 7][..], -1.79, Some(-1.8)),
    ] {
        let mut guards = guards(Fallback::Safe);
        for (now, &loss) in (1..).zip(window) {
            guards.observe_loss(now, loss, 1.0);
            guards.decide(now).unwrap();
        }
        guards.observe_loss(99, loss, 1.0);
        let events = guards.decide(99).unwrap();
        let limit = events.first().map(|event| match event.kind {
            GuardEventKind::LossSpike { limit, .. } => limit,
            kind => panic!("{kind:?}"),
        });
        match (limit, expected) {
            // f32 arithmetic on numbers around two.
            (Some(limit), Some(expected)) => {
                assert_abs_diff_eq!(limit, expected, epsilon = 1e-5);
            }
            _ => assert_eq!(limit, expected, "{window:?} {loss}"),
        }
    }
}

#[test]
fn a_spike_convicts_whoever_has_a_step_against_it() {
    let mut guards = guards(Fallback::Safe);
    for now in 1..=4 {
        assert_eq!(step(&mut guards, now, good()), []);
    }
    guards.observe_tensor(5, 0, &good());
    guards.observe_tensor(5, 1, &bad());
    guards.observe_loss(5, 4.0, 1.0);
    let events = guards.decide(5).unwrap();
    assert_eq!(events[0].reason, "loss 4.0000 is above 2.2000; recent median 2.0000");
    assert_eq!(
        events[1].reason,
        "5.100 % of the elements of a tensor underflowed to zero, more than 5.000 %, in a step \
         whose loss spiked"
    );
    assert_eq!(guards.in_fallback(), [1]);
}

#[test]
fn counters_history_and_the_cap_on_events() {
    let mut guards = guards(Fallback::Off);
    for now in 1..=3 {
        let stats = QuantStats { amax: now as f32, underflows: 1, ..good() };
        guards.observe_tensor(now, 1, &stats);
        guards.observe_tensor(now, 7, &stats); // no such layer
        assert_eq!(guards.decide(now).unwrap(), []);
    }
    let expected = QuantStats { amax: 3.0, elements: 3000, underflows: 3, ..QuantStats::default() };
    assert_eq!(guards.counters(1), Some(&expected));
    assert_eq!(guards.counters(7), None);
    assert_eq!(guards.amax_history(1).collect::<Vec<_>>(), [2.0, 3.0]);
    assert_eq!(guards.amax_history(7).count(), 0);
    assert_eq!(guards.names().collect::<Vec<_>>(), ["up", "down"]);

    for now in 0..EVENTS_MAX as u64 + 5 {
        guards.observe_loss(now, f32::NAN, 1.0);
        assert_eq!(guards.decide(now).unwrap().len(), 1);
    }
    assert_eq!(guards.events().len(), EVENTS_MAX);
    assert_eq!(guards.events_dropped(), 5);
}

/// A spike moves the layers that depart most from what they were, and none where nothing changed.
#[test]
fn a_loss_spike_alone_moves_the_layers_that_stand_out() {
    let base = QuantStats { underflows: 10, ..good() };
    let config = || GuardConfig { underflow_fraction_max: 0.9, ..config() };
    // What three layers count in the step of the spike, as (forward, backward).
    let check = |config: GuardConfig, spiked: [(QuantStats, QuantStats); 3], expected: &[&str]| {
        let names = ["a", "b", "c"].map(String::from).to_vec();
        let mut guards = Guards::new(config, names, Fallback::Safe);
        let mut told = Vec::new();
        for now in 1..=6 {
            let calm = (base, QuantStats { amax: 1e-4, ..base });
            let counted = if now == 6 { spiked } else { [calm; 3] };
            for (layer, (forward, backward)) in counted.iter().enumerate() {
                guards.observe_tensor(now, layer, forward);
                guards.observe_backward_tensor(now, layer, backward);
            }
            guards.observe_loss(now, if now == 6 { 9.0 } else { 2.0 }, 1.0);
            let json = serde_json::to_string(&guards).unwrap();
            guards = serde_json::from_str(&json).unwrap();
            for event in guards.decide(now).unwrap() {
                assert_eq!(now, 6, "{event:?}");
                let is_move = matches!(event.kind, ToBf16 { .. });
                told.extend(is_move.then(|| format!("{}: {}", event.layer, event.reason)));
            }
        }
        let suffix = ", in a step whose loss spiked";
        let expected: Vec<String> = expected.iter().map(|it| format!("{it}{suffix}")).collect();
        assert_eq!(told, expected);
    };
    let (forward, backward) = (base, QuantStats { amax: 1e-4, ..base });
    let calm = (forward, backward);
    check(config(), [calm; 3], &[]);
    let louder = |amax| (QuantStats { amax, ..forward }, backward);
    check(config(), [calm, louder(1.9), calm], &[]);
    check(config(), [calm, louder(4.0), calm], &["b: amax rose from 1e0 to 4e0"]);
    // Half as far in binades is as far as it goes.
    check(
        config(),
        [louder(2.0), louder(16.0), louder(4.0)],
        &["b: amax rose from 1e0 to 1.6e1", "c: amax rose from 1e0 to 4e0"],
    );
    // Gradients have a history of their own, far below that of activations.
    let steep = (forward, QuantStats { amax: 8e-3, ..base });
    check(config(), [steep, calm, calm], &["a: amax of the backward pass rose from 1e-4 to 8e-3"]);
    let vanishing = (QuantStats { underflows: 400, ..forward }, backward);
    check(
        config(),
        [calm, calm, vanishing],
        &["c: underflow to zero rose from 1.000 % to 40.000 %"],
    );
    let clamped = (QuantStats { scale_clamps: 3, ..forward }, backward);
    let lenient = GuardConfig { scale_clamp_fraction_max: 1.0, ..config() };
    check(lenient, [clamped, calm, calm], &["a: clamped scales rose from 0.000 % to 9.375 %"]);
    let clipped = (QuantStats { saturations: 20, ..forward }, backward);
    check(config(), [calm, clipped, calm], &["b: saturation rose from 0.000 % to 2.000 %"]);
    // Another factor.
    let strict = GuardConfig { spike_departure_min: 32.0, ..config() };
    check(strict, [calm, louder(16.0), calm], &[]);
}
