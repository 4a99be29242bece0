//! One training step, as text and as JSON.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::nonfinite;

/// One training step. `Display` is the line on the terminal; the JSON has the same fields.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Number of the step, from 1.
    pub step: u64,
    /// Steps of the whole run.
    pub steps_total: u64,
    /// Mean training loss, nats per token; none of a step without a target.
    #[serde(with = "nonfinite::option")]
    pub loss: Option<f64>,
    /// Norm of all gradients before clipping.
    #[serde(with = "nonfinite")]
    pub grad_norm: f64,
    /// Tokens per second.
    #[serde(with = "nonfinite")]
    pub tokens_per_s: f64,
    /// Achieved fraction of the datasheet's speed, if known: 1 is the full speed.
    pub speed_of_light: Option<f64>,
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = match self.steps_total {
            0 => 100.0,
            total => 100.0 * self.step as f64 / total as f64,
        };
        let loss = self.loss.map_or("none".to_owned(), |loss| format!("{loss:.4}"));
        write!(
            f,
            "step {} [{percent:.1}%] | loss {loss} | grad norm {:.2} | {} tok/s",
            self.step,
            self.grad_norm,
            short(self.tokens_per_s)
        )?;
        match self.speed_of_light {
            Some(share) => write!(f, " | {:.1}% of roofline", 100.0 * share),
            None => Ok(()),
        }
    }
}

/// Three or four digits and a unit: `845`, `10.4k`, `1.23M`.
fn short(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        // Numbers that would round up to the next unit use this unit: 999,960 is 1.00M, not
        // 1000.0k.
        if value >= unit * 0.9999 {
            let value = value / unit;
            let digits = if value < 9.995 { 2 } else { 1 };
            return format!("{value:.digits$}{name}");
        }
    }
    format!("{value:.0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_numbers() {
        for (value, expected) in [
            (0.0, "0"),
            (12.6, "13"),
            (845.0, "845"),
            (999.4, "999"),
            (1000.0, "1.00k"),
            (10_400.0, "10.4k"),
            (999_949.0, "1.00M"),
            (1_234_567.0, "1.23M"),
            (9_999_000.0, "10.0M"),
            (2.5e9, "2.50G"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(short(value), expected, "{value}");
        }
    }

    #[test]
    fn lines() {
        let line = StepLine {
            step: 7,
            steps_total: 2000,
            loss: Some(f64::NAN),
            grad_norm: f64::INFINITY,
            tokens_per_s: 512.0,
            speed_of_light: None,
        };
        assert_eq!(line.to_string(), "step 7 [0.3%] | loss NaN | grad norm inf | 512 tok/s");
        let json = serde_json::to_string(&line).unwrap();
        let expected = [
            r#"{"step":7,"steps_total":2000,"loss":"NaN","grad_norm":"inf","#,
            r#""tokens_per_s":512.0,"speed_of_light":null}"#,
        ];
        assert_eq!(json, expected.concat());
        let none = StepLine { loss: None, ..line };
        assert_eq!(none.to_string(), "step 7 [0.3%] | loss none | grad norm inf | 512 tok/s");
        assert!(serde_json::to_string(&none).unwrap().contains(r#""loss":null"#));
        let back: StepLine = serde_json::from_str(&json).unwrap();
        assert_eq!(back.to_string(), line.to_string());
    }
}
