//! `sm100_bf16_gemm.cu`: the three GEMMs of a linear layer, on tcgen05.

use deepwell_ir::{KernelRequest, Op, Target};

use super::bf16_gemm;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::device_tensor::DeviceTensor;
use crate::runtime::cuda::driver::{Argument, DevicePtr, TensorMap};
use crate::runtime::cuda::launch::gemm::{LinearSizes, not_empty};
use crate::runtime::cuda::launch::tcgen05::{GemmSizes, TileShape};
use crate::runtime::cuda::launch::tcgen05_cost::ResultCost;
use crate::runtime::cuda::launch::tensor_maps::{Operands, k_major_boxes, mn_major_boxes};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::{CudaKernelSpec, TileSelection};

/// Row strides of operands are multiples of this, for tensor copies.
const WIDTH: usize = 8;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_sm100_bf16_gemm", OPS, prepare)
        .architectures(ARCHITECTURES)
        .reject(reject)
        .predict(predict)
        .select_tile(select_tile)];

const OPS: &[&str] = &["linear", "linear_dgrad", "linear_wgrad"];
pub(crate) const ARCHITECTURES: &[Architecture] = &[Architecture::Sm100a, Architecture::Sm103a];

pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let rows_are_whole = || {
        let lengths = request.operands[..2].iter().map(|operand| operand.shape[1]);
        let odd = lengths.into_iter().find(|length| !length.is_multiple_of(WIDTH))?;
        Some(format!("takes operands with rows of multiples of {WIDTH}, not {odd}"))
    };
    bf16_gemm::reject(request).or_else(|| not_empty(request, &[0, 1])).or_else(rows_are_whole)
}

/// A GEMM in the kernel's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) name: &'static str,
    pub(crate) sizes: GemmSizes,
    /// Whether operands are K-major, otherwise MN-major.
    pub(super) a_k_major: bool,
    pub(super) b_k_major: bool,
}

impl Form {
    pub(crate) fn new(op: &Op, sizes: LinearSizes) -> Form {
        let LinearSizes { tokens, outputs, inputs } = sizes;
        let (name, [m, n, k], [a_k_major, b_k_major]) = match op {
            Op::LinearDgrad(_) => ("dgrad", [tokens, inputs, outputs], [true, false]),
            Op::LinearWgrad(_) => ("wgrad", [outputs, inputs, tokens], [false, false]),
            _ => ("linear", [tokens, outputs, inputs], [true, true]),
        };
        Form { name, sizes: GemmSizes { m, n, k }, a_k_major, b_k_major }
    }
}

fn select_tile(request: &KernelRequest<'_>, target: &Target) -> TileSelection {
    let [first, second] = [0, 1].map(|index| &request.operands[index].shape);
    let form = Form::new(request.op, LinearSizes::new(request.op, first, second));
    let shapes = TileShape::all(Operands::Bf16);
    TileShape::select(shapes, form.sizes, ResultCost::default(), target)
}

fn predict(request: &KernelRequest<'_>, target: &Target) -> f64 {
    let [first, second] = [0, 1].map(|index| &request.operands[index].shape);
    let form = Form::new(request.op, LinearSizes::new(request.op, first, second));
    let shapes = TileShape::all(Operands::Bf16);
    TileShape::predicted_s(shapes, form.sizes, ResultCost::default(), request, target)
}

