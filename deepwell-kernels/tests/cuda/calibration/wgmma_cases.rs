//! The MMAs of `wgmma` that are calibrated, and operands as images of shared memory.

use super::element::{Element, Sum};
use super::wgmma_ptx::{COPY_BYTES, Image, ROWS, STEP_BYTES, WgmmaKernel};

/// How an operand lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    /// Bytes of a swizzled row: 128, 64, 32, or 16 for no swizzle.
    pub(super) width: usize,
    /// Whether M or N is the inner dimension instead of K.
    pub(super) transposed: bool,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) a: Element,
    pub(super) b: Element,
    pub(super) sum: Sum,
    pub(super) columns: usize,
    pub(super) steps: usize,
    pub(super) adds: bool,
    /// `None` for A in registers.
    pub(super) a_layout: Option<Layout>,
    pub(super) b_layout: Layout,
    pub(super) negated: (bool, bool),
}

const ALONG_K: Layout = Layout { width: 128, transposed: false };

impl Case {
    fn new(a: Element, b: Element, columns: usize) -> Case {
        Case {
            a,
            b,
            sum: Sum::F32,
            columns,
            steps: 4,
            adds: false,
            a_layout: Some(ALONG_K),
            b_layout: ALONG_K,
            negated: (false, false),
        }
    }

    pub(super) fn name(&self) -> String {
        let Case { a, b, sum, columns, steps, .. } = self;
        let layout = |layout: Option<Layout>| match layout {
            None => "registers".to_string(),
            Some(Layout { width, transposed: true }) => format!("{width}t"),
            Some(Layout { width, .. }) => width.to_string(),
        };
        let sign = |negated: bool| if negated { "-" } else { "" };
        format!(
            "n{columns} {} {}{} {}{} x{steps} {} {}{}",
            sum.name(),
            sign(self.negated.0),
            a.name(),
            sign(self.negated.1),
            b.name(),
            layout(self.a_layout),
            layout(Some(self.b_layout)),
            if self.adds { " adds" } else { "" }
        )
    }

    /// The kernel of this case.
    pub(super) fn kernel(&self) -> WgmmaKernel {
        let row_bytes = STEP_BYTES * self.steps;
        WgmmaKernel {
            a: self.a,
            b: self.b,
            sum: self.sum,
            columns: self.columns,
            steps: self.steps,
            adds: self.adds,
            a_image: self.a_layout.map(|layout| layout.image(ROWS, row_bytes)),
            b_image: self.b_layout.image(self.columns, row_bytes),
            transposed: (
                self.a_layout.is_some_and(|layout| layout.transposed),
                self.b_layout.transposed,
            ),
            negated: self.negated,
        }
    }
}

impl Layout {
    /// Where byte `byte` (along K) of row `row` is.
    fn place(self, (rows, row_bytes): (usize, usize), row: usize, byte: usize) -> usize {
        let width = self.width;
        // What runs along the inner dimension and across it, in lines of `width` bytes.
        let (inner, line, lines) = match self.transposed {
            false => (byte, row, rows),
            true => (2 * row + byte % 2, byte / 2, row_bytes / 2),
        };
        let chunk = inner % width / 16;
        // Bits 4 to 6 of an address are changed by bits 7 to 9, as many as the width has.
        let swizzled = chunk ^ (line * width / 128 % (width / 16));
        inner / width * lines * width + line * width + swizzled * 16 + inner % 16
    }

