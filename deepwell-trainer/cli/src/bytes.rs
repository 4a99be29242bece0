//! Amounts of memory on the command line.

const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Reads `2GiB`, `1.5 GB` or `65536`, in bytes rounded down.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let refuse = || {
        format!(
            "expected bytes such as `2GiB`, `512 MiB`, `1.5GB` or `65536`, got `{}`",
            text.trim()
        )
    };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let unit = unit.trim();
    let factor = match UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
        Some(&(_, factor)) => factor,
        None if unit.is_empty() => 1,
        None => return Err(refuse()),
    };
    // Integers stay exact above 2^53.
    let bytes = match number.parse::<u64>() {
        Ok(integer) => integer.checked_mul(factor).ok_or_else(refuse)?,
        Err(_) => {
            let bytes = number.parse::<f64>().map_err(|_| refuse())? * factor as f64;
            if bytes >= u64::MAX as f64 {
                return Err(refuse());
            }
            bytes as u64
        }
    };
    if bytes == 0 { Err(refuse()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn amounts() {
        let check = |text: &str, expected: Option<u64>| assert_eq!(parse(text).ok(), expected);
        check("65536", Some(65_536));
        check("1B", Some(1));
        check("2GiB", Some(2 << 30));
        check(" 512 MiB ", Some(512 << 20));
        check("2gib", Some(2 << 30));
        check("1.5GB", Some(1_500_000_000));
        check("0.5KiB", Some(512));
        check("18446744073709551615", Some(u64::MAX));
        for refused in [
            "",
            "GiB",
            "0",
            "0.0GiB",
            "-1",
            "2 GiB!",
            "2Gi",
            "1e9",
            "1.2.3MB",
            "NaN",
            "99999999TiB",
        ] {
            check(refused, None);
        }
    }
}
