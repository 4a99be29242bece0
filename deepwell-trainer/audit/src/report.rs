//! The findings of an audit.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Number of findings that a report keeps; further findings are only counted.
pub const FINDINGS_KEPT: usize = 64;

/// One deviation from a definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The call, or `program` if the finding concerns no single call.
    pub call: String,
    /// Tensor, coordinate, expected and actual value.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.call, self.what)
    }
}

/// Counts and findings of an [`Audit`](super::Audit).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditReport {
    /// Calls whose outputs were compared; the weight conversions at the start of a step count too.
    pub calls_checked: u64,
    /// Tensors compared, in full or by samples.
    pub tensors_checked: u64,
    /// Elements and scale bytes compared.
    pub elements_checked: u64,
    /// The first [`FINDINGS_KEPT`] findings, in the order of the calls.
    pub findings: Vec<Finding>,
    /// Number of all findings, kept or not.
    pub findings_total: u64,
}

impl AuditReport {
    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings_total == 0
    }

    /// Adds a finding.
    pub(super) fn add(&mut self, call: &str, what: String) {
        self.findings_total += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push(Finding { call: call.to_string(), what });
        }
    }

    /// Counts a tensor and its compared elements.
    pub(super) fn count_tensor(&mut self, elements: usize) {
        self.tensors_checked += 1;
        self.elements_checked += elements as u64;
    }
}

impl fmt::Display for AuditReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "audit: {} calls, {} tensors, {} elements compared, {}",
            self.calls_checked,
            self.tensors_checked,
            self.elements_checked,
            match self.findings_total {
                0 => "no findings".to_string(),
                1 => "1 finding".to_string(),
                total => format!("{total} findings"),
            }
        )?;
        for finding in &self.findings {
            write!(f, "\n  {finding}")?;
        }
        match self.findings_total - self.findings.len() as u64 {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_some_findings_and_counts_all() {
        let mut report = AuditReport::default();
        assert!(report.is_clean() && report.to_string().ends_with("no findings"));
        for index in 0..FINDINGS_KEPT + 2 {
            report.add("call", format!("fault {index}"));
        }
        assert_eq!((report.findings.len(), report.findings_total), (64, 66));
        let text = report.to_string();
        assert!(text.contains("\n  `call`: fault 63\n  and 2 more"), "{text}");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<AuditReport>(&json).unwrap(), report);
    }
}
