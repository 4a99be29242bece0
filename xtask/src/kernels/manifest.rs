//! Manifest of the compiled kernels, as JSON and as a table.

use std::fmt::Write;

use serde_json::{Value, json};

use super::resources::Resources;
use super::sass::{Counts, Instructions};

/// A `__global__` function of a cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) resources: Resources,
    pub(crate) instructions: Instructions,
}

/// One source compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Compiled {
    /// Name of the source without `.cu`.
    pub(crate) stem: String,
    pub(crate) architecture: String,
    /// Hash of sources, flags and compiler, in hexadecimal.
    pub(crate) content_hash: String,
    /// Hash of the sources alone: the version of the kernel in tables of measured times.
    pub(crate) source_hash: String,
    pub(crate) ptx_bytes: u64,
    /// `None` if only the PTX was requested.
    pub(crate) cubin: Option<Cubin>,
}

/// SASS, and the contents of its kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cubin {
    pub(crate) bytes: u64,
    pub(crate) kernels: Vec<Kernel>,
    /// Warnings of the compiler, one per line.
    pub(crate) warnings: Vec<String>,
}

/// A source that did not compile or broke a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) stem: String,
    /// `None` if the source names no valid architectures.
    pub(crate) architecture: Option<String>,
    /// The compiler's text.
    pub(crate) message: String,
}

/// All results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// Versions of nvcc and ptxas.
    pub(crate) compiler: String,
    pub(crate) flags: Vec<String>,
    /// Sorted by source, then by architecture, oldest first.
    pub(crate) compiled: Vec<Compiled>,
    pub(crate) failed: Vec<Failed>,
}

impl Compiled {
    /// Returns the JSON of the manifest and of the record next to the cubin, which the next run
    /// reads.
    pub(crate) fn to_json(&self) -> Value {
        let mut value = json!({
            "file": self.stem,
            "architecture": self.architecture,
            "content_hash": self.content_hash,
            "source_hash": self.source_hash,
            "ptx": format!("{}/{}.ptx", self.architecture, self.stem),
            "ptx_bytes": self.ptx_bytes,
        });
        if let Some(cubin) = &self.cubin {
            let kernels: Vec<_> = cubin.kernels.iter().map(kernel_to_json).collect();
            value["cubin"] = json!(format!("{}/{}.cubin", self.architecture, self.stem));
            value["cubin_bytes"] = json!(cubin.bytes);
            value["kernels"] = json!(kernels);
            value["warnings"] = json!(cubin.warnings);
        }
        value
    }

    /// Parses [`Compiled::to_json`]; `None` for JSON of another version.
    pub(crate) fn from_json(value: &Value) -> Option<Compiled> {
        let text = |key: &str| Some(value.get(key)?.as_str()?.to_string());
        let cubin = match value.get("cubin_bytes") {
            None => None,
            Some(bytes) => {
                let kernels = value.get("kernels")?.as_array()?;
                let warnings = value.get("warnings")?.as_array()?;
                Some(Cubin {
                    bytes: bytes.as_u64()?,
                    kernels: kernels.iter().map(kernel_from_json).collect::<Option<_>>()?,
                    warnings: warnings
                        .iter()
                        .map(|warning| warning.as_str().map(str::to_string))
                        .collect::<Option<_>>()?,
                })
            }
        };
        Some(Compiled {
            stem: text("file")?,
            architecture: text("architecture")?,
            content_hash: text("content_hash")?,
            // Records without this key remain valid: the caller sets the hash from the source.
            source_hash: text("source_hash").unwrap_or_default(),
            ptx_bytes: value.get("ptx_bytes")?.as_u64()?,
            cubin,
        })
    }
}

fn kernel_to_json(kernel: &Kernel) -> Value {
    let resources = &kernel.resources;
    json!({
        "entry": resources.entry,
        "registers": resources.registers,
        "shared_bytes": resources.shared_bytes,
        "stack_bytes": resources.stack_bytes,
        "spill_bytes": resources.spill_bytes,
        "tensor_instructions": kernel.instructions.mmas,
        "tensor_loads": kernel.instructions.tensor_loads,
    })
}

