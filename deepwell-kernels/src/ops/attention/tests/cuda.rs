//! `attention.cu`, and the cases of `attention_backward.cu`.

use deepwell_ir::ops::{Attention, AttentionBackward, AttentionHeads, HeadsFirst};
use deepwell_ir::{DType, Op};
use deepwell_kernels::ops::attention::oracle::{Shape, forward};

use crate::compare::{assert_biased_within, assert_within};
use crate::harness::{Gpu, HostTensor, RunOptions, uniform};

/// The portable kernel.
const KERNEL: &str = "cuda_attention";

/// What the numbers look like.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data {
    /// Uniform, queries of this size.
    Uniform(f32),
    /// All scores are equal.
    Flat,
    /// Every key has a greater score than those before it, by more than any margin.
    Rising,
    /// Every key has a smaller score than those before it.
    Falling,
    /// One query and one key are NaN.
    Nan,
}

/// Sizes, by the names of the oracle, and data.
pub(crate) struct Case {
    pub(crate) shape: Shape,
    pub(crate) data: Data,
    /// Sinks are uniform, of this size, if there are any.
    pub(crate) sinks: Option<f32>,
    pub(crate) heads_first: HeadsFirst,
}

impl Case {
    pub(crate) fn new(sizes: [usize; 5], causal: bool, data: Data) -> Case {
        let [batch, seq, heads, kv_heads, head_dim] = sizes;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let extended = Shape::default();
        Case {
            shape: Shape { batch, seq, heads, kv_heads, head_dim, scale, causal, ..extended },
            data,
            sinks: None,
            heads_first: HeadsFirst::default(),
        }
    }

    /// Operands whose heads precede the tokens in the memory of a kernel; tensors of this test have
    /// the tokens first.
    pub(crate) fn heads_first(mut self, heads_first: HeadsFirst) -> Case {
        self.heads_first = heads_first;
        self
    }

    /// An operand in the memory of a kernel.
    pub(crate) fn stored(&self, tensor: &HostTensor, heads: usize, is_first: bool) -> HostTensor {
        self.swapped(tensor, is_first, [self.shape.seq, heads])
    }

    /// The reverse of [`Case::stored`].
    pub(crate) fn loaded(&self, tensor: &HostTensor, heads: usize, is_first: bool) -> HostTensor {
        self.swapped(tensor, is_first, [heads, self.shape.seq])
    }