    /// How a `[rows, row_bytes]` matrix is described.
    fn image(self, rows: usize, row_bytes: usize) -> Image {
        let width = self.width;
        let group = 8 * width;
        // From one column of lines to the next, and from eight lines to the next. Without a
        // swizzle the fields are named by K and M, otherwise by the line.
        let lines = if self.transposed { row_bytes / 2 } else { rows };
        let (leading, stride) = match (width, self.transposed) {
            (16, true) => (group, lines * width),
            (16, false) | (_, true) => (lines * width, group),
            (_, false) => (16, group),
        };
        let code: u64 = match width {
            128 => 1,
            64 => 2,
            32 => 3,
            _ => 0,
        };
        let steps = row_bytes / STEP_BYTES;
        Image {
            bytes: (rows * row_bytes).next_multiple_of(COPY_BYTES),
            descriptor: (leading as u64 / 16) << 16 | (stride as u64 / 16) << 32 | code << 62,
            offsets: (0..steps)
                .map(|step| self.place((rows, row_bytes), 0, step * STEP_BYTES))
                .collect(),
        }
    }

    /// A `[rows, row_bytes]` matrix as it lies in shared memory, filled up to `len`.
    pub(super) fn lay_out(self, matrix: &[u8], rows: usize, len: usize) -> Vec<u8> {
        let row_bytes = matrix.len() / rows;
        let mut image = vec![0; len];
        for (index, &value) in matrix.iter().enumerate() {
            let place = self.place((rows, row_bytes), index / row_bytes, index % row_bytes);
            image[place] = value;
        }
        image
    }
}

/// Every row.
pub(super) fn cases() -> Vec<Case> {
    use Element::{Bf16, E4m3, E5m2, F16, Tf32};
    let mut cases = Vec::new();
    // Types, accumulators and widths, without and with accumulators before, A in both places.
    let pairs = [
        (Bf16, Bf16, Sum::F32),
        (F16, F16, Sum::F32),
        (F16, F16, Sum::F16),
        (Tf32, Tf32, Sum::F32),
        (E4m3, E4m3, Sum::F32),
        (E5m2, E5m2, Sum::F32),
        (E4m3, E5m2, Sum::F32),
        (E5m2, E4m3, Sum::F32),
        (E4m3, E4m3, Sum::F16),
        (E5m2, E5m2, Sum::F16),
    ];
    for (a, b, sum) in pairs {
        let case = Case { sum, ..Case::new(a, b, 64) };
        cases.push(case);
        // A row of one step is no longer than 32 bytes.
        let short = Layout { width: 32, transposed: false };
        let one = Case { adds: true, steps: 1, ..case };
        cases.push(Case { a_layout: Some(short), b_layout: short, ..one });
        cases.push(Case { adds: true, a_layout: None, ..case });
        if a == b {
            cases.push(Case { columns: 128, adds: true, ..case });
            cases.push(Case { columns: 256, ..case });
            cases.push(Case { negated: (true, false), adds: true, ..case });
        }
    }
    // Signs, and numbers of columns.
    for negated in [(false, true), (true, true)] {
        cases.push(Case { negated, adds: true, ..Case::new(Bf16, Bf16, 64) });
        cases.push(Case { negated, adds: true, a_layout: None, ..Case::new(E4m3, E4m3, 64) });
    }
    for columns in [8, 24, 200] {
        cases.push(Case::new(Bf16, Bf16, columns));
        cases.push(Case { steps: 8, ..Case::new(E4m3, E4m3, columns) });
    }
    // Layouts: every swizzle along K, and across it for 16-bit types.
    for width in [64, 32, 16] {
        let layout = Layout { width, transposed: false };
        for element in [Bf16, Tf32, E4m3] {
            let case = Case::new(element, element, 128);
            cases.push(Case { a_layout: Some(layout), b_layout: layout, ..case });
        }
    }
    for width in [128, 64, 32, 16] {
        let across = Layout { width, transposed: true };
        let case = Case::new(Bf16, Bf16, 128);
        cases.push(Case { a_layout: Some(across), ..case });
        cases.push(Case { b_layout: across, ..case });
        cases.push(Case { a_layout: None, b_layout: across, ..case });
        let both = Case { a_layout: Some(across), b_layout: across, ..case };
        cases.push(Case { a: F16, b: F16, ..both });
    }
    cases
}
