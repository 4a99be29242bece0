//! RoPE keys of a `config.json`: `rope_parameters` of transformers 5, or `rope_theta` with
//! `rope_scaling` of earlier versions.

use serde_json::{Map, Value, json};

use crate::capture::json::{Keys, kind};
use crate::capture::{CaptureError, CaptureNotes, Rope, RopeScaling, YarnScaling};

const SUPPORTED: &str = "supported: `default`, `linear`, `dynamic`, `llama3`, `yarn`";

/// Reads base and scaling from the keys of the whole config. `theta_default` is the default of
/// transformers.
pub(super) fn read(
    keys: &mut Keys<'_>,
    location: &str,
    theta_default: f64,
    max_position_embeddings: usize,
    notes: &mut CaptureNotes,
) -> Result<Rope, CaptureError> {
    let outer_theta = keys.number("rope_theta", 1.0, false)?;
    let outer_original = keys.size("original_max_position_embeddings")?;
    let (name, nested) = match (keys.get("rope_parameters"), keys.get("rope_scaling")) {
        (None, None) => {
            if outer_original.is_some() {
                notes.without_effect.push("original_max_position_embeddings".to_string());
            }
            let theta = outer_theta.unwrap_or_else(|| {
                notes.remarks.push(format!(
                    "`rope_theta` is not stated: {theta_default}, the default of transformers"
                ));
                theta_default
            });
            return Ok(Rope { theta, scaling: RopeScaling::None });
        }
        (Some(new), None) => ("rope_parameters", new),
        (None, Some(old)) => ("rope_scaling", old),
        (Some(_), Some(old)) => {
            let hint = "`rope_parameters` is there too, the newer name; keep one of them";
            return Err(keys.wrong("rope_scaling", "one of the two keys", old, hint));
        }
    };
    let Value::Object(object) = nested else {
        let hint = "for example {\"rope_type\": \"linear\", \"factor\": 2.0}";
        return Err(keys.wrong(name, "an object", &json!(kind(nested)), hint));
    };

    let mut inner = Keys::new(location, &format!("{name}."), object);
    let theta = match (inner.number("rope_theta", 1.0, false)?, outer_theta) {
        (Some(inside), Some(outside)) if inside != outside => {
            let expected = format!("the same as `{name}.rope_theta` ({inside})");
            let hint = "keep one of the two keys";
            return Err(keys.wrong("rope_theta", &expected, &json!(outside), hint));
        }
        (inside, outside) => inside.or(outside).unwrap_or(theta_default),
    };
    let factor = inner.get("partial_rotary_factor");
    if let Some(value) = factor.filter(|value| value.as_f64() != Some(1.0)) {
        let hint = "supported: 1, a rotation of the whole head";
        return Err(inner.unsupported("partial_rotary_factor", value, hint));
    }
    let rope_type = read_type(&mut inner)?;
    let lengths = Lengths { original: outer_original, longest: max_position_embeddings };
    let scaling = read_scaling(&mut inner, rope_type, lengths, notes)?;
    inner.finish_nested(&format!("rope_type `{rope_type}`"))?;
    let uses_original = matches!(scaling, RopeScaling::Llama3 { .. } | RopeScaling::Yarn(_));
    if outer_original.is_some() && !uses_original {
        notes.without_effect.push("original_max_position_embeddings".to_string());
    }
    Ok(Rope { theta, scaling })
}

/// `rope_type` and its older name `type`.
fn read_type<'a>(keys: &mut Keys<'a>) -> Result<&'a str, CaptureError> {
    match (keys.string("rope_type")?, keys.string("type")?) {
        (Some(new), Some(old)) if new != old => {
            let expected = format!("`{new}` as in `rope_type`");
            Err(keys.wrong("type", &expected, &json!(old), "keep one of the two keys"))
        }
        (new, old) => Ok(new.or(old).unwrap_or("default")),
    }
}

/// Lengths stated outside the nested object, tokens.
#[derive(Clone, Copy)]
struct Lengths {
    original: Option<usize>,
    longest: usize,
}