/// Tensor maps of both operands, each K-major or MN-major.
pub(crate) fn operand_maps(
    form: &Form,
    shape: TileShape,
    a: &DeviceTensor,
    b: &DeviceTensor,
    device: &mut Device<'_>,
) -> Result<[TensorMap; 2], KernelError> {
    let mut map = |tensor, k_major, rows| {
        let spec = match k_major {
            true => k_major_boxes(tensor, Operands::Bf16, rows),
            false => mn_major_boxes(tensor, Operands::Bf16),
        };
        device.tensor_map(&spec)
    };
    let [a_rows, b_rows] = shape.copied_rows();
    Ok([map(a, form.a_k_major, a_rows)?, map(b, form.b_k_major, b_rows)?])
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let op = &call.call.op;
    let (a, b, out) = (call.input(0), call.input(1), call.output(0));
    let form = Form::new(op, LinearSizes::new(op, &a.shape, &b.shape));
    let sizes = form.sizes;
    let sm_count = device.sm_count();
    let shape = TileShape::of_call(call, &TileShape::all(Operands::Bf16))?;
    let name = format!("sm100_bf16_gemm_{}_{}", form.name, shape.name());
    let function = device.function("sm100_bf16_gemm", &name, shape.shared_bytes())?;
    let [a_map, b_map] = operand_maps(&form, shape, &a, &b, device)?;
    let bias = match op {
        Op::Linear(linear) if linear.bias => call.input(2).pointer,
        _ => DevicePtr(0),
    };
    let arguments = vec![
        Argument::TensorMap(a_map),
        Argument::TensorMap(b_map),
        Argument::Pointer(bias),
        out.argument(),
        Argument::I32(sizes.m as i32),
        Argument::I32(sizes.n as i32),
        Argument::I32(sizes.k as i32),
        Argument::U32(call.accumulate().into()),
    ];
    Ok(vec![shape.launch(function, sizes, sm_count, arguments)])
}

#[cfg(test)]
mod tests {
    use deepwell_ir::{DType, OperandType, ops};

    use super::*;

    fn gemms() -> [Op; 3] {
        let linear = ops::Linear { bias: false };
        [linear.into(), ops::LinearDgrad {}.into(), ops::LinearWgrad {}.into()]
    }

    #[test]
    fn forms_of_the_three_gemms() {
        let [linear, dgrad, wgrad] = gemms();
        let sizes = LinearSizes { tokens: 5, outputs: 3, inputs: 7 };
        for (op, name, mnk, k_major) in [
            (linear, "linear", [5, 3, 7], [true, true]),
            (dgrad, "dgrad", [5, 7, 3], [true, false]),
            (wgrad, "wgrad", [3, 7, 5], [false, false]),
        ] {
            let [m, n, k] = mnk;
            let [a_k_major, b_k_major] = k_major;
            let gemm_sizes = GemmSizes { m, n, k };
            let expected = Form { name, sizes: gemm_sizes, a_k_major, b_k_major };
            assert_eq!(Form::new(&op, sizes), expected);
        }
    }

    #[test]
    fn refusals_say_what_is_taken() {
        let [linear, dgrad, wgrad] = gemms();
        let (bf16, f32) = (DType::Bf16, DType::F32);
        let odd =
            |length: usize| format!("takes operands with rows of multiples of 8, not {length}");
        // The first two operands, the dtype of the result.
        for (op, dtype, first, second, output, expected) in [
            (&linear, bf16, [5, 16], [7, 16], bf16, None),
            (&linear, bf16, [5, 12], [8, 12], bf16, Some(odd(12))),
            (&dgrad, bf16, [5, 8], [8, 16], bf16, None),
            (&dgrad, bf16, [5, 7], [7, 16], bf16, Some(odd(7))),
            (&dgrad, bf16, [5, 8], [8, 15], bf16, Some(odd(15))),
            (&wgrad, bf16, [5, 8], [5, 16], f32, None),
            (&wgrad, bf16, [5, 9], [5, 16], f32, Some(odd(9))),
            (&wgrad, bf16, [0, 8], [0, 16], f32, Some("takes no empty matrices".to_string())),
            (&wgrad, bf16, [5, 8], [5, 16], bf16, Some("gives f32, not bf16".to_string())),
            (&linear, f32, [5, 16], [7, 16], f32, Some("takes bf16 operands, not f32".to_string())),
        ] {
            let operand = |dtype, shape: [usize; 2]| OperandType { dtype, shape: shape.to_vec() };
            let operands = [operand(dtype, first), operand(dtype, second), operand(output, [1, 1])];
            let request = KernelRequest { op, operands: &operands, input_count: 2 };
            assert_eq!(reject(&request), expected, "{} {first:?} {second:?}", op.name());
        }
    }
}
