//! Plans on a driver that executes nothing.

use std::sync::{Arc, Mutex};

use deepwell_ir::{DType, GemmKind, KernelCatalog, Op, ops};
use deepwell_kernels::SingleCall;
use deepwell_kernels::cuda::{
    Architecture, CudaCatalog, Driver, FakeDriver, KernelImages, Step, cuda_target,
};
use deepwell_precision::QuantFormat;

use super::CudaDevice;
use crate::device::Device;
use crate::plan::DwPlan;
use crate::template::{Template, moved};

fn rms_norm_backward() -> SingleCall {
    let (x, w) = ((DType::Bf16, vec![64, 256]), (DType::Bf16, vec![256]));
    let inputs = [x.clone(), x.clone(), w, (DType::F32, vec![64])];
    let op: Op = ops::RmsNormBackward { residual: false }.into();
    SingleCall::new(op, &inputs, &[x, (DType::F32, vec![256])])
}

fn attention() -> SingleCall {
    let heads = ops::AttentionHeads {
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        scale: 0.1,
        causal: true,
        ..ops::AttentionHeads::default()
    };
    let (q, k) = ((DType::Bf16, vec![512, 512]), (DType::Bf16, vec![512, 256]));
    let outputs = [q.clone(), (DType::F32, vec![2, 4, 256])];
    let mut call = SingleCall::new(ops::Attention { heads }, &[q, k.clone(), k], &outputs);
    (call.batch, call.seq) = (2, 256);
    call
}

fn attention_backward() -> SingleCall {
    let forward = attention();
    let Op::Attention(ops::Attention { heads }) = &forward.op else { unreachable!() };
    let typed = |index: usize| {
        let operand = &forward.operands[index];
        (operand.dtype, operand.shape.clone())
    };
    let inputs = [3, 0, 1, 2, 3, 4].map(typed);
    let op = ops::AttentionBackward { heads: heads.clone() };
    let mut call = SingleCall::new(op, &inputs, &[0, 1, 2].map(typed));
    (call.batch, call.seq) = (2, 256);
    call
}

fn cross_entropy() -> SingleCall {
    let (x, w) = ((DType::Bf16, vec![256, 128]), (DType::Bf16, vec![1024, 128]));
    let inputs = [x.clone(), w, (DType::I32, vec![256]), (DType::F32, vec![1])];
    let outputs = [(DType::F32, vec![1]), x, (DType::F32, vec![1024, 128])];
    SingleCall::new(ops::LinearCrossEntropyGrad {}, &inputs, &outputs)
}

fn quantize() -> SingleCall {
    let format = QuantFormat::MXFP8_128;
    let planes = [
        (DType::E4m3, vec![256, 512]),
        (DType::E8m0, vec![2, 4, 512]),
        (DType::E4m3, vec![512, 256]),
        (DType::E8m0, vec![4, 2, 512]),
        (DType::U64, vec![ops::Quantize::STATISTICS]),
    ];
    let op = ops::Quantize { format, axis: ops::Axis::Both };
    SingleCall::new(op, &[(DType::Bf16, vec![256, 512])], &planes)
}

fn mxfp8_gemm() -> SingleCall {
    let (a, b) = (QuantFormat::MXFP8_128, QuantFormat::MXFP8_128.square());
    let planes = [
        (DType::E4m3, vec![1024, 512]),
        (DType::E8m0, vec![8, 4, 512]),
        (DType::E4m3, vec![2048, 512]),
        (DType::E8m0, vec![16, 4, 512]),
    ];
    let (kind, output) = (GemmKind::Fprop, DType::Bf16);
    let op = ops::ScaledGemm { kind, output, bias: false, a, b };
    SingleCall::new(op, &planes, &[(DType::Bf16, vec![1024, 2048])])
}

