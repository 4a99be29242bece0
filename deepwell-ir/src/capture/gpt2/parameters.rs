//! The tensors of a GPT-2 model: in the graph and in the weight files.
//!
//! Weight files store projections as `[inputs, outputs]` and concatenate query, key and value
//! projections; the graph has separate projections `[outputs, inputs]`, like all linear layers.

use crate::Init;
use crate::capture::{Gpt2Config, ParameterRole, ParameterRole as R, ParameterSpec, StoredSlice};

/// An entry in the list of a layer's projections.
struct Projection {
    name: &'static str,
    stored: &'static str,
    /// Outputs, inputs.
    sizes: [usize; 2],
    /// Columns of the stored tensor.
    columns: usize,
    /// First output.
    start: usize,
    roles: [ParameterRole; 2],
}

impl Gpt2Config {
    /// All parameters of the graph in canonical order: tables of tokens and positions, layers from
    /// the first, final norm, head. A tied head is not repeated.
    ///
    /// Initial values are those of transformers: weights normal with `initializer_range`, divided
    /// by the square root of twice the number of layers if they write to the residual stream; gains
    /// one, biases zero.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters_and_parts().into_iter().map(|(spec, _)| spec).collect()
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(ParameterSpec::count).sum()
    }

    /// [`Gpt2Config::parameters`], each with its location in the weight files.
    pub fn parameters_and_parts(&self) -> Vec<(ParameterSpec, StoredSlice)> {
        let (vocab, width) = (self.vocab_size, self.hidden_size);
        let mut list =
            List { all: Vec::new(), std: self.initializer_range, layers: self.num_layers };
        list.plain("wte.weight", vec![vocab, width], R::TokenEmbedding, None);
        let positions = vec![self.max_position_embeddings, width];
        list.plain("wpe.weight", positions, R::PositionEmbedding, None);
        for layer in 0..self.num_layers as u32 {
            list.norm(
                &format!("h.{layer}.ln_1"),
                width,
                [R::AttentionNorm, R::AttentionNormBias],
                layer,
            );
            let (attention, mlp) = self.projections();
            for projection in attention {
                list.projection(projection, layer);
            }
            list.norm(&format!("h.{layer}.ln_2"), width, [R::MlpNorm, R::MlpNormBias], layer);
            for projection in mlp {
                list.projection(projection, layer);
            }
        }
        list.plain("ln_f.weight", vec![width], R::FinalNorm, None);
        list.plain("ln_f.bias", vec![width], R::FinalNormBias, None);
        if !self.tie_word_embeddings {
            list.plain("lm_head.weight", vec![vocab, width], R::Head, None);
        }
        list.all
    }

    fn projections(&self) -> ([Projection; 4], [Projection; 2]) {
        let (width, ffn) = (self.hidden_size, self.intermediate_size);
        let of_attention = |name, index: usize, roles| Projection {
            name,
            stored: "attn.c_attn",
            sizes: [width, width],
            columns: 3 * width,
            start: index * width,
            roles,
        };
        let whole = |stored, sizes: [usize; 2], roles| Projection {
            name: stored,
            stored,
            sizes,
            columns: sizes[0],
            start: 0,
            roles,
        };
        let attention = [
            of_attention("attn.q", 0, [R::Query, R::QueryBias]),
            of_attention("attn.k", 1, [R::Key, R::KeyBias]),
            of_attention("attn.v", 2, [R::Value, R::ValueBias]),
            whole("attn.c_proj", [width, width], [R::AttentionOutput, R::AttentionOutputBias]),
        ];
        let mlp = [
            whole("mlp.c_fc", [ffn, width], [R::Up, R::UpBias]),
            whole("mlp.c_proj", [width, ffn], [R::Down, R::DownBias]),
        ];
        (attention, mlp)
    }
}

struct List {
    all: Vec<(ParameterSpec, StoredSlice)>,
    std: f64,
    layers: usize,
}

impl List {
    /// Adds a tensor stored as is.
    fn plain(&mut self, name: &str, shape: Vec<usize>, role: ParameterRole, layer: Option<u32>) {
        let part = StoredSlice::whole(name, &shape);
        self.add(name.to_string(), shape, role, layer, part);
    }

    fn norm(&mut self, stem: &str, width: usize, roles: [ParameterRole; 2], layer: u32) {
        self.plain(&format!("{stem}.weight"), vec![width], roles[0], Some(layer));
        self.plain(&format!("{stem}.bias"), vec![width], roles[1], Some(layer));
    }

    fn projection(&mut self, projection: Projection, layer: u32) {
        let Projection { name, stored, sizes, columns, start, roles } = projection;
        for (suffix, shape, stored_shape, role, transposed) in [
            ("weight", sizes.to_vec(), vec![sizes[1], columns], roles[0], true),
            ("bias", vec![sizes[0]], vec![columns], roles[1], false),
        ] {
            let whole = StoredSlice::whole(&format!("h.{layer}.{stored}.{suffix}"), &stored_shape);
            let part = StoredSlice { start, transposed, ..whole };
            self.add(format!("h.{layer}.{name}.{suffix}"), shape, role, Some(layer), part);
        }
    }

    fn add(
        &mut self,
        name: String,
        shape: Vec<usize>,
        role: ParameterRole,
        layer: Option<u32>,
        part: StoredSlice,
    ) {
        let init = match role {
            R::AttentionNorm | R::MlpNorm | R::FinalNorm => Init::Ones,
            R::AttentionOutput | R::Down => {
                Init::Normal { std: self.std / (2.0 * self.layers as f64).sqrt() }
            }
            _ if shape.len() == 1 => Init::Zeros,
            _ => Init::Normal { std: self.std },
        };
        self.all.push((ParameterSpec { name, shape, init, role, layer }, part));
    }
}