fn kernel_from_json(value: &Value) -> Option<Kernel> {
    let number = |key: &str| value.get(key)?.as_u64();
    let counts = |key: &str| -> Option<Counts> {
        let counts = value.get(key)?.as_object()?;
        counts.iter().map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
    };
    Some(Kernel {
        resources: Resources {
            entry: value.get("entry")?.as_str()?.to_string(),
            registers: number("registers")?,
            shared_bytes: number("shared_bytes")?,
            stack_bytes: number("stack_bytes")?,
            spill_bytes: number("spill_bytes")?,
        },
        instructions: Instructions {
            mmas: counts("tensor_instructions")?,
            tensor_loads: counts("tensor_loads")?,
        },
    })
}

impl Manifest {
    /// Returns the manifest for programs. Paths are relative to the folder of the manifest.
    pub(crate) fn to_json(&self) -> Value {
        let compiled: Vec<_> = self.compiled.iter().map(Compiled::to_json).collect();
        let failed: Vec<_> = self
            .failed
            .iter()
            .map(|failed| {
                json!({
                    "file": failed.stem,
                    "architecture": failed.architecture,
                    "message": failed.message,
                })
            })
            .collect();
        json!({
            "version": 1,
            "compiler": self.compiler,
            "flags": self.flags,
            "compiled": compiled,
            "failed": failed,
        })
    }

    /// Returns the manifest for people: a line for each kernel, and for each source without
    /// kernels.
    pub(crate) fn table(&self) -> String {
        let mut rows = vec![
            [
                "file",
                "kernel",
                "architecture",
                "registers",
                "shared B",
                "spill B",
                "tensor cores",
                "cubin B",
            ]
            .map(str::to_string)
            .to_vec(),
        ];
        let none = || "-".to_string();
        for compiled in &self.compiled {
            let head = |entry| vec![compiled.stem.clone(), entry, compiled.architecture.clone()];
            let Some(cubin) = &compiled.cubin else {
                let mut row = head(none());
                row.extend([none(), none(), none(), none(), "ptx only".to_string()]);
                rows.push(row);
                continue;
            };
            for (index, kernel) in cubin.kernels.iter().enumerate() {
                let resources = &kernel.resources;
                let mut row = head(resources.entry.clone());
                row.extend([
                    resources.registers.to_string(),
                    grouped(resources.shared_bytes),
                    grouped(resources.spill_bytes),
                    counts_text(&kernel.instructions.mmas),
                    // Shown once for each file.
                    if index == 0 { grouped(cubin.bytes) } else { String::new() },
                ]);
                rows.push(row);
            }
        }
        for failed in &self.failed {
            let is_shown = |compiled: &Compiled| {
                compiled.stem == failed.stem
                    && Some(&compiled.architecture) == failed.architecture.as_ref()
            };
            if self.compiled.iter().any(is_shown) {
                continue;
            }
            let architecture = failed.architecture.clone().unwrap_or_else(none);
            let mut row = vec![failed.stem.clone(), "failed".to_string(), architecture];
            row.extend([none(), none(), none(), none(), none()]);
            rows.push(row);
        }
        let is_number = [false, false, false, true, true, true, false, true];
        aligned(&rows, &is_number)
    }
}

fn counts_text(counts: &Counts) -> String {
    if counts.is_empty() {
        return "-".to_string();
    }
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    counts.join(", ")
}

