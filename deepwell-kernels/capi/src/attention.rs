//! Attention, forward and backward.

use std::ffi::c_void;

use deepwell_ir::DType;
use deepwell_ir::ops::{Attention, AttentionBackward, AttentionHeads};

use crate::session::{Memory, Request, not_null, run, size};
use crate::status::{DwStatus, Failure, guard};

/// Sizes of an attention over whole sequences.
struct Sizes {
    batch: usize,
    seq: usize,
    heads: AttentionHeads,
}

impl Sizes {
    fn new(
        [batch, seq, heads, kv_heads, head_dim]: [(&str, i32); 5],
        scale: f64,
        causal: i32,
    ) -> Result<Sizes, Failure> {
        let of = |(name, value): (&str, i32)| size(name, value);
        let head_dim = of(head_dim)?;
        let scale = match scale {
            0.0 => 1.0 / (head_dim as f64).sqrt(),
            scale if scale.is_finite() => scale,
            other => {
                return Err(Failure::InvalidArgument(format!(
                    "`scale`: expected a finite number, or 0 for 1/sqrt(head_dim), got {other}"
                )));
            }
        };
        let (heads, kv_heads) = (of(heads)?, of(kv_heads)?);
        if !heads.is_multiple_of(kv_heads) {
            return Err(Failure::InvalidArgument(format!(
                "expected `heads` to be a multiple of `kv_heads`, got {heads} and {kv_heads}"
            )));
        }
        let heads = AttentionHeads {
            heads,
            kv_heads,
            head_dim,
            scale,
            causal: causal != 0,
            ..AttentionHeads::default()
        };
        Ok(Sizes { batch: of(batch)?, seq: of(seq)?, heads })
    }

    /// Shape of q, o and their gradients.
    fn q(&self) -> [usize; 2] {
        [self.batch * self.seq, self.heads.heads * self.heads.head_dim]
    }

    /// Shape of k, v and their gradients.
    fn kv(&self) -> [usize; 2] {
        [self.batch * self.seq, self.heads.kv_heads * self.heads.head_dim]
    }

    fn lse(&self) -> [usize; 3] {
        [self.batch, self.heads.heads, self.seq]
    }

    fn run(&self, request: Request) -> Result<(), Failure> {
        run(&Request { batch: self.batch, seq: self.seq, ..request })
    }
}

/// Scaled dot-product attention in BF16 with contiguous heads: q, k, v and o are `[B, H, S, D]`.
/// The scores are multiplied by `1/sqrt(D)`; if `causal` is not 0 a token sees itself and earlier
/// tokens only. `Q` and `K`, the numbers of queries and keys, must be equal.
///
/// # Safety
/// Each pointer is memory of the chosen device with `B * H * S * D` BF16 numbers. No other code may
/// write this memory (or read `o`) during the call.
#[unsafe(no_mangle)]
#[allow(non_snake_case, clippy::too_many_arguments)] // the names and the order of a given interface
pub unsafe extern "C" fn dw_fmha_bf16_forward(
    q: *const c_void,
    k: *const c_void,
    v: *const c_void,
    o: *mut c_void,
    B: i32,
    H: i32,
    Q: i32,
    K: i32,
    D: i32,
    causal: i32,
) -> DwStatus {
    guard(|| {
        if Q != K {
            return Err(Failure::InvalidArgument(format!(
                "expected as many queries as keys, got Q = {Q} and K = {K}"
            )));
        }
        not_null(&[("q", q), ("k", k), ("v", v), ("o", o)])?;
        let (batch, heads) = (size("B", B)?, size("H", H)?);
        // For the kernels each head is a sequence with one head.
        let sequences = i32::try_from(batch * heads).map_err(|_| {
            Failure::InvalidArgument(format!("expected B * H below 2^31, got {B} * {H}"))
        })?;
        let sizes =
            Sizes::new([("B", sequences), ("Q", Q), ("H", 1), ("H", 1), ("D", D)], 0.0, causal)?;
        let inputs = vec![
            Memory::input("q", q, DType::Bf16, &sizes.q()),
            Memory::input("k", k, DType::Bf16, &sizes.kv()),
            Memory::input("v", v, DType::Bf16, &sizes.kv()),
        ];
        let outputs = vec![
            Memory::output("o", o, DType::Bf16, &sizes.q()),
            Memory::scratch("lse", DType::F32, &sizes.lse()),
        ];
        sizes.run(Request::new(Attention { heads: sizes.heads.clone() }, inputs, outputs))
    })
}

