//! Allocation of tensor-memory columns.

use super::address::TensorAddress;
use crate::error::Fault;
use crate::place::TENSOR_COLUMNS;

/// Allocation unit, in columns.
pub const COLUMNS_MIN: u32 = 32;

/// The columns allocated by one CTA, and its permit to allocate more.
///
/// ```
/// use deepwell_emulator::tcgen05::Allocator;
///
/// let mut cta = Allocator::new();
/// let first = cta.allocate(1, 256)?.expect("nothing else is allocated");
/// assert_eq!(first, 0);
/// assert_eq!(cta.allocate(1, 256)?, Some(256));
/// assert_eq!(cta.allocate(1, 32)?, None, "all columns are taken: the warp waits");
/// cta.deallocate(1, first, 256)?;
/// assert_eq!(cta.check_exit().unwrap_err().rule, "tensor-memory-not-freed");
/// # Ok::<(), deepwell_emulator::error::Fault>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Allocator {
    /// First column and number of columns, in the order of allocation.
    live: Vec<(u32, u32)>,
    /// Number of columns of the last allocation.
    columns_last: Option<u32>,
    relinquished: bool,
    group: Option<u32>,
}

impl Allocator {
    /// Creates the state of a CTA without allocations.
    pub fn new() -> Allocator {
        Allocator::default()
    }

    /// Records an instruction with `.cta_group::<group>`. All instructions of a kernel must use the
    /// same group.
    ///
    /// # Errors
    /// An earlier instruction used another group.
    pub fn use_group(&mut self, group: u32) -> Result<(), Fault> {
        match self.group {
            Some(earlier) if earlier != group => Err(Fault::new(
                "tcgen05-group-mixed",
                format!(
                    "expected `.cta_group::{earlier}` as in the instructions before, got \
                     `.cta_group::{group}`: all of a kernel must have the same"
                ),
            )),
            _ => {
                self.group = Some(group);
                Ok(())
            }
        }
    }

    /// `tcgen05.alloc` of a single CTA: returns the address, or `None` if the warp has to wait.
    ///
    /// # Errors
    /// An illegal count, a count larger than the previous one, or an allocation after the permit
    /// was relinquished.
    pub fn allocate(&mut self, group: u32, columns: u32) -> Result<Option<u32>, Fault> {
        self.check_allocate(group, columns)?;
        let Some(column) = free_columns(&[self], columns) else { return Ok(None) };
        self.take(column, columns);
        Ok(Some(column))
    }

    /// `tcgen05.alloc.cta_group::2`, after both CTAs of a pair have reached it: returns the address
    /// for both CTAs, or `None` if they have to wait.
    ///
    /// # Errors
    /// The errors of [`Allocator::allocate`], for either CTA.
    pub fn allocate_pair(
        even: &mut Allocator,
        odd: &mut Allocator,
        columns: u32,
    ) -> Result<Option<u32>, Fault> {
        even.check_allocate(2, columns)?;
        odd.check_allocate(2, columns)?;
        let Some(column) = free_columns(&[even, odd], columns) else { return Ok(None) };
        even.take(column, columns);
        odd.take(column, columns);
        Ok(Some(column))
    }

    /// `tcgen05.dealloc`, called for each CTA of the group.
    ///
    /// # Errors
    /// There is no allocation with this address and number of columns.
    pub fn deallocate(&mut self, group: u32, address: u32, columns: u32) -> Result<(), Fault> {
        self.use_group(group)?;
        check_count(columns)?;
        let address = TensorAddress::decode(address)?;
        let found = self.live.iter().position(|&live| live == (address.column, columns));
        match found {
            Some(index) if address.lane == 0 => {
                self.live.remove(index);
                Ok(())
            }
            _ => Err(Fault::new(
                "tensor-dealloc-unknown",
                format!(
                    "expected the address and the count of an allocation, got {columns} columns \
                     from {address}; allocated are {}",
                    self.describe()
                ),
            )),
        }
    }

    /// `tcgen05.relinquish_alloc_permit`: the CTA may not allocate any more.
    ///
    /// # Errors
    /// An earlier instruction used another group.
    pub fn relinquish(&mut self, group: u32) -> Result<(), Fault> {
        self.use_group(group)?;
        self.relinquished = true;
        Ok(())
    }