    fn swapped(
        &self,
        tensor: &HostTensor,
        is_first: bool,
        [outer, inner]: [usize; 2],
    ) -> HostTensor {
        let rows = self.shape.batch * outer * inner;
        if !is_first || rows == 0 {
            return tensor.clone();
        }
        let row_bytes = tensor.bytes.len() / rows;
        let mut swapped = tensor.clone();
        for (index, row) in tensor.bytes.chunks_exact(row_bytes).enumerate() {
            let (batch, o, i) = (index / inner / outer, index / inner % outer, index % inner);
            let at = (batch * inner + i) * outer + o;
            swapped.bytes[at * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        swapped
    }

    pub(crate) fn window(mut self, window: usize) -> Case {
        self.shape.window = Some(window);
        self
    }

    pub(crate) fn values(mut self, value_dim: usize) -> Case {
        self.shape.value_dim = Some(value_dim);
        self
    }

    /// See [`Shape::documents`].
    pub(crate) fn documents(mut self, lengths: &'static [usize]) -> Case {
        self.shape.documents = lengths;
        self
    }

    /// What stands behind the operands of every attention.
    pub(crate) fn extra_inputs(&self) -> Vec<HostTensor> {
        let sinks = self.sinks.map(|_| HostTensor::f32(&[self.shape.heads], &self.sink_scores()));
        let documents = || {
            let tokens = self.shape.batch * self.shape.seq;
            HostTensor::i32(&[tokens, 2], &self.shape.documents_of_tokens())
        };
        let documents = (!self.shape.documents.is_empty()).then(documents);
        sinks.into_iter().chain(documents).collect()
    }

    pub(crate) fn sinks(mut self, size: f32) -> Case {
        self.sinks = Some(size);
        self
    }

    /// Products of elements that scores take.
    pub(crate) fn work(&self) -> usize {
        let Shape { batch, seq, heads, head_dim, .. } = self.shape;
        batch * heads * seq * seq * head_dim
    }

    /// Whether gradients are larger than what they may be wrong by. With equal keys or scores far
    /// apart they are zero but for what rounding leaves, and so is every first row.
    pub(crate) fn has_gradients(&self) -> bool {
        self.shape.seq >= 15
            && self.shape.window.is_none_or(|window| window >= 15)
            && self.shape.documents.iter().all(|&length| length >= 15)
            && self.sinks.is_none_or(|size| size <= 4.0)
            && matches!(self.data, Data::Uniform(size) if size <= 8.0)
    }

    pub(crate) fn heads(&self) -> AttentionHeads {
        let Shape { heads, kv_heads, head_dim, value_dim, scale, causal, window, .. } = self.shape;
        let sinks = self.sinks.is_some();
        let documents = !self.shape.documents.is_empty();
        AttentionHeads {
            heads,
            kv_heads,
            head_dim,
            value_dim,
            scale,
            causal,
            window,
            sinks,
            documents,
            heads_first: self.heads_first,
        }
    }

    pub(crate) fn name(&self) -> String {
        let heads_first = self.heads().heads_first;
        format!("{:?} {:?} sinks {:?} {heads_first:?}", self.shape, self.data, self.sinks)
    }

    pub(crate) fn query_shape(&self) -> [usize; 2] {
        [self.shape.batch * self.shape.seq, self.shape.heads * self.shape.head_dim]
    }

    pub(crate) fn key_shape(&self) -> [usize; 2] {
        [self.shape.batch * self.shape.seq, self.shape.kv_heads * self.shape.head_dim]
    }

    pub(crate) fn out_shape(&self) -> [usize; 2] {
        [self.shape.batch * self.shape.seq, self.shape.heads * self.shape.value_dim()]
    }

    pub(crate) fn value_shape(&self) -> [usize; 2] {
        [self.shape.batch * self.shape.seq, self.shape.kv_heads * self.shape.value_dim()]
    }

    /// A score for each head, or none.
    pub(crate) fn sink_scores(&self) -> Vec<f32> {
        self.sinks.map_or(Vec::new(), |size| uniform(self.shape.heads, 5, size))
    }

    pub(crate) fn lse_shape(&self) -> [usize; 3] {
        [self.shape.batch, self.shape.heads, self.shape.seq]
    }

    /// q, k, v and dout.
    pub(crate) fn inputs(&self) -> [HostTensor; 4] {
        let Shape { seq, head_dim, kv_heads, heads, .. } = self.shape;
        let query_len = self.query_shape().iter().product();
        let key_len = self.key_shape().iter().product();
        let size = if let Data::Uniform(size) = self.data { size } else { 1.0 };
        let mut q = uniform(query_len, 1, size);
        let mut k = uniform(key_len, 2, 1.0);
        let value_len = self.value_shape().iter().product();
        let out_len = self.out_shape().iter().product();
        let v = uniform(value_len, 3, 1.0);
        let dout = uniform(out_len, 4, 1.0);
        let key_token = |index: usize| index / (kv_heads * head_dim) % seq;
        match self.data {
            Data::Uniform(_) => {}
            Data::Flat => k.fill(0.0),
            // With q = 1 and a scale of 1/sqrt(D): scores of 0.25 sqrt(D) a token, a step of 32.
            Data::Rising | Data::Falling => {
                q.fill(1.0);
                let sign = if matches!(self.data, Data::Rising) { 1.0 } else { -1.0 };
                for (index, k) in k.iter_mut().enumerate() {
                    *k = sign * 0.25 * (key_token(index) as f32);
                }
            }
            Data::Nan => {
                q[(seq / 3) * heads * head_dim + 1] = f32::NAN;
                k[(seq / 2) * kv_heads * head_dim + 2] = f32::NAN;
            }
        }
        let (queries, keys) = (self.query_shape(), self.key_shape());
        [
            HostTensor::bf16(&queries, &q),
            HostTensor::bf16(&keys, &k),
            HostTensor::bf16(&self.value_shape(), &v),
            HostTensor::bf16(&self.out_shape(), &dout),
        ]
    }
}

/// Orders of the operands in memory: those of a model of PyTorch whose keys and values come from a
/// cache, whose queries and keys are rotated in part, and whose operands all have the heads first.
pub(crate) const ORDERS: [HeadsFirst; 3] = [
    HeadsFirst { q: false, k: true, v: true, o: false },
    HeadsFirst { q: true, k: true, v: false, o: false },
    HeadsFirst { q: true, k: true, v: true, o: true },
];

pub(crate) fn cases() -> Vec<Case> {
    let random = Data::Uniform(1.0);
    // batch, seq, heads, kv_heads, head_dim
    let mut cases = vec![
        Case::new([1, 0, 2, 1, 64], true, random),
        Case::new([1, 700, 4, 2, 128], true, random),
        Case::new([1, 1025, 4, 1, 64], true, Data::Uniform(4.0)),
        Case::new([3, 513, 6, 2, 64], false, random),
        Case::new([2, 300, 2, 2, 128], false, Data::Uniform(8.0)),
        // Scores far apart: one key has nearly all the weight.
        Case::new([1, 257, 2, 1, 64], true, Data::Uniform(64.0)),
    ];
    for head_dim in [16, 32, 64, 128] {
        // Around the tiles of queries (128) and keys (32, 64, 128).
        for seq in [1, 2, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193, 257] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, random));
        }
        for seq in [1, 64, 65, 130] {
            cases.push(Case::new([2, seq, 3, 1, head_dim], false, random));
        }
        for data in [Data::Flat, Data::Rising, Data::Falling, Data::Nan] {
            cases.push(Case::new([1, 200, 2, 1, head_dim], true, data));
            cases.push(Case::new([1, 133, 2, 1, head_dim], false, data));
        }
    }
    // In tiles of 64 and 128 elements.
    for head_dim in [8, 24, 56, 72, 80, 96, 120] {
        for seq in [1, 65, 129, 257] {
            cases.push(Case::new([2, seq, 4, 2, head_dim], true, random));
        }
        cases.push(Case::new([2, 130, 3, 1, head_dim], false, random));
        cases.push(Case::new([1, 133, 2, 1, head_dim], true, Data::Nan));
    }
    cases
}