fn read_scaling(
    keys: &mut Keys<'_>,
    rope_type: &str,
    lengths: Lengths,
    notes: &mut CaptureNotes,
) -> Result<RopeScaling, CaptureError> {
    match rope_type {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: required(keys, "factor", 1.0, true)? }),
        "dynamic" => Ok(RopeScaling::Dynamic { factor: required(keys, "factor", 1.0, true)? }),
        "llama3" => {
            let factor = required(keys, "factor", 1.0, true)?;
            let low_freq_factor = required(keys, "low_freq_factor", 0.0, false)?;
            let high_freq_factor = required(keys, "high_freq_factor", 0.0, false)?;
            if high_freq_factor <= low_freq_factor {
                return Err(keys.wrong(
                    "high_freq_factor",
                    &format!("a number greater than `low_freq_factor` ({low_freq_factor})"),
                    &json!(high_freq_factor),
                    "the rule interpolates between the two",
                ));
            }
            let original_max_position_embeddings = original_length(keys, lengths)?;
            Ok(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            })
        }
        "yarn" => read_yarn(keys, lengths, notes).map(RopeScaling::Yarn),
        "longrope" | "su" => {
            let hint = "factors for each pair of a head are not supported; the variants of the \
                        model for its original length (`4k`) have none";
            Err(keys.unsupported("rope_type", &json!(rope_type), hint))
        }
        other => Err(keys.unsupported("rope_type", &json!(other), SUPPORTED)),
    }
}

fn read_yarn(
    keys: &mut Keys<'_>,
    lengths: Lengths,
    notes: &mut CaptureNotes,
) -> Result<YarnScaling, CaptureError> {
    let original = original_length(keys, lengths)?;
    let ratio = lengths.longest as f64 / original as f64;
    let factor = match keys.number("factor", 1.0, true)? {
        Some(factor) => {
            if ratio != factor && ratio != 1.0 {
                notes.remarks.push(format!(
                    "yarn: `factor` is {factor} but `max_position_embeddings` is {ratio} times the \
                     original length; {factor} is used, as transformers 5 does (4 used the ratio \
                     for the attention factor)"
                ));
            }
            factor
        }
        None if ratio >= 1.0 => ratio,
        None => return Err(keys.missing("factor", "how many times longer sequences become")),
    };
    // Zero counts as absent, as in Python.
    let beta_fast = keys.number("beta_fast", 0.0, true)?.filter(|&n| n != 0.0).unwrap_or(32.0);
    let beta_slow = keys.number("beta_slow", 0.0, true)?.filter(|&n| n != 0.0).unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(keys.wrong(
            "beta_fast",
            &format!("a number of `beta_slow` ({beta_slow}) or more"),
            &json!(beta_fast),
            "pairs that turn more often than `beta_fast` times are kept as they are",
        ));
    }
    Ok(YarnScaling {
        factor,
        original_max_position_embeddings: original,
        attention_factor: keys.number("attention_factor", 0.0, false)?,
        beta_fast,
        beta_slow,
        mscale: keys.number("mscale", 0.0, true)?,
        mscale_all_dim: keys.number("mscale_all_dim", 0.0, true)?,
        truncate: keys.boolean("truncate")?.unwrap_or(true),
    })
}

fn required(
    keys: &mut Keys<'_>,
    key: &'static str,
    least: f64,
    inclusive: bool,
) -> Result<f64, CaptureError> {
    let hint = "this rope_type cannot do without it";
    keys.number(key, least, inclusive)?.ok_or_else(|| keys.missing(key, hint))
}

/// Original sequence length of pretraining: stated inside, outside, or equal to the longest length.
fn original_length(keys: &mut Keys<'_>, lengths: Lengths) -> Result<usize, CaptureError> {
    let key = "original_max_position_embeddings";
    match (keys.size(key)?, lengths.original) {
        (Some(inside), Some(outside)) if inside != outside => {
            let expected = format!("{outside}, as outside of it");
            Err(keys.wrong(key, &expected, &json!(inside), "keep one of the two keys"))
        }
        (inside, outside) => Ok(inside.or(outside).unwrap_or(lengths.longest)),
    }
}

/// The scaling as `rope_scaling`; `null` for none.
pub(super) fn write(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
        RopeScaling::Yarn(yarn) => {
            let mut object = Map::new();
            object.insert("rope_type".to_string(), json!("yarn"));
            for (key, value) in [
                ("factor", Some(yarn.factor)),
                ("attention_factor", yarn.attention_factor),
                ("beta_fast", Some(yarn.beta_fast)),
                ("beta_slow", Some(yarn.beta_slow)),
                ("mscale", yarn.mscale),
                ("mscale_all_dim", yarn.mscale_all_dim),
            ] {
                if let Some(value) = value {
                    object.insert(key.to_string(), json!(value));
                }
            }
            let original = json!(yarn.original_max_position_embeddings);
            object.insert("original_max_position_embeddings".to_string(), original);
            object.insert("truncate".to_string(), json!(yarn.truncate));
            Value::Object(object)
        }
    }
}
