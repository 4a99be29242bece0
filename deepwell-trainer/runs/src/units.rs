//! Numbers as text.

/// Bytes with a binary unit: `4.53 MiB`.
pub(crate) fn bytes(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { 2 };
    format!("{value:.digits$} {}", units[unit])
}

/// A count with a decimal unit: `1.23M`.
pub(crate) fn count(value: f64) -> String {
    for (unit, name) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")] {
        if value >= unit * 0.99999 {
            let unit = if name == "k" { 1e3 } else { unit };
            return format!("{:.3}{name}", Significant(value / unit, 3));
        }
    }
    format!("{value:.0}")
}

/// A share as a percentage: `41.2 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// `12.3 s`, `4 min 10 s`, `3 h 5 min`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// A number with so many significant digits, for numbers of 1 to 9999.
struct Significant(f64, usize);

impl std::fmt::Display for Significant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let before = self.0.abs().max(1.0).log10().floor() as usize + 1;
        write!(f, "{:.*}", self.1.saturating_sub(before), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        let check = |text: String, expected: &str| assert_eq!(text, expected);
        check(bytes(0.0), "0 B");
        check(bytes(4_745_408.0), "4.53 MiB");
        check(bytes(150e9), "140 GiB");
        check(count(591.03), "591");
        check(count(9_999.0), "9999");
        check(count(12_345.0), "12.3k");
        check(count(999_999.0), "1.00M");
        check(count(640e6), "640M");
        check(count(1.3e12), "1.30T");
        check(percent(0.41234), "41.2 %");
        check(duration(59.4), "59.4 s");
        check(duration(250.0), "4 min 10 s");
        check(duration(11_100.0), "3 h 5 min");
    }
}
