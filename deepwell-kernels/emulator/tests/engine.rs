//! Kernels of `fixtures/engine.cu`, each of which needs one part of the engine, in all completion
//! modes, against what the host computes.

use deepwell_emulator::error::EmulatorError;
use deepwell_emulator::launch::{
    Arguments, Completion, Emulator, LaunchSpec, ModuleId, Report, Settings,
};

const PTX: &str = include_str!("fixtures/engine.ptx");

fn modes() -> Vec<Completion> {
    let mut modes = vec![Completion::Eager, Completion::Demand];
    modes.extend((1..=4).map(|seed| Completion::Lazy { seed }));
    modes
}

fn device(completion: Completion) -> (Emulator, ModuleId) {
    let mut emulator = Emulator::new(Settings { completion, ..Settings::default() });
    let module = emulator.load(PTX).expect("the fixture loads");
    (emulator, module)
}

fn spec(kernel: &str, grid: u32, block: u32, arguments: Arguments) -> LaunchSpec {
    LaunchSpec {
        kernel: kernel.to_owned(),
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        arguments: arguments.bytes(),
        programmatic: false,
    }
}

fn upload(emulator: &mut Emulator, words: &[u32], name: &str) -> u64 {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let address = emulator.allocate(bytes.len() as u64, name);
    emulator.write(address, &bytes).expect("just allocated");
    address
}

fn download(emulator: &Emulator, address: u64, count: usize) -> Vec<u32> {
    let bytes = emulator.read(address, count * 4).expect("just allocated");
    bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

fn clean(report: &Report) {
    assert!(report.hazards.is_empty(), "{:#?}", report.hazards);
    assert!(report.unwritten.is_empty(), "{:#?}", report.unwritten);
}

#[test]
fn saxpy_with_a_tail() {
    for n in [0u32, 1, 31, 255, 257, 1000] {
        let (mut emulator, module) = device(Completion::Eager);
        let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
        let y: Vec<f32> = (0..n).map(|i| 100.0 - i as f32).collect();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let x_at = upload(&mut emulator, &bits(&x), "x");
        let y_at = upload(&mut emulator, &bits(&y), "y");
        let arguments = Arguments::new().u64(x_at).u64(y_at).f32(3.0).u32(n);
        clean(&emulator.launch(module, &spec("saxpy", 2, 128, arguments)).unwrap());
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 3f32.mul_add(*x, *y)).collect();
        assert_eq!(download(&emulator, y_at, n as usize), bits(&expected), "{n} elements");
    }
}

#[test]
fn a_sum_whose_last_cta_is_told_by_a_counter() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let x: Vec<u32> = (0..5000).map(|i| i * i % 1013).collect();
        let x_at = upload(&mut emulator, &x, "x");
        let partial = emulator.allocate(4 * 12, "partial");
        let arrivals = upload(&mut emulator, &[0], "arrivals");
        let total = emulator.allocate(4, "total");
        let arguments =
            Arguments::new().u64(x_at).u64(partial).u64(arrivals).u64(total).u32(x.len() as u32);
        let report = emulator.launch(module, &spec("sum", 12, 96, arguments)).unwrap();
        clean(&report);
        assert_eq!(report.counts.ctas, 12);
        assert_eq!(download(&emulator, total, 1), [x.iter().sum::<u32>()], "{completion:?}");
    }
}

#[test]
fn lanes_that_went_apart_come_together() {
    let (mut emulator, module) = device(Completion::Eager);
    let threads = 96;
    let steps = emulator.allocate(4 * threads, "steps");
    let largest = emulator.allocate(4 * 3, "largest");
    let arguments = Arguments::new().u64(steps).u64(largest);
    clean(&emulator.launch(module, &spec("collatz", 1, threads as u32, arguments)).unwrap());
    let expected: Vec<u32> = (1..=threads)
        .map(|mut n| {
            let mut count = 0;
            while n != 1 {
                n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
                count += 1;
            }
            count
        })
        .collect();
    assert_eq!(download(&emulator, steps, threads as usize), expected);
    let of_warps: Vec<u32> =
        expected.chunks(32).map(|warp| warp.iter().copied().max().unwrap_or(0)).collect();
    assert_eq!(download(&emulator, largest, 3), of_warps);
}

#[test]
fn resident_ctas_wait_for_each_other() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let token = upload(&mut emulator, &[0], "token");
        let order = emulator.allocate(4 * 8, "order");
        let arguments = Arguments::new().u64(token).u64(order);
        emulator.launch(module, &spec("hand_round", 8, 64, arguments)).unwrap();
        assert_eq!(download(&emulator, order, 8), (0..8).map(|i| i * 10).collect::<Vec<_>>());
    }
}

