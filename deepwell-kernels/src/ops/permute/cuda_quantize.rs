//! `permute_quantize.cu`: rows of tokens to rows of pairs, with block quantization.

use deepwell_ir::KernelRequest;

use crate::KernelError;
use crate::cuda::driver::Argument;
use crate::cuda::launch::row_quantize::{self, Rows, Tiles};
use crate::cuda::prepare::{CallView, Device, Step};
use crate::cuda::spec::{Architecture, CudaKernelSpec, no_workspace};
use crate::predict::roofline;

pub(crate) const SPECS: &[CudaKernelSpec] = &[CudaKernelSpec {
    name: "cuda_permute_quantize",
    ops: &["permute"],
    epilogue: row_quantize::epilogue,
    architectures: &Architecture::ALL,
    library: None,
    reject,
    predict: roofline,
    workspace_bytes: no_workspace,
    select_tile: None,
    prepare,
}];

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
