//! Every kernel on the emulator, in every test run: right, and with nothing that is not ordered.
//!
//! A row for each `.cu` file of `src/ops/`. It runs all of its kernels at shapes that give each
//! of four multiprocessors, with one block each, three tiles or more, and that use every stage of a
//! pipeline more than once; a kernel that was not launched on all four fails the row, and so does
//! a file without one. Shapes at the edges, and hard numbers, are what the other tests are for.
//!
//! `DEEPWELL_TEST_DEVICE` names another architecture than the row's; rows of files that are not
//! compiled for it are skipped. `harness.rs` lists the variables that choose other ways to run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use deepwell_ir::ops::{Axis, Quantize};
use deepwell_ir::{DType, Tile};
use deepwell_kernels::cuda::{Architecture, Verdict};
use deepwell_precision::{Granularity, MxSpec};

use crate::compare::Tolerance;
use crate::cublaslt::{ROWS, SQUARES};
use crate::device::{emulate, emulated_architecture};
use crate::harness::{Gpu, uniform};
use crate::linear_cross_entropy::{Case as HeadCase, KERNELS as HEADS, Targets};
use crate::mx::MxKind;
use crate::products::Kind;
use crate::trials::skip;
use crate::{
    adamw, add, add_positions, attention, attention_backward, bf16_gemm, bias_grad, cast,
    dequantize, elementwise_quantize, embedding, embedding_backward, expand_scales, fused_product,
    gelu, grad_norm, head_rms_norm, layer_norm, layer_norm_backward, linear_cross_entropy,
    mxfp8_gemm, norm_quantize, ptx, quantize, rms_norm, rms_norm_backward, rope, sm100_bf16_gemm,
    sm100_mxfp8_gemm, sm120_mxfp8_gemm, stochastic_round, swiglu,
};

/// Multiprocessors of the emulated device.
const MULTIPROCESSORS: u32 = 4;
/// Kernels whose work is that of one block, whatever the shapes.
const OF_ONE_BLOCK: [&str; 1] = ["adamw_coefficients"];

/// Rows: a `.cu` file of `src/ops/`, its architecture, and what runs its kernels.
macro_rules! table {
    ($($file:ident on $architecture:ident: $check:expr;)*) => {
        const FILES: &[&str] = &[$(stringify!($file)),*];
        $(
            trial!($file);
            fn $file() {
                run(stringify!($file), Architecture::$architecture, $check);
            }
        )*
    };
}

