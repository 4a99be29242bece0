//! Means over pairs of runs, with their confidence intervals.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, FisherSnedecor, StudentsT};

/// Confidence level of the intervals if pairs are evaluated once.
const CONFIDENCE: f64 = 0.95;

/// Confidence level of each interval if pairs are evaluated twice, after the first half and at the
/// end: both intervals contain the true mean in 95 % of comparisons. Pocock, "Group sequential
/// methods in the design and analysis of clinical trials", Biometrika 64 (1977), table 1: two
/// looks, nominal level 0.0294.
const CONFIDENCE_OF_EACH_LOOK: f64 = 1.0 - 0.0294;

/// The samples use their own deviation if, for the known deviation, a deviation this far above or
/// below has less than this probability.
const OWN_DEVIATION_RISK: f64 = 0.005;

/// Maximum number of pairs that is suggested to settle a verdict.
const PAIRS_MAX: u64 = 1000;

/// The deviation of a pair, recorded from other pairs with the same settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KnownDeviation {
    /// Standard deviation of the gap of a pair, relative.
    pub deviation: f64,
    /// Degrees of freedom: recorded pairs minus the means taken from them.
    pub freedom: u64,
}

/// A mean over pairs. Gaps are relative: 0.01 is one percent.
///
/// ```
/// use deepwell_trainer::parity::Estimate;
/// let estimate = Estimate::of(&[0.0025, 0.0053, 0.0041, 0.0028]);
/// let half_width = estimate.half_width.ok_or("one sample")?;
/// assert!((estimate.mean - 0.003_675).abs() < 1e-12);
/// // Student's t for three degrees of freedom, 3.182, times the standard deviation over 2.
/// assert!((half_width - 3.182 * 0.001_283 / 2.0).abs() < 1e-5);
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Number of pairs.
    pub pairs: u64,
    /// Mean over pairs.
    pub mean: f64,
    /// Standard deviation over pairs, with `pairs - 1` in the denominator; none for one pair.
    pub deviation: Option<f64>,
    /// Half the width of the confidence interval by Student's t; none for one pair.
    pub half_width: Option<f64>,
    /// Confidence level of the interval.
    #[serde(default = "confidence_of_one_look")]
    pub confidence: f64,
    /// The recorded deviation that was pooled with the deviation of these pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooled_with: Option<KnownDeviation>,
}

impl Estimate {
    /// The mean of `samples`, assumed independent and normal; NaN without samples.
    pub fn of(samples: &[f64]) -> Estimate {
        let pairs = samples.len() as u64;
        let mean = samples.iter().sum::<f64>() / pairs as f64;
        let deviation = (pairs > 1).then(|| {
            let squares = samples.iter().map(|sample| (sample - mean).powi(2)).sum::<f64>();
            (squares / (pairs - 1) as f64).sqrt()
        });
        Estimate {
            pairs,
            mean,
            deviation,
            half_width: None,
            confidence: CONFIDENCE,
            pooled_with: None,
        }
        .with_interval()
    }

    /// The mean of `samples` with a deviation known from other samples. The variances are pooled by
    /// their degrees of freedom, unless an F test distinguishes them: then only the samples' own
    /// deviation is used. A single pair has an interval from the known deviation.
    ///
    /// ```
    /// use deepwell_trainer::parity::{Estimate, KnownDeviation};
    /// let known = KnownDeviation { deviation: 0.002, freedom: 30 };
    /// let estimate = Estimate::of_known(&[0.001, 0.003, 0.002], known);
    /// let half_width = estimate.half_width.ok_or("one sample")?;
    /// // The pooled variance is (30 · 4e-6 + 2 · 1e-6) / 32, and t of 32 degrees 2.037.
    /// assert!((half_width - 2.037 * (122e-6_f64 / 32.0 / 3.0).sqrt()).abs() < 1e-6);
    /// # Ok::<(), &str>(())
    /// ```
    pub fn of_known(samples: &[f64], known: KnownDeviation) -> Estimate {
        let own = Estimate::of(samples);
        if own.deviation.is_some_and(|deviation| differs(deviation, own.pairs, known)) {
            return own;
        }
        Estimate { pooled_with: Some(known), ..own }.with_interval()
    }

    /// Returns the same mean with the wider interval for two looks: after half of the pairs, and
    /// after all pairs if the first look leaves the question open.
    pub fn of_each_look(self) -> Estimate {
        Estimate { confidence: CONFIDENCE_OF_EACH_LOOK, ..self }.with_interval()
    }

    fn with_interval(self) -> Estimate {
        let is_known = self.deviation.is_some() || self.pooled_with.is_some();
        let half_width =
            is_known.then(|| self.half_width_of(self.deviation.unwrap_or(0.0), self.pairs));
        Estimate { half_width, ..self }
    }

