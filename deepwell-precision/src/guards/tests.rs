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

/// One step: what GEMM 1 counted (none while it is in BF16) and a calm loss.
fn step(guards: &mut Guards, step: u64, stats: QuantStats) -> Vec<GuardEventKind> {
    guards.observe_tensor(step, &[0], &good());
    if guards.state(1) != Some(GemmState::Bf16 { until_step: None })
        && guards.in_fallback().is_empty()
    {
        guards.observe_tensor(step, &[1], &stats);
    }
    guards.observe_loss(step, 2.0, 1.0);
    let events = guards.decide(step).unwrap();
    assert!(events.iter().all(|event| event.gemm == "down" && event.step == step));
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
    // Step, what the GEMMs do, what is decided after it.
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
    assert_eq!(guards.events()[0].gemm, "down");
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
            guards.observe_tensor(now, &[1], &stats);
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
            Err("step 2: the GEMMs of `down` are not safe in low precision: 5.100 % of the \
                 elements of a tensor underflowed to zero, more than 5.000 %, 2 steps in a \
                 row\nhint: `fallback = \"safe\"` computes them in `bf16` instead, or give \
                 the weight a rule"),
        ),
        (Fallback::Off, Ok(vec![Offence])),
        (Fallback::Safe, Ok(vec![ToBf16 { until_step: Some(5), fallbacks: 1 }])),
    ] {
        let mut guards = guards(fallback);
        step(&mut guards, 1, bad());
        guards.observe_tensor(2, &[1], &bad());
        let got = guards.decide(2).map_err(|error| error.to_string());
        let got = got.map(|events| events.into_iter().map(|event| event.kind).collect());
        assert_eq!(got, expected.map_err(str::to_owned), "{fallback}");
        assert_eq!(guards.in_fallback().is_empty(), fallback != Fallback::Safe);
        assert_eq!(guards.events().len(), 1, "recorded under every fallback");
    }
}

