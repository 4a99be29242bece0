//! Documents that are understood, all that is refused, and what becomes of launches.

use std::fs;
use std::path::Path;

use super::lines::SourceLine;
use super::npy::{Array, NpyError};
use super::redundant::reason_in;
use super::*;
use crate::bulk::Swizzle;
use crate::launch::Settings;
use crate::mutation::{Class, mutations};
use crate::numerics::ResultMode;

/// Adds `addend` to `count` numbers, a thread each; warps hand them over through shared memory.
const PTX: &str = "
.version 9.0
.target sm_90a
.address_size 64
.visible .entry swap_add(.param .u64 numbers, .param .u32 addend)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    .shared .align 4 .b8 shared[256];
    .loc 1 10 5
    ld.param.u64 %d1, [numbers];
    ld.param.u32 %r1, [addend];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %d2, %r2, 4;
    add.s64 %d3, %d1, %d2;
    ld.global.u32 %r3, [%d3];
    add.u32 %r3, %r3, %r1;
    mov.u32 %r4, shared;
    shl.b32 %r5, %r2, 2;
    add.u32 %r6, %r4, %r5;
    st.shared.u32 [%r6], %r3;
    .loc 1 11 5
    .loc 2 4 9, function_name $L__info_string0, inlined_at 1 11 5
    bar.sync 0;
    .loc 1 12 5
    bar.warp.sync -1;
    xor.b32 %r5, %r5, 128;
    add.u32 %r6, %r4, %r5;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d3], %r7;
    ret;
}
.file 1 \"cuda/swap.cu\"
.file 2 \"cuda/barrier.cuh\"
";

const DOCUMENT: &str = "
ptx = \"swap.ptx\"
kernel = \"swap_add\"
grid = [1]
block = [64]
[[buffer]]
name = \"numbers\"
dtype = \"u32\"
shape = [64]
random = { distribution = \"uniform\", low = 0, high = 1000, seed = 3 }
[[argument]]
buffer = \"numbers\"
[[argument]]
u32 = 5
";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("swap.ptx"), PTX).unwrap();
    folder
}

fn prepare(text: &str, folder: &Path) -> Result<PreparedLaunch, LaunchFileError> {
    PreparedLaunch::of(&LaunchFile::parse(text, "t.toml")?, folder)
}

/// The chain of an error's messages.
fn message(error: &dyn std::error::Error) -> String {
    let cause = error.source().map(message).unwrap_or_default();
    format!("{error} {cause}")
}

#[test]
fn documents_are_written_as_they_are_read() {
    let text = "
        ptx = \"a.ptx\"
        kernel = \"k\"
        grid = [1, 2, 3]
        block = [128]
        cluster = [1, 2]
        shared_bytes = 1024
        programmatic = true
        sm_count = 8
        ctas_per_sm = 1
        sources = \"..\"
        [recorded]
        source = \"a\"
        instructions = 7
        [[buffer]]
        name = \"a\"
        file = \"a.npy\"
        address = 0x1000200000
        written_before = [{ offset = 0, bytes = 16 }]
        [[buffer]]
        name = \"b\"
        bytes = 64
        fill = 255
        [[tensor_map]]
        name = \"m\"
        buffer = \"a\"
        element = \"bf16\"
        dimensions = [64, 64]
        box = [64, 8]
        swizzle = \"128B\"
        fill = \"nan\"
        [[argument]]
        tensor_map = \"m\"
        [[argument]]
        f32 = 0.1
        [[argument]]
        hex = \"00 ff\"
        [[expect]]
        buffer = \"b\"
        file = \"b.bin\"
        tolerance = { relative = 0.01 }
        tolerance_other_results = \"any\"
        [[redundant]]
        what = \"fence\"
        at = \"12\"
        reason = \"nobody reads it\"
    ";
    let file = LaunchFile::parse(text, "t.toml").unwrap();
    // As files said it before.
    let older = text.replace("ctas_per_sm", "blocks_per_sm");
    assert_eq!(LaunchFile::parse(&older, "t.toml").unwrap(), file);
    assert_eq!(file.tensor_maps[0].swizzle, Swizzle::Bytes128);
    assert_eq!(file.expectations[0].tolerance_other_results, Some(Tolerance::Any));
    assert_eq!(file.arguments[1].f32, Some(0.1));
    let again = LaunchFile::parse(&file.to_toml().unwrap(), "again.toml").unwrap();
    assert_eq!(again, file);
}