table! {
    adamw on Sm100a: |gpu| adamw::check_steps(gpu, &[5, 36 * 1024 + 7]);
    add on Sm100a: |gpu| add::check(gpu, 401, 1000);
    add_positions on Sm100a: |gpu| {
        add_positions::check_forward(gpu, (3, 130, 140, 256));
        add_positions::check_forward(gpu, (3, 67, 70, 63));
    };
    add_positions_backward on Sm100a: |gpu| {
        for sizes in [(9, 20, 25, 512), (9, 25, 26, 63)] {
            let count = add_positions::elements(sizes);
            let values: Vec<f32> =
                uniform(count, 3, 8.0).iter().map(|value| value.trunc()).collect();
            add_positions::check_backward(gpu, sizes, &values, EXACT);
        }
    };
    attention on Sm100a: |gpu| heads().for_each(|case| attention::check_forward(gpu, &case));
    attention_backward on Sm100a: |gpu| {
        heads().for_each(|case| attention_backward::check_backward(gpu, &case));
    };
    bf16_gemm on Sm100a: |gpu| {
        for sizes in [(390, 264, 264), (130, 131, 265)] {
            bf16_gemm::check(gpu, "cuda_bf16_gemm", sizes, Kind::Uniform);
        }
    };
    bias_grad on Sm100a: |gpu| {
        for (rows, columns) in [(400, 512), (400, 255)] {
            let values = uniform(rows * columns, 3, 8.0);
            let values: Vec<f32> = values.iter().map(|value| value.trunc()).collect();
            bias_grad::check(gpu, rows, columns, &values, EXACT);
        }
    };
    cast on Sm100a: |gpu| cast::check(gpu, "tiles", &uniform(800_003, 1, 100.0));
    // Rows of seven tiles, of which shared memory keeps six.
    cross_entropy on Sm100a: |gpu| head(gpu, 0, 13, 8, 7 * 4096 - 3);
    cross_entropy_gemm on Sm100a: |gpu| {
        head(gpu, 1, 390, 136, 264);
        // Four tiles in depth: the last is where the first was, and the result passes there.
        head(gpu, 1, 150, 131, 201);
    };
    dequantize on Sm100a: |gpu| dequantize::check(gpu, 200, 260);
    embedding on Sm100a: |gpu| {
        embedding::check(gpu, 400, 50, 4096);
        embedding::check(gpu, 50, 10, 4097);
    };
    embedding_backward on Sm100a: |gpu| {
        for size in [(1000, 300, 257), (2048, 257, 64)] {
            let values: Vec<f32> =
                uniform(size.0 * size.2, 3, 8.0).iter().map(|value| value.trunc()).collect();
            let kind = embedding_backward::Tokens::Skewed;
            embedding_backward::check(gpu, size, kind, &values, EXACT);
        }
    };
    expand_scales on Sm90a: |gpu| {
        expand_scales::check(gpu, (1040, 72, 272), [ROWS, SQUARES], MxKind::Even);
    };
    gelu on Sm100a: |gpu| gelu::check(gpu, "tiles", [401, 1000], &uniform(401_000, 1, 6.0));
    gelu_quantize on Sm100a: |gpu| {
        elementwise_quantize::check_file(gpu, "gelu_quantize", TILES_OF_QUANTIZE);
    };
    grad_norm on Sm100a: |gpu| grad_norm::check(gpu, &[5, 110_003]);
    head_rms_norm on Sm100a: |gpu| {
        HEADS_OF_NORM.into_iter().for_each(|sizes| head_rms_norm::check_forward(gpu, sizes));
    };
    head_rms_norm_backward on Sm100a: |gpu| {
        HEADS_OF_NORM.into_iter().for_each(|sizes| head_rms_norm::check_backward(gpu, sizes, true));
    };
    layer_norm on Sm100a: |gpu| {
        for (rows, columns) in ROWS_OF_NORM {
            layer_norm::check(gpu, rows, columns);
            layer_norm::check_add(gpu, rows, columns);
        }
    };
    layer_norm_backward on Sm100a: |gpu| {
        for (rows, columns) in ROWS_OF_NORM {
            layer_norm_backward::check(gpu, rows, columns, true, true);
        }
    };
    layer_norm_quantize on Sm100a: |gpu| {
        norm_quantize::check_file(gpu, "layer_norm_quantize", TILES_OF_NORM_QUANTIZE);
    };
    mxfp8_gemm on Sm100a: |gpu| {
        for sizes in [(390, 264, 288), (140, 140, 150)] {
            mxfp8_gemm::check(gpu, mxfp8_gemm::KERNEL, sizes, MxSpec::default(), MxKind::Even);
        }
    };
    quantize on Sm100a: |gpu| {
        for axis in [Axis::Row, Axis::Column, Axis::Both] {
            for granularity in [Granularity::G32, Granularity::G128] {
                let spec = MxSpec { granularity, ..MxSpec::default() };
                let (rows, columns) = TILES_OF_QUANTIZE;
                quantize::check(gpu, rows, columns, "wide", &Quantize { spec, axis });
            }
        }
    };
    rms_norm on Sm100a: |gpu| {
        for (rows, columns) in ROWS_OF_NORM {
            rms_norm::check(gpu, rows, columns);
            rms_norm::check_add(gpu, rows, columns);
        }
    };
    rms_norm_backward on Sm100a: |gpu| {
        for (rows, columns) in ROWS_OF_NORM {
            rms_norm_backward::check(gpu, rows, columns, true, true);
        }
    };
    rms_norm_quantize on Sm100a: |gpu| {
        norm_quantize::check_file(gpu, "rms_norm_quantize", TILES_OF_NORM_QUANTIZE);
    };
    rope on Sm100a: |gpu| {
        rope::check(gpu, &rope::Case::new(600, 5, 64, 48));
        rope::check(gpu, &rope::Case::new(400, 3, 6, 48));
    };
    sm100_bf16_gemm on Sm100a: sm100_bf16_gemm::check_several_tiles;
    sm100_bf16_gemm_fused on Sm100a: |gpu| {
        let operands = fused_product::Operands::Bf16(Kind::Uniform);
        fused_product::check_several_tiles(gpu, operands);
    };
    // The stages of a ring are used again in the second tile, if not in the first, and each of the
    // four pieces of depth whose scales are read at a time is there.
    sm100_mxfp8_gemm on Sm100a: |gpu| {
        for ((m, n), cluster, sizes) in [
            ((128, 128), [1, 1], (390, 376, 400)),
            ((128, 256), [1, 1], (390, 760, 400)),
            ((256, 128), [1, 1], (760, 256, 400)),
            // Depths that do not end where the ring does: waits after the last stage see both
            // parities.
            ((256, 256), [1, 1], (760, 264, 528)),
            // The second tile of some clusters is beyond the result.
            ((256, 128), [1, 2], (264, 264, 528)),
            ((256, 256), [2, 1], (520, 264, 400)),
        ] {
            let tile = Tile { cluster, ..Tile::new(m, n, 128) };
            let forms = [(DType::Bf16, true, false), (DType::F32, false, true)];
            for kernel in [sm100_mxfp8_gemm::KERNEL, sm100_mxfp8_gemm::CLAIMED] {
                sm100_mxfp8_gemm::check(gpu, kernel, Some(tile), sizes, &forms);
            }
        }
    };
    sm100_mxfp8_gemm_fused on Sm100a: |gpu| {
        let operands = fused_product::Operands::Mx(MxKind::Even);
        fused_product::check_several_tiles(gpu, operands);
    };
    sm120_mxfp8_gemm on Sm120a: |gpu| {
        for sizes in [(390, 264, 416), (140, 140, 150)] {
            let kernel = sm120_mxfp8_gemm::KERNEL;
            mxfp8_gemm::check(gpu, kernel, sizes, MxSpec::default(), MxKind::Even);
        }
    };
    stochastic_round on Sm100a: |gpu| stochastic_round::check(gpu, 200, 260, "wide");
    swiglu on Sm100a: |gpu| swiglu::check(gpu, 401, 1000, false);
    swiglu_quantize on Sm100a: |gpu| {
        elementwise_quantize::check_file(gpu, "swiglu_quantize", TILES_OF_QUANTIZE);
    };
}

