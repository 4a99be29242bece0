//! Scalar arithmetic and conversions, one instruction at a time.

use std::collections::HashMap;

use deepwell_kernels::cuda::Argument;

use super::bench::Bench;
use super::element::Element;
use super::golden::Group;
pub(super) use super::scalar_inputs::Words;
use super::scalar_inputs::{BYTES, COUNT, words};
use super::scalar_rows::{approximation_rows, arithmetic_rows, conversion_rows};

const THREADS: usize = 256;

/// What the words of a result are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Output {
    F32,
    /// Two in a word.
    F16,
    /// Two in a word.
    Bf16,
    /// Two in the lower half of a word.
    E4m3,
    /// Two in the lower half of a word.
    E5m2,
    Signed,
    Unsigned,
}

/// What a result is meant to be: of number `lane` of the word, given the three words.
pub(super) type Reference = fn(lane: usize, words: [u32; 3]) -> f64;

/// One instruction.
pub(super) struct Row {
    /// With operands `%a`, `%b`, `%c` and the result `%y`, all of 32 bits; `%h0` to `%h3` have 16.
    pub(super) body: &'static str,
    pub(super) inputs: Words,
    pub(super) output: Output,
    pub(super) reference: Reference,
    /// Units in the last place that the result may be off.
    pub(super) ulps: f64,
    /// What it may be off besides, for what counts as zero, and around zeros of a function.
    pub(super) absolute: f64,
}

impl Output {
    fn decode(self, word: u32) -> Vec<f64> {
        let halves =
            |element: Element| vec![element.decode(word & 0xffff), element.decode(word >> 16)];
        let codes =
            |element: Element| vec![element.decode(word & 0xff), element.decode(word >> 8 & 0xff)];
        match self {
            Output::F32 => vec![f32::from_bits(word).into()],
            Output::F16 => halves(Element::F16),
            Output::Bf16 => halves(Element::Bf16),
            Output::E4m3 => codes(Element::E4m3),
            Output::E5m2 => codes(Element::E5m2),
            Output::Signed => vec![f64::from(word.cast_signed())],
            Output::Unsigned => vec![word.into()],
        }
    }

    /// Bits of the fraction, smallest exponent, largest number.
    fn range(self) -> (i32, i32, f64) {
        match self {
            Output::F32 => (23, -126, f32::MAX.into()),
            Output::F16 => (10, -14, 65504.0),
            Output::Bf16 => (7, -126, 3.389_531_389_251_535_5e38),
            Output::E4m3 => (3, -6, 448.0),
            Output::E5m2 => (2, -14, 57344.0),
            // The unit is one.
            Output::Signed | Output::Unsigned => (0, 0, f64::from(u32::MAX)),
        }
    }
}

impl Row {
    /// The instruction, to name the case.
    fn name(&self) -> String {
        self.body.replace(';', "").replace('\n', " ")
    }

    fn ptx(&self) -> String {
        let mut text = String::from(
            ".visible .entry run(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 y)\n{\n\
             .reg .b32 %r<4>;\n.reg .b32 %a;\n.reg .b32 %b;\n.reg .b32 %c;\n.reg .b32 %y;\n\
             .reg .b16 %h<4>;\n.reg .b64 %q<4>;\n\
             mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\n\
             mad.lo.u32 %r0, %r1, %r2, %r0;\nmul.wide.u32 %q1, %r0, 4;\n",
        );
        let address = |name: &str| {
            format!(
                "ld.param.u64 %q0, [{name}];\ncvta.to.global.u64 %q0, %q0;\n\
                 add.s64 %q0, %q0, %q1;\n"
            )
        };
        for name in ["a", "b", "c"] {
            text += &address(name);
            text += &format!("ld.global.b32 %{name}, [%q0];\n");
        }
        text + self.body + "\n" + &address("y") + "st.global.b32 [%q0], %y;\nret;\n}\n"
    }

    fn check(&self, lane: usize, words: [u32; 3], got: f64) -> Option<f64> {
        let expected = (self.reference)(lane, words);
        let (fraction, lowest, largest) = self.output.range();
        let is_right = if expected.is_nan() {
            got.is_nan()
        } else if expected.abs() > largest {
            got.abs() >= largest && got.is_sign_negative() == expected.is_sign_negative()
        } else {
            let exponent = (expected.abs().log2().floor() as i32).max(lowest);
            let unit = 2f64.powi(exponent - fraction);
            // Near the largest number a rounding may end at infinity.
            let is_end = got.is_infinite() && expected.abs() + unit > largest;
            is_end || (got - expected).abs() <= self.ulps * unit + self.absolute
        };
        (!is_right).then_some(expected)
    }
}

fn run(bench: &mut Bench, name: &'static str, rows: &[Row]) {
    let mut group = Group::new(name);
    let mut inputs = HashMap::new();
    for row in rows {
        let (operands, pointers) = inputs.entry(row.inputs as usize).or_insert_with(|| {
            let operands = words(row.inputs);
            let pointers = operands.each_ref().map(|operand| {
                let bytes: Vec<u8> = operand.iter().flat_map(|word| word.to_le_bytes()).collect();
                bench.upload(&bytes)
            });
            (operands, pointers)
        });
        let output = bench.output(BYTES);
        let [a, b, c] = *pointers;
        let arguments = [a, b, c, output].map(Argument::Pointer).to_vec();
        let launch = (COUNT / THREADS, THREADS as u32);
        let got = bench.run(&row.ptx(), launch, arguments, (output, BYTES));
        bench.driver().free(output).unwrap();

        let results: Vec<u32> = bytemuck::pod_collect_to_vec(&got);
        let wrong = results.iter().enumerate().find_map(|(index, &word)| {
            let words = operands.each_ref().map(|operand| operand[index]);
            let numbers = row.output.decode(word).into_iter().enumerate();
            let mut wrong = numbers.filter_map(|(lane, got)| {
                row.check(lane, words, got).map(|expected| (lane, got, expected))
            });
            wrong.next().map(|(lane, got, expected)| {
                format!("{index}.{lane} of {words:x?} is {got:e} ({word:x}), meant is {expected:e}")
            })
        });
        if let Some(wrong) = wrong {
            group.complain(format!("{}: {wrong}", row.name()));
        }
        group.record(&row.name(), &got);
    }
    group.finish(&bench.properties());
}

trial!(conversions);
fn conversions() {
    let mut bench = Bench::open();
    run(&mut bench, "conversions", &conversion_rows());
}

trial!(arithmetic);
fn arithmetic() {
    let mut bench = Bench::open();
    run(&mut bench, "arithmetic", &arithmetic_rows());
}

trial!(approximations);
fn approximations() {
    let mut bench = Bench::open();
    run(&mut bench, "approximations", &approximation_rows());
}
