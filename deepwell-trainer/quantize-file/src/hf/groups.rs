//! Modules that inference engines merge into one: they need equal formats and equal tensor scales.

/// Modules of one parent whose weights are merged along the outputs.
const MERGED: [&[&str]; 4] = [
    &["q_proj", "k_proj", "v_proj"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
];
const EXPERTS: &str = "experts";

/// The group of modules that share a tensor scale with `module`, as a name.
pub(super) fn scale_group(module: &str) -> String {
    let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
    match MERGED.iter().find(|group| group.contains(&last)) {
        Some(group) => format!("{parent}.{}", group.join("+")),
        None => module.to_owned(),
    }
}

/// The group of modules that share a format with `module`, as a name. All experts of a layer are
/// one kernel call.
pub(super) fn format_group(module: &str) -> String {
    experts_of(module).unwrap_or_else(|| scale_group(module))
}

/// The module of all experts of a layer, for a module of one expert.
pub(super) fn experts_of(module: &str) -> Option<String> {
    let parts: Vec<&str> = module.split('.').collect();
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let at = parts.windows(2).position(|pair| pair[0] == EXPERTS && is_number(pair[1]))?;
    Some(parts[..=at].join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_of_a_group() {
        let (attention, mlp) = ("l.0.self_attn", "l.0.mlp");
        for (a, b, same_scale, same_format) in [
            (format!("{attention}.q_proj"), format!("{attention}.v_proj"), true, true),
            (format!("{attention}.q_proj"), format!("{attention}.o_proj"), false, false),
            (
                format!("{attention}.q_a_proj"),
                format!("{attention}.kv_a_proj_with_mqa"),
                true,
                true,
            ),
            (format!("{mlp}.gate_proj"), format!("{mlp}.up_proj"), true, true),
            (format!("{mlp}.gate_proj"), "l.1.mlp.up_proj".to_owned(), false, false),
            (format!("{mlp}.experts.0.w1"), format!("{mlp}.experts.0.w3"), true, true),
            (format!("{mlp}.experts.0.w1"), format!("{mlp}.experts.1.w1"), false, true),
            (format!("{mlp}.experts.0.w1"), format!("{mlp}.experts.0.w2"), false, true),
            (format!("{mlp}.experts.0.w1"), format!("{mlp}.shared_experts.w1"), false, false),
        ] {
            assert_eq!(scale_group(&a) == scale_group(&b), same_scale, "{a} {b}");
            assert_eq!(format_group(&a) == format_group(&b), same_format, "{a} {b}");
        }
    }
}
