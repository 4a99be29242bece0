//! `permute_quantize.cu`: rows of tokens to rows of pairs, with block quantization.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::launch::row_quantize::{self, Rows, Tiles};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_permute_quantize", &["permute"], prepare)
        .epilogue(row_quantize::epilogue)
        .reject(reject)];

/// Shape of the rows of pairs, from x `[tokens, columns]` and pairs `[rows]`.
fn shape(x: &[usize], pairs: &[usize]) -> [usize; 2] {
    [pairs[0], x[1]]
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let shape = shape(&request.operands[0].shape, &request.operands[2].shape);
    row_quantize::reject_rows(request, &[0], &shape)
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let [x, rows, pairs] = [0, 1, 2].map(|index| call.input(index));
    let rows = Rows {
        shape: &shape(&x.shape, &pairs.shape),
        inputs: vec![x.argument(), pairs.argument()],
        rest: vec![Argument::U32(rows.shape[1] as u32)],
        tiles: Tiles::Walked,
        pipe: None,
    };
    Ok(vec![rows.launch(call, device, "permute_quantize", "permute")?])
}