#[test]
fn what_a_document_may_not_say() {
    let check = |text: &str, expected: &str| {
        let error = message(&LaunchFile::parse(text, "t.toml").unwrap_err());
        assert!(error.starts_with("t.toml: "), "{error}");
        assert!(error.contains(expected), "{text}\nexpected `{expected}` in `{error}`");
    };
    let with = |more: &str| format!("{DOCUMENT}{more}");
    check("kernel = \"k\"", "missing field `ptx`");
    check(
        &DOCUMENT.replace("block = [64]", "blok = [64]"),
        "unknown field `blok`, expected one of",
    );
    check(&DOCUMENT.replace("grid = [1]", "grid = []"), "`grid`: expected 1 to 3 numbers, got 0");
    check(&DOCUMENT.replace("[64]\n[[b", "[1, 1, 1, 1]\n[[b"), "`block`: expected 1 to 3 numbers");
    check(
        &DOCUMENT.replace("grid = [1]", "grid = [1]\ncluster = [1, 1, 1, 1]"),
        "`cluster`: expected 1 to 3 numbers, got 4",
    );
    check(&with("[[buffer]]\nname = \"numbers\"\nbytes = 1"), "`numbers` is there twice");
    check(&with("[[buffer]]\nname = \"x\""), "expected `shape`, `bytes` or `file`");
    check(
        &with("[[buffer]]\nname = \"x\"\nshape = [1]\nbytes = 1"),
        "`shape` or `bytes`, got both",
    );
    check(
        &with("[[buffer]]\nname = \"x\"\nbytes = 1\nfill = 1\nfile = \"a\""),
        "expected one of `file`, `random` and `fill`",
    );
    check(&with("[[buffer]]\nname = \"x\"\ndtype = \"f33\"\nbytes = 1"), "unknown variant `f33`");
    check(&with("[[buffer]]\nname = \"x\"\nbytes = 1\nsize = 2"), "unknown field `size`");
    let random = |fields: &str| {
        with(&format!("[[buffer]]\nname = \"x\"\nshape = [1]\nrandom = {{ {fields} }}"))
    };
    check(&random("distribution = \"even\""), "unknown variant `even`");
    check(&random("distribution = \"normal\", low = 0.0"), "for the distribution `uniform`");
    check(&random("distribution = \"bits\", deviation = 1.0"), "for the distribution `normal`");
    check(&random("distribution = \"uniform\", low = 2.0"), "expected `low` below `high`");
    check(&random("distribution = \"normal\", deviation = -1.0"), "a `deviation` of 0 or more");
    check(
        &with("[[buffer]]\nname = \"x\"\nbytes = 1\nwritten_before = [{ offset = 0, bytes = 1 }]"),
        "is for launches with `programmatic = true`",
    );
    check(&with("[[argument]]"), "argument 3: expected one of `buffer`, `tensor_map`");
    check(&with("[[argument]]\nu32 = 1\ni32 = 1"), "got u32, i32");
    check(&with("[[argument]]\nu32 = 1\noffset = 1"), "`offset` is for arguments with `buffer`");
    check(&with("[[argument]]\nbuffer = \"x\""), "one of the buffers `numbers`, got `x`");
    check(&with("[[argument]]\ntensor_map = \"x\""), "expected a tensor map, and there are none");
    check(&with("[[argument]]\nhex = \"0\""), "pairs of hexadecimal digits");
    check(&with("[[argument]]\nhex = \"0g\""), "pairs of hexadecimal digits");
    check(&with("[[argument]]\nu8 = 256"), "u8");
    let map = "[[tensor_map]]\nname = \"m\"\nelement = \"u8\"\nbox = [16]\n";
    check(&with(&format!("{map}buffer = \"x\"\ndimensions = [16]")), "got `x`");
    check(&with(&format!("{map}buffer = \"numbers\"\ndimensions = []")), "1 to 5 `dimensions`");
    let twice = format!("{map}buffer = \"numbers\"\ndimensions = [16]\n").repeat(2);
    check(&with(&twice), "tensor map `m` is there twice");
    let expect = "[[expect]]\nbuffer = \"numbers\"\nfile = \"a\"\n";
    check(&with(&expect.replace("numbers", "x")), "`expect`: expected one of the buffers");
    check(&with(&format!("{expect}tolerance = \"near\"")), "expected `\"bits\"`, `\"any\"`");
    check(&with(&format!("{expect}tolerance = {{ off = 1.0 }}")), "unknown field `off`");
    check(&with(&format!("{expect}tolerance = {{ relative = -1.0 }}")), "a tolerance of 0 or more");
}