    /// Half the width of the interval of a mean of `pairs` samples: at least 2 where no recorded
    /// deviation is pooled with theirs.
    fn half_width_of(&self, deviation: f64, pairs: u64) -> f64 {
        let own = (pairs - 1) as f64;
        let (other, other_deviation) =
            self.pooled_with.map_or((0.0, 0.0), |known| (known.freedom as f64, known.deviation));
        let freedom = own + other;
        let variance = (own * deviation.powi(2) + other * other_deviation.powi(2)) / freedom;
        let t = StudentsT::new(0.0, 1.0, freedom).expect("positive degrees of freedom");
        t.inverse_cdf(0.5 + self.confidence / 2.0) * (variance / pairs as f64).sqrt()
    }

    /// Lower end of the interval; minus infinity without an interval.
    pub fn lower(&self) -> f64 {
        self.mean - self.half_width.unwrap_or(f64::INFINITY)
    }

    /// Upper end of the interval; infinity without an interval.
    pub fn upper(&self) -> f64 {
        self.mean + self.half_width.unwrap_or(f64::INFINITY)
    }

    /// Number of pairs, at least two, that would decide on which side of `tolerance` the mean lies,
    /// for the same mean and deviation. None if more than a thousand would be needed, and for a
    /// single pair, which has no deviation.
    pub fn pairs_that_tell(&self, tolerance: f64) -> Option<u64> {
        let deviation = self.deviation?;
        let distance = (tolerance - self.mean).abs();
        (2..=PAIRS_MAX).find(|&pairs| self.half_width_of(deviation, pairs) < distance)
    }
}

fn confidence_of_one_look() -> f64 {
    CONFIDENCE
}

/// Whether the deviation is unlikely for pairs of the `known` deviation, by a two-sided F test.
fn differs(deviation: f64, pairs: u64, known: KnownDeviation) -> bool {
    let ratio = (deviation / known.deviation).powi(2);
    let distribution = FisherSnedecor::new((pairs - 1) as f64, known.freedom as f64)
        .expect("positive degrees of freedom");
    let below = distribution.cdf(ratio);
    below.min(1.0 - below) < OWN_DEVIATION_RISK
}