/// What a head may look at beside all keys, in tiles of 64 and of 128 elements.
pub(crate) fn extended_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let of = |sizes| Case::new(sizes, true, Data::Uniform(1.0));
    for head_dim in [64, 128] {
        // A token alone, around tiles of keys (32, 64) and of queries (128), and all tokens.
        for (seq, window) in [
            (1, 1),
            (130, 1),
            (70, 31),
            (200, 63),
            (200, 64),
            (200, 65),
            (300, 127),
            (300, 128),
            (300, 129),
            (257, 257),
            (257, 1000),
            (600, 33),
        ] {
            cases.push(of([1, seq, 4, 2, head_dim]).window(window));
        }
        for seq in [1, 64, 129] {
            cases.push(of([2, seq, 4, 2, head_dim]).sinks(2.0));
        }
        // Sinks with next to all the weight, and with next to none.
        cases.push(of([1, 133, 5, 1, head_dim]).sinks(40.0));
        cases.push(Case::new([2, 100, 3, 3, head_dim], false, Data::Uniform(4.0)).sinks(1.0));
        cases.push(of([2, 200, 4, 1, head_dim]).window(70).sinks(1.0));
    }
    // Keys, values.
    for (head_dim, value_dim) in [
        (24, 16),
        (16, 40),
        (64, 128),
        (128, 64),
        (96, 72),
        (120, 8),
        (192, 128),
        (136, 72),
        (184, 8),
    ] {
        cases.push(of([2, 129, 4, 2, head_dim]).values(value_dim));
        cases.push(of([1, 200, 2, 1, head_dim]).values(value_dim).window(66).sinks(1.0));
        cases.push(Case::new([1, 70, 2, 1, head_dim], false, Data::Uniform(1.0)).values(value_dim));
    }
    cases
}

