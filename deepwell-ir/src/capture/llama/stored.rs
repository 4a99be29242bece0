//! The tensors that the weight files of a model hold, where they are not its parameters one by
//! one: experts stored one by one or two projections in one, and packed weights.

use super::parameters::ParameterSpec;
use crate::Role;
use crate::capture::{
    LlamaConfig, ModelFamily, ParameterRole, StoredDType, StoredPart, WeightPacking,
};

/// Values that share an MXFP4 scale.
pub(super) const MXFP4_BLOCK: usize = 32;

/// Element types that a stored tensor may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredElement {
    /// F32, BF16 or F16.
    Float,
    /// This one.
    Exactly(StoredDType),
}

/// A tensor that weight files must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSpec {
    /// Its name.
    pub name: String,
    /// Its row-major shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub element: StoredElement,
}

/// The name of one expert's tensor, from that of the stack.
fn name_of_expert(stack: &str, expert: usize) -> String {
    stack.replace(".experts.", &format!(".experts.{expert}."))
}

impl LlamaConfig {
    /// The tensors of the weight files, in the order of [`LlamaConfig::parameters`].
    ///
    /// One for each parameter, except that mixtral, qwen3_moe and deepseek_v3 store each expert by
    /// itself and gpt_oss gate and up projections in one, and that packed weights are data and
    /// scales.
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
        let mut all = Vec::new();
        for spec in self.parameters() {
            self.add_stored(&spec, &mut all);
        }
        all
    }

    /// The tensors of a stack of experts that is stored one by one and not packed; none for any
    /// other parameter.
    pub(in crate::capture) fn parts_of_experts(&self, spec: &ParameterSpec) -> Vec<StoredPart> {
        use ParameterRole as R;
        let is_stack = matches!(spec.role, R::ExpertGate | R::ExpertUp | R::ExpertDown);
        if !is_stack || self.packing.is_some() || self.family == ModelFamily::GptOss {
            return Vec::new();
        }
        let part = |expert| {
            StoredPart::of_stack(&name_of_expert(&spec.name, expert), &spec.shape[1..], expert)
        };
        (0..spec.shape[0]).map(part).collect()
    }

    fn add_stored(&self, spec: &ParameterSpec, all: &mut Vec<StoredSpec>) {
        use ParameterRole as R;
        let stacked = matches!(spec.role, R::ExpertGate | R::ExpertUp | R::ExpertDown);
        if self.family == ModelFamily::GptOss && spec.role.precision_role() == Role::Expert {
            return self.add_fused(spec, all);
        }
        if !stacked {
            return self.add_matrix(&spec.name, &spec.shape, spec.role, all);
        }
        let (experts, matrix) = (spec.shape[0], &spec.shape[1..]);
        for expert in 0..experts {
            self.add_matrix(&name_of_expert(&spec.name, expert), matrix, spec.role, all);
        }
    }

    /// A tensor as it is, or its data and factors.
    fn add_matrix(
        &self,
        name: &str,
        shape: &[usize],
        role: ParameterRole,
        all: &mut Vec<StoredSpec>,
    ) {
        let is_linear = matches!(role.precision_role(), Role::Linear | Role::Expert);
        let (element, factors) = match (self.packing, shape) {
            (Some(WeightPacking::Fp8Blocks { rows, columns }), &[height, width]) if is_linear => (
                StoredElement::Exactly(StoredDType::E4m3),
                Some(vec![height.div_ceil(rows), width.div_ceil(columns)]),
            ),
            _ => (StoredElement::Float, None),
        };
        all.push(StoredSpec { name: name.to_string(), shape: shape.to_vec(), element });
        if let Some(shape) = factors {
            let element = StoredElement::Exactly(StoredDType::F32);
            all.push(StoredSpec { name: format!("{name}_scale_inv"), shape, element });
        }
    }

    /// The tensors of gpt-oss: gate and up projections with their columns in turns, inputs first
    /// unless packed.
    fn add_fused(&self, spec: &ParameterSpec, all: &mut Vec<StoredSpec>) {
        use ParameterRole as R;
        let (stem, rows_factor) = match spec.role {
            R::ExpertGate | R::ExpertGateBias => ("gate_up_proj", 2),
            R::ExpertDown | R::ExpertDownBias => ("down_proj", 1),
            // In one tensor with the gates.
            _ => return,
        };
        let block = spec.name.split(".experts.").next().unwrap_or_default();
        let name = format!("{block}.experts.{stem}");
        let (experts, rows) = (spec.shape[0], rows_factor * spec.shape[1]);
        let float = StoredElement::Float;
        let &[_, _, columns] = spec.shape.as_slice() else {
            let shape = vec![experts, rows];
            return all.push(StoredSpec { name: format!("{name}_bias"), shape, element: float });
        };
        if self.packing != Some(WeightPacking::Mxfp4) {
            let shape = vec![experts, columns, rows];
            return all.push(StoredSpec { name, shape, element: float });
        }
        let blocks = columns / MXFP4_BLOCK;
        for (suffix, shape) in [
            ("blocks", vec![experts, rows, blocks, MXFP4_BLOCK / 2]),
            ("scales", vec![experts, rows, blocks]),
        ] {
            let element = StoredElement::Exactly(StoredDType::U8);
            all.push(StoredSpec { name: format!("{name}_{suffix}"), shape, element });
        }
    }
}
