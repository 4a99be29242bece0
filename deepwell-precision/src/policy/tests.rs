//! Policies: who gets what, and the words of errors.

use super::*;
use crate::{ElementRounding, GemmKind, Hadamard16};

/// Two blocks of a small model, in execution order.
fn tensors() -> Vec<TensorUse<'static>> {
    [
        ("embed_tokens.weight", Role::Embedding),
        ("layers.0.input_norm.weight", Role::Norm),
        ("layers.0.self_attn.q_proj.weight", Role::Linear),
        ("layers.0.mlp.down_proj.weight", Role::Linear),
        ("layers.1.router.weight", Role::Router),
        ("layers.1.experts.0.up_proj.weight", Role::Expert),
        ("layers.1.experts.0.down_proj.weight", Role::Expert),
        ("lm_head.weight", Role::Head),
    ]
    .map(|(name, role)| {
        let layer =
            name.strip_prefix("layers.").map(|rest| if rest.starts_with('0') { 0 } else { 1 });
        TensorUse { name, role, layer }
    })
    .to_vec()
}

fn formats(policy: &PrecisionPolicy) -> String {
    let assigned = policy.assign(&tensors()).unwrap();
    assigned.iter().map(|assignment| assignment.format.name()).collect::<Vec<_>>().join(" ")
}

fn from_toml(text: &str) -> PrecisionPolicy {
    PrecisionPolicy::from_toml(text, "p.toml").unwrap()
}

#[test]
fn assignment() {
    for (text, expected) in [
        ("", "bf16 bf16 bf16 mxfp8 bf16 mxfp8 bf16 bf16"),
        ("precision = 'mxfp8'", "bf16 bf16 bf16 mxfp8 bf16 mxfp8 bf16 bf16"),
        ("precision = 'f32'", "f32 f32 f32 f32 f32 f32 f32 f32"),
        ("precision = 'bf16'", "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16"),
        (include_str!("../../examples/policy.toml"), "bf16 bf16 bf16 bf16 bf16 mxfp8 bf16 bf16"),
        ("keep_first_last_bf16 = false", "bf16 bf16 mxfp8 mxfp8 bf16 mxfp8 mxfp8 bf16"),
        (
            "[[rule]]\ntensors = 'layers.0.*'\nformat = 'mxfp8'",
            "bf16 mxfp8 mxfp8 mxfp8 bf16 mxfp8 bf16 bf16",
        ),
        (
            "[[rule]]\ntensors = '*'\nformat = 'f32'\n\
             [[rule]]\ntensors = 'layers.?.{mlp,experts.*}.down_proj.*'\nformat = 'mxfp8'",
            "f32 f32 f32 mxfp8 f32 f32 mxfp8 f32",
        ),
        (
            "[[rule]]\ntensors = '*down_proj*'\nformat = 'mxfp8'\n\
             [[rule]]\ntensors = '*'\nformat = 'bf16'",
            "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16",
        ),
    ] {
        assert_eq!(formats(&from_toml(text)), expected, "{text}");
    }
}

#[test]
fn reasons() {
    let policy = PrecisionPolicy::mxfp8()
        .with_rule("*.experts.0.up*", Format::F32)
        .unwrap()
        .force_bf16([("layers.0.mlp.down_proj.weight", "guard: underflow")]);
    let reasons: Vec<String> =
        policy.assign(&tensors()).unwrap().into_iter().map(|a| a.reason).collect();
    assert_eq!(
        reasons,
        [
            "role `embedding` stays `bf16`",
            "role `norm` stays `bf16`",
            "first linear tensor in execution order stays `bf16`",
            "guard: underflow",
            "role `router` stays `bf16`",
            "rule `*.experts.0.up*`",
            "last linear tensor in execution order stays `bf16`",
            "role `head` stays `bf16`",
        ]
    );
}