#[test]
fn lanes_of_a_warp_take_a_lock_in_turn() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let mutex = upload(&mut emulator, &[0], "mutex");
        let counter = upload(&mut emulator, &[0], "counter");
        let arguments = Arguments::new().u64(mutex).u64(counter);
        emulator.launch(module, &spec("lock", 3, 64, arguments)).unwrap();
        assert_eq!(download(&emulator, counter, 1), [192]);
    }
}

#[test]
fn ctas_of_a_cluster_write_to_each_other() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let found = emulator.allocate(4 * 32 * 8, "found");
        let arguments = Arguments::new().u64(found);
        let report = emulator.launch(module, &spec("neighbors", 8, 32, arguments)).unwrap();
        clean(&report);
        assert_eq!(report.counts.bytes.cluster, 8 * 32 * 4);
        let expected: Vec<u32> = (0..8u32)
            .flat_map(|block| (0..32).map(move |thread| (block + 3) % 4 * 100 + thread))
            .collect();
        assert_eq!(download(&emulator, found, 256), expected);
    }
}

#[test]
fn copies_of_lanes_in_groups() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let stages = 5;
        let x: Vec<u32> = (0..stages * 128).collect();
        let x_at = upload(&mut emulator, &x, "x");
        let y_at = emulator.allocate(4 * x.len() as u64, "y");
        let arguments = Arguments::new().u64(x_at).u64(y_at).u32(stages);
        clean(&emulator.launch(module, &spec("staged", 1, 32, arguments)).unwrap());
        let expected: Vec<u32> = (0..stages)
            .flat_map(|stage| {
                (0..32)
                    .rev()
                    .flat_map(move |lane| (0..4).map(move |word| stage * 128 + lane * 4 + word))
            })
            .collect();
        assert_eq!(download(&emulator, y_at, x.len()), expected, "{completion:?}");
    }
}

#[test]
fn a_ring_of_bulk_copies() {
    for completion in modes() {
        let (mut emulator, module) = device(completion);
        let stages = 7;
        let x: Vec<u32> = (0..stages * 256).map(|i| i * 3).collect();
        let x_at = upload(&mut emulator, &x, "x");
        let y_at = emulator.allocate(4 * x.len() as u64, "y");
        let arguments = Arguments::new().u64(x_at).u64(y_at).u32(stages);
        let report = emulator.launch(module, &spec("ring", 1, 64, arguments)).unwrap();
        clean(&report);
        assert_eq!(report.counts.bytes.copied_to_shared, 7 * 1024);
        let expected: Vec<u32> = (0..stages)
            .flat_map(|stage| (0..256).map(move |i| (stage * 256 + 255 - i) * 3 + 1))
            .collect();
        assert_eq!(download(&emulator, y_at, x.len()), expected, "{completion:?}");
    }
}

#[test]
fn a_deadlock_tells_who_waits_for_what() {
    let (mut emulator, module) = device(Completion::Eager);
    let out = emulator.allocate(4 * 64, "out");
    let launch = spec("stuck", 1, 64, Arguments::new().u64(out));
    let error = emulator.launch(module, &launch).unwrap_err();
    let EmulatorError::Deadlock { waiters } = &error else { panic!("{error}") };
    assert_eq!(waiters.len(), 2);
    assert!(error.to_string().contains("barrier 2 of the CTA: 32 of 64"), "{error}");
    let line = PTX.lines().nth(waiters[0].ptx_line as usize - 1).unwrap();
    assert!(line.contains("barrier.sync 1, 64"), "{line}");
    assert!(waiters[0].source.is_some());
}

#[test]
fn an_access_out_of_range_names_thread_and_line() {
    let (mut emulator, module) = device(Completion::Eager);
    let out = emulator.allocate(4 * 64, "out");
    let launch = spec("too_far", 1, 64, Arguments::new().u64(out));
    let error = emulator.launch(module, &launch).unwrap_err();
    let EmulatorError::Fault(report) = &error else { panic!("{error}") };
    assert_eq!(report.fault.rule, "global-out-of-range");
    assert_eq!(report.thread, Some([63, 0, 0]));
    assert!(report.fault.message.contains("`out`"), "{report}");
    assert!(PTX.lines().nth(report.ptx_line as usize - 1).unwrap().contains("st.global"));
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let (mut emulator, module) = device(Completion::Eager);
    let arguments = || Arguments::new().u64(0).u64(0);
    let cases: [(LaunchSpec, &str); 5] = [
        (spec("nobody", 1, 32, arguments()), "no kernel of this name"),
        (spec("lock", 1, 1025, arguments()), "1 to 1024"),
        (spec("lock", 0, 32, arguments()), "every axis"),
        (spec("lock", 1, 32, Arguments::new()), "0 bytes of arguments, the kernel takes 16"),
        (spec("neighbors", 6, 32, Arguments::new().u64(0)), "no multiple of clusters"),
    ];
    for (launch, expected) in cases {
        let error = emulator.launch(module, &launch).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}
