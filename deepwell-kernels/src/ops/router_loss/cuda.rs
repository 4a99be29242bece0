//! `router_loss.cu`: the auxiliary losses of a router, with their gradient.

use deepwell_ir::ops::{IGNORED_TARGET, RouteScore, RouterLoss};
use deepwell_ir::{KernelRequest, Op, Target};

use crate::KernelError;
use crate::runtime::cuda::driver::{Argument, DevicePtr};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::cuda::spec::CudaKernelSpec;

/// Threads of a CTA, as in the source.
const THREADS: u32 = 256;
/// Warps of a CTA, with one token each at a time.
const WARPS: usize = THREADS as usize / 32;
/// Largest number of CTAs. The number determines the order of summation, and so is the same for all
/// devices.
const CTAS_MAX: usize = 512;
/// Largest number of counting CTAs: every CTA of the second launch adds all of their counts.
const COUNTING_CTAS_MAX: usize = 32;
/// Most experts that fit shared memory, with 17 FP64 numbers per expert.
const EXPERTS_MAX: usize = 512;

pub(crate) const SPECS: &[CudaKernelSpec] =
    &[CudaKernelSpec::new("cuda_router_loss", &["router_loss", "router_loss_grad"], prepare)
        .reject(reject)
        .workspace_bytes(workspace_bytes)];

fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let experts = request.operands[0].shape[1];
    (experts > EXPERTS_MAX).then(|| format!("takes at most {EXPERTS_MAX} experts, not {experts}"))
}

/// Number of CTAs for this many tokens.
fn ctas(tokens: usize) -> usize {
    tokens.div_ceil(WARPS).clamp(1, CTAS_MAX)
}

/// Number of CTAs that count this many pairs.
fn counting_ctas(pairs: usize) -> usize {
    pairs.div_ceil(4 * THREADS as usize).clamp(1, COUNTING_CTAS_MAX)
}

/// Bytes of the CTAs' sums, which precede the counts.
fn partial_bytes(tokens: usize) -> usize {
    ctas(tokens) * size_of::<f64>()
}

fn workspace_bytes(request: &KernelRequest<'_>, _: &Target) -> usize {
    let (logits, chosen) = (&request.operands[0].shape, &request.operands[1].shape);
    let counts = counting_ctas(chosen[0] * chosen[1]) * (logits[1] + 1);
    partial_bytes(logits[0]) + counts * size_of::<u32>()
}

fn prepare(call: &CallView<'_>, device: &mut Device<'_>) -> Result<Vec<Step>, KernelError> {
    let (op, with_gradient): (&RouterLoss, bool) = match &call.call.op {
        Op::RouterLoss(op) => (op, false),
        Op::RouterLossGrad(op) => (&op.forward, true),
        _ => return Err(call.refuse("expected a router's losses")),
    };
    let [logits, chosen, targets, loss_scale] = [0, 1, 2, 3].map(|index| call.input(index));
    let ([tokens, experts], pairs) = ([logits.shape[0], logits.shape[1]], chosen.elements());
    let dlogits = if with_gradient { call.output(1).pointer } else { DevicePtr(0) };
    let partials = call.workspace().0;
    let counts = Argument::Pointer(partials.offset(partial_bytes(tokens)));
    let number = |number: usize| Argument::U32(number as u32);

    let counting = counting_ctas(pairs);
    let counting_bytes = ((experts + 1) * size_of::<u32>()) as u32;
    let count = device.function("router_loss", "router_loss_count", counting_bytes)?;
    let of_count = vec![
        chosen.argument(),
        targets.argument(),
        counts,
        number(pairs),
        number(tokens),
        number(experts),
        Argument::I32(IGNORED_TARGET),
    ];

    let shared_bytes = ((1 + 2 * WARPS) * experts * size_of::<f64>()) as u32;
    let function = device.function("router_loss", "router_loss", shared_bytes)?;
    // Avoids a division by zero without tokens.
    let balance = op.balance * experts as f64 / (tokens.max(1) * pairs.max(1)) as f64;
    let z = op.z / tokens.max(1) as f64;
    let arguments = vec![
        logits.argument(),
        loss_scale.argument(),
        call.output(0).argument(),
        Argument::Pointer(dlogits),
        counts,
        Argument::Pointer(partials),
        Argument::Pointer(device.arrival_counters(1)?),
        number(tokens),
        number(experts),
        Argument::U32((op.score == RouteScore::Sigmoid).into()),
        Argument::U64(balance.to_bits()),
        Argument::U64(z.to_bits()),
        number(counting),
        Argument::U32(op.ranks),
        Argument::U32(call.accumulate().into()),
    ];
    Ok(vec![
        Device::launch(count, counting as u32, THREADS, counting_bytes, of_count),
        Device::launch(function, ctas(tokens) as u32, THREADS, shared_bytes, arguments),
    ])
}
