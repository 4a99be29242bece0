//! The tensors of a model's weight files, if different from its parameters. Experts may be stored
//! separately, several projections in one tensor, and weights packed.

use super::parameters::ParameterSpec;
use crate::Role;
use crate::capture::{
    LlamaConfig, ModelFamily, ParameterRole, StoredDType, StoredSlice, WeightPacking,
};

/// Values that share an MXFP4 scale.
pub(super) const MXFP4_BLOCK: usize = 32;

/// Allowed element types of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredElement {
    /// F32, BF16 or F16.
    Float,
    /// Exactly this type.
    Exactly(StoredDType),
}

/// A tensor required in the weight files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSpec {
    /// Name of the tensor.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub element: StoredElement,
}

/// Name of one expert's tensor, from the name of the stack.
fn name_of_expert(stack: &str, expert: usize) -> String {
    stack.replace(".experts.", &format!(".experts.{expert}."))
}

impl LlamaConfig {
    /// The tensors of the weight files, in the order of [`LlamaConfig::parameters`].
    ///
    /// One tensor per parameter, with these exceptions: mixtral, qwen3_moe and deepseek_v3 store
    /// each expert separately; gpt_oss and phi3 combine gate and up projections; phi3 also combines
    /// query, key and value projections; packed weights are data and scales.
    ///
    /// ```
    /// use deepwell_ir::capture::LlamaConfig;
    ///
    /// let config = LlamaConfig::preset("llama-micro").unwrap();
    /// let stored = config.stored_tensors();
    /// assert_eq!(stored.len(), config.parameters().len());
    /// assert_eq!(stored[0].name, "model.embed_tokens.weight");
    /// ```
    pub fn stored_tensors(&self) -> Vec<StoredSpec> {
        let slices = |spec: ParameterSpec| self.slices_of(&spec);
        let slices = self.parameters().into_iter().flat_map(slices);
        // Only the first part of a shared tensor names the tensor.
        slices.filter(|slice| slice.start == 0).flat_map(tensors_of).collect()
    }

    /// The tensors that hold a parameter: one, or one per expert.
    pub(in crate::capture) fn slices_of(&self, spec: &ParameterSpec) -> Vec<StoredSlice> {
        use ParameterRole as R;
        if self.family == ModelFamily::GptOss && spec.role.precision_role() == Role::Expert {
            return vec![self.slice_of_fused(spec)];
        }
        if self.family.stores_fused()
            && let Some(slice) = self.slice_of_projections(spec)
        {
            return vec![slice];
        }
        let packed = |slice: StoredSlice| StoredSlice {
            packing: self.packing_of(&slice.shape, spec.role),
            ..slice
        };
        if !matches!(spec.role, R::ExpertGate | R::ExpertUp | R::ExpertDown) {
            return vec![packed(StoredSlice::whole(&spec.name, &spec.shape))];
        }
        let slice = |expert| {
            let name = name_of_expert(&spec.name, expert);
            packed(StoredSlice::of_stack(&name, &spec.shape[1..], expert))
        };
        (0..spec.shape[0]).map(slice).collect()
    }

    /// A projection of Phi-3, stored in one tensor with other projections of the same input.
    fn slice_of_projections(&self, spec: &ParameterSpec) -> Option<StoredSlice> {
        use ParameterRole as R;
        let (queries, keys) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let (own, fused, start, outputs) = match spec.role {
            R::Query => ("q_proj", "qkv_proj", 0, queries + 2 * keys),
            R::Key => ("k_proj", "qkv_proj", queries, queries + 2 * keys),
            R::Value => ("v_proj", "qkv_proj", queries + keys, queries + 2 * keys),
            R::Gate => ("gate_proj", "gate_up_proj", 0, 2 * self.intermediate_size),
            R::Up => {
                ("up_proj", "gate_up_proj", self.intermediate_size, 2 * self.intermediate_size)
            }
            _ => return None,
        };
        let name = spec.name.replace(own, fused);
        Some(StoredSlice { start, ..StoredSlice::whole(&name, &[outputs, *spec.shape.get(1)?]) })
    }

    /// Experts of gpt-oss: gate and up projections are interleaved in one tensor, and inputs come
    /// first unless packed.
    fn slice_of_fused(&self, spec: &ParameterSpec) -> StoredSlice {
        use ParameterRole as R;
        let (stem, start, step) = match spec.role {
            R::ExpertGate | R::ExpertGateBias => ("gate_up_proj", 0, 2),
            R::ExpertUp | R::ExpertUpBias => ("gate_up_proj", 1, 2),
            _ => ("down_proj", 0, 1),
        };
        let block = spec.name.split(".experts.").next().unwrap_or_default();
        let name = format!("{block}.experts.{stem}");
        let (experts, outputs) = (spec.shape[0], step * spec.shape[1]);
        let packing = self.packing.filter(|packing| *packing == WeightPacking::Mxfp4);
        let (name, shape, packing) = match (spec.shape.get(2), packing) {
            (None, _) => (format!("{name}_bias"), vec![experts, outputs], None),
            (Some(&inputs), None) => (name, vec![experts, inputs, outputs], None),
            (Some(&inputs), packing) => (name, vec![experts, outputs, inputs], packing),
        };
        let transposed = shape.len() == 3 && packing.is_none();
        let whole = StoredSlice::whole(&name, &shape);
        if !transposed && step == 1 {
            return StoredSlice { packing, ..whole };
        }
        StoredSlice { start, step, transposed, stacked: true, packing, ..whole }
    }

    /// Packing of a separately stored tensor.
    fn packing_of(&self, shape: &[usize], role: ParameterRole) -> Option<WeightPacking> {
        let is_linear = matches!(role.precision_role(), Role::Linear | Role::Expert);
        self.packing.filter(|packing| {
            matches!(packing, WeightPacking::Fp8Blocks { .. }) && is_linear && shape.len() == 2
        })
    }
}

/// The tensor itself, or data and scale factors if packed.
fn tensors_of(slice: StoredSlice) -> Vec<StoredSpec> {
    let StoredSlice { name, shape, packing, .. } = slice;
    let spec = |name: String, shape: Vec<usize>, element| StoredSpec { name, shape, element };
    match (packing, shape.as_slice()) {
        (Some(WeightPacking::Mxfp4), [stack @ .., rows, columns]) => {
            let blocks = [stack, &[*rows, columns / MXFP4_BLOCK]].concat();
            let data = [&blocks[..], &[MXFP4_BLOCK / 2]].concat();
            let bytes = StoredElement::Exactly(StoredDType::U8);
            vec![
                spec(format!("{name}_blocks"), data, bytes),
                spec(format!("{name}_scales"), blocks, bytes),
            ]
        }
        (Some(WeightPacking::Fp8Blocks { rows, columns }), &[height, width]) => {
            let factors = vec![height.div_ceil(rows), width.div_ceil(columns)];
            vec![
                spec(name.clone(), shape, StoredElement::Exactly(StoredDType::E4m3)),
                spec(
                    format!("{name}_scale_inv"),
                    factors,
                    StoredElement::Exactly(StoredDType::F32),
                ),
            ]
        }
        _ => vec![spec(name, shape, StoredElement::Float)],
    }
}
