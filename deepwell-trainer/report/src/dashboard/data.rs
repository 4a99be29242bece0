//! The curves of a page as compact JSON.

use std::fmt::Write as _;

use serde_json::json;

use super::model::{Curve, Dashboard, DashboardRun};
use super::thin::thin;

/// Points of the axis of time of a run, at most.
const TIMES_MAX: usize = 200;
/// Events of a run that are marked, at most.
const EVENTS_MAX: usize = 500;

/// Everything that the script draws, safe within a `script` element.
pub(super) fn json(page: &Dashboard, buckets: usize) -> String {
    let mut out = String::from("{\"charts\":[");
    push_list(&mut out, &page.charts, |out, chart| {
        let value = json!({"title": chart.title, "y": chart.y_label, "noisy": chart.is_noisy});
        let _ = write!(out, "{value}");
    });
    out.push_str("],\"runs\":[");
    push_list(&mut out, &page.runs, |out, run| push_run(out, run, buckets));
    out.push_str("]}");
    // `</script>` in a name would end the element.
    out.replace('<', "\\u003c")
}

fn push_list<T>(out: &mut String, items: &[T], mut push: impl FnMut(&mut String, &T)) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        push(out, item);
    }
}

fn push_run(out: &mut String, run: &DashboardRun, buckets: usize) {
    let settings: Vec<String> =
        run.settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let _ = write!(
        out,
        "{{\"name\":{},\"settings\":{},\"tokens\":",
        json!(run.name),
        json!(settings.join(" "))
    );
    push_number(out, run.tokens_per_step.unwrap_or(f64::NAN));
    out.push_str(",\"times\":");
    push_points(out, &every(&run.times, TIMES_MAX));
    let events: Vec<(f64, f64)> = run.event_steps.iter().map(|&step| (step, 0.0)).collect();
    out.push_str(",\"events\":[");
    push_list(out, &every(&events, EVENTS_MAX), |out, point| push_number(out, point.0));
    out.push_str("],\"curves\":[");
    push_list(out, &run.curves, |out, curve| match curve {
        Curve::None => out.push('0'),
        Curve::Points(points) if points.is_empty() => out.push('0'),
        Curve::Points(points) => push_points(out, &thin(points, buckets)),
        Curve::Scaled { chart, factor } => {
            let _ = write!(out, "{{\"of\":{chart},\"by\":");
            push_number(out, *factor);
            out.push('}');
        }
    });
    out.push_str("]}");
}

/// At most `count` points at equal distances, with the first and the last.
fn every(points: &[(f64, f64)], count: usize) -> Vec<(f64, f64)> {
    let step = points.len().div_ceil(count).max(1);
    let mut kept: Vec<(f64, f64)> = points.iter().copied().step_by(step).collect();
    if let Some(&last) = points.last()
        && kept.last() != Some(&last)
    {
        kept.push(last);
    }
    kept
}

/// Points as differences of x, and values.
fn push_points(out: &mut String, points: &[(f64, f64)]) {
    let mut before = 0.0;
    out.push_str("{\"x\":[");
    push_list(out, points, |out, &(x, _)| {
        push_number(out, x - before);
        before = x;
    });
    out.push_str("],\"y\":[");
    push_list(out, points, |out, &(_, y)| push_number(out, y));
    out.push_str("]}");
}

/// A number with five digits, or all digits of a whole number; `null` if not finite.
fn push_number(out: &mut String, value: f64) {
    if !value.is_finite() {
        out.push_str("null");
    } else if value.fract() == 0.0 && value.abs() < 1e15 {
        let _ = write!(out, "{value}");
    } else {
        let short = format!("{value:.4e}").parse().unwrap_or(value);
        let (plain, exponential) = (format!("{short}"), format!("{short:e}"));
        out.push_str(if exponential.len() < plain.len() { &exponential } else { &plain });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, expected) in [
            (0.0, "0"),
            (7e-5, "7e-5"),
            (2.345678901, "2.3457"),
            (-0.000123456, "-1.2346e-4"),
            (123456.0, "123456"),
            (123456.7, "123460"),
            (1e300, "1e300"),
            (f64::NAN, "null"),
            (f64::NEG_INFINITY, "null"),
        ] {
            let mut out = String::new();
            push_number(&mut out, value);
            assert_eq!(out, expected, "{value}");
            serde_json::from_str::<serde_json::Value>(&out).unwrap();
        }
    }

    #[test]
    fn ends_of_the_axis_of_time_stay() {
        let points: Vec<(f64, f64)> = (0..1001).map(|i| (f64::from(i), 0.5)).collect();
        let kept = every(&points, 200);
        assert!(kept.len() <= 201, "{}", kept.len());
        assert_eq!((kept[0].0, kept[kept.len() - 1].0), (0.0, 1000.0));
        assert_eq!(every(&[], 200), []);
    }
}
