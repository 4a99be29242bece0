//! Limits of the guards that depend on the elements of an operand.

use super::*;
use crate::{ElementFormat, QuantStats};

/// Elements of a small range underflow more, and E2M1 saturates more under the floor rule.
#[test]
fn limits_of_elements() {
    use ElementFormat::{E2M1, E2M3, E3M2, E4M3, E5M2};
    let share = |underflows, saturations| QuantStats {
        amax: 1.0,
        elements: 1000,
        underflows,
        saturations,
        scale_clamps: 0,
        nonfinite: 0,
    };
    for (element, stats, offends) in [
        (E4M3, share(490, 29), false),
        (E4M3, share(510, 0), true),
        (E5M2, share(510, 0), true),
        (E3M2, share(510, 0), true),
        (E3M2, share(0, 31), true),
        (E2M3, share(890, 29), false),
        (E2M3, share(910, 0), true),
        (E2M3, share(0, 31), true),
        (E2M1, share(890, 124), false),
        (E2M1, share(910, 0), true),
        (E2M1, share(0, 126), true),
    ] {
        let config = GuardConfig { strikes_max: 2, ..GuardConfig::default() };
        let mut guards = Guards::new(config, vec!["up".into(), "down".into()], Fallback::Safe);
        let operand = Observed { element, ..Observed::default() };
        let mut count = 0;
        for now in 1..=2 {
            guards.observe_operand(now, &[1], &stats, operand);
            guards.observe_loss(now, 2.0, 1.0);
            count += guards.decide(now).unwrap().len();
        }
        assert_eq!(count > 0, offends, "{element} {stats:?}");
    }
}
