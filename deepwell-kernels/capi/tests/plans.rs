//! Plans on host memory, and the errors of requests.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use deepwell::*;

#[repr(align(64))]
#[derive(Clone, Copy)]
struct Row([f32; 32]);

const F32: i32 = DwDType::F32 as i32;

fn operand(dtype: i32, shape: &[i64]) -> DwOperand {
    let mut sizes = [0; DW_MAX_RANK];
    sizes[..shape.len()].copy_from_slice(shape);
    DwOperand { dtype, rank: shape.len() as i32, updated: 0, reserved: 0, sizes }
}

/// A request with the strings that it points to.
struct Owned {
    device: CString,
    op: CString,
    operands: Vec<DwOperand>,
    input_count: i32,
    accumulate: i32,
    struct_bytes: usize,
}

impl Owned {
    fn request(&self) -> DwRequest {
        DwRequest {
            struct_bytes: self.struct_bytes,
            device: self.device.as_ptr(),
            op: self.op.as_ptr(),
            operands: self.operands.as_ptr(),
            input_count: self.input_count,
            output_count: self.operands.len() as i32 - self.input_count,
            batch: 1,
            seq: 1,
            accumulate: self.accumulate,
            reserved: 0,
        }
    }

    /// Status and message of `dw_supported`.
    fn supported(&self) -> (DwStatus, String) {
        // SAFETY: the strings and operands live in `self`.
        let status = unsafe { dw_supported(&self.request()) };
        (status, last_error())
    }

    fn plan(&self) -> *mut DwPlan {
        let mut plan = ptr::null_mut();
        // SAFETY: as above.
        let status = unsafe { dw_plan_create(&self.request(), &mut plan) };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        plan
    }
}

fn last_error() -> String {
    // SAFETY: the last call of this thread left a string.
    unsafe { CStr::from_ptr(dw_last_error()) }.to_str().unwrap().to_string()
}

