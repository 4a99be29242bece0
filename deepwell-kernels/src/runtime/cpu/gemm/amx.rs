//! AMX: detection, the tile configuration of a thread, and the 32 x 32 kernel.
//!
//! The compiler knows AMX registers only as clobbers of inline assembly, so the whole sum over `k`
//! is one block of assembly: no tile is live between two blocks. Only the thread's tile
//! configuration lives longer; [`TileConfig`] loads and releases it.
#![allow(unsafe_code)]

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::bf16_path::Block;

/// Whether the CPU has `amx-tile` and `amx-bf16` and the operating system permits their use.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let highest_leaf = __cpuid_count(0, 0).eax;
        if highest_leaf < 7 {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        let amx_bf16 = features & (1 << 22) != 0;
        let amx_tile = features & (1 << 24) != 0;
        amx_bf16 && amx_tile && request_tile_state()
    })
}

/// Asks Linux for permission to use AMX tile data. Linux saves this 8 KiB part of the extended
/// state only for processes that asked; the permission holds for every thread.
#[cfg(target_os = "linux")]
fn request_tile_state() -> bool {
    const SYS_ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let status: isize;
    // SAFETY: the call takes two integers and touches no memory of ours; `syscall` overwrites
    // rax, rcx and r11, which are declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => status,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    status == 0
}

/// Requests on other systems are not implemented.
#[cfg(not(target_os = "linux"))]
fn request_tile_state() -> bool {
    false
}

/// In-memory tile configuration (palette 1): 64 bytes, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct TileConfigBytes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<TileConfigBytes>() == 64);

/// Configuration of all eight tiles with 16 rows of 64 bytes.
static FULL_TILES: TileConfigBytes = TileConfigBytes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The calling thread's tile configuration. Dropping it releases the tiles, so that an idle thread
/// carries no tile state through context switches.
///
/// Neither `Send` nor `Sync`, since a tile configuration belongs to its thread.
pub(super) struct TileConfig {
    not_send: PhantomData<*mut ()>,
}

impl TileConfig {
    /// Configures the thread's tiles at their full size.
    ///
    /// # Safety
    ///
    /// [`is_available`] has returned true, and the thread holds no other `TileConfig`.
    pub(super) unsafe fn load() -> Self {
        // SAFETY: the instruction exists and is permitted (the caller's promise) and reads the
        // 64 bytes of a valid configuration.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                config = in(reg) &raw const FULL_TILES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        Self { not_send: PhantomData }
    }
}

impl Drop for TileConfig {
    fn drop(&mut self) {
        let _ = self.not_send;
        // SAFETY: `load` ran on this thread, so the instruction exists and is permitted.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}

/// Writes one 32 x 32 block of the result.
///
/// Four tiles accumulate (rows 0-15 and 16-31 by columns 0-15 and 16-31). Each step along `k` loads
/// two tiles of A and two of B and multiplies all pairs, so each load serves two multiplications.
///
/// # Safety
///
/// The calling thread holds a [`TileConfig`]; `block.steps > 0`; for every step the rows of A and
/// the 2048 bytes of B that `block` describes can be read, and 32 rows of 128 bytes,
/// `block.c_row_bytes` apart, can be written at `block.c`.
pub(super) unsafe fn multiply_block(block: &Block) {
    // SAFETY: the caller allows all of these reads and writes; flags and every modified register
    // are declared.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a_upper} + {a_row_bytes}*1]",
            "tileloadd tmm6, [{b} + {b_row_bytes}*1]",
            "tileloadd tmm7, [{b} + {b_row_bytes}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a_lower} + {a_row_bytes}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a_upper}, {a_step_bytes}",
            "add {a_lower}, {a_step_bytes}",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c_upper} + {c_row_bytes}*1], tmm0",
            "tilestored [{c_upper} + {c_row_bytes}*1 + 64], tmm1",
            "tilestored [{c_lower} + {c_row_bytes}*1], tmm2",
            "tilestored [{c_lower} + {c_row_bytes}*1 + 64], tmm3",
            a_upper = inout(reg) block.a_upper => _,
            a_lower = inout(reg) block.a_lower => _,
            a_row_bytes = in(reg) block.a_row_bytes,
            a_step_bytes = in(reg) block.a_step_bytes,
            b = inout(reg) block.b => _,
            b_row_bytes = in(reg) 64usize,
            steps = inout(reg) block.steps => _,
            c_upper = in(reg) block.c,
            c_lower = in(reg) block.c.wrapping_byte_add(16 * block.c_row_bytes),
            c_row_bytes = in(reg) block.c_row_bytes,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
