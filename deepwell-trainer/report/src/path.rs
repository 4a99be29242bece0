//! A series of values as the path of an SVG: no more points than can be seen.

use std::fmt::Write as _;

/// Points of a path in pixels; `None` breaks the line.
type Pixel = Option<(f64, f64)>;

/// The `d` attribute of a path through `pixels`, which go from left to right.
///
/// Among the points of one pixel column only the first, the lowest, the highest and the last are
/// kept, in order, so that a long run keeps every spike. A single point becomes a dot, visible with
/// round line caps.
pub(crate) fn path_data(pixels: impl Iterator<Item = Pixel>) -> String {
    let mut data = String::new();
    let mut run: Vec<(f64, f64)> = Vec::new();
    for pixel in pixels.chain([None]) {
        match pixel {
            Some(pixel) => run.push(pixel),
            None => {
                push_run(&mut data, &thin(&run));
                run.clear();
            }
        }
    }
    data
}

fn push_run(data: &mut String, run: &[(f64, f64)]) {
    for (i, (x, y)) in run.iter().enumerate() {
        let command = if i == 0 { 'M' } else { 'L' };
        // Writing to a string cannot fail.
        let _ = write!(data, "{command}{} {}", tenths(*x), tenths(*y));
    }
    if run.len() == 1 {
        data.push_str("h0");
    }
}

/// A number with at most one decimal.
pub(crate) fn tenths(value: f64) -> String {
    let text = format!("{value:.1}");
    match text.strip_suffix(".0") {
        Some("-0") => "0".to_owned(),
        Some(whole) => whole.to_owned(),
        None => text,
    }
}

fn thin(run: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut kept = Vec::new();
    let same_column = |a: &(f64, f64), b: &(f64, f64)| a.0.floor() == b.0.floor();
    for column in run.chunk_by(same_column) {
        let by_height = |&a: &usize, &b: &usize| column[a].1.total_cmp(&column[b].1);
        let last = column.len() - 1;
        let lowest = (0..column.len()).min_by(by_height).unwrap_or(0);
        let highest = (0..column.len()).max_by(by_height).unwrap_or(0);
        let mut indices = [0, lowest, highest, last];
        indices.sort_unstable();
        let mut previous = None;
        for index in indices {
            if previous != Some(index) {
                kept.push(column[index]);
            }
            previous = Some(index);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        let check = |pixels: &[Pixel], expected: &str| {
            assert_eq!(path_data(pixels.iter().copied()), expected);
        };
        check(&[], "");
        check(&[Some((1.0, 2.0))], "M1 2h0");
        check(&[Some((1.0, 2.04)), Some((3.26, -0.01))], "M1 2L3.3 0");
        check(
            &[None, Some((1.0, 2.0)), None, None, Some((5.0, 1.0)), Some((6.0, 1.0))],
            "M1 2h0M5 1L6 1",
        );
    }

    #[test]
    fn thinning_keeps_spikes() {
        let run: Vec<(f64, f64)> = (0..100_000)
            .map(|i| (i as f64 / 1000.0, if i == 54_321 { 99.0 } else { (i % 7) as f64 }))
            .collect();
        let kept = thin(&run);
        assert!(kept.len() <= 4 * 100, "{}", kept.len());
        assert!(kept.contains(&run[54_321]));
        assert_eq!((kept.first(), kept.last()), (run.first(), run.last()));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(thin(&run[..1]), &run[..1]);
    }
}
