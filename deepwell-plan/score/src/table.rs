//! CSV tables of measurements, with the line of every value.

use deepwell_lower::PlanError;

/// A table with the line of each row.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) name: String,
    columns: Vec<String>,
    rows: Vec<(usize, Vec<String>)>,
}

/// One row.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    table: &'a Table,
    /// Line of the file, from 1.
    pub(super) line: usize,
    cells: &'a [String],
}

impl Table {
    /// Reads a header and rows; comment lines (`#`) and empty lines are skipped.
    pub(super) fn read(name: &str, text: &str) -> Result<Table, PlanError> {
        let refuse =
            |line: usize, what: String| PlanError::Score { file: name.to_string(), line, what };
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let Some((header_line, header)) = lines.next() else {
            return Err(refuse(1, "expected a line of column names, got nothing".to_string()));
        };
        let header = header.trim_start_matches('\u{feff}');
        let columns = split(header).map_err(|what| refuse(header_line, what))?;
        for (at, column) in columns.iter().enumerate() {
            if !column.is_empty() && columns[..at].contains(column) {
                let what = format!("expected each column once, got `{column}` twice");
                return Err(refuse(header_line, what));
            }
        }
        let mut rows = Vec::new();
        for (line, text) in lines {
            let cells = split(text).map_err(|what| refuse(line, what))?;
            // Spreadsheets leave rows of commas.
            if cells.iter().all(String::is_empty) {
                continue;
            }
            if cells.len() != columns.len() {
                let (expected, got) = (columns.len(), cells.len());
                return Err(refuse(line, format!("expected {expected} columns, got {got}")));
            }
            rows.push((line, cells));
        }
        if rows.is_empty() {
            return Err(refuse(header_line + 1, "expected a row, got none".to_string()));
        }
        Ok(Table { name: name.to_string(), columns, rows })
    }

    /// Whether the table has all columns of `names`.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        names.iter().all(|name| self.columns.iter().any(|column| column == name))
    }

    pub(super) fn columns(&self) -> String {
        self.columns.join(", ")
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|(line, cells)| Row { table: self, line: *line, cells })
    }
}

/// Splits a line into cells; quotes enclose commas, and a doubled quote is a quote.
fn split(line: &str) -> Result<Vec<String>, String> {
    let (mut cells, mut cell, mut quoted) = (Vec::new(), String::new(), false);
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                cell.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(std::mem::take(&mut cell).trim().to_string()),
            other => cell.push(other),
        }
    }
    if quoted {
        return Err("expected a closing `\"`, got the end of the line".to_string());
    }
    cells.push(cell.trim().to_string());
    Ok(cells)
}

impl<'a> Row<'a> {
    pub(super) fn refuse(&self, what: String) -> PlanError {
        PlanError::Score { file: self.table.name.clone(), line: self.line, what }
    }

    /// The text of a column; empty if missing.
    pub(super) fn text(&self, column: &str) -> &'a str {
        let at = self.table.columns.iter().position(|name| name == column);
        at.and_then(|at| self.cells.get(at)).map_or("", String::as_str)
    }

    /// A finite number; `None` for an empty cell.
    pub(super) fn number(&self, column: &str) -> Result<Option<f64>, PlanError> {
        let text = self.text(column);
        if text.is_empty() || text == "-" {
            return Ok(None);
        }
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.refuse(format!("`{column}`: expected a number, got `{text}`"))),
        }
    }

    /// A number above 0.
    pub(super) fn positive(&self, column: &str) -> Result<f64, PlanError> {
        match self.number(column)? {
            Some(number) if number > 0.0 => Ok(number),
            Some(number) => {
                Err(self.refuse(format!("`{column}`: expected a number above 0, got `{number}`")))
            }
            None => Err(self.refuse(format!("`{column}`: expected a number, got nothing"))),
        }
    }

    /// A whole number from 1; `default` for an empty cell.
    pub(super) fn size_or(&self, column: &str, default: usize) -> Result<usize, PlanError> {
        match self.number(column)? {
            None => Ok(default),
            // Larger sizes would overflow in products.
            Some(size) if size >= 1.0 && size.fract() == 0.0 && size <= 1e9 => Ok(size as usize),
            Some(size) => {
                Err(self
                    .refuse(format!("`{column}`: expected a whole number from 1, got `{size}`")))
            }
        }
    }

    /// A whole number from 1.
    pub(super) fn size(&self, column: &str) -> Result<usize, PlanError> {
        match self.size_or(column, 0)? {
            0 => Err(self.refuse(format!("`{column}`: expected a whole number, got nothing"))),
            size => Ok(size),
        }
    }

    /// Number of equal parts of size `part` in `whole`.
    pub(super) fn share(&self, what: &str, whole: usize, part: usize) -> Result<usize, PlanError> {
        if part == 0 || whole < part || !whole.is_multiple_of(part) {
            return Err(self.refuse(format!("{what}: expected a multiple of {part}, got {whole}")));
        }
        Ok(whole / part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_or_refused_with_the_line() {
        let check = |text: &str, expected: Result<&[&str], (usize, &str)>| match (
            Table::read("t.csv", text),
            expected,
        ) {
            (Ok(table), Ok(cells)) => {
                let found: Vec<&str> =
                    table.rows().flat_map(|row| row.cells).map(|s| s.as_str()).collect();
                assert_eq!(found, cells);
            }
            (Err(PlanError::Score { line, what, .. }), Err((at, part))) => {
                assert!(line == at && what.contains(part), "{line}: {what}");
            }
            (found, _) => panic!("{text:?}: {found:?}"),
        };
        check("a,b\n1,2\n", Ok(&["1", "2"]));
        check("a,b\n,\n1,2\n , \n", Ok(&["1", "2"]));
        check("# source\na,b\r\n\r\n 1 ,\"x, \"\"y\"\"\"\r\n", Ok(&["1", "x, \"y\""]));
        check("", Err((1, "column names")));
        check("a,b\n", Err((2, "expected a row")));
        check("a,b\n1,2\n1\n", Err((3, "expected 2 columns, got 1")));
        check("a,b\n1,\"2\n", Err((2, "closing")));
        check("# source\na,b, a\n1,2,3\n", Err((2, "`a` twice")));
    }

    #[test]
    fn numbers_are_checked() {
        let table = Table::read("t.csv", "a,b,c,d\n8,x,,-2\n").unwrap();
        let row = table.rows().next().unwrap();
        assert_eq!(row.size("a").unwrap(), 8);
        assert_eq!(row.size_or("c", 3).unwrap(), 3);
        for (column, part) in [("b", "got `x`"), ("c", "got nothing"), ("d", "got `-2`")] {
            let error = row.size(column).unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains("t.csv") && error.contains("line 2"),
                "{error}"
            );
        }
        assert!(row.share("GPUs", 8, 3).is_err());
    }
}
