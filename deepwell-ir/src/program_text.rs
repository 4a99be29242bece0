//! A program as text: one line per call.

use std::fmt;

use crate::{Access, MemoryKind, Phase, Program};

impl fmt::Display for Program {
    /// Header, arena, then one line per call:
    /// `name: kernel(op) outputs <- inputs  flops bytes @workspace`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program {:?} mode={} rank={} target={} batch={} seq={} micro_batches={}",
            self.name,
            format!("{:?}", self.mode).to_lowercase(),
            self.rank,
            self.target.arch,
            self.batch,
            self.seq,
            self.micro_batches
        )?;
        writeln!(
            f,
            "  arena {} bytes, transient from {} (lower bound {} bytes)",
            self.arena.bytes, self.arena.transient_offset, self.arena.transient_lower_bound_bytes
        )?;
        for kind in MemoryKind::ALL {
            let values = self.values_of(kind).count();
            if values > 0 {
                let bytes: usize = self.values_of(kind).map(|value| value.range.bytes).sum();
                writeln!(f, "  {} values of {}: {bytes} bytes", values, kind.name())?;
            }
        }
        let mut phase: Option<Phase> = None;
        for call in &self.calls {
            if phase != Some(call.phase) {
                writeln!(f, "  {}:", call.phase)?;
                phase = Some(call.phase);
            }
            let names = |operands: &[crate::Operand]| {
                operands
                    .iter()
                    .map(|operand| {
                        let value = self.value(operand.value);
                        let mark = if operand.access == Access::Update { "+" } else { "" };
                        format!("{mark}{}[{}]", value.name, value.range.offset)
                    })
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            writeln!(
                f,
                "    {}: {} {} <- {}  flops={} bytes={}{}",
                call.name,
                call.choice.kernel,
                names(call.outputs()),
                names(call.inputs()),
                call.cost.flops,
                call.cost.bytes(),
                if call.workspace.bytes > 0 {
                    format!(" workspace={}@{}", call.workspace.bytes, call.workspace.offset)
                } else {
                    String::new()
                }
            )?;
        }
        Ok(())
    }
}
