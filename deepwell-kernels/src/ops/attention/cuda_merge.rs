//! `merge_attention.cu`: merges attention to disjoint sets of keys into attention to all keys.

use deepwell_ir::{DType, KernelRequest, Op};

use crate::KernelError;
use crate::runtime::cuda::driver::Argument;
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Elements per thread.
const WIDTH: usize = 4;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_merge_attention", &["merge_attention"], prepare).reject(reject)];

/// Units per row of a head and in total, for o `[T, H·V]`; `None` if rows are no whole units, or
/// their number exceeds the source's 32-bit counter.
fn units(out: &[usize], heads: usize) -> Option<(usize, u32)> {
    let width = out[1] / heads.max(1);
    let items = out[0].checked_mul(out[1] / WIDTH)?;
    width.is_multiple_of(WIDTH).then(|| Some((width / WIDTH, u32::try_from(items).ok()?)))?
}

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let Op::MergeAttention(op) = request.op else {
        return Some("takes `merge_attention`".to_string());
    };
    let out = &request.operands[request.input_count];
    if units(&out.shape, op.heads).is_none() {
        return Some(format!(
            "takes heads of a multiple of {WIDTH} elements, at most {} of them in all, not {:?} of \
             {} heads",
            WIDTH as u64 * u64::from(u32::MAX),
            out.shape,
            op.heads
        ));
    }
    (!matches!(out.dtype, DType::Bf16 | DType::F32))
        .then(|| format!("gives bf16 or f32, not {}", out.dtype))
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let Op::MergeAttention(op) = &call.call.op else {
        return Err(call.refuse("expected `merge_attention`"));
    };
    let (out, lse) = (call.output(0), call.output(1));
    let Some((units, items)) = units(&out.shape, op.heads) else {
        return Err(call.refuse(format!("expected no rows {:?}", out.shape)));
    };
    // Pairs of o and lse, part by part.
    let inputs = call.call.input_count;
    let addresses: Vec<u64> = (0..inputs).map(|index| call.input(index).pointer.0).collect();
    let parts = device.constant(bytemuck::cast_slice(&addresses))?;
    let entry = match out.dtype {
        DType::F32 => "merge_attention_f32",
        _ => "merge_attention_bf16",
    };
    let function = device.function("merge_attention", entry, 0)?;
    let arguments = vec![
        Argument::Pointer(parts),
        Argument::U32(inputs as u32 / 2),
        out.argument(),
        lse.argument(),
        Argument::U32(items),
        Argument::U32(op.heads as u32),
        Argument::U32(lse.shape[2] as u32),
        Argument::U32(units as u32),
    ];
    let ctas = items.div_ceil(THREADS).max(1);
    Ok(vec![Device::launch(function, ctas, THREADS, 0, arguments)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_four_elements_of_a_head() {
        for (out, heads, expected) in [
            ([10, 64], 4, Some((4, 160))),
            ([0, 64], 4, Some((4, 0))),
            ([3, 12], 3, Some((1, 9))),
            ([3, 12], 2, None),
            ([1 << 30, 64], 4, None),
            ([usize::MAX, 64], 4, None),
        ] {
            assert_eq!(units(&out, heads), expected, "{out:?} {heads}");
        }
    }
}