#[test]
fn forced_tensors_go_up_to_bf16_never_down() {
    let name = "layers.1.experts.0.up_proj.weight";
    let forced = |policy: PrecisionPolicy| formats(&policy.force_bf16([(name, "why")]));
    assert_eq!(forced(PrecisionPolicy::f32()), "f32 f32 f32 f32 f32 f32 f32 f32");
    assert_eq!(forced(PrecisionPolicy::mxfp8()), "bf16 bf16 bf16 mxfp8 bf16 bf16 bf16 bf16");
    let ruled = PrecisionPolicy::mxfp8().with_rule(name, Format::MXFP8).unwrap();
    assert_eq!(forced(ruled.clone()), "bf16 bf16 bf16 mxfp8 bf16 bf16 bf16 bf16");
    let released = ruled.force_bf16([(name, "why")]).without_forced();
    assert_eq!(formats(&released), "bf16 bf16 bf16 mxfp8 bf16 mxfp8 bf16 bf16");
}

#[test]
fn presets_and_specs() {
    use BlockShape::{Row, Square};
    use Granularity::{G32, G128};
    use ScaleRule::{OcpFloor, Rceil};
    for (name, rule, granularity, weight_block) in [
        ("f32", Rceil, G32, Row),
        ("bf16", Rceil, G32, Row),
        ("mxfp8", Rceil, G32, Row),
        ("mxfp8-floor", OcpFloor, G32, Row),
        ("mxfp8-128", Rceil, G128, Square),
        ("mxfp8-2d", Rceil, G32, Square),
        ("mxfp8-hybrid", Rceil, G32, Row),
        ("mxfp8-e5m2", Rceil, G32, Row),
        ("mxfp6", Rceil, G32, Row),
        ("mxfp6-e2m3", Rceil, G32, Row),
        ("mxfp6-e3m2", Rceil, G32, Row),
        ("mxfp4", Rceil, G32, Row),
        ("nvfp4", Rceil, G32, Square),
    ] {
        let policy = PrecisionPolicy::preset(name).unwrap();
        let format = policy.format().quantized().unwrap_or_default();
        let format = format.with_scale_rule(rule).with_granularity(granularity);
        assert_eq!(policy.weight_format(), format.with_shape(weight_block), "{name}");
        assert_eq!(policy.activation_format(), format, "{name}");
        for (tensor, assignment) in tensors().iter().zip(policy.assign(&tensors()).unwrap()) {
            for &class in OperandClass::ALL {
                let block = if class.operand() == "weight" { weight_block } else { Row };
                let is_nvfp4 = name == "nvfp4";
                let has_recipe = is_nvfp4 || name == "mxfp4";
                let is_gradient = class.operand() == "gradient";
                let is_random = has_recipe && is_gradient;
                let rounding =
                    if is_random { ElementRounding::Stochastic } else { ElementRounding::Nearest };
                let mut format = format.with_shape(block).with_rounding(rounding);
                match name {
                    "mxfp8-hybrid" if is_gradient => format.element = ElementFormat::E5M2,
                    "mxfp6" if is_gradient => format.element = ElementFormat::E3M2,
                    _ => {}
                }
                if has_recipe && class.gemm() == GemmKind::Wgrad {
                    format = format.with_hadamard(Some(Hadamard16::TRAINING));
                }
                if is_nvfp4 && class == OperandClass::FpropActivation {
                    format = format.with_four_six(true);
                }
                // The second of two blocks is the last 15 %.
                if has_recipe && tensor.layer == Some(1) {
                    format = QuantFormat::MXFP8;
                }
                let expected = assignment.format.is_quantized().then_some(format);
                assert_eq!(assignment.operand(class), expected, "{name} {class}");
            }
        }
        // The TOML form and the JSON form hold all of it.
        assert_eq!(from_toml(&policy.to_toml()), policy, "{name}");
        assert_eq!(from_toml(&format!("precision = '{name}'")), policy, "{name}");
        let json = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<PrecisionPolicy>(&json).unwrap(), policy, "{name}");
    }
    assert_eq!(PRESETS.len(), 13);
}

