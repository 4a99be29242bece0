//! Tensor-core instructions in machine code, as nvdisasm prints it.

use std::collections::BTreeMap;

/// Counts by mnemonic, `HGMMA` or `UTCQMMA` for example.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Tensor-core instructions of each function in nvdisasm's text. Functions without any have an
/// empty entry.
pub(crate) fn count_tensor_instructions(text: &str) -> BTreeMap<String, Counts> {
    let mut functions: BTreeMap<String, Counts> = BTreeMap::new();
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
            && let Some(mnemonic) = mnemonic_in(line)
            && mnemonic.ends_with("MMA")
        {
            let counts = functions.entry(function.clone()).or_default();
            *counts.entry(mnemonic.to_string()).or_default() += 1;
        }
    }
    functions
}

/// `HMMA` of `/*0b10*/  @!P0 HMMA.16816.F32.BF16 R4, R8, R2, R4 ;`.
fn mnemonic_in(line: &str) -> Option<&str> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    if address.is_empty() || !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let word = rest.split_whitespace().find(|word| !word.starts_with(['@', '{']))?;
    word.split(['.', ';']).next().filter(|mnemonic| !mnemonic.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_instructions_of_each_function() {
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
        /*0d40*/                   NOP;
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
        let found = count_tensor_instructions(text);
        let found: Vec<String> = found
            .iter()
            .map(|(function, counts)| {
                let counts: Vec<_> =
                    counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
                format!("{function}: {}", counts.join(", "))
            })
            .collect();
        let expected =
            ["_Z5thirdv: HMMA 1, OMMA 1, QMMA 1", "first: HGMMA 2, UTCQMMA 2", "second: "];
        assert_eq!(found, expected);
    }
}
