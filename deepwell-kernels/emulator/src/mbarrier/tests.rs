//! Barriers through their phases, and each rule broken.

use super::*;

/// One operation on the object at offset 64.
enum Do {
    Init(u32),
    Inval,
    Arrive(u32),
    NoComplete(u32),
    Drop(u32),
    Expect(u32),
    ArriveExpect(u32),
    Complete(u32),
    Pending(u32),
    Test(u32),
    Ordinary(u32, u32, bool),
}
use Do::*;

fn run(operation: &Do, table: &mut MbarrierTable) -> Result<bool, Fault> {
    let completed = |arrival: Arrival| arrival.completed;
    match *operation {
        Init(count) => table.init(0, 64, count).map(|()| false),
        Inval => table.inval(0, 64).map(|()| false),
        Arrive(count) => table.arrive(0, 64, count, false).map(completed),
        NoComplete(count) => table.arrive(0, 64, count, true).map(completed),
        Drop(count) => table.arrive_drop(0, 64, count, 0, false).map(completed),
        Expect(bytes) => table.expect_tx(0, 64, bytes).map(completed),
        ArriveExpect(bytes) => table.arrive_expect_tx(0, 64, bytes).map(completed),
        Complete(bytes) => table.complete_tx(0, 64, bytes).map(completed),
        Pending(count) => table.add_pending(0, 64, count).map(|()| false),
        Test(parity) => table.test(0, 64, PhaseTest::Parity(parity)),
        Ordinary(offset, bytes, write) => {
            table.check_access(0, offset, bytes, write).map(|()| false)
        }
    }
}

/// Runs `operations`; the last gives `expected`, all before it succeed.
fn check(operations: &[Do], expected: Result<bool, &str>) {
    let mut table = MbarrierTable::new(2);
    let (last, before) = operations.split_last().unwrap();
    for operation in before {
        run(operation, &mut table).unwrap();
    }
    let got = run(last, &mut table);
    assert_eq!(got.as_ref().map(|found| *found).map_err(|fault| fault.rule), expected);
}

#[test]
fn phases_complete_when_arrivals_and_bytes_are_there() {
    check(&[Init(1), Arrive(1)], Ok(true));
    check(&[Init(2), Arrive(1)], Ok(false));
    check(&[Init(2), Arrive(1), Arrive(1)], Ok(true));
    check(&[Init(1), ArriveExpect(8)], Ok(false));
    check(&[Init(1), ArriveExpect(8), Complete(8)], Ok(true));
    check(&[Init(1), Complete(8), ArriveExpect(8)], Ok(true));
    check(&[Init(1), Expect(8), Complete(8)], Ok(false));
    check(&[Init(1), Pending(1), Arrive(1), Arrive(1)], Ok(true));
    check(&[Init(2), Drop(1), Arrive(1), Arrive(1)], Ok(true));
}

#[test]
fn parity_is_of_the_phase_that_must_be_complete() {
    check(&[Init(1), Test(0)], Ok(false));
    check(&[Init(1), Test(1)], Ok(true));
    check(&[Init(1), Arrive(1), Test(0)], Ok(true));
    check(&[Init(1), Arrive(1), Test(1)], Ok(false));
    check(&[Init(1), Arrive(1), Arrive(1), Test(1)], Ok(true));
    check(&[Init(1), Test(2)], Err("mbarrier-parity-out-of-range"));
}

#[test]
fn misuse_has_a_name() {
    check(&[Arrive(1)], Err("mbarrier-uninitialized"));
    check(&[Complete(8)], Err("mbarrier-uninitialized"));
    check(&[Test(0)], Err("mbarrier-uninitialized"));
    check(&[Init(1), Inval, Arrive(1)], Err("mbarrier-uninitialized"));
    check(&[Init(1), Init(1)], Err("mbarrier-reinitialized"));
    check(&[Init(1), Inval, Init(1)], Ok(false));
    check(&[Init(0)], Err("mbarrier-count-out-of-range"));
    check(&[Init(1 << 20)], Err("mbarrier-count-out-of-range"));
    check(&[Init(COUNT_MAX), Pending(1)], Err("mbarrier-count-out-of-range"));
    check(&[Init(2), Arrive(3)], Err("mbarrier-arrived-too-often"));
    check(&[Init(1), ArriveExpect(8), Arrive(1)], Err("mbarrier-arrived-too-often"));
    check(&[Init(1), NoComplete(1)], Err("mbarrier-no-complete-completed"));
    check(&[Init(2), NoComplete(1)], Ok(false));
    check(&[Init(1), ArriveExpect(8), Complete(16)], Err("mbarrier-more-bytes-than-expected"));
    check(&[Init(1), Complete(16), ArriveExpect(8)], Err("mbarrier-more-bytes-than-expected"));
    check(&[Init(2), Expect(COUNT_MAX), Expect(1)], Err("mbarrier-transactions-out-of-range"));
}

#[test]
fn bytes_of_a_live_object_are_no_memory() {
    check(&[Init(1), Ordinary(64, 4, true)], Err("mbarrier-overwritten"));
    check(&[Init(1), Ordinary(71, 1, true)], Err("mbarrier-overwritten"));
    check(&[Init(1), Ordinary(0, 65, false)], Err("mbarrier-read"));
    check(&[Init(1), Ordinary(0, 64, true)], Ok(false));
    check(&[Init(1), Ordinary(72, 8, true)], Ok(false));
    check(&[Init(1), Inval, Ordinary(64, 8, true)], Ok(false));
}

#[test]
fn states_name_their_phase() {
    let mut table = MbarrierTable::new(1);
    table.init(0, 8, 2).unwrap();
    let first = table.arrive(0, 8, 1, false).unwrap();
    assert_eq!(MbarrierTable::pending_count(first.state), Ok(2));
    assert_eq!(table.test(0, 8, PhaseTest::State(first.state)), Ok(false));
    table.arrive(0, 8, 1, false).unwrap();
    assert_eq!(table.test(0, 8, PhaseTest::State(first.state)), Ok(true));
    table.arrive(0, 8, 2, false).unwrap();
    let outdated = table.test(0, 8, PhaseTest::State(first.state)).unwrap_err();
    assert_eq!(outdated.rule, "mbarrier-state-outdated");
    assert_eq!(MbarrierTable::pending_count(7).unwrap_err().rule, "mbarrier-no-state");
}

#[test]
fn deadlocks_are_described() {
    let mut table = MbarrierTable::new(1);
    table.init(0, 16, 2).unwrap();
    table.arrive_expect_tx(0, 16, 512).unwrap();
    assert_eq!(
        table.describe_wait(0, 16, 0),
        "waits for parity 0 of mbarrier at shared 0x10 of CTA 0: phase 0 (parity 0) lacks \
         1 of 2 arrivals and 512 bytes of copies"
    );
    assert_eq!(table.init(0, 12, 1).unwrap_err().rule, "mbarrier-misaligned");
}