/// Documents that begin around tiles of keys (32, 64, 128) and of queries (128, 192): all of them
/// one, and every token its own; with windows, sinks and several sequences.
pub(crate) fn document_cases(head_dims: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    let of = |sizes| Case::new(sizes, true, Data::Uniform(1.0));
    for &head_dim in head_dims {
        let documents: [(usize, &[usize]); 12] = [
            (1, &[1]),
            (150, &[1]),
            (150, &[150]),
            (150, &[1, 31, 1, 32, 63, 22]),
            (150, &[63]),
            (150, &[64]),
            (150, &[65]),
            (400, &[127, 273]),
            (400, &[128, 1, 271]),
            (400, &[129, 63, 208]),
            (400, &[300, 100]),
            (513, &[192, 1, 319]),
        ];
        for (seq, lengths) in documents {
            cases.push(of([1, seq, 2, 1, head_dim]).documents(lengths));
        }
        // Sequences that are cut in other places.
        cases.push(of([3, 90, 2, 1, head_dim]).documents(&[17, 40, 64]));
        cases.push(of([2, 300, 4, 2, head_dim]).documents(&[100, 33, 200]));
        cases.push(of([1, 150, 2, 1, head_dim]).documents(&[40, 110]).window(30));
        cases.push(of([1, 150, 4, 1, head_dim]).documents(&[40, 90]).sinks(2.0));
        cases.push(of([2, 100, 2, 2, head_dim]).documents(&[5, 70]).window(20).sinks(1.0));
    }
    cases
}

/// Largest [`Case::work`] on the emulator: a tile of queries and more, and every kind of data.
pub(crate) const EMULATED_WORK: usize = 4 << 20;

/// Half a unit in the last place of a BF16 (8 bits), relative to the least of its binade.
pub(crate) const HALF_ULP: f64 = 1.0 / 256.0;
/// Arithmetic on FP32 may replace smaller numbers by zero.
const LEAST_NORMAL: f64 = f32::MIN_POSITIVE as f64;
/// Room for FP32: sums, exponentials and reciprocals, all far below a rounding to BF16.
pub(crate) const SLACK: f64 = 1.25;

pub(crate) fn check_forward(gpu: &mut Gpu, case: &Case) {
    check_forward_with(gpu, case, RunOptions { kernel: Some(KERNEL), ..RunOptions::default() });
}

/// [`check_forward`] with a kernel of its own.
pub(crate) fn check_forward_with(gpu: &mut Gpu, case: &Case, options: RunOptions<'_>) {
    check_forward_within(gpu, case, options, 0.0);
}