/// Each part of a preset is in its defaults, alone and left out, and survives both forms.
#[test]
fn parts_of_the_recipe() {
    use RecipePart::{
        FourSix, GradientElement, Hadamard, LastBlocks, SquareWeights, StochasticRounding,
    };
    for (name, parts) in [
        ("mxfp8", &[][..]),
        ("mxfp8-hybrid", &[GradientElement]),
        ("mxfp6", &[GradientElement]),
        ("mxfp6-e3m2", &[]),
        ("mxfp4", &[Hadamard, StochasticRounding, LastBlocks]),
        ("nvfp4", &[Hadamard, StochasticRounding, SquareWeights, LastBlocks, FourSix]),
    ] {
        let policy = PrecisionPolicy::preset(name).unwrap();
        let known = RecipePart::ALL.iter().filter(|&&part| policy.has_part(part));
        assert_eq!(known.copied().collect::<Vec<_>>(), parts, "{name}");
        check_parts(&policy, parts);
    }
}

fn check_parts(whole: &PrecisionPolicy, parts: &[RecipePart]) {
    for &part in parts {
        let (alone, left_out) =
            (whole.clone().with_part_alone(part), whole.clone().without_part(part));
        for &other in parts {
            assert_eq!(alone.has_part(other), other == part, "{other} of {part} alone");
            assert_eq!(left_out.has_part(other), other != part, "{other} without {part}");
        }
        for policy in [&alone, &left_out] {
            assert_eq!(from_toml(&policy.to_toml()), *policy, "{}", policy.to_toml());
            let json = serde_json::to_string(policy).unwrap();
            assert_eq!(serde_json::from_str::<PrecisionPolicy>(&json).unwrap(), *policy);
        }
        assert_eq!(&left_out.with_part(part), whole, "{part}");
    }
}

/// Elements of gradients belong to tensors of the policy's own format: rules, guards and the last
/// blocks have those of their format.
#[test]
fn elements_of_gradients() {
    use ElementFormat::{E2M1, E2M3, E3M2, E4M3, E5M2};
    let name = "layers.0.mlp.down_proj.weight";
    let of = |policy: &PrecisionPolicy| {
        let assigned = policy.assign(&tensors()).unwrap();
        let operand = |class| assigned[3].operand(class).unwrap().element;
        [OperandClass::FpropWeight, OperandClass::DgradWeight, OperandClass::WgradGradient]
            .map(operand)
    };
    let rule = |format: &str| format!("\n[[rule]]\ntensors = '{name}'\nformat = '{format}'");
    for (text, expected) in [
        ("precision = 'mxfp8-hybrid'".to_owned(), [E4M3, E4M3, E5M2]),
        ("gradient_element = 'e5m2'".to_owned(), [E4M3, E4M3, E5M2]),
        ("gradient_element = 'e4m3'".to_owned(), [E4M3, E4M3, E4M3]),
        ("precision = 'mxfp6'".to_owned(), [E2M3, E2M3, E3M2]),
        ("precision = 'mxfp6'\ngradient_element = 'e5m2'".to_owned(), [E2M3, E2M3, E5M2]),
        ("precision = 'mxfp6'".to_owned() + &rule("mxfp8"), [E4M3, E4M3, E4M3]),
        ("precision = 'mxfp6'".to_owned() + &rule("mxfp6-e2m3"), [E2M3, E2M3, E3M2]),
        ("precision = 'mxfp8'\ndgrad.weight = 'mxfp4'".to_owned(), [E4M3, E2M1, E4M3]),
        (
            "precision = 'mxfp8-hybrid'\nwgrad.gradient = { element = 'e3m2' }".to_owned(),
            [E4M3, E4M3, E3M2],
        ),
        ("precision = 'mxfp8-hybrid'\nwgrad.gradient = 'mxfp8'".to_owned(), [E4M3, E4M3, E4M3]),
    ] {
        let policy = from_toml(&text);
        assert_eq!(of(&policy), expected, "{text}");
        assert_eq!(of(&from_toml(&policy.to_toml())), expected, "{text}");
    }
    for (preset, to_mxfp8) in [("mxfp8-hybrid", false), ("mxfp6", true), ("mxfp4", true)] {
        let policy = PrecisionPolicy::preset(preset).unwrap();
        let before = of(&policy);
        let moved = policy.force(Format::MXFP8, [(name, "guard")]);
        let expected = if to_mxfp8 { [E4M3; 3] } else { before };
        assert_eq!(of(&moved), expected, "{preset}");
        let moved = moved.force_bf16([(name, "guard")]);
        assert_eq!(moved.assign(&tensors()).unwrap()[3].format, Format::Bf16, "{preset}");
    }
}

