//! A program as text: one line per call.

use std::fmt;

use crate::{Access, Call, MemoryKind, Op, OpRule, Operand, Program};

impl fmt::Display for Program {
    /// Header, arena, then each body with its runs per step and one line per call:
    /// `name: kernel outputs <- inputs  flops bytes workspace stream`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program {:?} mode={} rank={} target={} batch={} seq={} micro_batches={} \
             slots={}",
            self.name,
            format!("{:?}", self.mode).to_lowercase(),
            self.rank,
            self.target.arch,
            self.batch,
            self.seq,
            self.micro_batches,
            self.slots
        )?;
        writeln!(
            f,
            "  arena {} bytes, transient from {} (lower bound {} bytes)",
            self.arena.bytes, self.arena.transient_offset, self.arena.transient_lower_bound_bytes
        )?;
        let ranks = &self.target.ranks;
        if !ranks.is_single() {
            write!(f, "  rank {} of {}", ranks.rank, ranks.world_size)?;
            for (id, group) in ranks.groups.iter().enumerate() {
                write!(f, "; group {id} `{}`: {:?}", group.name, group.ranks)?;
            }
            writeln!(f)?;
        }
        for kind in MemoryKind::ALL {
            let values = self.values_of(kind).count();
            if values > 0 {
                let bytes: usize = self.values_of(kind).map(|value| value.range.bytes).sum();
                writeln!(f, "  {} values of {}: {bytes} bytes", values, kind.name())?;
            }
        }
        for (body, runs) in self.bodies.iter().zip(self.runs_per_step()) {
            match body.chunk {
                0 => writeln!(f, "  {} x {runs}:", body.phase)?,
                chunk => writeln!(f, "  {} of chunk {chunk} x {runs}:", body.phase)?,
            }
            for call in &self.calls[body.calls.clone()] {
                self.write_call(call, f)?;
            }
        }
        Ok(())
    }
}

impl Program {
    fn write_call(&self, call: &Call, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |operands: &[Operand]| {
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
        write!(
            f,
            "    {}: {} {} <- {}  flops={} bytes={}",
            call.name,
            call.choice.kernel,
            names(call.outputs()),
            names(call.inputs()),
            call.cost.flops,
            call.cost.bytes(),
        )?;
        if let Op::Collective(collective) = &call.op {
            write!(f, " on_link={}  {}", call.cost.bytes_on_link, collective.attributes())?;
        }
        if call.workspace.bytes > 0 {
            write!(f, " workspace={}@{}", call.workspace.bytes, call.workspace.offset)?;
        }
        if call.last_only {
            write!(f, " last_only")?;
        }
        if call.alone_only {
            write!(f, " alone_only")?;
        }
        if call.stream > 0 {
            write!(f, " stream={}", call.stream)?;
        }
        if !call.waits.is_empty() {
            write!(f, " waits={:?}", call.waits)?;
        }
        if let Some(event) = call.records {
            write!(f, " records={event}")?;
        }
        writeln!(f)
    }
}