/// Standard error of the mean gap caused by the finite evaluation set, relative to the loss of the
/// first base. `pairs` holds the losses of base and other, batch by batch; the result is the
/// standard error over batches of the difference averaged over pairs. Runs on the same batches
/// share most of a batch's difficulty, so this error is far below the error of either loss. None
/// for fewer than two batches, or if pairs have different batches.
pub(super) fn evaluation_error_rel(pairs: &[[&[f64]; 2]]) -> Option<f64> {
    let [first, _] = *pairs.first()?;
    let batches = first.len();
    if pairs.iter().flatten().any(|losses| losses.len() != batches) {
        return None;
    }
    let difference = |batch: usize| {
        let of_pair = |[base, other]: &[&[f64]; 2]| other[batch] - base[batch];
        pairs.iter().map(of_pair).sum::<f64>() / pairs.len() as f64
    };
    let differences: Vec<f64> = (0..batches).map(difference).collect();
    let loss = first.iter().sum::<f64>() / batches as f64;
    let deviation = Estimate::of(&differences).deviation?;
    Some(deviation / (batches as f64).sqrt() / loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_by_hand() {
        // Critical values of Student's t from the NIST handbook, table 1.3.6.7.2: 12.706, 4.303,
        // 2.776 for 1, 2 and 4 degrees of freedom.
        for (samples, mean, half_width) in [
            (&[1.0, 3.0][..], 2.0, 12.706),
            (&[1.0, 2.0, 3.0], 2.0, 4.303 / 3f64.sqrt()),
            (&[1.0, 1.0, 1.0], 1.0, 0.0),
            (&[0.0, 1.0, 2.0, 3.0, 4.0], 2.0, 2.776 * 0.5f64.sqrt()),
        ] {
            let estimate = Estimate::of(samples);
            assert_eq!(estimate.mean, mean, "{samples:?}");
            // Half a unit of the last printed digit.
            let got = estimate.half_width.unwrap();
            assert!((got - half_width).abs() <= 6e-4, "{samples:?}: {got}");
        }
        let one = Estimate::of(&[0.1]);
        assert_eq!((one.deviation, one.upper()), (None, f64::INFINITY));
    }

    #[test]
    fn deviations_are_pooled_unless_they_differ() {
        let known = KnownDeviation { deviation: 1.0, freedom: 30 };
        let check = |samples: &[f64], half_width: f64, is_pooled: bool| {
            let estimate = Estimate::of_known(samples, known);
            // Half a unit of the last digit of the table's critical values.
            let got = estimate.half_width.unwrap();
            assert!((got - half_width).abs() <= 6e-4, "{samples:?}: {got}");
            assert_eq!(estimate.pooled_with.is_some(), is_pooled, "{samples:?}");
        };
        // t of 32 and of 30 degrees of freedom: 2.037 and 2.042 (NIST handbook, table 1.3.6.7.2).
        check(&[-1.0, 0.0, 1.0], 2.037 / 3f64.sqrt(), true);
        check(&[-2.0, 0.0, 2.0], 2.037 * (38.0 / 32.0 / 3.0_f64).sqrt(), true);
        check(&[0.5], 2.042, true);
        // F of 2 and 30 degrees of freedom is above 6.35 in 0.5 % of cases (table 1.3.6.7.3
        // has 5.39 for 1 %), and below 0.00501 in as many.
        check(&[-2.6, 0.0, 2.6], 4.303 * 2.6 / 3f64.sqrt(), false);
        check(&[0.0, 0.0, 0.0], 0.0, false);
        check(&[-0.06, 0.0, 0.06], 4.303 * 0.06 / 3f64.sqrt(), false);
    }

    /// Pairs of normal gaps without a true mean, looked at after 3 and after 6: an interval without
    /// zero ends the comparison.
    #[test]
    fn two_looks_err_as_seldom_as_one() {
        const COMPARISONS: usize = 20_000;
        let known = KnownDeviation { deviation: 1.0, freedom: 100_000 };
        let normal = statrs::distribution::Normal::standard();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut sample = || {
            // Constants of Knuth's linear congruential generator (MMIX).
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            normal.inverse_cdf(((state >> 11) as f64 + 0.5) / 2f64.powi(53))
        };
        let errs = |samples: &[f64]| {
            let estimate = Estimate::of_known(samples, known).of_each_look();
            estimate.lower() > 0.0 || estimate.upper() < 0.0
        };
        let wrong = (0..COMPARISONS).filter(|_| {
            let gaps: Vec<f64> = (0..6).map(|_| sample()).collect();
            errs(&gaps[..3]) || errs(&gaps)
        });
        let share = wrong.count() as f64 / COMPARISONS as f64;
        // Four standard errors of the share. Two intervals of 95 % err in 8.3 %.
        let error = 4.0 * (0.05 * 0.95 / COMPARISONS as f64).sqrt();
        assert!((share - 0.05).abs() < error, "{share}");
    }

    #[test]
    fn the_number_of_pairs_that_tell() {
        let estimate = |mean: f64, deviation: f64| Estimate {
            pairs: 4,
            mean,
            deviation: Some(deviation),
            half_width: None,
            confidence: CONFIDENCE,
            pooled_with: None,
        };
        for (estimate, tolerance, expected) in [
            // t(1) = 12.7: two pairs only decide for distances of at least nine deviations.
            (estimate(0.0, 0.1), 1.0, Some(2)),
            (estimate(0.0, 1.0), 1.0, Some(7)),
            (estimate(2.0, 1.0), 1.0, Some(7)),
            (estimate(0.0, 0.0), 1.0, Some(2)),
            (estimate(1.0, 1.0), 1.0, None),
            (estimate(0.99, 1.0), 1.0, None),
            (Estimate::of(&[0.5]), 1.0, None),
        ] {
            assert_eq!(estimate.pairs_that_tell(tolerance), expected, "{estimate:?}");
        }
    }

    #[test]
    fn what_both_runs_find_hard_is_no_error() {
        let check = |pairs: &[[&[f64]; 2]], expected: Option<f64>| {
            let error = evaluation_error_rel(pairs);
            let is_near = |(error, expected): (f64, f64)| (error - expected).abs() < 1e-6;
            assert!(error == expected || error.zip(expected).is_some_and(is_near), "{error:?}");
        };
        // Batches differ by integer nats, the runs by 0.1 on each batch.
        let base = [1.0, 5.0, 3.0, 3.0];
        let shifted = base.map(|loss| loss + 0.1);
        check(&[[&base, &shifted]], Some(0.0));
        let uneven = [1.1, 5.0, 3.1, 3.0];
        // Deviation of (0.1, 0, 0.1, 0) is 0.0577, over two and over a loss of 3.
        check(&[[&base, &uneven]], Some(0.057_735 / 2.0 / 3.0));
        // A difference common to two pairs stays, opposite differences cancel.
        check(&[[&base, &uneven], [&base, &uneven]], Some(0.057_735 / 2.0 / 3.0));
        check(&[[&base, &uneven], [&base, &[1.0, 5.1, 3.0, 3.1]]], Some(0.0));
        check(&[[&base, &shifted[..3]]], None);
        check(&[[&base, &shifted], [&base[..2], &shifted[..2]]], None);
        check(&[[&base[..1], &shifted[..1]]], None);
        check(&[], None);
    }
}