/// [`check_forward_with`] for a kernel whose exponentials have this relative error, which may be
/// that of a row's sum, too.
pub(crate) fn check_forward_within(
    gpu: &mut Gpu,
    case: &Case,
    options: RunOptions<'_>,
    exponential_error: f64,
) {
    let [q, k, v, _] = case.inputs();
    let sinks = case.sink_scores();
    let sinks64: Vec<f64> = sinks.iter().map(|&x| x.into()).collect();
    let expected = forward(&case.shape, &q.to_f64(), &k.to_f64(), &v.to_f64(), &sinks64);
    let magnitudes: Vec<f64> = v.to_f64().iter().map(|v| v.abs()).collect();
    // Weights are rounded to BF16 before they are multiplied, and the result is. Results below the
    // least normal number may be zero.
    let weighted = forward(&case.shape, &q.to_f64(), &k.to_f64(), &magnitudes, &sinks64).out;
    let bounds: Vec<f64> = weighted
        .iter()
        .zip(&expected.out)
        .map(|(weighted, out)| SLACK * HALF_ULP * (weighted + out.abs()) + LEAST_NORMAL)
        .collect();
    let op = Attention { heads: case.heads() };
    let outputs = [
        HostTensor::output(DType::Bf16, &case.out_shape()),
        HostTensor::output(DType::F32, &case.lse_shape()),
    ];
    let options = RunOptions { seq: case.shape.seq, ..options };
    let Shape { heads, kv_heads, .. } = case.shape;
    let first = case.heads_first;
    let mut inputs = vec![
        case.stored(&q, heads, first.q),
        case.stored(&k, kv_heads, first.k),
        case.stored(&v, kv_heads, first.v),
    ];
    inputs.extend(case.extra_inputs());
    let mut got = gpu.run_with(op, &inputs, &outputs, options);
    got[0] = case.loaded(&got[0], heads, first.o);
    let name = case.name();
    // Where scores follow from the place alone, all rows have the same few probabilities, whose
    // rounding to BF16 they share.
    let bias = if matches!(case.data, Data::Uniform(_)) { 0.0 } else { 2f64.powi(-9) };
    assert_biased_within(&format!("{name}: out"), &got[0].to_f64(), &expected.out, &bounds, bias);
    // A score of D products in FP32, each partial sum at most the sum of magnitudes.
    let most = |x: &HostTensor| {
        x.to_f64().iter().filter(|x| !x.is_nan()).fold(1.0, |most: f64, x| most.max(x.abs()))
    };
    let scores = case.shape.scale * case.shape.head_dim as f64 * most(&q) * most(&k)
        + f64::from(case.sinks.unwrap_or(0.0));
    let lse_bound = (1.0 + scores) * 2f64.powi(-20) + exponential_error;
    let bounds = vec![lse_bound; expected.lse.len()];
    assert_within(&format!("{name}: lse"), &got[1].to_f64(), &expected.lse, &bounds);
}

trial!(attention_of_any_size);
fn attention_of_any_size() {
    let mut gpu = Gpu::open();
    for case in cases() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case);
        }
    }
}

trial!(attention_with_windows_sinks_and_other_values);
fn attention_with_windows_sinks_and_other_values() {
    let mut gpu = Gpu::open();
    for case in extended_cases() {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case);
        }
    }
}

trial!(attention_within_documents);
fn attention_within_documents() {
    let mut gpu = Gpu::open();
    for case in document_cases(&[16, 64, 96, 128]) {
        if gpu.runs(case.work(), EMULATED_WORK) {
            check_forward(&mut gpu, &case);
        }
    }
    let wide = Case::new([1, 70, 2, 1, 192], true, Data::Uniform(1.0)).values(128);
    check_forward(&mut gpu, &wide.documents(&[33, 20]));
}

trial!(one_document_is_attention_without_to_the_bit);
fn one_document_is_attention_without_to_the_bit() {
    let mut gpu = Gpu::open();
    for head_dim in [16, 64, 96, 128] {
        one_document_changes_no_bit(&mut gpu, head_dim, [None, None]);
    }
}

/// Forward and backward, by kernels of these names.
pub(crate) fn one_document_changes_no_bit(
    gpu: &mut Gpu,
    head_dim: usize,
    [of_forward, of_backward]: [Option<&str>; 2],
) {
    let plain = Case::new([2, 150, 2, 1, head_dim], true, Data::Uniform(2.0));
    let cut = Case::new([2, 150, 2, 1, head_dim], true, Data::Uniform(2.0)).documents(&[150]);
    let [q, k, v, dout] = plain.inputs();
    let outputs = [
        HostTensor::output(DType::Bf16, &plain.out_shape()),
        HostTensor::output(DType::F32, &plain.lse_shape()),
    ];
    let gradients = [plain.query_shape(), plain.key_shape(), plain.value_shape()]
        .map(|shape| HostTensor::output(DType::Bf16, &shape));
    let [expected, got] = [&plain, &cut].map(|case| {
        let options = |kernel| RunOptions { kernel, seq: 150, ..RunOptions::default() };
        let mut inputs = vec![q.clone(), k.clone(), v.clone()];
        inputs.extend(case.extra_inputs());
        let op = Attention { heads: case.heads() };
        let results = gpu.run_with(op, &inputs, &outputs, options(of_forward));
        let [out, lse] = [&results[0], &results[1]].map(HostTensor::clone);
        let mut inputs = vec![dout.clone(), q.clone(), k.clone(), v.clone(), out, lse];
        inputs.extend(case.extra_inputs());
        let op = AttentionBackward { heads: case.heads() };
        let gradients = gpu.run_with(op, &inputs, &gradients, options(of_backward));
        results.iter().chain(&gradients).map(HostTensor::to_f64).collect::<Vec<_>>()
    });
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(got == expected, "heads of {head_dim}: result {index} has other bits");
    }
}