#[test]
fn what_does_not_fit_the_kernel_or_a_file() {
    let folder = folder();
    let check = |text: &str, expected: &str| {
        let error = message(&prepare(text, folder.path()).unwrap_err());
        assert!(error.contains(expected), "{text}\nexpected `{expected}` in `{error}`");
    };
    let array = Array { dtype: DataType::F32, shape: vec![2], bytes: vec![0; 8] };
    fs::write(folder.path().join("two.npy"), array.to_npy()).unwrap();
    fs::write(folder.path().join("seven.bin"), [0; 7]).unwrap();
    fs::write(folder.path().join("bad.npy"), "no array").unwrap();
    let with = |more: &str| format!("{DOCUMENT}{more}");
    check(&DOCUMENT.replace("swap.ptx", "absent.ptx"), "cannot read");
    check(&DOCUMENT.replace("swap_add", "swap"), "no kernel is named `swap`; there are `swap_add`");
    check(&with("[[argument]]\nu32 = 1"), "expected 2 arguments, `numbers` (8 bytes), `addend`");
    check(&DOCUMENT.replace("u32 = 5", "u64 = 5"), "argument 2: expected 4 bytes for `addend`");
    let file = |name: &str, more: &str| {
        with(&format!("[[buffer]]\nname = \"x\"\nfile = \"{name}\"\n{more}"))
    };
    check(&file("absent.bin", ""), "cannot read");
    check(&file("bad.npy", ""), "expected a `.npy` file");
    check(&file("two.npy", "dtype = \"bf16\""), "expected elements of f32 as `two.npy` has them");
    check(&file("two.npy", "dtype = \"f32\"\nshape = [3]"), "expected 12 bytes, `two.npy` has 8");
    check(&with("[[buffer]]\nname = \"x\"\nbytes = 100000000000"), "expected at most");
    check(&with("[[buffer]]\nname = \"x\"\nbytes = 1\naddress = 16"), "global-place");
    let map = "[[tensor_map]]\nname = \"m\"\nbuffer = \"numbers\"\nelement = \"u32\"\n";
    check(&with(&format!("{map}dimensions = [64]\nbox = [257]")), "tensor map `m`");
    check(&with(&format!("{map}dimensions = [64]\nbox = [1, 1]")), "tensor-map-rank");
    let expect = |name: &str, more: &str| {
        with(&format!("[[expect]]\nbuffer = \"numbers\"\nfile = \"{name}\"\n{more}"))
    };
    check(&expect("two.npy", "offset = 252"), "expected at most 4 bytes, the rest of `numbers`");
    check(&expect("two.npy", "dtype = \"u32\""), "expected elements of f32");
    check(&expect("seven.bin", ""), "expected whole elements of 4 bytes");
    check(&expect("absent.bin", ""), "cannot read");
}