/// Formats a number with a comma at each thousand.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Aligns columns; numbers are right-aligned.
pub(crate) fn aligned(rows: &[Vec<String>], is_number: &[bool]) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<_> = (0..is_number.len()).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, &width), &is_number) in row.iter().zip(&widths).zip(is_number) {
            if is_number {
                write!(line, "{cell:>width$}  ").expect("a string takes all text");
            } else {
                write!(line, "{cell:<width$}  ").expect("a string takes all text");
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(entry: &str, numbers: [u64; 4], counts: &[(&str, u64)]) -> Kernel {
        let [registers, shared_bytes, stack_bytes, spill_bytes] = numbers;
        Kernel {
            resources: Resources {
                entry: entry.to_string(),
                registers,
                shared_bytes,
                stack_bytes,
                spill_bytes,
            },
            instructions: Instructions {
                mmas: counts.iter().map(|(name, count)| (name.to_string(), *count)).collect(),
                ..Instructions::default()
            },
        }
    }

    fn sample() -> Manifest {
        let compiled = |stem: &str, architecture: &str, cubin| Compiled {
            stem: stem.to_string(),
            architecture: architecture.to_string(),
            content_hash: "0123abcd".to_string(),
            source_hash: "4567ef".to_string(),
            ptx_bytes: 2338,
            cubin,
        };
        Manifest {
            compiler: "release 13.0, V13.0.88".to_string(),
            flags: vec!["-std=c++17".to_string(), "-O3".to_string()],
            compiled: vec![
                compiled(
                    "add",
                    "sm_90a",
                    Some(Cubin {
                        bytes: 5336,
                        kernels: vec![
                            kernel("add_bf16", [24, 0, 0, 0], &[]),
                            kernel("add_scaled_bf16", [30, 1024, 8, 12], &[]),
                        ],
                        warnings: vec!["variable `x` was declared but never used".to_string()],
                    }),
                ),
                compiled(
                    "bf16_gemm",
                    "sm_100a",
                    Some(Cubin {
                        bytes: 1_016_152,
                        kernels: vec![kernel(
                            "bf16_gemm_tn",
                            [255, 33804, 0, 0],
                            &[("HMMA", 256), ("UTCQMMA", 4)],
                        )],
                        warnings: vec![],
                    }),
                ),
                compiled("norm", "sm_120a", None),
            ],
            failed: vec![
                Failed {
                    stem: "rope".to_string(),
                    architecture: Some("sm_90a".to_string()),
                    message: "rope.cu(3): error: identifier \"x\" is undefined".to_string(),
                },
                Failed {
                    stem: "swiglu".to_string(),
                    architecture: None,
                    message: "no line `// architectures: ...`".to_string(),
                },
            ],
        }
    }

    #[test]
    fn the_table() {
        insta::assert_snapshot!(sample().table());
    }

    #[test]
    fn the_json() {
        insta::assert_json_snapshot!(sample().to_json());
    }

    #[test]
    fn what_is_written_is_read_back() {
        for compiled in sample().compiled {
            assert_eq!(Compiled::from_json(&compiled.to_json()), Some(compiled));
        }
        let mut lacking = sample().compiled[0].to_json();
        lacking["kernels"][0].as_object_mut().unwrap().remove("registers");
        assert_eq!(Compiled::from_json(&lacking), None);
    }

    #[test]
    fn spills_beside_tensor_cores_are_a_fault() {
        let check = |kernels: Vec<Kernel>, expected: Option<&str>| {
            let mut compiled = sample().compiled[0].clone();
            compiled.cubin.as_mut().unwrap().kernels = kernels;
            let fault = compiled.fault();
            let found = fault.as_deref().and_then(|fault| fault.lines().next());
            let found = found.and_then(|line| line.split(": ").nth(1));
            assert_eq!(found, expected);
        };
        let tensor: &[(&str, u64)] = &[("HMMA", 1)];
        check(vec![], None);
        check(vec![kernel("a", [255, 0, 64, 0], tensor)], None);
        check(vec![kernel("a", [255, 0, 64, 4], &[])], None);
        check(vec![kernel("a", [255, 0, 64, 4], tensor)], Some("`a` 4 bytes"));
        check(
            vec![
                kernel("a", [255, 0, 64, 4], tensor),
                kernel("b", [255, 0, 64, 0], tensor),
                kernel("c", [255, 0, 64, 24], tensor),
            ],
            Some("`a` 4 bytes, `c` 24 bytes"),
        );
    }

    #[test]
    fn numbers_for_people() {
        for (number, expected) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (33804, "33,804"), (1_016_152, "1,016,152")]
        {
            assert_eq!(grouped(number), expected);
        }
    }
}