trial!(what_the_kernels_do_not_take_is_said);
fn what_the_kernels_do_not_take_is_said() {
    use deepwell_ir::{KernelRequest, OperandType};
    use deepwell_kernels::cuda::cuda_kernels;

    const WIDTHS: &str = "takes heads of 8 to 128 elements, to 192 where values have at most 128, \
                          each a multiple of 8, not of 100";
    // head_dim, scale, dtype, expected
    let rows = [
        (64, 0.125, DType::Bf16, None),
        (96, 0.125, DType::Bf16, None),
        (100, 0.125, DType::Bf16, Some(WIDTHS)),
        (64, -0.125, DType::Bf16, Some("takes a positive scale, not -0.125")),
        (64, f64::NAN, DType::Bf16, Some("takes a positive scale, not NaN")),
        (64, 0.125, DType::F32, Some("takes bf16 operands, not f32")),
    ];
    for (head_dim, scale, dtype, expected) in rows {
        let heads = AttentionHeads {
            heads: 4,
            kv_heads: 2,
            head_dim,
            scale,
            causal: true,
            ..AttentionHeads::default()
        };
        let of = |dtype, shape: &[usize]| OperandType { dtype, shape: shape.to_vec() };
        let query = of(dtype, &[10, 4 * head_dim]);
        let key = of(dtype, &[10, 2 * head_dim]);
        let lse = of(DType::F32, &[2, 4, 5]);
        let forward = [&query, &key, &key, &query, &lse].map(Clone::clone);
        let backward =
            [&query, &query, &key, &key, &query, &lse, &query, &key, &key].map(Clone::clone);
        let calls: [(Op, &[OperandType], usize, &str); 2] = [
            (Attention { heads: heads.clone() }.into(), &forward, 3, KERNEL),
            (AttentionBackward { heads }.into(), &backward, 6, "cuda_attention_backward"),
        ];
        for (op, operands, input_count, kernel) in calls {
            let request = KernelRequest { op: &op, operands, input_count };
            let spec = cuda_kernels().find(|spec| spec.name == kernel);
            let got = spec.and_then(|spec| (spec.reject)(&request));
            assert_eq!(got.as_deref(), expected, "{kernel}");
        }
    }
}

/// Every width of a head: twelve work items and more, five stages of keys.
pub(crate) fn heads() -> impl Iterator<Item = Case> {
    let case = |head_dim| Case::new([1, 264, 4, 1, head_dim], true, Data::Uniform(1.0));
    [16, 32, 48, 64, 96, 128].into_iter().map(case)
}

/// Every width of extended kernels: windows that begin within and between tiles, sinks, values of
/// another width.
pub(crate) fn extended_heads() -> impl Iterator<Item = Case> {
    let case = |head_dim| Case::new([1, 400, 4, 2, head_dim], true, Data::Uniform(1.0));
    [
        case(64).window(100).sinks(1.0).values(40),
        case(128).window(150).sinks(1.0).values(96),
        case(192).window(130).sinks(1.0).values(128),
        case(64).documents(&[130, 70, 1, 199]),
        case(128).documents(&[150, 250]).window(100),
        case(192).documents(&[65, 200]).values(128),
    ]
    .into_iter()
}

emulated! {
    attention on Sm100a: |gpu| {
        heads().chain(extended_heads()).for_each(|case| check_forward(gpu, &case));
    }
}