/// Sums of integers.
const EXACT: Tolerance = Tolerance { absolute: 0.0, relative: 0.0 };
/// Four by three tiles of 128, whole ones and the rest.
const TILES_OF_QUANTIZE: (usize, usize) = (390, 264);
/// Rows over four blocks, which take four strips of 128.
const TILES_OF_NORM_QUANTIZE: (usize, usize) = (390, 392);
/// For blocks of 16 rows, and for those that take a row element by element.
const ROWS_OF_NORM: [(usize, usize); 2] = [(200, 768), (40, 33)];

/// Tokens, heads and their widths: three turns of four CTAs and more, for groups of 16 lanes, of
/// which some have nothing, and of four.
const HEADS_OF_NORM: [(usize, usize, usize); 3] = [(320, 5, 128), (320, 5, 96), (1600, 4, 32)];

/// Every width of a head: twelve pieces of work and more, seven stages of keys.
fn heads() -> impl Iterator<Item = attention::Case> {
    let case = |head_dim| {
        attention::Case::new([1, 400, 3, 1, head_dim], true, attention::Data::Uniform(1.0))
    };
    [16, 32, 48, 64, 96, 128].into_iter().map(case)
}

/// An output head with its loss, with products of the host (0) or by our kernels (1).
fn head(gpu: &mut Gpu, products: usize, tokens: usize, hidden: usize, vocab: usize) {
    let targets = Targets::EveryThirdIgnored;
    let case = HeadCase { tokens, hidden, vocab, scale: 1.0, targets };
    linear_cross_entropy::check(gpu, HEADS[products], &case);
}

/// The kernels' sources by name without `.cu`; a test that runs without them is skipped.
fn sources() -> BTreeMap<String, PathBuf> {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    if !ops.is_dir() {
        skip(format!("{} is not there", ops.display()));
    }
    let listed = |folder: PathBuf| {
        let files = fs::read_dir(folder).expect("a readable folder");
        files.map(|file| file.expect("a readable folder").path())
    };
    let files = listed(ops).filter(|path| path.is_dir()).flat_map(listed);
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_string(), path)))
        .collect()
}

/// Whether the head of a source names an architecture.
fn is_for(source: &Path, architecture: Architecture) -> bool {
    let text = fs::read_to_string(source).unwrap_or_else(|error| panic!("{source:?}: {error}"));
    let named = text.lines().find_map(|line| line.strip_prefix("// architectures:"));
    named.is_some_and(|names| names.split_whitespace().any(|name| name == architecture.name()))
}

fn run(file: &str, preferred: Architecture, check: impl Fn(&mut Gpu)) {
    let architecture = emulated_architecture().unwrap_or(preferred);
    let sources = sources();
    let source = sources.get(file).unwrap_or_else(|| panic!("no op has a kernel {file}.cu"));
    if !is_for(source, architecture) {
        skip(format!("{file} is not for {}", architecture.name()));
    }
    let text = ptx::of_file(file, architecture).unwrap_or_else(|reason| skip(reason));
    let mut emulated = emulate(architecture, 1);
    check(&mut emulated.gpu);

    let entries = text.lines().filter_map(|line| line.split_once(".entry "));
    let entries: BTreeSet<&str> = entries
        .map(|(_, rest)| {
            rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(rest)
        })
        .collect();
    assert!(!entries.is_empty(), "no kernel in the PTX of {file}");
    let launches = emulated.launches.read();
    for entry in entries {
        let blocks = launches
            .iter()
            .filter(|launch| launch.kernel == entry && launch.verdict == Verdict::Clean)
            .map(|launch| launch.grid.iter().product::<u32>())
            .max();
        let expected = if OF_ONE_BLOCK.contains(&entry) { 1 } else { MULTIPROCESSORS };
        assert!(
            blocks.is_some_and(|blocks| blocks >= expected),
            "expected a launch of `{entry}` on {expected} multiprocessors, got one of {} blocks \
             at most",
            blocks.unwrap_or(0)
        );
    }
}

trial!(every_file_has_a_row);
fn every_file_has_a_row() {
    let stems: BTreeSet<String> = sources().into_keys().collect();
    let rows: BTreeSet<String> = FILES.iter().map(ToString::to_string).collect();
    let without: Vec<&String> = stems.difference(&rows).collect();
    assert!(without.is_empty(), "add rows to the table for {without:?}");
    let gone: Vec<&String> = rows.difference(&stems).collect();
    assert!(gone.is_empty(), "these rows have no file: {gone:?}");
}