#[test]
fn the_readers_of_the_first_nan_are_responsible() {
    let mut guards = guards(Fallback::Safe);
    step(&mut guards, 1, bad());
    guards.observe_tensor(2, &[1], &nonfinite());
    guards.observe_tensor(2, &[0], &nonfinite());
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
    guards.observe_tensor(5, &[0], &good());
    guards.observe_tensor(5, &[1], &bad());
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
        guards.observe_tensor(now, &[1], &stats);
        guards.observe_tensor(now, &[7], &stats); // no such GEMM
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

/// A spike moves the GEMMs that depart most from what they were, and none where nothing changed.
#[test]
fn a_loss_spike_alone_moves_the_gemms_that_stand_out() {
    let base = QuantStats { underflows: 10, ..good() };
    let config = || GuardConfig { underflow_fraction_max: 0.9, ..config() };
    // What three GEMMs count in the step of the spike, as (forward, backward).
    let check = |config: GuardConfig, spiked: [(QuantStats, QuantStats); 3], expected: &[&str]| {
        let names = ["a", "b", "c"].map(String::from).to_vec();
        let mut guards = Guards::new(config, names, Fallback::Safe);
        let mut told = Vec::new();
        for now in 1..=6 {
            let calm = (base, QuantStats { amax: 1e-4, ..base });
            let counted = if now == 6 { spiked } else { [calm; 3] };
            for (gemm, (forward, backward)) in counted.iter().enumerate() {
                guards.observe_tensor(now, &[gemm], forward);
                guards.observe_backward_tensor(now, &[gemm], backward);
            }
            guards.observe_loss(now, if now == 6 { 9.0 } else { 2.0 }, 1.0);
            let json = serde_json::to_string(&guards).unwrap();
            guards = serde_json::from_str(&json).unwrap();
            for event in guards.decide(now).unwrap() {
                assert_eq!(now, 6, "{event:?}");
                let is_move = matches!(event.kind, ToBf16 { .. });
                told.extend(is_move.then(|| format!("{}: {}", event.gemm, event.reason)));
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

/// An operand that several GEMMs read counts for each of them, and for no others.
#[test]
fn a_shared_operand_counts_for_all_its_readers() {
    type Seen<'a> = &'a [(&'a [usize], QuantStats)];
    let check = |seen: Seen<'_>, expected: &[&str]| {
        let names = ["q", "k", "v", "o"].map(String::from).to_vec();
        let config = GuardConfig { strikes_max: 1, ..config() };
        let mut guards = Guards::new(config, names, Fallback::Safe);
        for (gemms, stats) in seen {
            guards.observe_tensor(1, gemms, stats);
        }
        guards.observe_loss(1, 2.0, 1.0);
        let moved: Vec<String> =
            guards.decide(1).unwrap().into_iter().map(|event| event.gemm).collect();
        assert_eq!(moved, expected, "{seen:?}");
    };
    check(&[(&[0, 1, 2], good()), (&[3], good())], &[]);
    check(&[(&[0, 1, 2], bad()), (&[3], good())], &["q", "k", "v"]);
    // The weight of one of them, then their input.
    check(&[(&[0], bad()), (&[0, 1, 2], good())], &["q"]);
    check(&[(&[1], good()), (&[0, 1, 2], nonfinite()), (&[3], nonfinite())], &["q", "k", "v"]);
    check(&[(&[3], nonfinite()), (&[0, 1, 2], nonfinite())], &["o"]);
    // What no GEMM reads counts for none, and hides nothing that comes later.
    check(&[(&[], nonfinite()), (&[9], nonfinite()), (&[3], nonfinite())], &["o"]);
}

/// A state of a version that had guards over layers: its GEMMs go on as their layer stood.
#[test]
fn guards_over_layers_become_guards_over_gemms() {
    let mut layers = guards(Fallback::Safe);
    for now in 1..=2 {
        step(&mut layers, now, bad());
    }
    let mut text = serde_json::to_value(&layers).unwrap();
    let state = text.as_object_mut().unwrap();
    let of_layers = state.remove("gemms").unwrap();
    state.insert("layers".to_owned(), of_layers);
    state.remove("is_nonfinite");
    state.insert("nonfinite_layer".to_owned(), serde_json::Value::Null);
    let event = &mut state["events"][0];
    let name = event.as_object_mut().unwrap().remove("gemm").unwrap();
    event["layer"] = name;
    let read: Guards = serde_json::from_value(text).unwrap();
    assert_eq!(read, layers);

    let gemms = [("down.a", Some(1)), ("up.a", Some(0)), ("down.b", Some(1)), ("new", None)];
    let mut guards = read.regrouped(gemms.map(|(name, before)| (name.to_owned(), before)));
    assert_eq!(guards.in_fallback(), [0, 2]);
    assert_eq!(guards.events(), layers.events());
    assert_eq!(guards.counters(0), Some(&QuantStats::default()), "those of all its tensors");
    assert_eq!(guards.amax_history(0).count(), 0);
    let kinds = |events: Vec<GuardEvent>| -> Vec<(String, GuardEventKind)> {
        events.into_iter().map(|event| (event.gemm, event.kind)).collect()
    };
    let back = BackToLow { probation_until_step: 9 };
    let expected = ["down.a", "down.b"].map(|name| (name.to_owned(), back));
    assert_eq!(kinds(guards.decide(5).unwrap()), expected, "they return when their layer would");
}

/// Llama-3.1-405B has 126 layers of 7 GEMMs. Bounded: a decision stands between two steps, which
/// take at least some tens of milliseconds.
#[test]
fn a_decision_over_all_gemms_of_a_large_model_takes_less_than_a_millisecond() {
    let names = (0..126 * 7).map(|index| format!("layers.{index}.weight")).collect();
    let config = GuardConfig { fallbacks_max: 1, ..GuardConfig::default() };
    let mut guards = Guards::new(config, names, Fallback::Safe);
    let times = (1..=200).map(|now| {
        for gemm in 0..126 * 7 {
            guards.observe_tensor(now, &[gemm], &good());
            guards.observe_backward_tensor(now, &[gemm], &good());
        }
        // Each second loss of the second half spikes.
        let spikes = now > 100 && now % 2 == 0;
        guards.observe_loss(now, if spikes { 9.0 } else { 2.0 }, 1.0);
        let begin = std::time::Instant::now();
        let events = guards.decide(now).unwrap();
        let took = begin.elapsed();
        assert_eq!(events.len(), usize::from(spikes), "{now}: {events:?}");
        (spikes, took)
    });
    let times: Vec<_> = times.collect();
    for of_spikes in [false, true] {
        let least = times.iter().filter(|(spikes, _)| *spikes == of_spikes).map(|it| it.1).min();
        std::println!("spike {of_spikes}: {least:?}");
        assert!(least < Some(std::time::Duration::from_millis(1)), "{of_spikes}: {least:?}");
    }
}

/// GEMMs in a format with a tensor scale move to MXFP8, and from there to BF16.
#[test]
fn mxfp8_comes_before_bf16() {
    use GuardEventKind::ToMxfp8;
    let mut guards = guards(Fallback::Safe).with_mxfp8_stage(vec![900, 100]);
    let (b, g) = (bad as fn() -> QuantStats, good as fn() -> QuantStats);
    for (now, stats, expected, format) in [
        (1, b, None, None),
        (2, b, Some(ToMxfp8 { until_step: Some(5), fallbacks: 1 }), Some(Format::MXFP8)),
        (3, g, None, Some(Format::MXFP8)),
        (5, g, Some(BackToLow { probation_until_step: 9 }), None),
        (6, b, None, None),
        (7, b, Some(ToMxfp8 { until_step: Some(13), fallbacks: 2 }), Some(Format::MXFP8)),
        (8, b, None, Some(Format::MXFP8)),
        // MXFP8 does not help.
        (9, b, Some(ToBf16 { until_step: None, fallbacks: 3 }), Some(Format::Bf16)),
    ] {
        assert_eq!(step(&mut guards, now, stats()), Vec::from_iter(expected), "step {now}");
        let moved = Vec::from_iter(format.map(|format| (1, format)));
        assert_eq!(guards.moved(), moved, "step {now}");
    }
}

/// More than a quarter of the FLOPs outside the format ends the run.
#[test]
fn a_format_that_suits_too_few_gemms_is_an_error() {
    for (flops, is_error) in [([751, 249], false), ([749, 251], true)] {
        let mut guards = guards(Fallback::Safe).with_mxfp8_stage(flops.to_vec());
        for now in 1..=2 {
            guards.observe_tensor(now, &[1], &bad());
            guards.observe_loss(now, 2.0, 1.0);
            let decided = guards.decide(now);
            assert_eq!(decided.is_err(), is_error && now == 2, "{flops:?}: {decided:?}");
        }
    }
}

/// Ratios of signal to error: two in a row below 10, or below 40 and a quarter of the median of at
/// least four, are an offence of that weight alone.
#[test]
fn products_with_large_errors_offend() {
    let [calm, low, less, high] = [80.0, 9.0, 15.0, 400.0];
    for (ratios, offence) in [
        (vec![calm, low, calm, low, calm], None),
        (
            vec![calm, low, low],
            Some((3, "fprop has a signal of 9.0 times the error, less than 10")),
        ),
        // No history to compare with.
        (vec![calm, less, less], None),
        (
            vec![calm, calm, calm, calm, less, less],
            Some((6, "fprop has a signal of 15.0 times the error, below 1/4 of its median 80.0")),
        ),
        (vec![calm, calm, calm, calm, 21.0, 21.0], None),
        // The tokens of wgrad correlated before.
        (vec![high, high, high, high, 41.0, 41.0], None),
        // No signal, no error, no number.
        (vec![0.0, 0.0, f64::INFINITY, f64::INFINITY, f64::NAN, f64::NAN], None),
    ] {
        let mut guards = guards(Fallback::Safe);
        let mut events = Vec::new();
        for (now, &ratio) in (1..).zip(&ratios) {
            let (signal, error) = if ratio == f64::INFINITY { (1.0, 0.0) } else { (ratio, 1.0) };
            guards.observe_product(1, GemmKind::Fprop, signal, error);
            // Another GEMM of the weight, and another weight, are calm.
            guards.observe_product(1, GemmKind::Wgrad, calm, 1.0);
            guards.observe_product(0, GemmKind::Fprop, calm, 1.0);
            guards.observe_loss(now, 2.0, 1.0);
            events.extend(guards.decide(now).unwrap());
        }
        let got: Vec<_> =
            events.iter().map(|it| (it.step, it.gemm.as_str(), &*it.reason)).collect();
        let expected = offence.map(|(step, reason)| (step, "down", reason));
        assert_eq!(got, Vec::from_iter(expected), "{ratios:?}");
    }
}

/// Counters that a format with a tensor scale has by design move nothing.
#[test]
fn formats_with_a_tensor_scale_have_limits_of_their_own() {
    let stats = |underflows, saturations, scale_clamps| QuantStats {
        amax: 1.0,
        elements: 1600,
        underflows,
        saturations,
        scale_clamps,
        nonfinite: 0,
    };
    for (stats, offends) in [
        (stats(1400, 100, 30), false),
        (stats(1450, 0, 0), true),
        (QuantStats { nonfinite: 1, ..stats(0, 0, 0) }, true),
    ] {
        let mut guards = guards(Fallback::Safe);
        let operand = Observed { has_tensor_scale: true, ..Observed::default() };
        let mut count = 0;
        for now in 1..=2 {
            guards.observe_operand(now, &[1], &stats, operand);
            guards.observe_loss(now, 2.0, 1.0);
            count += guards.decide(now).unwrap().len();
        }
        assert_eq!(count > 0, offends, "{stats:?}");
    }
}

/// The amax of activations is the largest of the last two steps; other operands do not count, nor
/// do steps that quantize no activation.
#[test]
fn the_amax_of_activations() {
    let mut guards = guards(Fallback::Safe);
    let of = |amax: f32| QuantStats { amax, ..good() };
    for (step, activation, expected) in [
        (1, Some(3.0), 3.0),
        (2, Some(5.0), 5.0),
        (3, None, 5.0),
        (4, Some(2.0), 5.0),
        (5, Some(4.0), 4.0),
    ] {
        guards.observe_tensor(step, &[0, 1], &of(70.0));
        guards.observe_backward_tensor(step, &[0, 1], &of(90.0));
        if let Some(amax) = activation {
            guards.observe_activation(step, &[1], &of(1.0));
            guards.observe_activation(step, &[1], &of(amax));
        }
        guards.observe_loss(step, 2.0, 1.0);
        guards.decide(step).unwrap();
        let json = serde_json::to_string(&guards).unwrap();
        guards = serde_json::from_str(&json).unwrap();
        let amax: Vec<(&str, f32)> = guards.activation_amax().collect();
        assert_eq!(amax, [("down", expected)], "step {step}");
    }
}