/// Settings that go with an operand in a format of another family: scale rule and granularity stay.
#[test]
fn mx_operands_keep_the_scales_of_the_policy() {
    let text = "scale_rule = 'floor'\ngranularity = 128\nwgrad.gradient = 'mxfp8-e5m2'";
    let assigned = from_toml(text).assign(&tensors()).unwrap();
    let expected = QuantFormat::mx(ElementFormat::E5M2)
        .with_scale_rule(ScaleRule::OcpFloor)
        .with_granularity(Granularity::G128);
    assert_eq!(assigned[3].operand(OperandClass::WgradGradient), Some(expected));
    let expected = "default of precision `mxfp8`; wgrad.gradient in `mxfp8-e5m2`";
    assert_eq!(assigned[3].reason, expected);
    // One GEMM of both.
    assert!(assigned[3].gemm(GemmKind::Wgrad).is_scaled);
}

/// Blocks are counted up, and rules of the user win over the rule about the last blocks.
#[test]
fn last_blocks() {
    let names: Vec<String> = (0..20).map(|layer| format!("layers.{layer}.up")).collect();
    let tensors: Vec<TensorUse<'_>> = (names.iter().zip(0..))
        .map(|(name, layer)| TensorUse { name, role: Role::Linear, layer: Some(layer) })
        .collect();
    let count = |policy: &PrecisionPolicy, count: usize, format: Format| {
        let assigned = policy.assign(&tensors[..count]).unwrap();
        assigned.iter().filter(|assignment| assignment.format == format).count()
    };
    // The last linear tensor is in BF16.
    for (blocks, expected) in [(1, 0), (2, 0), (6, 0), (7, 1), (13, 1), (14, 2), (20, 2)] {
        assert_eq!(count(&PrecisionPolicy::nvfp4(), blocks, Format::MXFP8), expected, "{blocks}");
    }
    for (text, mxfp8, bf16) in [
        ("last_blocks = { percent = 50, format = 'mxfp8' }", 9, 2),
        ("last_blocks = { percent = 50, format = 'bf16' }", 0, 11),
        ("last_blocks = { percent = 0, format = 'mxfp8' }", 0, 2),
        ("[[rule]]\ntensors = 'layers.18.*'\nformat = 'nvfp4'", 1, 2),
    ] {
        let policy = from_toml(&format!("precision = 'nvfp4'\n{text}"));
        assert_eq!(count(&policy, 20, Format::MXFP8), mxfp8, "{text}");
        assert_eq!(count(&policy, 20, Format::Bf16), bf16, "{text}");
        // By name, for blocks that are numbered anew.
        let by_name = policy.clone().with_blocks_by_name(&tensors);
        let of = |policy: &PrecisionPolicy| {
            let assigned = policy.assign(&tensors).unwrap().into_iter();
            assigned.map(|it| (it.format, it.operands)).collect::<Vec<_>>()
        };
        assert_eq!(of(&by_name), of(&policy), "{text}");
    }
    let error =
        PrecisionPolicy::from_toml("last_blocks = { percent = 150, format = 'mxfp8' }", "p.toml");
    let expected = "p.toml:1:15: expected 0 to 100 `percent` of the blocks, got 150";
    assert_eq!(error.unwrap_err().to_string(), expected);
}

