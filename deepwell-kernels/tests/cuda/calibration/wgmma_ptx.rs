//! Writes a kernel of chained `wgmma`: two images of operands go to shared memory as they are,
//! accumulators stay in the order of registers.

use std::fmt::Write;

use super::element::{Element, Sum};

/// Threads of a warpgroup.
pub(super) const THREADS: usize = 128;
/// Rows of A and of the result.
pub(super) const ROWS: usize = 64;
/// Bytes along K of one instruction.
pub(super) const STEP_BYTES: usize = 32;
/// Bytes that the warpgroup copies at a time.
pub(super) const COPY_BYTES: usize = 16 * THREADS;

/// One operand in shared memory.
#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) bytes: usize,
    /// A descriptor without its address.
    pub(super) descriptor: u64,
    /// How far on each step begins.
    pub(super) offsets: Vec<usize>,
}

/// What a kernel computes.
#[derive(Clone, Debug)]
pub(super) struct WgmmaKernel {
    pub(super) a: Element,
    pub(super) b: Element,
    pub(super) sum: Sum,
    pub(super) columns: usize,
    pub(super) steps: usize,
    /// Whether it adds to accumulators.
    pub(super) adds: bool,
    /// A is an image, or in registers, read from plain rows.
    pub(super) a_image: Option<Image>,
    pub(super) b_image: Image,
    /// Whether M, or N, is the inner dimension, which only 16-bit types say.
    pub(super) transposed: (bool, bool),
    pub(super) negated: (bool, bool),
}

impl WgmmaKernel {
    /// Registers of accumulators in a thread.
    pub(super) fn registers(&self) -> usize {
        ROWS * self.columns / THREADS / self.sum.per_word()
    }

    pub(super) fn row_bytes(&self) -> usize {
        STEP_BYTES * self.steps
    }

    /// The instruction with its shape and types.
    fn opcode(&self) -> String {
        let k = STEP_BYTES / self.a.bytes();
        let (sum, a, b) = (self.sum.name(), self.a.name(), self.b.name());
        format!("wgmma.mma_async.sync.aligned.m64n{}k{k}.{sum}.{a}.{b}", self.columns)
    }

    /// The kernel: a, b, accumulators before and after, one CTA for each MMA.
    pub(super) fn ptx(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("a string takes all");
        text
    }

    fn write(&self, t: &mut String) -> std::fmt::Result {
        let a_bytes = self.a_image.as_ref().map_or(ROWS * self.row_bytes(), |image| image.bytes);
        let b_bytes = self.b_image.bytes;
        let registers = self.registers();
        writeln!(
            t,
            ".visible .entry run(.param .u64 a, .param .u64 b, \
             .param .u64 before, .param .u64 after)\n\
             .reqntid {THREADS}\n{{\n\
             .reg .pred %p<2>;\n.reg .b32 %r<8>;\n.reg .b32 %w<4>;\n.reg .b32 %a<{}>;\n\
             .reg .b32 %d<{registers}>;\n.reg .b64 %q<10>;\n\
             .shared .align 1024 .b8 tile_a[{a_bytes}];\n\
             .shared .align 1024 .b8 tile_b[{b_bytes}];\n\
             mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;",
            4 * self.steps
        )?;
        if self.a_image.is_some() {
            copy(t, "a", a_bytes)?;
        } else {
            self.load_a(t, a_bytes)?;
        }
        copy(t, "b", b_bytes)?;
        writeln!(t, "fence.proxy.async.shared::cta;\nbar.sync 0;")?;
        // Where this thread's accumulators are: register by register, a word for each thread.
        writeln!(t, "mad.lo.u32 %r2, %r1, {}, %r0;", registers * THREADS)?;
        for (register, name) in [("%q0", "before"), ("%q1", "after")] {
            writeln!(
                t,
                "ld.param.u64 {register}, [{name}];\ncvta.to.global.u64 {register}, {register};\n\
                 mul.wide.u32 %q2, %r2, 4;\nadd.s64 {register}, {register}, %q2;"
            )?;
        }
        for index in 0..registers {
            let offset = 4 * THREADS * index;
            match self.adds {
                true => writeln!(t, "ld.global.b32 %d{index}, [%q0+{offset}];")?,
                false => writeln!(t, "mov.b32 %d{index}, 0;")?,
            }
        }
        descriptor(t, "%q3", "tile_b", self.b_image.descriptor)?;
        if let Some(image) = &self.a_image {
            descriptor(t, "%q4", "tile_a", image.descriptor)?;
        }
        writeln!(t, "wgmma.fence.sync.aligned;")?;
        for step in 0..self.steps {
            self.multiply(t, step)?;
        }
        writeln!(t, "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;")?;
        for index in 0..registers {
            writeln!(t, "st.global.b32 [%q1+{}], %d{index};", 4 * THREADS * index)?;
        }
        writeln!(t, "ret;\n}}")
    }