#[test]
fn a_launch_is_compared_and_watched() {
    let folder = folder();
    let expected: Vec<u8> = {
        let prepared = prepare(DOCUMENT, folder.path()).unwrap();
        let (outcome, device) = prepared.run_program(&Settings::default(), None, None);
        assert!(outcome.is_right());
        let (_, address, bytes) = prepared.buffers[0];
        device.read(address, bytes as usize).unwrap().to_vec()
    };
    fs::write(folder.path().join("right.bin"), &expected).unwrap();
    let mut off = expected;
    off[0] ^= 1;
    off[252] ^= 1;
    fs::write(folder.path().join("off.bin"), &off).unwrap();
    let verdict = |file: &str, tolerance: &str, results| {
        let text =
            format!("{DOCUMENT}[[expect]]\nbuffer = \"numbers\"\nfile = \"{file}\"\n{tolerance}\n");
        let prepared = prepare(&text, folder.path()).unwrap();
        let outcome = prepared.run(&Settings { results, ..Settings::default() });
        (outcome.status(), outcome.comparisons[0].clone())
    };
    let hardware = ResultMode::Hardware;
    assert_eq!(verdict("right.bin", "", hardware).0, ReplayStatus::Right);
    let (wrong, comparison) = verdict("off.bin", "", hardware);
    assert_eq!((wrong, comparison.wrong, comparison.elements), (ReplayStatus::Wrong, 2, 64));
    let first = comparison.first.unwrap();
    assert_eq!((first.element, (first.got - first.expected).abs()), (0, 1.0));
    for (tolerance, expected) in [
        ("tolerance = { absolute = 1.0 }", ReplayStatus::Right),
        ("tolerance = { absolute = 0.5 }", ReplayStatus::Wrong),
        ("tolerance = { largest = 0.01 }", ReplayStatus::Right),
        ("tolerance = \"any\"", ReplayStatus::Right),
        ("tolerance_other_results = \"any\"", ReplayStatus::Wrong),
    ] {
        assert_eq!(verdict("off.bin", tolerance, hardware).0, expected, "{tolerance}");
    }
    let other = "tolerance_other_results = \"any\"";
    assert_eq!(verdict("off.bin", other, ResultMode::Exact).0, ReplayStatus::Right);

    let racing = PTX.replace("bar.sync 0;", "");
    fs::write(folder.path().join("swap.ptx"), racing).unwrap();
    let outcome = prepare(DOCUMENT, folder.path()).unwrap().run(&Settings::default());
    assert_eq!(outcome.status(), ReplayStatus::Hazard);
    // Lanes of one warp hand numbers over, and nothing orders that.
    let within_a_warp = PTX
        .replace("bar.warp.sync -1;", "")
        .replace("xor.b32 %r5, %r5, 128", "xor.b32 %r5, %r5, 4");
    fs::write(folder.path().join("swap.ptx"), within_a_warp.replace("bar.sync 0;", "")).unwrap();
    for (lenient, expected) in [
        ("lenient = [\"tensor_fences\", \"advice\", \"lane_bits\"]", ReplayStatus::Hazard),
        ("lenient = [\"lanes\"]", ReplayStatus::Right),
    ] {
        let prepared = prepare(&format!("{lenient}\n{DOCUMENT}"), folder.path()).unwrap();
        let settings = prepared.settings(Settings::default());
        assert_eq!(prepared.run(&settings).status(), expected, "{lenient}");
    }
    fs::write(folder.path().join("swap.ptx"), PTX).unwrap();
    let outside = DOCUMENT.replace("shape = [64]", "shape = [63]");
    let outcome = prepare(&outside, folder.path()).unwrap().run(&Settings::default());
    assert_eq!(outcome.status(), ReplayStatus::Failed);
}

#[test]
fn a_deletion_is_noticed_or_has_a_reason() {
    let folder = folder();
    let ends = |more: &str| {
        let mut prepared = prepare(&format!("{DOCUMENT}{more}"), folder.path()).unwrap();
        prepared.set_sources(folder.path());
        let mut deletions = prepared.program().map(mutations).unwrap_or_default();
        deletions.retain(|mutation| mutation.class == Class::Deletion);
        let options = MutationOptions::default();
        let summary = mutate(&[prepared], &options, &deletions, || {}).unwrap();
        let ends: Vec<(&str, MutantEnd)> =
            summary.mutants.iter().map(|mutant| (mutant.what, mutant.end.clone())).collect();
        (ends, summary.is_right(), summary.reasons_unused.len())
    };
    let (found, is_right, _) = ends("");
    assert!(!is_right);
    assert!(matches!(&found[0], ("bar.sync", MutantEnd::Noticed(how)) if how.contains("missing")));
    assert_eq!(found[1], ("bar.warp.sync", MutantEnd::Unnoticed));

    let because = || MutantEnd::Redundant("the CTA's barrier is enough".to_owned());
    let reason = |at: &str| {
        format!(
            "[[redundant]]\nwhat = \"bar.warp.sync\"\nat = \"{at}\"\n\
             reason = \"the CTA's barrier is enough\"\n"
        )
    };
    for at in ["26", "swap.cu:12", "cuda/swap.cu:12"] {
        let (found, is_right, unused) = ends(&reason(at));
        assert_eq!((found[1].1.clone(), is_right, unused), (because(), true, 0), "{at}");
    }
    for at in ["24", "wap.cu:12", "swap.cu:11"] {
        let (found, is_right, unused) = ends(&reason(at));
        assert_eq!(
            (found[1].1.clone(), is_right, unused),
            (MutantEnd::Unnoticed, false, 1),
            "{at}"
        );
    }
    // By a comment in the source, behind the line or before it.
    fs::create_dir(folder.path().join("cuda")).unwrap();
    let comment = "// redundant bar.warp.sync: the CTA's barrier is enough";
    for (before, line) in
        [(String::new(), format!("x; {comment}")), (comment.to_owned(), "x;".into())]
    {
        let text = format!("{}{before}\n{line}\n", "\n".repeat(10));
        fs::write(folder.path().join("cuda/swap.cu"), text).unwrap();
        let (found, is_right, _) = ends("");
        assert_eq!((found[1].1.clone(), is_right), (because(), true), "{before} {line}");
    }
}

