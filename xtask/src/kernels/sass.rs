//! Counts MMAs and tensor copies in SASS printed by nvdisasm.

use std::collections::BTreeMap;

/// Counts by mnemonic, for example `HGMMA`, `UTCQMMA`, `UTCQMMA.2CTA` for a CTA pair, and `QMMA.SF`
/// with block scales.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Modifiers that count as separate instructions: CTA pairs, and block scales.
const KEPT_MODIFIERS: [&str; 2] = ["2CTA", "SF"];

/// Counted instructions of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Instructions {
    /// MMAs.
    pub(crate) mmas: Counts,
    /// Copies of tensor boxes to shared memory.
    pub(crate) tensor_loads: Counts,
}

impl Instructions {
    /// Adds the counts of another function.
    pub(crate) fn add(&mut self, other: &Instructions) {
        for (own, others) in
            [(&mut self.mmas, &other.mmas), (&mut self.tensor_loads, &other.tensor_loads)]
        {
            for (name, count) in others {
                *own.entry(name.clone()).or_default() += count;
            }
        }
    }
}

/// Returns the counts for each function in nvdisasm's text. Functions without such instructions
/// have an empty entry.
pub(crate) fn count_instructions(text: &str) -> BTreeMap<String, Instructions> {
    let mut functions: BTreeMap<String, Instructions> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix(".section") {
            // `.section  .text.<function>,"ax",@progbits`; any other section is data.
            let name = rest.trim_start().split(',').next().unwrap_or_default();
            current = name.strip_prefix(".text.").map(str::to_string);
            if let Some(function) = &current {
                functions.entry(function.clone()).or_default();
            }
        } else if let Some(function) = &current
            && let Some(word) = instruction_in(line)
        {
            let mut parts = word.split('.');
            let mnemonic = parts.next().unwrap_or_default();
            let kept = parts.filter(|part| KEPT_MODIFIERS.contains(part));
            let name: String = kept.fold(mnemonic.to_string(), |name, part| name + "." + part);
            let instructions = functions.entry(function.clone()).or_default();
            let counts = match mnemonic {
                "UTMALDG" => &mut instructions.tensor_loads,
                _ if mnemonic.ends_with("MMA") => &mut instructions.mmas,
                _ => continue,
            };
            *counts.entry(name).or_default() += 1;
        }
    }
    functions
}

/// `HMMA.16816.F32.BF16` of `/*0b10*/  @!P0 HMMA.16816.F32.BF16 R4, R8, R2, R4 ;`.
fn instruction_in(line: &str) -> Option<&str> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    if address.is_empty() || !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let word = rest.split_whitespace().find(|word| !word.starts_with(['@', '{']))?;
    word.split(';').next().filter(|instruction| !instruction.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_each_function() {
        let text = r#"
	.target	sm_90a
	.section	.text.first,"ax",@progbits
        .global         first
first:
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0bf0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0cf0*/             @!PT  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0d00*/               @P0 FFMA R1, R2, R3, R4 ;
        /*0d10*/                   UTCQMMA gdesc[UR18], gdesc[UR20], tmem[UR11], idesc[UR23] ;
        /*0d20*/                   UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR11] ;
        /*0d30*/                   UTCCP.T.S.4x32dp128bit tmem[UR11+0x84], gdesc[UR4] ;
        /*0d40*/                   UTMALDG.2D [UR8], [UR6] ;
        /*0d50*/              @UP1 UTMALDG.2D.2CTA [UR8], [UR6] ;
        /*0d60*/                   NOP;
	.section	.nv.constant0.first,"a",@progbits
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
	.section	.text.second,"ax",@progbits
        /*0000*/                   EXIT ;
	.section	.text._Z5thirdv,"ax",@progbits
        /*01a0*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R12, R12, R16, RZ, R6, R9, URZ ;
        /*01b0*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R2, R4, R0, R1 ;
        /*01c0*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /* not an address */       HMMA
"#;
        let counts_text = |counts: &Counts| {
            let counts: Vec<_> =
                counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
            counts.join(", ")
        };
        let found: Vec<String> = count_instructions(text)
            .iter()
            .map(|(function, found)| {
                let (mmas, loads) = (counts_text(&found.mmas), counts_text(&found.tensor_loads));
                format!("{function}: {mmas}; {loads}")
            })
            .collect();
        let expected = [
            "_Z5thirdv: HMMA 1, OMMA.SF 1, QMMA.SF 1; ",
            "first: HGMMA 2, UTCQMMA 1, UTCQMMA.2CTA 1; UTMALDG 1, UTMALDG.2CTA 1",
            "second: ; ",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn counts_of_functions_add_up() {
        let counts =
            |names: &[&str]| -> Counts { names.iter().map(|name| (name.to_string(), 2)).collect() };
        let mut all = Instructions { mmas: counts(&["HMMA"]), ..Instructions::default() };
        all.add(&Instructions {
            mmas: counts(&["HMMA", "QMMA"]),
            tensor_loads: counts(&["UTMALDG"]),
        });
        let mmas: Vec<_> = all.mmas.into_iter().collect();
        assert_eq!(mmas, [("HMMA".to_string(), 4), ("QMMA".to_string(), 2)]);
        assert_eq!(all.tensor_loads, counts(&["UTMALDG"]));
    }
}