#[test]
fn toml_text_is_stable() {
    let policy = PrecisionPolicy::preset("mxfp8-128")
        .unwrap()
        .with_rule("layers.*.mlp.down_proj.*", Format::Bf16)
        .unwrap()
        .with_fallback(Fallback::Off);
    let text = "precision = \"mxfp8\"\nscale_rule = \"rceil\"\ngranularity = 128\n\
                weight_block = \"square\"\nfallback = \"off\"\nkeep_first_last_bf16 = true\n\
                gemm = \"native\"\n\n\
                [[rule]]\ntensors = \"layers.*.mlp.down_proj.*\"\nformat = \"bf16\"\n";
    assert_eq!(policy.to_toml(), text);
    assert_eq!(from_toml(text).to_toml(), text);
}

#[test]
fn refused_text() {
    for (text, expected) in [
        (
            "precision = \"fp8\"",
            "p.toml:1:13: expected one of `f32`, `bf16`, `mxfp8`, `mxfp8-floor`, `mxfp8-128`, \
             `mxfp8-2d`, `mxfp8-hybrid`, `mxfp8-e5m2`, `mxfp6`, `mxfp6-e2m3`, `mxfp6-e3m2`, \
             `mxfp4`, `nvfp4` as precision, got `fp8`\nhint: eight bits are `mxfp8-128` on \
             Hopper and `mxfp8` elsewhere",
        ),
        (
            "# a comment\n\nscale_rule = 'up'",
            "p.toml:3:14: expected one of `rceil`, `floor`, `min_error` as scale rule, got `up`",
        ),
        ("granularity = 64", "p.toml:1:15: expected `32` or `128` as granularity, got `64`"),
        ("granularity = '32'", "p.toml:1:15: invalid type: string \"32\", expected i64"),
        (
            "weight_block = 'column'",
            "p.toml:1:16: expected one of `row`, `square` as block shape, got `column`",
        ),
        (
            "fallback = 'panic'",
            "p.toml:1:12: expected one of `safe`, `strict`, `off` as fallback, got `panic`",
        ),
        (
            "precision = 'mxfp8'\n  speed = 3",
            "p.toml:2:3: unknown field `speed`, expected one of `precision`, `scale_rule`, \
             `granularity`, `weight_block`, `fallback`, `keep_first_last_bf16`, `gemm`, \
             `scale_order`, `last_blocks`, `gradient_element`, `repair`, `fprop`, `dgrad`, \
             `wgrad`, `rule`",
        ),
        (
            "[[rule]]\ntensors = '*'\nformat = 'fp4'",
            "p.toml:3:10: expected one of `f32`, `bf16`, `mxfp8`, `mxfp8-e5m2`, `mxfp6-e2m3`, \
             `mxfp6-e3m2`, `mxfp4`, `nvfp4` as format, got `fp4`",
        ),
        (
            "precision = 'nvfp4'\ngradient_element = 'e5m2'",
            "p.toml:2:20: expected an MX format as `precision` with `gradient_element`, got \
             `nvfp4`",
        ),
        (
            "gradient_element = 'e4m2'",
            "p.toml:1:20: expected one of `e4m3`, `e5m2`, `e3m2`, `e2m3`, `e2m1` as element \
             format, got `e4m2`",
        ),
        (
            "[[rule]]\ntensors = '*'",
            "p.toml:2:11: expected `format`, `fprop`, `dgrad` or `wgrad` in a rule, got `tensors` \
             alone",
        ),
        (
            "[[rule]]\ntensors = '*'\nformat = 'f32'\nformats = 'f32'",
            "p.toml:4:1: unknown field `formats`, expected one of `tensors`, `format`, `fprop`, \
             `dgrad`, `wgrad`\nhint: the nearest key is `format`",
        ),
        (
            "[[rule]]\nformat = 'f32'\ntensors = 'layers.[0'",
            "p.toml:3:11: glob `layers.[0` is malformed: \
             unclosed character class; missing ']'",
        ),
        ("precision = ", "p.toml:1:13: string values must be quoted, expected literal string"),
    ] {
        let error = PrecisionPolicy::from_toml(text, "p.toml").unwrap_err();
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

#[test]
fn rules_that_match_nothing() {
    let text = "precision = 'mxfp8'\n[[rule]]\ntensors = 'layer.*.mlp.dwn_proj.*'\nformat = 'bf16'";
    let error = from_toml(text).assign(&tensors()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "p.toml:3:11: rule `layer.*.mlp.dwn_proj.*` matches none of the 8 tensors\n\
         hint: the nearest names are `layers.0.mlp.down_proj.weight`, \
         `layers.1.experts.0.down_proj.weight`, `layers.1.experts.0.up_proj.weight`"
    );
    let error = PrecisionPolicy::bf16().with_rule("*", Format::F32).unwrap().assign(&[]);
    assert_eq!(error.unwrap_err().to_string(), "rule `*` matches none of the 0 tensors");

    // A model with some of the tensors has rules that are of none.
    let of_both = PrecisionPolicy::mxfp8()
        .with_rule("layers.0.*", Format::F32)
        .and_then(|policy| policy.with_rule("layers.9.*", Format::Bf16))
        .unwrap()
        .force_bf16([("layers.9.mlp.up_proj.weight", ""), ("lm_head.weight", "")]);
    assert!(of_both.assign(&tensors()).is_err());
    let names: Vec<&str> = tensors().iter().map(|tensor| tensor.name).collect();
    let expected = PrecisionPolicy::mxfp8()
        .with_rule("layers.0.*", Format::F32)
        .unwrap()
        .force_bf16([("lm_head.weight", "")]);
    assert_eq!(of_both.of_part(&names).unwrap(), expected);

    let error = PrecisionPolicy::mxfp8().force_bf16([("lm_heed.weight", "")]).assign(&tensors());
    let text = error.unwrap_err().to_string();
    let start = "tensor `lm_heed.weight`, to be forced to `bf16`, is none of the 8 tensors\n\
                 hint: the nearest names are `lm_head.weight`, ";
    assert!(text.starts_with(start), "{text}");
}

/// The end of a run with forward GEMMs in BF16.
#[test]
fn repair() {
    let read = |text: &str| PrecisionPolicy::from_toml(text, "p.toml");
    let policy = read("precision = 'nvfp4'\nrepair = { forward = 'bf16', percent = 18 }").unwrap();
    assert_eq!(policy.repair(), Some(Repair::PUBLISHED));
    assert_eq!(read(&policy.to_toml()).unwrap(), policy);
    let of = |policy: &PrecisionPolicy| policy.assign(&tensors()).unwrap().swap_remove(5);
    let (planned, repaired) = (of(&policy), of(&policy.repaired().unwrap()));
    for &class in OperandClass::ALL {
        let is_forward = class.gemm() == GemmKind::Fprop;
        let expected = planned.operand(class).filter(|_| !is_forward);
        assert_eq!(repaired.operand(class), expected, "{class}");
        assert!(planned.operand(class).is_some(), "{class}");
    }
    assert_eq!(PrecisionPolicy::nvfp4().repaired(), None);
    for (text, expected) in [
        ("repair = { forward = 'mxfp8', percent = 5 }", "expected `bf16` as `forward` of a repair"),
        ("repair = { forward = 'bf16' }", "expected `percent` or `spike_steps` in a repair"),
        ("repair = { forward = 'bf16', percent = 101 }", "expected 0 to 100 `percent`"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("p.toml:1:10: {expected}")), "{error}");
    }
}