#[test]
fn reasons_in_comments() {
    let check = |line: &str, expected: Option<&str>| {
        assert_eq!(reason_in(line, "fence.proxy.async").as_deref(), expected, "{line}");
    };
    check("f(); // redundant fence.proxy.async: seen by all", Some("seen by all"));
    check("// redundant fence.proxy.async: a: b", Some("a: b"));
    check("f(); // redundant fence: seen by all", None);
    check("f(); // redundant fence.proxy.async.more: seen", None);
    check("f(); // redundant fence.proxy.async:", None);
    check("f(); // redundant fence.proxy.async: ", None);
    check("f();", None);
}

#[test]
fn lines_are_followed_through_calls() {
    let lines = SourceLines::new(PTX);
    let check = |ptx_line: u32, expected: &[(&str, u32)]| {
        let expected: Vec<SourceLine> = expected
            .iter()
            .map(|(file, line)| SourceLine { file: format!("cuda/{file}"), line: *line })
            .collect();
        assert_eq!(lines.chain(ptx_line), expected, "PTX line {ptx_line}");
    };
    check(5, &[]);
    check(9, &[]);
    check(14, &[("swap.cu", 10)]);
    check(24, &[("barrier.cuh", 4), ("swap.cu", 11)]);
    check(26, &[("swap.cu", 12)]);
    assert_eq!(lines.chain(25)[0].to_string(), "cuda/swap.cu:12");
}

#[test]
fn arrays_of_numpy() {
    for (dtype, shape) in [
        (DataType::F32, vec![2, 3]),
        (DataType::U8, vec![5]),
        (DataType::I64, vec![]),
        (DataType::F16, vec![0, 4]),
    ] {
        let elements: u64 = shape.iter().product();
        let bytes: Vec<u8> = (0..elements as usize * dtype.bytes()).map(|at| at as u8).collect();
        let array = Array { dtype, shape, bytes };
        let file = array.to_npy();
        assert_eq!((file.len() - array.bytes.len()) % 64, 0);
        assert_eq!(Array::parse(&file).unwrap(), array);
    }
    // As NumPy 2 writes `numpy.arange(3, dtype='<u2')`.
    let mut file =
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }".to_vec();
    file.resize(127, b' ');
    file.extend(b"\n\x00\x00\x01\x00\x02\x00");
    let array = Array::parse(&file).unwrap();
    assert_eq!((array.dtype, array.shape, array.bytes.len()), (DataType::U16, vec![3], 6));

    let header = |text: &str| {
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((text.len() as u16).to_le_bytes());
        file.extend(text.as_bytes());
        Array::parse(&file).unwrap_err()
    };
    let dictionary = |descr: &str, order: &str, shape: &str| {
        header(&format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"))
    };
    assert_eq!(Array::parse(b"PK").unwrap_err(), NpyError::NotNpy);
    assert_eq!(Array::parse(b"\x93NUMPY\x01\x00\xff\xff").unwrap_err(), NpyError::NotNpy);
    assert!(matches!(header("{}"), NpyError::Header(_)));
    assert!(matches!(dictionary("'<f4'", "Maybe", "(1,)"), NpyError::Header(_)));
    assert!(matches!(dictionary("'<f4'", "False", "(x,)"), NpyError::Header(_)));
    assert_eq!(dictionary("'<f4'", "True", "(1,)"), NpyError::FortranOrder);
    assert_eq!(dictionary("'>f4'", "False", "(1,)"), NpyError::Type(">f4".to_owned()));
    assert_eq!(dictionary("'<c8'", "False", "(1,)"), NpyError::Type("<c8".to_owned()));
    assert_eq!(dictionary("'<f4'", "False", "(1, 2)"), NpyError::Length { expected: 8, got: 0 });
}

#[test]
fn elements_of_every_type() {
    for dtype in DataType::ALL {
        for value in [0.0, 1.0, 2.0] {
            // A scale has no zero.
            let expected =
                if dtype == DataType::Ue8m0 && value == 0.0 { 2f64.powi(-127) } else { value };
            let bytes = dtype.encode(value);
            assert_eq!(bytes.len(), dtype.bytes(), "{dtype:?}");
            assert_eq!(dtype.decode(&bytes), expected, "{dtype:?}");
        }
    }
    assert_eq!(DataType::I8.decode(&DataType::I8.encode(-300.0)), -128.0);
    assert_eq!(DataType::E4m3.decode(&DataType::E4m3.encode(1e9)), 448.0);
    assert_eq!(DataType::Bf16.decode(&DataType::Bf16.encode(-1.5)), -1.5);
}
