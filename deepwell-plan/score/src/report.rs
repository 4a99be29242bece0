//! Scores as text and CSV.

use std::fmt;

use super::Scored;

impl Scored {
    /// A line for each row: line, label, predicted, measured, error, unmodelled feature.
    pub fn csv(&self) -> String {
        let mut text = "file,line,label,group,predicted,measured,error,unmodelled\n".to_string();
        for row in &self.rows {
            let error = self.error(row);
            let quoted = |cell: &str| {
                if cell.contains([',', '"']) {
                    format!("\"{}\"", cell.replace('"', "\"\""))
                } else {
                    cell.to_string()
                }
            };
            text += &format!(
                "{},{},{},{},{},{},{error:.6},{}\n",
                quoted(&self.file),
                row.line,
                quoted(&row.label),
                quoted(&row.group),
                row.predicted,
                row.measured,
                row.unmodelled.unwrap_or_default()
            );
        }
        text
    }

    fn percent(&self, error: f64) -> String {
        if self.absolute { format!("{error:.4}") } else { format!("{:.2} %", 100.0 * error) }
    }
}

impl fmt::Display for Scored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}, {} rows)", self.file, self.kind, self.rows.len())?;
        writeln!(
            f,
            "  error          mean {}, p50 {}, p90 {}, largest {}",
            self.percent(self.mean_error()),
            self.percent(self.error_quantile(0.5)),
            self.percent(self.error_quantile(0.9)),
            self.percent(self.error_quantile(1.0))
        )?;
        let marked = self.rows.iter().filter(|row| row.unmodelled.is_some()).count();
        if marked > 0 {
            let mut modelled = self.clone();
            modelled.rows.retain(|row| row.unmodelled.is_none());
            writeln!(
                f,
                "  modelled       {} rows: mean {}, p90 {}, largest {}",
                modelled.rows.len(),
                self.percent(modelled.mean_error()),
                self.percent(modelled.error_quantile(0.9)),
                self.percent(modelled.error_quantile(1.0))
            )?;
        }
        for group in self.groups() {
            writeln!(
                f,
                "  ranking        {}: regret {:.2} %, Kendall tau {:.3}, {} plans",
                group.group,
                100.0 * group.regret,
                group.tau,
                group.rows
            )?;
        }
        if let Some(fits) = self.fits {
            writeln!(
                f,
                "  micro-batch    fits in {} of {}; one sequence more does not in {}, twice as \
                 many in {}",
                fits.fits, fits.rows, fits.next_does_not, fits.twice_does_not
            )?;
            writeln!(
                f,
                "                 in {} rows the table itself shows that more fits; of the other \
                 {} one more does not in {}",
                fits.refuted,
                fits.rows - fits.refuted,
                fits.next_does_not_of_others
            )?;
        }
        if !self.published.is_empty() {
            writeln!(f, "  published      {}", self.published)?;
        }
        for note in &self.notes {
            writeln!(f, "  note           {note}")?;
        }
        Ok(())
    }
}
