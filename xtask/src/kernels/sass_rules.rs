//! Rules for the SASS of some kernels: the compiler need not emit the instruction that a source
//! requests.

use super::manifest::{Compiled, Kernel};
use super::sass::Counts;

/// Rule for the kernels of a source.
struct Rule {
    /// Name of the source without `.cu`.
    stem: &'static str,
    /// The instruction of all MMAs; required.
    mma: &'static str,
    /// The instruction of all tensor copies; required. `None` if tensor copies are forbidden.
    load: Option<&'static str>,
    /// Substring in the names of kernels whose MMAs and copies use CTA pairs.
    pair: Option<&'static str>,
}

/// GEMMs on tcgen05, with tensor copies of operands, and sm_120 GEMMs with block scales. Local
/// memory is forbidden.
const RULES: &[Rule] = &[
    Rule { stem: "sm100_bf16_gemm", mma: "UTCHMMA", load: Some("UTMALDG"), pair: Some("_256x") },
    Rule { stem: "sm100_mxfp8_gemm", mma: "UTCQMMA", load: Some("UTMALDG"), pair: Some("_256x") },
    Rule {
        stem: "sm100_bf16_gemm_fused",
        mma: "UTCHMMA",
        load: Some("UTMALDG"),
        pair: Some("_256x"),
    },
    Rule {
        stem: "sm100_mxfp8_gemm_fused",
        mma: "UTCQMMA",
        load: Some("UTMALDG"),
        pair: Some("_256x"),
    },
    Rule { stem: "sm100_nvfp4_gemm", mma: "UTCOMMA", load: Some("UTMALDG"), pair: Some("_256x") },
    Rule {
        stem: "sm100_nvfp4_grouped_gemm",
        mma: "UTCOMMA",
        load: Some("UTMALDG"),
        pair: Some("_256x"),
    },
    Rule { stem: "sm120_mxfp8_gemm", mma: "QMMA.SF", load: None, pair: None },
    Rule { stem: "sm120_nvfp4_gemm", mma: "OMMA.SF", load: None, pair: None },
    Rule { stem: "sm120_nvfp4_grouped_gemm", mma: "OMMA.SF", load: None, pair: None },
];

impl Kernel {
    /// Whether a kernel with MMAs spills registers: tensor cores would wait for memory.
    fn spills_beside_tensor_cores(&self) -> bool {
        self.resources.spill_bytes > 0 && !self.instructions.mmas.is_empty()
    }
}

impl Compiled {
    /// Returns the broken rules of a compiled source.
    pub(crate) fn fault(&self) -> Option<String> {
        let kernels = self.cubin.iter().flat_map(|cubin| &cubin.kernels);
        let spilling: Vec<_> = kernels
            .filter(|kernel| kernel.spills_beside_tensor_cores())
            .map(|kernel| {
                format!("`{}` {} bytes", kernel.resources.entry, kernel.resources.spill_bytes)
            })
            .collect();
        let spills = (!spilling.is_empty()).then(|| {
            format!(
                "registers are spilled in kernels that use tensor cores: {}\n\
                 hint: take a smaller tile, split the accumulators over more warps, or allow more \
                 registers with `__launch_bounds__`",
                spilling.join(", ")
            )
        });
        let kernels = self.cubin.iter().flat_map(|cubin| &cubin.kernels);
        let others = kernels.filter_map(|kernel| sass_fault(&self.stem, kernel));
        let faults: Vec<String> = spills.into_iter().chain(others).collect();
        (!faults.is_empty()).then(|| faults.join("\n"))
    }
}

/// Returns the broken rules of a kernel's SASS.
fn sass_fault(stem: &str, kernel: &Kernel) -> Option<String> {
    let rule = RULES.iter().find(|rule| rule.stem == stem)?;
    let resources = &kernel.resources;
    let is_of_pair = rule.pair.is_some_and(|pair| resources.entry.contains(pair));
    let of_pair = if is_of_pair { ".2CTA" } else { "" };
    let mut faults = Vec::new();
    for (counts, mnemonic) in [
        (&kernel.instructions.mmas, Some(rule.mma)),
        (&kernel.instructions.tensor_loads, rule.load),
    ] {
        let expected = mnemonic.map(|mnemonic| format!("{mnemonic}{of_pair}"));
        if !counts.keys().eq(&expected) {
            let wanted = match expected {
                Some(name) => format!("`{name}` and no other"),
                None => "no tensor copies".to_string(),
            };
            faults.push(format!("expected {wanted}, got {}", names(counts)));
        }
    }
    if resources.stack_bytes > 0 {
        faults.push(format!("expected no local memory, got {} bytes", resources.stack_bytes));
    }
    (!faults.is_empty()).then(|| format!("SASS of `{}`: {}", resources.entry, faults.join("; ")))
}

fn names(counts: &Counts) -> String {
    let names: Vec<_> = counts.keys().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".to_string() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::super::resources::Resources;
    use super::super::sass::Instructions;
    use super::*;

    #[test]
    fn kernels_that_break_a_rule() {
        let check = |stem: &str, entry: &str, mmas: &str, loads: &str, stack_bytes, expected| {
            let counts = |names: &str| -> Counts {
                names.split_whitespace().map(|name| (name.to_string(), 4)).collect()
            };
            let kernel = Kernel {
                resources: Resources {
                    entry: entry.to_string(),
                    stack_bytes,
                    ..Resources::default()
                },
                instructions: Instructions { mmas: counts(mmas), tensor_loads: counts(loads) },
            };
            assert_eq!(sass_fault(stem, &kernel).as_deref(), expected, "{entry}");
        };
        let stem = "sm100_bf16_gemm";
        check(stem, "g_128x256", "UTCHMMA", "UTMALDG", 0, None);
        check(stem, "g_256x128", "UTCHMMA.2CTA", "UTMALDG.2CTA", 0, None);
        check("sm100_mxfp8_gemm", "g_256x128", "UTCQMMA.2CTA", "UTMALDG.2CTA", 0, None);
        check("bf16_gemm", "g_256x128", "HMMA", "", 8, None);
        check("sm120_mxfp8_gemm", "g_f32", "QMMA.SF", "", 0, None);
        check(
            "sm120_mxfp8_gemm",
            "g_f32",
            "QMMA",
            "UTMALDG",
            0,
            Some(
                "SASS of `g_f32`: expected `QMMA.SF` and no other, got `QMMA`; expected no \
                 tensor copies, got `UTMALDG`",
            ),
        );
        check(
            stem,
            "g_256x128",
            "UTCHMMA",
            "UTMALDG UTMALDG.2CTA",
            0,
            Some(
                "SASS of `g_256x128`: expected `UTCHMMA.2CTA` and no other, got `UTCHMMA`; \
                 expected `UTMALDG.2CTA` and no other, got `UTMALDG`, `UTMALDG.2CTA`",
            ),
        );
        check(
            stem,
            "g_128x128",
            "UTCHMMA",
            "",
            16,
            Some(
                "SASS of `g_128x128`: expected `UTMALDG` and no other, got none; expected \
                 no local memory, got 16 bytes",
            ),
        );
    }
}