    /// Checks that the CTA owns these columns.
    ///
    /// # Errors
    /// A column that the CTA does not own.
    pub fn check_access(&self, column: u32, columns: u32) -> Result<(), Fault> {
        let end = column + columns.max(1);
        // The range may span adjacent allocations.
        let mut reached = column;
        while reached < end {
            let owner = self.live.iter().find(|(at, n)| (*at..at + n).contains(&reached));
            match owner {
                Some((at, n)) => reached = at + n,
                None => {
                    return Err(Fault::new(
                        "tensor-memory-not-allocated",
                        format!(
                            "columns {column} to {}: allocated are {}",
                            end - 1,
                            self.describe()
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that the CTA has freed all columns when it ends.
    ///
    /// # Errors
    /// Columns that are still allocated.
    pub fn check_exit(&self) -> Result<(), Fault> {
        if self.live.is_empty() {
            return Ok(());
        }
        Err(Fault::new(
            "tensor-memory-not-freed",
            format!("the CTA ends and still has {}", self.describe()),
        ))
    }

    /// Number of allocated columns.
    pub fn columns_live(&self) -> u32 {
        self.live.iter().map(|(_, columns)| columns).sum()
    }

    fn check_allocate(&mut self, group: u32, columns: u32) -> Result<(), Fault> {
        self.use_group(group)?;
        check_count(columns)?;
        if self.relinquished {
            return Err(Fault::new(
                "tensor-alloc-after-relinquish",
                "the CTA has given up the permit to allocate tensor memory",
            ));
        }
        match self.columns_last {
            Some(last) if columns > last => Err(Fault::new(
                "tensor-alloc-grows",
                format!(
                    "expected at most {last} columns as the allocation before, got {columns}: \
                     counts must not grow"
                ),
            )),
            _ => Ok(()),
        }
    }

    fn take(&mut self, column: u32, columns: u32) {
        self.live.push((column, columns));
        self.columns_last = Some(columns);
    }

    fn describe(&self) -> String {
        if self.live.is_empty() {
            return "no columns".to_string();
        }
        let each = self.live.iter().map(|(at, n)| format!("columns {at} to {}", at + n - 1));
        each.collect::<Vec<_>>().join(", ")
    }
}

fn check_count(columns: u32) -> Result<(), Fault> {
    if columns.is_power_of_two() && (COLUMNS_MIN..=TENSOR_COLUMNS).contains(&columns) {
        return Ok(());
    }
    Err(Fault::new(
        "tensor-alloc-columns",
        format!(
            "expected a power of two from {COLUMNS_MIN} to {TENSOR_COLUMNS} columns, got {columns}"
        ),
    ))
}

/// Returns the first range that is free in all CTAs. The start is a multiple of the size.
fn free_columns(ctas: &[&Allocator], columns: u32) -> Option<u32> {
    (0..TENSOR_COLUMNS).step_by(columns as usize).find(|&at| {
        let taken = ctas.iter().flat_map(|cta| &cta.live);
        taken.into_iter().all(|&(live, n)| live + n <= at || at + columns <= live)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn illegal_requests_have_names() {
        let rule = |result: Result<Option<u32>, Fault>| result.unwrap_err().rule;
        let mut cta = Allocator::new();
        for columns in [0, 16, 48, 1024] {
            assert_eq!(rule(cta.allocate(1, columns)), "tensor-alloc-columns");
        }
        assert_eq!(cta.allocate(1, 64).unwrap(), Some(0));
        assert_eq!(rule(cta.allocate(1, 128)), "tensor-alloc-grows");
        assert_eq!(rule(cta.allocate(2, 32)), "tcgen05-group-mixed");
        for (address, columns) in [(0, 32), (32, 64), (0x0010_0000, 64), (64, 64)] {
            let fault = cta.deallocate(1, address, columns).unwrap_err();
            assert_eq!(fault.rule, "tensor-dealloc-unknown");
        }
        cta.relinquish(1).unwrap();
        assert_eq!(rule(cta.allocate(1, 32)), "tensor-alloc-after-relinquish");
        cta.deallocate(1, 0, 64).unwrap();
        cta.check_exit().unwrap();
        assert_eq!(cta.deallocate(1, 0, 64).unwrap_err().rule, "tensor-dealloc-unknown");
    }

    #[test]
    fn accesses_stay_in_allocations() {
        let mut cta = Allocator::new();
        cta.allocate(1, 64).unwrap();
        cta.allocate(1, 32).unwrap();
        assert_eq!(cta.columns_live(), 96);
        cta.check_access(0, 96).unwrap();
        cta.check_access(60, 36).unwrap();
        for (column, columns) in [(0, 97), (96, 1), (511, 1)] {
            let fault = cta.check_access(column, columns).unwrap_err();
            assert_eq!(fault.rule, "tensor-memory-not-allocated");
        }
    }

    #[test]
    fn a_pair_gets_one_address() {
        let (mut even, mut odd) = (Allocator::new(), Allocator::new());
        assert_eq!(Allocator::allocate_pair(&mut even, &mut odd, 512).unwrap(), Some(0));
        assert_eq!(Allocator::allocate_pair(&mut even, &mut odd, 32).unwrap(), None);
        even.deallocate(2, 0, 512).unwrap();
        assert_eq!(Allocator::allocate_pair(&mut even, &mut odd, 32).unwrap(), None);
        odd.deallocate(2, 0, 512).unwrap();
        assert_eq!(Allocator::allocate_pair(&mut even, &mut odd, 32).unwrap(), Some(0));
        assert_eq!(even.allocate(1, 32).unwrap_err().rule, "tcgen05-group-mixed");
    }
}
