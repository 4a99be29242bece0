//! Random operands: the power and thus the speed of arithmetic depend on the operands' bits.

use deepwell_ir::ops::GroupedRows;
use deepwell_ir::{Access, DType, Op, ops};
use deepwell_kernels::SingleCall;
use deepwell_precision::random::XorShift64;
use deepwell_precision::{Overflow, Rounding, e4m3};
use half::bf16;

use super::expert_gemms::{Grouped, Routing};

/// Number of elements of the pool of operands; odd, so that rows of round length differ.
const POOL: usize = (1 << 20) + 7;

/// Contents of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Uniform in [-1, 1).
    Uniform,
    /// Uniform in [0.5, 1.5): reciprocal deviations, weights of norms.
    Positive,
    /// E4M3 elements of numbers uniform in [-448, 448): the block quantization of uniform numbers.
    E4m3,
    /// Powers of two from 1/16 to 8, in groups of four equal bytes as for one scale per 128
    /// elements.
    Scales,
    /// The same number in every element.
    Constant(f32),
    /// The first rows of groups, in a buffer with this number of rows.
    Offsets(Routing, GroupedRows, usize),
    /// Nothing: outputs, counters.
    Zero,
}

/// Contents of the operands of a call, in order; `routing` is the routing of the experts' tokens.
pub(super) fn fills(call: &SingleCall, routing: Routing) -> Vec<Fill> {
    let producer = call.op.leading();
    let expert_gemm = Grouped::of(call);
    (0..call.operands.len())
        .map(|index| {
            // Pure outputs and accumulators are zero; the optimizer's state is neither.
            let is_state = matches!(producer, Op::AdamW(_)) && call.access[index] != Access::Write;
            if index >= call.input_count && !is_state {
                return Fill::Zero;
            }
            special(producer, index, call).unwrap_or(match call.operands[index].dtype {
                DType::E4m3 => Fill::E4m3,
                DType::E8m0 => Fill::Scales,
                DType::F32 | DType::Bf16 => Fill::Uniform,
                DType::I32 => expert_gemm
                    .map_or(Fill::Zero, |Grouped { grouped, rows, .. }| {
                        Fill::Offsets(routing, grouped, rows)
                    }),
                _ => Fill::Zero,
            })
        })
        .collect()
}

/// Contents of operands that are not plain data.
fn special(op: &Op, index: usize, call: &SingleCall) -> Option<Fill> {
    match (op, index) {
        // The logarithm of a sum over the keys of numbers around 1.
        (Op::AttentionBackward(_), 5) => Some(Fill::Constant((call.seq.max(1) as f32).ln())),
        (Op::RmsNormBackward(_), 2 | 3) => Some(Fill::Positive),
        (Op::LayerNormBackward(_), 2 | 4) => Some(Fill::Positive),
        // Coefficients of a step that is applied and stays finite, and each parameter's second
        // moment.
        (Op::AdamW(_), 0) => Some(Fill::Constant(0.5)),
        (Op::AdamW(_), _) => {
            let of_parameter =
                (index - ops::AdamW::LEADING_OPERANDS) % ops::AdamW::OPERANDS_PER_PARAMETER;
            (of_parameter == 3).then_some(Fill::Positive)
        }
        _ => None,
    }
}

/// Random bytes to cut operands from.
pub(super) struct Pool {
    words: Vec<u64>,
}

impl Pool {
    /// Returns a pool of random words, which depend only on the seed.
    pub(super) fn new(seed: u64) -> Pool {
        Pool::of(POOL, seed)
    }

    /// A pool of the given number of words.
    pub(super) fn of(words: usize, seed: u64) -> Pool {
        let mut random = XorShift64(seed ^ 0xD1B5_4A32_D192_ED03);
        Pool { words: (0..words).map(|_| random.draw()).collect() }
    }

    /// The bytes of one period of an operand; an operand repeats its period.
    pub(super) fn period(&self, fill: Fill, dtype: DType) -> Vec<u8> {
        let unit = |word: u64| (word >> 40) as f32 / (1u64 << 24) as f32;
        let floats = |value: &dyn Fn(u64) -> f32| -> Vec<u8> {
            let values = self.words.iter().map(|&word| value(word));
            match dtype {
                DType::Bf16 => {
                    let values: Vec<bf16> = values.map(bf16::from_f32).collect();
                    bytemuck::cast_slice(&values).to_vec()
                }
                _ => bytemuck::cast_slice(&values.collect::<Vec<f32>>()).to_vec(),
            }
        };
        match fill {
            Fill::Uniform => floats(&|word| unit(word) * 2.0 - 1.0),
            Fill::Positive => floats(&|word| unit(word) + 0.5),
            Fill::Constant(value) => floats(&|_| value),
            Fill::E4m3 => {
                let code = |x: f32| e4m3::encode(x, Rounding::NearestEven, Overflow::Saturate);
                let number = |word: u64| e4m3::MAX * (unit(word) * 2.0 - 1.0);
                self.words.iter().map(|&word| code(number(word))).collect()
            }
            Fill::Scales => {
                self.words.iter().flat_map(|&word| [123 + ((word >> 32) % 8) as u8; 4]).collect()
            }
            Fill::Offsets(routing, grouped, rows) => {
                bytemuck::cast_slice(&routing.offsets(grouped, rows)).to_vec()
            }
            Fill::Zero => vec![0; 4096],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_what_they_should_be() {
        let pool = Pool::new(1);
        let bytes = pool.period(Fill::Uniform, DType::F32);
        let floats: Vec<f32> =
            bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        assert!(floats.iter().all(|x| (-1.0..1.0).contains(x)));
        let mean = floats.iter().sum::<f32>() / floats.len() as f32;
        // Four standard errors of the mean of a million numbers of deviation 0.58.
        assert!(mean.abs() < 4.0 * 0.58 / 1024.0, "{mean}");
        let codes = pool.period(Fill::E4m3, DType::E4m3);
        assert!(codes.iter().all(|code| code & 0x7F != 0x7F));
        // Half of the numbers are in the upper half, whose codes start at 224.
        let upper = codes.iter().filter(|&&code| e4m3::decode(code).abs() >= 224.0).count();
        assert!((upper as f64 / codes.len() as f64 - 0.5).abs() < 0.02, "{upper}");
        let scales = pool.period(Fill::Scales, DType::E8m0);
        assert!(scales.chunks(4).all(|four| four.iter().all(|&byte| byte == four[0])));
        let bytes = pool.period(Fill::Positive, DType::Bf16);
        let positive: Vec<bf16> =
            bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]])).collect();
        assert!(positive.iter().all(|x| (0.5..=1.5).contains(&x.to_f32())));
    }
}
