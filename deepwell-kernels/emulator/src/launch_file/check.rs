//! Consistency checks of a launch file.

use super::file::{Argument, Buffer, Distribution, Expectation, LaunchFile, TensorMap};

impl LaunchFile {
    /// Checks that the parts of the document are consistent.
    pub(super) fn check(&self) -> Result<(), String> {
        for (name, axes) in [("grid", &self.grid), ("block", &self.block)] {
            if !(1..=3).contains(&axes.len()) {
                return Err(format!("`{name}`: expected 1 to 3 numbers, got {}", axes.len()));
            }
        }
        if self.cluster.len() > 3 {
            return Err(format!("`cluster`: expected 1 to 3 numbers, got {}", self.cluster.len()));
        }
        let mut known: Vec<&str> = Vec::new();
        for buffer in &self.buffers {
            if known.contains(&buffer.name.as_str()) {
                return Err(format!("buffer `{}` is there twice", buffer.name));
            }
            known.push(&buffer.name);
            check_buffer(buffer).map_err(|what| format!("buffer `{}`: {what}", buffer.name))?;
            if !self.programmatic && !buffer.written_before.is_empty() {
                return Err(format!(
                    "buffer `{}`: `written_before` is for launches with `programmatic = true`",
                    buffer.name
                ));
            }
        }
        let mut maps: Vec<&str> = Vec::new();
        for map in &self.tensor_maps {
            if maps.contains(&map.name.as_str()) {
                return Err(format!("tensor map `{}` is there twice", map.name));
            }
            maps.push(&map.name);
            check_map(map, &known).map_err(|what| format!("tensor map `{}`: {what}", map.name))?;
        }
        for (index, argument) in self.arguments.iter().enumerate() {
            check_argument(argument, &known, &maps)
                .map_err(|what| format!("argument {}: {what}", index + 1))?;
        }
        for expectation in &self.expectations {
            check_expectation(expectation, &known)?;
        }
        Ok(())
    }
}

fn one_of(kind: &str, name: &str, known: &[&str]) -> Result<(), String> {
    if known.contains(&name) {
        return Ok(());
    }
    let known: Vec<String> = known.iter().map(|known| format!("`{known}`")).collect();
    match known.is_empty() {
        true => Err(format!("expected a {kind}, and there are none, got `{name}`")),
        false => Err(format!("expected one of the {kind}s {}, got `{name}`", known.join(", "))),
    }
}

fn check_buffer(buffer: &Buffer) -> Result<(), String> {
    let contents = [
        ("file", buffer.file.is_some()),
        ("random", buffer.random.is_some()),
        ("fill", buffer.fill.is_some()),
    ];
    let given: Vec<&str> = contents.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
    if given.len() > 1 {
        return Err(format!("expected one of `file`, `random` and `fill`, got {given:?}"));
    }
    if buffer.shape.is_some() && buffer.bytes.is_some() {
        return Err("expected `shape` or `bytes`, got both".to_owned());
    }
    if buffer.file.is_none() && buffer.shape.is_none() && buffer.bytes.is_none() {
        return Err("expected `shape`, `bytes` or `file`, got none of them".to_owned());
    }
    let Some(random) = buffer.random else { return Ok(()) };
    let is_uniform = random.distribution == Distribution::Uniform;
    if !is_uniform && (random.low.is_some() || random.high.is_some()) {
        return Err("`low` and `high` are for the distribution `uniform`".to_owned());
    }
    if random.distribution != Distribution::Normal && random.deviation.is_some() {
        return Err("`deviation` is for the distribution `normal`".to_owned());
    }
    let (low, high) = (random.low.unwrap_or(-1.0), random.high.unwrap_or(1.0));
    if is_uniform && !(low < high && low.is_finite() && high.is_finite()) {
        return Err(format!("expected `low` below `high`, got {low} and {high}"));
    }
    match random.deviation {
        Some(deviation) if !(deviation >= 0.0 && deviation.is_finite()) => {
            Err(format!("expected a `deviation` of 0 or more, got {deviation}"))
        }
        _ => Ok(()),
    }
}

fn check_map(map: &TensorMap, buffers: &[&str]) -> Result<(), String> {
    one_of("buffer", &map.buffer, buffers)?;
    // The remaining rules of the driver are checked when the map is encoded.
    if map.dimensions.is_empty() {
        return Err("expected 1 to 5 `dimensions`, got none".to_owned());
    }
    Ok(())
}

fn check_argument(argument: &Argument, buffers: &[&str], maps: &[&str]) -> Result<(), String> {
    let values = [
        ("buffer", argument.buffer.is_some()),
        ("tensor_map", argument.tensor_map.is_some()),
        ("u8", argument.u8.is_some()),
        ("u16", argument.u16.is_some()),
        ("u32", argument.u32.is_some()),
        ("u64", argument.u64.is_some()),
        ("i32", argument.i32.is_some()),
        ("i64", argument.i64.is_some()),
        ("f32", argument.f32.is_some()),
        ("f64", argument.f64.is_some()),
        ("hex", argument.hex.is_some()),
    ];
    let given: Vec<&str> = values.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
    if given.len() != 1 {
        let known: Vec<String> = values.iter().map(|(name, _)| format!("`{name}`")).collect();
        let got = if given.is_empty() { "none".to_owned() } else { given.join(", ") };
        return Err(format!("expected one of {}, got {got}", known.join(", ")));
    }
    if argument.offset.is_some() && argument.buffer.is_none() {
        return Err("`offset` is for arguments with `buffer`".to_owned());
    }
    if let Some(name) = &argument.buffer {
        one_of("buffer", name, buffers)?;
    }
    if let Some(name) = &argument.tensor_map {
        one_of("tensor map", name, maps)?;
    }
    if let Some(text) = &argument.hex {
        hex_bytes(text)?;
    }
    Ok(())
}

fn check_expectation(expectation: &Expectation, buffers: &[&str]) -> Result<(), String> {
    use super::file::Tolerance;

    one_of("buffer", &expectation.buffer, buffers).map_err(|what| format!("`expect`: {what}"))?;
    for tolerance in [Some(expectation.tolerance), expectation.tolerance_other_results] {
        if let Some(Tolerance::Within(within)) = tolerance {
            let parts = [within.absolute, within.relative, within.largest];
            if parts.iter().any(|part| !(*part >= 0.0 && part.is_finite())) {
                return Err(format!(
                    "`expect` of `{}`: expected a tolerance of 0 or more, got {parts:?}",
                    expectation.buffer
                ));
            }
        }
    }
    Ok(())
}

/// Parses hexadecimal text to bytes.
pub(super) fn hex_bytes(text: &str) -> Result<Vec<u8>, String> {
    let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let refuse = || format!("`hex`: expected pairs of hexadecimal digits, got `{text}`");
    let (pairs, []) = digits.as_chunks::<2>() else { return Err(refuse()) };
    pairs
        .iter()
        .map(|[high, low]| {
            let (high, low) = (high.to_digit(16)?, low.to_digit(16)?);
            Some((16 * high + low) as u8)
        })
        .collect::<Option<_>>()
        .ok_or_else(refuse)
}
