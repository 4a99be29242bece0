//! Recipes and checks as text.

use std::fmt;

use super::{Check, Figure, Point, Recipe, Verdict};

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.name, self.summary)?;
        writeln!(f, "hardware  {}", self.hardware)?;
        writeln!(f, "command   {}", self.command)?;
        for remark in &self.remarks {
            writeln!(f, "remark    {remark}")?;
        }
        if !self.run.is_empty() {
            writeln!(f, "\nrun file")?;
            for line in toml::to_string(&self.run).map_err(|_| fmt::Error)?.lines() {
                writeln!(f, "  {line}")?;
            }
        }
        if !self.points.is_empty() {
            writeln!(f, "\nexpected curve")?;
        }
        for Point { step, of, low, high, basis, source } in &self.points {
            let (of, basis) = (of.name(), basis.name());
            writeln!(f, "  step {step:<6} {of:<14} {low:.4} to {high:.4}  {basis}: {source}")?;
        }
        if !self.figures.is_empty() {
            writeln!(f, "\nexpected figures")?;
        }
        for Figure { of, value, on, precision, basis, source, .. } in &self.figures {
            let value = of.format(*value);
            let place = match on.as_str() {
                "" => String::new(),
                on => format!(" on {on}"),
            };
            let precision = match precision.as_str() {
                "" => String::new(),
                precision => format!(" in {precision}"),
            };
            let (of, basis) = (of.name(), basis.name());
            writeln!(f, "  {of:<19} {value:<10} {basis}{place}{precision}: {source}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wide = self.rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
        for row in &self.rows {
            let (word, reason) = match &row.verdict {
                Verdict::Within => ("within", String::new()),
                Verdict::Outside => ("OUTSIDE", String::new()),
                Verdict::NotCompared(reason) => ("-", format!(" (not compared: {reason})")),
            };
            writeln!(
                f,
                "{word:<8} {:<wide$}  {}, expected {}{reason}",
                row.what, row.got, row.expected
            )?;
        }
        let Check { recipe, run, .. } = self;
        match self.within {
            Some(true) => writeln!(f, "{run}: within recipe {recipe}"),
            Some(false) => writeln!(f, "{run}: not within recipe {recipe}"),
            None => writeln!(f, "{run}: nothing of recipe {recipe} could be compared"),
        }
    }
}