/// RMSNorm of two rows of 32.
fn rms_norm(device: &str) -> Owned {
    Owned {
        device: CString::new(device).unwrap(),
        op: CString::new(r#"{"op": "rms_norm", "eps": 0.0}"#).unwrap(),
        operands: vec![
            operand(F32, &[2, 32]),
            operand(F32, &[32]),
            operand(F32, &[2, 32]),
            operand(F32, &[2]),
        ],
        input_count: 2,
        accumulate: 0,
        struct_bytes: size_of::<DwRequest>(),
    }
}

#[test]
fn a_plan_runs_several_times() {
    assert_eq!(dw_abi_version(), DW_ABI_VERSION);
    let plan = rms_norm("cpu").plan();
    let weight = Row(std::array::from_fn(|index| index as f32));
    for factor in [1.0f32, -3.0] {
        let x = [Row([factor; 32]), Row([2.0 * factor; 32])];
        let (mut y, mut rstd) = ([Row([9.0; 32]); 2], [Row([9.0; 32])]);
        let operands: [*mut c_void; 4] = [
            x.as_ptr().cast_mut().cast(),
            ptr::from_ref(&weight).cast_mut().cast(),
            y.as_mut_ptr().cast(),
            rstd.as_mut_ptr().cast(),
        ];
        // SAFETY: four operands of the sizes of the plan.
        let status =
            unsafe { dw_plan_run(plan, operands.as_ptr(), ptr::null_mut(), 0, ptr::null_mut()) };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        for row in y {
            assert_eq!(row.0, weight.0.map(|w| factor.signum() * w));
        }
        assert_eq!(rstd[0].0[..3], [1.0 / factor.abs(), 0.5 / factor.abs(), 9.0]);
    }
    // SAFETY: made above and not used after.
    unsafe { dw_plan_destroy(plan) };
    // SAFETY: null is allowed.
    unsafe { dw_plan_destroy(ptr::null_mut()) };
}

#[test]
fn gradients_are_added_if_asked_for() {
    for (accumulate, expected) in [(0, 64.0), (1, 164.0)] {
        let request = Owned {
            op: CString::new(r#"{"op": "rms_norm_backward", "residual": false}"#).unwrap(),
            operands: vec![
                operand(F32, &[2, 32]),
                operand(F32, &[2, 32]),
                operand(F32, &[32]),
                operand(F32, &[2]),
                operand(F32, &[2, 32]),
                operand(F32, &[32]),
            ],
            input_count: 4,
            accumulate,
            ..rms_norm("cpu")
        };
        let plan = request.plan();
        let ones = [Row([1.0; 32]); 2];
        let dy = [Row([32.0; 32]); 2];
        let (mut dx, mut dw) = ([Row([0.0; 32]); 2], Row([100.0; 32]));
        let one = ones.as_ptr().cast_mut().cast();
        let operands: [*mut c_void; 6] = [
            dy.as_ptr().cast_mut().cast(),
            one,
            one,
            one,
            dx.as_mut_ptr().cast(),
            ptr::from_mut(&mut dw).cast(),
        ];
        // SAFETY: six operands of the sizes of the plan.
        let status =
            unsafe { dw_plan_run(plan, operands.as_ptr(), ptr::null_mut(), 0, ptr::null_mut()) };
        assert_eq!(status, DwStatus::Ok, "{}", last_error());
        assert_eq!(dw.0, [expected; 32]);
        // SAFETY: made above and not used after.
        unsafe { dw_plan_destroy(plan) };
    }
}

#[test]
fn what_is_wrong_with_a_request_is_said() {
    let check = |request: Owned, status: DwStatus, expected: &str| {
        let (got, message) = request.supported();
        assert_eq!(got, status, "{message}");
        assert!(message.contains(expected), "expected `{expected}`, got `{message}`");
    };
    use DwStatus::{InvalidArgument, NoDevice, Ok, Unsupported};
    let base = || rms_norm("cpu");
    let with_op = |op: &str| Owned { op: CString::new(op).unwrap(), ..base() };
    let with = |index: usize, changed: DwOperand| {
        let mut request = base();
        request.operands[index] = changed;
        request
    };
    check(base(), Ok, "");
    check(rms_norm("sm90"), Unsupported, "cuda_rms_norm: takes bf16 operands, not f32");
    check(
        Owned { struct_bytes: 8, ..base() },
        InvalidArgument,
        "`struct_bytes`: expected at least",
    );
    check(rms_norm("tpu"), InvalidArgument, "as device, got `tpu`");
    check(rms_norm("emulated:sm90"), NoDevice, "without the feature `emulated`");
    check(with_op("{"), InvalidArgument, "`op`: EOF");
    check(with_op(r#"{"op": "norm"}"#), InvalidArgument, "unknown variant `norm`");
    check(with_op(r#"{"op": "rms_norm"}"#), InvalidArgument, "missing field `eps`");
    check(with(0, operand(77, &[2, 32])), InvalidArgument, "operand 0: expected a DwDType, got 77");
    check(with(1, operand(F32, &[-1])), InvalidArgument, "operand 1: expected sizes of 0 or more");
    check(with(1, operand(F32, &[31])), InvalidArgument, "`rms_norm`: expected");
    check(
        with(3, operand(F32, &[3])),
        InvalidArgument,
        "expected the outputs f32 [2, 32], f32 [2];",
    );
    let ids = with_op(
        r#"{"op": "rope", "heads": 2, "head_dim": 16, "interleaved": false,
        "inverse_frequencies": [1, 1, 1, 1, 1, 1, 1, 1], "attention_factor": 1}"#,
    );
    check(ids, InvalidArgument, "expected batch · seq rows, 1 · 1, got 2");
    let collective = Owned {
        op: CString::new(r#"{"op": "gelu", "tanh": true}"#).unwrap(),
        operands: vec![operand(F32, &[2, 3]), operand(F32, &[2, 3])],
        input_count: 1,
        ..rms_norm("sm90")
    };
    check(collective, Unsupported, "no kernel for `gelu` on `hopper-sm90`");
}

#[test]
fn operands_of_a_run_are_checked() {
    let plan = rms_norm("cpu").plan();
    let mut memory = [Row([1.0; 32]); 4];
    let place: *mut c_void = memory.as_mut_ptr().cast();
    let check = |operands: [*mut c_void; 4], expected: &str| {
        // SAFETY: the call rejects the addresses before it reads them.
        let status =
            unsafe { dw_plan_run(plan, operands.as_ptr(), ptr::null_mut(), 0, ptr::null_mut()) };
        assert_eq!(status, DwStatus::InvalidArgument);
        assert!(last_error().contains(expected), "{}", last_error());
    };
    let shifted = place.wrapping_byte_add(4);
    check([ptr::null_mut(), place, place, place], "operand 0: expected memory, got a null pointer");
    check(
        [place, shifted, place, place],
        "operand 1: expected an address that is a multiple of 64",
    );
    // SAFETY: made above and not used after.
    unsafe { dw_plan_destroy(plan) };
}
