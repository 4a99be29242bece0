//! Parser for the resources that `ptxas -v` prints for each kernel.

/// Resources of a kernel on an SM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// Name of the `__global__` function.
    pub(crate) entry: String,
    /// Registers of a thread.
    pub(crate) registers: u64,
    /// Static shared memory of a CTA.
    pub(crate) shared_bytes: u64,
    /// Local memory of a thread: arrays indexed at run time, and spilled registers.
    pub(crate) stack_bytes: u64,
    /// Bytes of spill stores plus spill loads: instructions times width.
    pub(crate) spill_bytes: u64,
}

/// Returns the kernels in ptxas' text, in order. Spills of functions that were not inlined count
/// for every kernel of the file, because the text does not name the callers.
pub(crate) fn parse_ptxas(text: &str) -> Vec<Resources> {
    let mut entries: Vec<Resources> = Vec::new();
    // Entry that the next lines describe; `None` for a function that is no entry.
    let mut current: Option<usize> = None;
    let mut function_spill_bytes = 0;
    for line in text.lines() {
        let said = line
            .strip_prefix("ptxas info")
            .map_or(line, |rest| rest.trim_start().strip_prefix(':').unwrap_or(rest));
        let said = said.trim();
        if let Some(rest) = said.strip_prefix("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_string();
            entries.push(Resources { entry, ..Resources::default() });
        } else if let Some(name) = said.strip_prefix("Function properties for ") {
            current = entries.iter().position(|entry| entry.entry == name.trim());
        } else if said.contains(" bytes stack frame") {
            let spills = number_before(said, " bytes spill stores").unwrap_or(0)
                + number_before(said, " bytes spill loads").unwrap_or(0);
            match current {
                Some(index) => {
                    entries[index].stack_bytes =
                        number_before(said, " bytes stack frame").unwrap_or(0);
                    entries[index].spill_bytes += spills;
                }
                None => function_spill_bytes += spills,
            }
        } else if said.starts_with("Used ")
            && let Some(index) = current
        {
            entries[index].registers = number_before(said, " registers").unwrap_or(0);
            entries[index].shared_bytes = number_before(said, " bytes smem").unwrap_or(0);
        }
    }
    for entry in &mut entries {
        entry.spill_bytes += function_spill_bytes;
    }
    entries
}

/// Returns the number directly before `unit`.
fn number_before(text: &str, unit: &str) -> Option<u64> {
    let before = &text[..text.find(unit)?];
    let digits = before.rsplit(|character: char| !character.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_ptxas() {
        let check = |text: &str, expected: &[(&str, u64, u64, u64, u64)]| {
            let found = parse_ptxas(text);
            let found: Vec<_> = found
                .iter()
                .map(|r| (&*r.entry, r.registers, r.shared_bytes, r.stack_bytes, r.spill_bytes))
                .collect();
            assert_eq!(found, expected, "{text}");
        };
        check("", &[]);
        check(
            "ptxas info    : 0 bytes gmem\n\
             ptxas info    : Compiling entry function 'two' for 'sm_90a'\n\
             ptxas info    : Function properties for two\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 8 registers, used 0 barriers\n\
             ptxas info    : Compile time = 1.802 ms\n\
             ptxas info    : Compiling entry function 'one' for 'sm_90a'\n\
             ptxas info    : Function properties for one\n    \
             1808 bytes stack frame, 1044 bytes spill stores, 1052 bytes spill loads\n\
             ptxas info    : Used 32 registers, used 1 barriers, \
             1808 bytes cumulative stack size, 400 bytes smem\n\
             ptxas info    : Compile time = 174.505 ms\n",
            &[("two", 8, 0, 0, 0), ("one", 32, 400, 1808, 2096)],
        );
        // A function of its own spills.
        check(
            "ptxas info    : Compiling entry function 'k' for 'sm_120a'\n\
             ptxas info    : Function properties for k\n    \
             16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
             ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, \
             33804 bytes smem, 4 bytes cmem[2]\n\
             ptxas info    : Function properties for _Z3bigPfi\n    \
             0 bytes stack frame, 100 bytes spill stores, 200 bytes spill loads\n",
            &[("k", 255, 33804, 16, 312)],
        );
        // Warnings in between.
        check(
            "ptxas warning : Value of threads per SM for entry k is out of range.\n\
             ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
             ptxas info    : Function properties for k\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async are serialized\n\
             ptxas info    : Used 22 registers, 512 bytes smem\n",
            &[("k", 22, 512, 0, 0)],
        );
    }
}