/// A second run at other addresses and in another stream launches as much as the first, and neither
/// run allocates, uploads or waits.
fn check(call: &SingleCall) {
    let mut driver = FakeDriver::h200();
    let counts = driver.counts();
    let memory = driver.allocate(64 << 20).unwrap().0 as usize;
    let target = cuda_target(Architecture::Sm90a, 132, &[]);
    let device = CudaDevice::new(Box::new(driver), KernelImages::empty(), target);
    let plan = DwPlan::new(Arc::new(Mutex::new(Device::Cuda(device))), call).unwrap();
    let made = counts.read();
    assert_eq!(made.launches, 0, "a plan launches nothing");
    let mut launches = Vec::new();
    // The last addresses are not aligned as a template expects.
    for (start, stream) in [(0, 0), (32 << 20, 7), (0, 7), (64, 7)] {
        let mut next = memory + start;
        let mut take = |bytes: usize| {
            let at = std::ptr::without_provenance_mut(next);
            next += bytes.next_multiple_of(256);
            at
        };
        let operands: Vec<_> =
            (0..call.operands.len()).map(|index| take(call.operand_bytes(index))).collect();
        let bytes = plan.workspace.bytes();
        let workspace = take(bytes);
        let before = counts.read();
        // SAFETY: the driver has this memory and runs no kernel.
        unsafe { plan.run(&operands, workspace, bytes, stream) }.unwrap();
        // SAFETY: as above.
        let short = unsafe { plan.run(&operands, workspace, bytes.wrapping_sub(1), stream) };
        assert_eq!(short.is_err(), bytes > 0);
        let after = counts.read();
        launches.push(after.launches - before.launches);
        let fills = usize::from(plan.workspace.counters > 0);
        assert!(after.fills - before.fills >= fills, "counters start at zero");
    }
    let ended = counts.read();
    let name = call.op.name();
    assert!(
        launches[0] > 0 && launches.iter().all(|&count| count == launches[0]),
        "{name}: {launches:?}"
    );
    let of = |counts: &deepwell_kernels::cuda::Counts| {
        (counts.allocations, counts.uploads, counts.synchronizations, counts.modules)
    };
    assert_eq!(of(&made), of(&ended), "{name}");
}

fn calls() -> [SingleCall; 6] {
    let [forward, backward] = [attention(), attention_backward()];
    [rms_norm_backward(), forward, backward, cross_entropy(), quantize(), mxfp8_gemm()]
}

#[test]
fn a_run_only_enqueues() {
    for call in calls() {
        check(&call);
    }
}

/// Gives launches the kernels of other steps: `FakeDriver` numbers a kernel anew at each use.
fn with_kernels_of(steps: &[Step], mut others: Vec<Step>) -> Vec<Step> {
    for (step, other) in steps.iter().zip(&mut others) {
        if let (Step::Launch(launch), Step::Launch(other)) = (step, other) {
            other.function = launch.function;
        }
    }
    others
}

/// Steps by a template are those that the launcher prepares, at any addresses.
#[test]
fn a_template_gives_what_the_launcher_prepares() {
    let target = cuda_target(Architecture::Sm90a, 132, &[]);
    let driver = Box::new(FakeDriver::h200());
    let mut device = CudaDevice::new(driver, KernelImages::empty(), target.clone());
    for call in calls() {
        let name = call.op.name();
        let choice = CudaCatalog.select(&call.request(), &target).unwrap().choice;
        let program = call.program(choice, target.clone(), 1);
        let workspace = device.warm_up(&program).unwrap();
        let places = |seed: usize| -> Vec<usize> {
            let place = |index: usize| (((index * 7 + seed * 5) % 13 + 1) << 33) | (seed << 8);
            (0..=program.values.len()).map(place).collect()
        };
        let addresses = places(0);
        let moved: Vec<usize> =
            addresses.iter().enumerate().map(|(index, &at)| moved(index, at)).collect();
        let first = device.steps(&program, &addresses, workspace).unwrap();
        let second = device.steps(&program, &moved, workspace).unwrap();
        let second = with_kernels_of(&first, second);
        let mut template = Template::new(first.clone(), second, &addresses).expect(&name);
        for addresses in [places(1), places(2)] {
            let prepared = device.steps(&program, &addresses, workspace).unwrap();
            assert_eq!(template.at(&addresses), with_kernels_of(&first, prepared), "{name}");
        }
    }
}

/// A launcher that writes an address's bits anywhere but in a word of its own has no template.
#[test]
fn a_step_with_a_hidden_address_has_no_template() {
    use deepwell_kernels::cuda::DevicePtr;

    let fill = |target: usize, bytes: usize| Step::Fill {
        target: DevicePtr(target as u64),
        byte: 0,
        bytes,
    };
    let addresses = [1 << 20];
    let second = moved(0, addresses[0]);
    for (first, then, expected) in [
        (fill(addresses[0] + 8, 4), fill(second + 8, 4), true),
        (fill(addresses[0], 4), fill(second, 8), false),
        (fill(addresses[0], 4), fill(second + 8, 4), false),
        (fill(addresses[0], 4), fill(moved(1, addresses[0]), 4), false),
    ] {
        let found = Template::new(vec![first.clone()], vec![then.clone()], &addresses).is_some();
        assert_eq!(found, expected, "{first:?} and {then:?}");
    }
}