/// Scaled dot-product attention in BF16 with grouped query heads and contiguous tokens: q and o are
/// `[batch, seq, heads, head_dim]`, k and v `[batch, seq, kv_heads, head_dim]`. `lse` is `[batch,
/// heads, seq]` in FP32, the natural logarithm of the sum of exponentials of the scaled scores; the
/// backward pass reads it. `scale` multiplies the scores; 0 stands for `1/sqrt(head_dim)`. If
/// `causal` is not 0 a token sees itself and earlier tokens only.
///
/// # Safety
/// Each pointer is memory of the chosen device with the stated number of elements. No other code
/// may write this memory (or read the outputs) during the call.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_attention_bf16_forward(
    q: *const c_void,
    k: *const c_void,
    v: *const c_void,
    o: *mut c_void,
    lse: *mut c_void,
    batch: i32,
    seq: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    scale: f64,
    causal: i32,
) -> DwStatus {
    guard(|| {
        not_null(&[("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)])?;
        let sizes = Sizes::new(
            [
                ("batch", batch),
                ("seq", seq),
                ("heads", heads),
                ("kv_heads", kv_heads),
                ("head_dim", head_dim),
            ],
            scale,
            causal,
        )?;
        let inputs = vec![
            Memory::input("q", q, DType::Bf16, &sizes.q()),
            Memory::input("k", k, DType::Bf16, &sizes.kv()),
            Memory::input("v", v, DType::Bf16, &sizes.kv()),
        ];
        let outputs = vec![
            Memory::output("o", o, DType::Bf16, &sizes.q()),
            Memory::output("lse", lse, DType::F32, &sizes.lse()),
        ];
        sizes.run(Request::new(Attention { heads: sizes.heads.clone() }, inputs, outputs))
    })
}

/// Gradients of [`dw_attention_bf16_forward`] with respect to q, k and v. `dout` is the gradient of
/// o, `o` and `lse` are outputs of the forward pass, and the sizes are those of the forward pass.
///
/// # Safety
/// As [`dw_attention_bf16_forward`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // C has no other way
pub unsafe extern "C" fn dw_attention_bf16_backward(
    dout: *const c_void,
    q: *const c_void,
    k: *const c_void,
    v: *const c_void,
    o: *const c_void,
    lse: *const c_void,
    dq: *mut c_void,
    dk: *mut c_void,
    dv: *mut c_void,
    batch: i32,
    seq: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    scale: f64,
    causal: i32,
) -> DwStatus {
    guard(|| {
        let read = [("dout", dout), ("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)];
        not_null(&read)?;
        not_null(&[("dq", dq), ("dk", dk), ("dv", dv)])?;
        let sizes = Sizes::new(
            [
                ("batch", batch),
                ("seq", seq),
                ("heads", heads),
                ("kv_heads", kv_heads),
                ("head_dim", head_dim),
            ],
            scale,
            causal,
        )?;
        let inputs = vec![
            Memory::input("dout", dout, DType::Bf16, &sizes.q()),
            Memory::input("q", q, DType::Bf16, &sizes.q()),
            Memory::input("k", k, DType::Bf16, &sizes.kv()),
            Memory::input("v", v, DType::Bf16, &sizes.kv()),
            Memory::input("o", o, DType::Bf16, &sizes.q()),
            Memory::input("lse", lse, DType::F32, &sizes.lse()),
        ];
        let outputs = vec![
            Memory::output("dq", dq, DType::Bf16, &sizes.q()),
            Memory::output("dk", dk, DType::Bf16, &sizes.kv()),
            Memory::output("dv", dv, DType::Bf16, &sizes.kv()),
        ];
        sizes.run(Request::new(AttentionBackward { heads: sizes.heads.clone() }, inputs, outputs))
    })
}