    /// Rows of A to registers: words t and t + 4 of rows g and g + 8 of a warp's sixteen.
    fn load_a(&self, t: &mut String, bytes: usize) -> std::fmt::Result {
        let row_bytes = self.row_bytes();
        writeln!(
            t,
            "ld.param.u64 %q5, [a];\ncvta.to.global.u64 %q5, %q5;\n\
             mul.wide.u32 %q6, %r1, {bytes};\nadd.s64 %q5, %q5, %q6;\n\
             shr.u32 %r2, %r0, 5;\nshl.b32 %r2, %r2, 4;\nand.b32 %r3, %r0, 31;\n\
             shr.u32 %r4, %r3, 2;\nadd.u32 %r2, %r2, %r4;\nand.b32 %r3, %r3, 3;\n\
             shl.b32 %r3, %r3, 2;\nmad.lo.u32 %r2, %r2, {row_bytes}, %r3;\n\
             cvt.u64.u32 %q6, %r2;\nadd.s64 %q5, %q5, %q6;"
        )?;
        for step in 0..self.steps {
            for word in 0..4 {
                let offset = step * STEP_BYTES + word % 2 * 8 * row_bytes + word / 2 * 16;
                writeln!(t, "ld.global.b32 %a{}, [%q5+{offset}];", 4 * step + word)?;
            }
        }
        Ok(())
    }

    fn multiply(&self, t: &mut String, step: usize) -> std::fmt::Result {
        writeln!(t, "add.s64 %q7, %q3, {};", self.b_image.offsets[step] / 16)?;
        let a = match &self.a_image {
            Some(image) => {
                writeln!(t, "add.s64 %q8, %q4, {};", image.offsets[step] / 16)?;
                "%q8".to_string()
            }
            None => list("%a", 4 * step..4 * step + 4),
        };
        let adds = u32::from(self.adds || step > 0);
        let sign = |negated: bool| if negated { -1 } else { 1 };
        let mut rest = format!("{}, {}", sign(self.negated.0), sign(self.negated.1));
        if self.a.bytes() == 2 {
            if self.a_image.is_some() {
                write!(rest, ", {}", u32::from(self.transposed.0))?;
            }
            write!(rest, ", {}", u32::from(self.transposed.1))?;
        }
        let sums = list("%d", 0..self.registers());
        writeln!(t, "setp.ne.b32 %p0, {adds}, 0;\n{} {sums}, {a}, %q7, %p0, {rest};", self.opcode())
    }
}

fn list(name: &str, numbers: std::ops::Range<usize>) -> String {
    let names: Vec<String> = numbers.map(|number| format!("{name}{number}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Copies an image to `tile_<name>`.
fn copy(t: &mut String, name: &str, bytes: usize) -> std::fmt::Result {
    writeln!(
        t,
        "ld.param.u64 %q5, [{name}];\ncvta.to.global.u64 %q5, %q5;\n\
         mul.wide.u32 %q6, %r1, {bytes};\nadd.s64 %q5, %q5, %q6;\n\
         mul.wide.u32 %q6, %r0, 16;\nadd.s64 %q5, %q5, %q6;\n\
         mov.u32 %r2, tile_{name};\nshl.b32 %r3, %r0, 4;\nadd.u32 %r2, %r2, %r3;"
    )?;
    for offset in (0..bytes).step_by(COPY_BYTES) {
        writeln!(
            t,
            "ld.global.v4.b32 {{%w0, %w1, %w2, %w3}}, [%q5+{offset}];\n\
             st.shared.v4.b32 [%r2+{offset}], {{%w0, %w1, %w2, %w3}};"
        )?;
    }
    Ok(())
}

fn descriptor(t: &mut String, register: &str, tile: &str, rest: u64) -> std::fmt::Result {
    writeln!(
        t,
        "mov.u32 %r2, {tile};\nshr.u32 %r2, %r2, 4;\nand.b32 %r2, %r2, 16383;\n\
         cvt.u64.u32 {register}, %r2;\nor.b64 {register}, {register}, {rest:#x};"
    )
}
