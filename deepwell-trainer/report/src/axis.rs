//! Axes: the range of the data, round ticks, and the pixel positions of values.

/// Arrangement of values along an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps for equal differences.
    #[default]
    Linear,
    /// Equal steps for equal ratios. Values that are not positive are omitted.
    Log,
}

impl Scale {
    /// True if the value has a place on the axis.
    pub(crate) fn shows(self, value: f64) -> bool {
        value.is_finite() && (self == Scale::Linear || value > 0.0)
    }

    fn forward(self, value: f64) -> f64 {
        match self {
            Scale::Linear => value,
            Scale::Log => value.log10(),
        }
    }

    fn backward(self, value: f64) -> f64 {
        match self {
            Scale::Linear => value,
            Scale::Log => 10f64.powf(value),
        }
    }
}

/// One axis: values from `low` to `high` are between the pixels `start` and `end`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

impl Axis {
    /// An axis that shows all `values` with `margin`, a share of the range, on both sides. Without
    /// values it extends from 0 to 1 (log: from 0.1 to 1).
    pub(crate) fn new(
        scale: Scale,
        values: impl Iterator<Item = f64>,
        margin: f64,
        start: f64,
        end: f64,
    ) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|&value| scale.shows(value)) {
            low = low.min(scale.forward(value));
            high = high.max(scale.forward(value));
        }
        if low > high {
            (low, high) = if scale == Scale::Log { (-1.0, 0.0) } else { (0.0, 1.0) };
        } else if high - low <= 1e-9 * low.abs().max(high.abs()) {
            // A single value gets some room, also if it is 0.
            let room = if low == 0.0 { 1.0 } else { 0.05 * low.abs() };
            (low, high) = (low - room, high + room);
        } else {
            let room = margin * (high - low);
            (low, high) = (low - room, high + room);
        }
        Self { scale, low, high, start, end }
    }

    /// Pixel position of a value that the scale can show.
    pub(crate) fn pixel(&self, value: f64) -> f64 {
        let share = (self.scale.forward(value) - self.low) / (self.high - self.low);
        self.start + share * (self.end - self.start)
    }

    /// Round values on the axis with their labels, about `count` of them.
    pub(crate) fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        match self.scale {
            Scale::Log if self.high - self.low > 1.0 => self.decades(),
            // Less than one decade: round differences are easier to read than powers of ten.
            _ => {
                let low = self.scale.backward(self.low);
                let high = self.scale.backward(self.high);
                linear_ticks(low, high, count)
            }
        }
    }

    fn decades(&self) -> Vec<(f64, String)> {
        let first = self.low.ceil() as i32;
        let last = self.high.floor() as i32;
        let every = ((last - first) / 6 + 1) as usize;
        (first..=last)
            .step_by(every)
            .map(|power| 10f64.powi(power))
            .map(|value| (value, tick_label(value, value)))
            .collect()
    }
}

/// Multiples of 1, 2 or 5 times a power of ten, about `count` between `low` and `high`.
fn linear_ticks(low: f64, high: f64, count: usize) -> Vec<(f64, String)> {
    let rough = (high - low) / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= rough * 0.999)
        .unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).map(|value| (value, tick_label(value, step))).collect()
}

/// A label with as many digits as the distance to the next tick asks for.
fn tick_label(value: f64, step: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let magnitude = value.abs();
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if magnitude >= unit * 0.9999 && (unit > 1e3 || magnitude >= 9999.0) {
            return format!("{}{name}", with_digits(value / unit, step / unit));
        }
    }
    if magnitude < 1e-3 || step < 1e-4 {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    with_digits(value, step)
}

fn with_digits(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{value:.digits$}");
    // Minus signs as in print.
    text.replace('-', "\u{2212}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, low: f64, high: f64) -> String {
        let axis = Axis::new(scale, [low, high].into_iter(), 0.0, 0.0, 100.0);
        let labels: Vec<String> = axis.ticks(5).into_iter().map(|(_, label)| label).collect();
        labels.join(" ")
    }

    #[test]
    fn ticks_are_round() {
        let check = |scale, low, high, expected| assert_eq!(labels(scale, low, high), expected);
        check(Scale::Linear, 0.0, 1000.0, "0 200 400 600 800 1000");
        check(Scale::Linear, 1.8, 5.6, "2 3 4 5");
        check(Scale::Linear, 1.87, 2.12, "1.90 1.95 2.00 2.05 2.10");
        check(Scale::Linear, -0.004, 0.006, "\u{2212}0.004 \u{2212}0.002 0 0.002 0.004 0.006");
        check(Scale::Linear, 0.0, 250_000.0, "0 50k 100k 150k 200k 250k");
        check(Scale::Linear, 0.0, 2.5e6, "0 500k 1.0M 1.5M 2.0M 2.5M");
        check(Scale::Linear, 0.0, 3e-5, "0 1e-5 2e-5 3e-5");
        check(Scale::Log, 1.8, 5.6, "2 3 4 5");
        check(Scale::Log, 1e-3, 20.0, "0.001 0.01 0.1 1 10");
        check(Scale::Log, 1.0, 1e13, "1 1000 1M 1G 1000G");
        check(Scale::Linear, 7.0, 7.0, "6.8 7.0 7.2");
        check(Scale::Linear, 0.0, 0.0, "\u{2212}1.0 \u{2212}0.5 0 0.5 1.0");
        check(Scale::Linear, f64::NAN, f64::INFINITY, "0 0.2 0.4 0.6 0.8 1.0");
        check(Scale::Log, -1.0, 0.0, "0.2 0.4 0.6 0.8 1.0");
    }

    #[test]
    fn pixels_run_from_start_to_end() {
        let axis = Axis::new(Scale::Linear, [0.0, 10.0].into_iter(), 0.1, 120.0, 0.0);
        assert!((axis.pixel(0.0) - 110.0).abs() < 1e-9 && (axis.pixel(10.0) - 10.0).abs() < 1e-9);
        let axis = Axis::new(Scale::Log, [1.0, 100.0].into_iter(), 0.0, 0.0, 100.0);
        assert!((axis.pixel(10.0) - 50.0).abs() < 1e-9);
    }
}
