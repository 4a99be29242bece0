//! What policies say about the operands of GEMMs.

use super::*;
use crate::{ElementRounding, GemmKind, GemmPrecision, OperandClass};

/// Linear tensors, of which the first and the last stay BF16.
const NAMES: [&str; 4] = ["layers.0.q", "layers.0.v", "layers.1.v", "layers.1.down"];

fn tensors() -> Vec<TensorUse<'static>> {
    NAMES.map(|name| TensorUse { name, role: Role::Linear, layer: None }).to_vec()
}

fn from_toml(text: &str) -> PrecisionPolicy {
    PrecisionPolicy::from_toml(text, "p.toml").unwrap()
}

/// The operands of each tensor as letters, fprop, dgrad and wgrad: quantized ones upper-case.
fn letters(policy: &PrecisionPolicy) -> String {
    let words = policy.assign(&tensors()).unwrap().into_iter().map(|assignment| {
        let letter = |&class: &OperandClass| {
            let letter = class.operand().chars().next().unwrap();
            match assignment.operand(class) {
                Some(_) => letter.to_ascii_uppercase(),
                None => letter,
            }
        };
        let is_quantized = assignment.operands != [None; 6];
        assert_eq!(is_quantized, assignment.format.is_quantized());
        OperandClass::ALL.iter().map(letter).collect::<String>()
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn what_each_operand_gets() {
    for (text, expected) in [
        ("precision = 'bf16'", "awgwga awgwga awgwga awgwga"),
        ("", "awgwga AWGWGA AWGWGA awgwga"),
        ("keep_first_last_bf16 = false", "AWGWGA AWGWGA AWGWGA AWGWGA"),
        ("wgrad = 'bf16'", "awgwga AWGWga AWGWga awgwga"),
        ("[wgrad]\ngradient = 'bf16'", "awgwga AWGWgA AWGWgA awgwga"),
        ("[wgrad]\ngradient = { format = 'bf16' }", "awgwga AWGWgA AWGWgA awgwga"),
        ("[wgrad]\ngradient = { rounding = 'stochastic' }", "awgwga AWGWGA AWGWGA awgwga"),
        ("fprop.activation = 'bf16'\ndgrad.weight = 'bf16'", "awgwga aWGwGA aWGwGA awgwga"),
        // A rule refines what is MXFP8, and only that.
        ("[[rule]]\ntensors = 'layers.*'\nwgrad = 'bf16'", "awgwga AWGWga AWGWga awgwga"),
        ("[[rule]]\ntensors = '*.v'\nwgrad.activation = 'bf16'", "awgwga AWGWGa AWGWGa awgwga"),
        (
            "[[rule]]\ntensors = 'layers.1.*'\nformat = 'mxfp8'\ndgrad = 'bf16'",
            "awgwga AWGWGA AWgwGA AWgwGA",
        ),
        // Later rules win, operand by operand; one with a format begins anew, from the defaults.
        (
            "fprop = 'bf16'\n\
             [[rule]]\ntensors = '*.v'\nwgrad = 'bf16'\n\
             [[rule]]\ntensors = 'layers.0.v'\nwgrad.gradient = 'mxfp8'\n\
             [[rule]]\ntensors = 'layers.1.v'\nformat = 'mxfp8'",
            "awgwga awGWGa awGWGA awgwga",
        ),
        // Of nothing quantized is left a BF16 tensor.
        (
            "[[rule]]\ntensors = '*'\nfprop = 'bf16'\ndgrad = 'bf16'\nwgrad = 'bf16'",
            "awgwga awgwga awgwga awgwga",
        ),
    ] {
        let policy = from_toml(text);
        assert_eq!(letters(&policy), expected, "{text}");
        assert_eq!(from_toml(&policy.to_toml()).to_toml(), policy.to_toml(), "{text}");
        assert_eq!(letters(&from_toml(&policy.to_toml())), expected, "{text}");
        let json = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<PrecisionPolicy>(&json).unwrap(), policy, "{json}");
    }
}

#[test]
fn builders_of_an_ablation() {
    use OperandClass::{FpropWeight, WgradActivation, WgradGradient};
    let policy = PrecisionPolicy::mxfp8();
    let wgrad = OperandClass::of(GemmKind::Wgrad);
    for (policy, expected) in [
        (policy.clone().only(&[FpropWeight]), "awgwga aWgwga aWgwga awgwga"),
        (policy.clone().only(&[]), "awgwga awgwga awgwga awgwga"),
        (policy.clone().without(&wgrad), "awgwga AWGWga AWGWga awgwga"),
        (policy.clone().only_in("*.1.v", &wgrad).unwrap(), "awgwga awgwga awgwGA awgwga"),
        (
            policy.clone().without_in("*.1.v", &[WgradGradient]).unwrap(),
            "awgwga AWGWGA AWGWgA awgwga",
        ),
        // The newest wins.
        (
            policy.clone().without(&wgrad).only(&[WgradActivation, FpropWeight]),
            "awgwga aWgwga aWgwga awgwga",
        ),
        (PrecisionPolicy::bf16().only(&[FpropWeight]), "awgwga awgwga awgwga awgwga"),
    ] {
        assert_eq!(letters(&policy), expected, "{}", policy.to_toml());
    }
}

/// How an operand is quantized survives `only`, which is about formats.
#[test]
fn specs_follow_the_nearest_word() {
    let text = "scale_rule = 'floor'\nweight_block = 'square'\n\
                [wgrad]\n\
                gradient = { rounding = 'stochastic', granularity = 128, scale_rule = 'rceil' }\n\
                [dgrad]\nweight = { block = 'row' }\n\
                [[rule]]\ntensors = 'layers.1.v'\nwgrad.gradient = { rounding = 'nearest' }";
    let policy = from_toml(text).only(&[OperandClass::WgradGradient, OperandClass::DgradWeight]);
    let assigned = policy.assign(&tensors()).unwrap();
    let floor = QuantFormat::MXFP8.with_scale_rule(ScaleRule::OcpFloor);
    for (tensor, rounding) in [(1, ElementRounding::Stochastic), (2, ElementRounding::Nearest)] {
        let of = |class| assigned[tensor].operand(class);
        let expected = QuantFormat::MXFP8_128.with_rounding(rounding);
        assert_eq!(of(OperandClass::WgradGradient), Some(expected));
        assert_eq!(of(OperandClass::DgradWeight), Some(floor));
        assert_eq!(of(OperandClass::FpropWeight), None);
    }
    let all = from_toml(text).assign(&tensors()).unwrap();
    assert_eq!(all[1].operand(OperandClass::FpropWeight), Some(floor.square()));
    assert_eq!(all[1].operand(OperandClass::FpropActivation), Some(floor));
    let setting = OperandSetting::of_format(Format::Bf16);
    let fewer = from_toml(text).with_operands(&[OperandClass::FpropWeight], &setting);
    assert_eq!(fewer.assign(&tensors()).unwrap()[1].operand(OperandClass::FpropWeight), None);
}

/// The file that the documentation quotes.
#[test]
fn example_of_the_documentation() {
    let policy = from_toml(include_str!("../../examples/operands.toml"));
    let names =
        ["layers.0.q_proj.weight", "layers.0.v_proj.weight", "layers.0.up_proj.weight", "x"];
    let tensors = names.map(|name| TensorUse { name, role: Role::Linear, layer: None });
    let assigned = policy.assign(&tensors).unwrap();
    let emulated = GemmPrecision { quantized: [true, false], is_scaled: false };
    let of_v = GemmKind::ALL.iter().map(|&way| assigned[1].gemm(way));
    assert_eq!(of_v.collect::<Vec<_>>(), [GemmPrecision::SCALED, emulated, GemmPrecision::PLAIN]);
    let gradient = assigned[2].operand(OperandClass::WgradGradient).unwrap();
    assert_eq!(gradient.rounding, ElementRounding::Stochastic);
}

#[test]
fn gemms_that_follow() {
    let gemms = |text: &str| {
        let assigned = from_toml(text).assign(&tensors()).unwrap();
        GemmKind::ALL.iter().map(|&way| assigned[1].gemm(way)).collect::<Vec<_>>()
    };
    let emulated = |quantized| GemmPrecision { quantized, is_scaled: false };
    for (text, expected) in [
        ("", [GemmPrecision::SCALED; 3]),
        ("precision = 'bf16'", [GemmPrecision::PLAIN; 3]),
        ("gemm = 'emulated'", [emulated([true, true]); 3]),
        (
            "dgrad.weight = 'bf16'\nwgrad = 'bf16'",
            [GemmPrecision::SCALED, emulated([true, false]), GemmPrecision::PLAIN],
        ),
    ] {
        assert_eq!(gemms(text), expected, "{text}");
    }
}

#[test]
fn reasons_name_the_rules_about_operands() {
    let text = "[[rule]]\ntensors = '*.v'\nwgrad = 'bf16'";
    let reasons: Vec<String> =
        from_toml(text).assign(&tensors()).unwrap().into_iter().map(|a| a.reason).collect();
    let refined = "default of precision `mxfp8`, operands by rule `*.v`";
    assert_eq!(reasons[1..3], [refined, refined]);
    assert_eq!(reasons[0], "first linear tensor in execution order stays `bf16`");
}

#[test]
fn toml_text_of_operands() {
    let policy = PrecisionPolicy::mxfp8()
        .with_gemm(GemmMode::Emulated)
        .with_operands(
            &[OperandClass::WgradGradient],
            &OperandSetting::of_rounding(ElementRounding::Stochastic),
        )
        .without_in("*.v", &[OperandClass::DgradWeight])
        .unwrap();
    let text = "precision = \"mxfp8\"\nscale_rule = \"rceil\"\ngranularity = 32\n\
                weight_block = \"row\"\nfallback = \"safe\"\nkeep_first_last_bf16 = true\n\
                gemm = \"emulated\"\n\n[wgrad.gradient]\nrounding = \"stochastic\"\n\n\
                [[rule]]\ntensors = \"*.v\"\n\n[rule.dgrad]\nweight = \"bf16\"\n";
    assert_eq!(policy.to_toml(), text);
    assert_eq!(from_toml(text).to_toml(), text);
}

#[test]
fn refused_operands() {
    for (text, expected) in [
        (
            "wgrad = 'fp8'",
            "p.toml:1:9: expected one of `f32`, `bf16`, `mxfp8`, `mxfp8-e5m2`, `mxfp6-e2m3`, \
             `mxfp6-e3m2`, `mxfp4`, `nvfp4` as format, got `fp8`",
        ),
        (
            "[fprop]\ngradient = 'bf16'",
            "p.toml:2:1: unknown field `gradient`, expected `activation` or `weight`",
        ),
        (
            "[wgrad]\ngradients = 'bf16'",
            "p.toml:2:1: unknown field `gradients`, expected `gradient` or `activation`\n\
             hint: the nearest key is `gradient`",
        ),
        (
            "wgrd = 'bf16'",
            "p.toml:1:1: unknown field `wgrd`, expected one of `precision`, `scale_rule`, \
             `granularity`, `weight_block`, `fallback`, `keep_first_last_bf16`, `gemm`, \
             `scale_order`, `last_blocks`, `gradient_element`, `repair`, `fprop`, `dgrad`, \
             `wgrad`, `rule`\n\
             hint: the nearest key is `wgrad`",
        ),
        (
            "[wgrad]\ngradient = { rounding = 'random' }",
            "p.toml:2:25: expected one of `nearest`, `stochastic` as rounding, got `random`",
        ),
        (
            "[wgrad]\ngradient = { granularity = 64 }",
            "p.toml:2:28: expected one of `32`, `128` as granularity, got `64`",
        ),
        (
            "[wgrad]\ngradient = 8",
            "p.toml:2:12: invalid type: integer `8`, expected the name of a format or a table",
        ),
        (
            "[[rule]]\ntensors = '*'\nformat = 'bf16'\nwgrad = 'mxfp8'",
            "p.toml:2:11: expected a quantized format, or none, in a rule about operands, \
             got `bf16`",
        ),
        ("gemm = 'fp8'", "p.toml:1:8: expected one of `native`, `emulated` as gemm, got `fp8`"),
    ] {
        let error = PrecisionPolicy::from_toml(text, "p.toml").unwrap_err();
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

/// A rule to MXFP8 in a policy of NVFP4 gives the operands of the policy of MXFP8, without the
/// recipe's rounding and squares.
#[test]
fn mxfp8_beside_the_recipe_is_plain() {
    let of = |policy: PrecisionPolicy| policy.assign(&tensors()).unwrap()[1].operands;
    let (plain, name) = (of(PrecisionPolicy::mxfp8()), NAMES[1]);
    let beside = PrecisionPolicy::nvfp4().with_mxfp8_because(name, "slower").unwrap();
    assert_eq!(of(beside), plain);
    let with_recipe = PrecisionPolicy::nvfp4().with_rule(name, Format::MXFP8).unwrap();
    assert_ne!(of(with_recipe), plain);
}
