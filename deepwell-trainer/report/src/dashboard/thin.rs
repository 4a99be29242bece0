//! Thinning of curves.

/// Thins a curve to at most about two points for each of `buckets` equal intervals of x.
///
/// Of each interval the points with the lowest and the highest value stay, in their order, so that
/// every spike stays. The first value that is not finite stays too, as do the first and the last
/// point of the curve. A curve with no more than two points for each interval is returned as it
/// is.
///
/// ```
/// use deepwell_report::thin;
/// let spike = |step: i32| if step == 777 { 9.0 } else { 1.0 };
/// let curve: Vec<(f64, f64)> = (0..1000).map(|step| (f64::from(step), spike(step))).collect();
/// let thinned = thin(&curve, 10);
/// assert!(thinned.len() <= 22 && thinned.contains(&(777.0, 9.0)));
/// ```
pub fn thin(points: &[(f64, f64)], buckets: usize) -> Vec<(f64, f64)> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    let width = (last.0 - first.0) / buckets.max(1) as f64;
    if points.len() <= 2 * buckets || width <= 0.0 {
        return points.to_vec();
    }
    let bucket_of = |point: &(f64, f64)| ((point.0 - first.0) / width) as usize;
    let mut kept = Vec::with_capacity(2 * buckets + 2);
    let mut start = 0;
    for bucket in points.chunk_by(|a, b| bucket_of(a) == bucket_of(b)) {
        let finite = || (0..bucket.len()).filter(|&index| bucket[index].1.is_finite());
        let by_value = |&a: &usize, &b: &usize| bucket[a].1.total_cmp(&bucket[b].1);
        let broken = (0..bucket.len()).find(|&index| !bucket[index].1.is_finite());
        let ends = [
            (start == 0).then_some(0),
            (start + bucket.len() == points.len()).then(|| bucket.len() - 1),
        ];
        let chosen = [finite().min_by(by_value), finite().max_by(by_value), broken];
        let mut indices: Vec<usize> = chosen.into_iter().chain(ends).flatten().collect();
        indices.sort_unstable();
        indices.dedup();
        kept.extend(indices.into_iter().map(|index| bucket[index]));
        start += bucket.len();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thins 1,000 points to ten intervals, with some of the values replaced.
    #[track_caller]
    fn check(spikes: &[(usize, f64)], expected: &[(f64, f64)]) {
        let mut curve: Vec<(f64, f64)> = (0..1000).map(|step| (step as f64, 1.0)).collect();
        for &(step, value) in spikes {
            curve[step].1 = value;
        }
        let thinned = thin(&curve, 10);
        assert!(thinned.len() <= 33, "{} points", thinned.len());
        assert!(thinned.is_sorted_by(|a, b| a.0 < b.0), "{thinned:?}");
        assert_eq!((thinned[0].0, thinned[thinned.len() - 1].0), (0.0, 999.0));
        for point in expected {
            assert!(thinned.contains(point), "{point:?} in {thinned:?}");
        }
    }

    #[test]
    fn spikes_and_breaks_stay() {
        check(&[], &[]);
        check(&[(555, 9.0), (560, -3.0)], &[(555.0, 9.0), (560.0, -3.0)]);
        check(&[(0, 9.0), (999, -3.0)], &[(0.0, 9.0), (999.0, -3.0)]);
        check(&[(1, 9.0), (998, 9.0)], &[(1.0, 9.0), (998.0, 9.0)]);
        let curve: Vec<(f64, f64)> =
            (0..1000).map(|step| (step as f64, if step == 321 { f64::NAN } else { 1.0 })).collect();
        assert!(thin(&curve, 10).iter().any(|point| point.0 == 321.0 && point.1.is_nan()));
    }

    #[test]
    fn short_curves_stay_whole() {
        let curve = [(1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)];
        for (points, buckets) in [(&curve[..0], 10), (&curve[..1], 10), (&curve[..], 2)] {
            let thinned = thin(points, buckets);
            assert_eq!(format!("{thinned:?}"), format!("{points:?}"));
        }
        // Points at one place have no intervals.
        assert_eq!(thin(&[(1.0, 1.0); 9], 2).len(), 9);
    }
}
