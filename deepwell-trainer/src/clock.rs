//! Current time as readable text.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the current time in the format of [`utc`].
pub fn utc_now() -> String {
    utc(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Returns the current time in seconds since 1970, to the millisecond.
pub fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as f64 / 1e3
}

/// Seconds since 1970 as `2026-01-31T23:59:59Z`.
pub fn utc(seconds: u64) -> String {
    // Days since 1 March of year 0, in eras of 400 years (the civil calendar's period).
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year_of_era + carry;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let check = |seconds: u64, expected: &str| assert_eq!(utc(seconds), expected);
        check(0, "1970-01-01T00:00:00Z");
        check(951_782_400, "2000-02-29T00:00:00Z");
        check(1_767_225_599, "2025-12-31T23:59:59Z");
        check(1_795_224_688, "2026-11-21T01:31:28Z");
    }
}
