//! A catalog with cached answers.
//!
//! All layers of a model request the same kernels, and so do the programs of other plans: a search
//! with a hundred lowered programs has a few hundred distinct requests.

use std::cell::RefCell;
use std::collections::HashMap;

use deepwell_ir::{
    Call, KernelCatalog, KernelChoice, KernelRequest, MathUnit, NoKernel, Op, OperandType, Ranks,
    Selection, Target,
};
use deepwell_precision::{QuantFormat, Role};

/// Caches a catalog by op, operands and device. The rank is ignored: an op contains its number of
/// ranks.
pub struct KnownKernels {
    catalog: Box<dyn KernelCatalog>,
    selections: Answers<Result<Selection, NoKernel>>,
    predictions: Answers<Option<f64>>,
}

impl KnownKernels {
    /// Creates an empty cache over `catalog`.
    pub fn new(catalog: Box<dyn KernelCatalog>) -> KnownKernels {
        let (selections, predictions) = (Answers::default(), Answers::default());
        KnownKernels { catalog, selections, predictions }
    }
}

impl KernelCatalog for KnownKernels {
    fn select(&self, request: &KernelRequest<'_>, target: &Target) -> Result<Selection, NoKernel> {
        self.selections.get(request, target, || self.catalog.select(request, target))
    }

    fn choices(&self, request: &KernelRequest<'_>, target: &Target) -> Vec<KernelChoice> {
        self.catalog.choices(request, target)
    }

    fn predicted_s(&self, request: &KernelRequest<'_>, target: &Target) -> Option<f64> {
        self.predictions.get(request, target, || self.catalog.predicted_s(request, target))
    }

    fn serves(&self, format: &QuantFormat, role: Role, target: &Target) -> Result<(), String> {
        self.catalog.serves(format, role, target)
    }

    fn unit_of(&self, kernel: &str, unit: MathUnit) -> MathUnit {
        self.catalog.unit_of(kernel, unit)
    }

    fn peak_share(&self, kernel: &str, target: &Target) -> f64 {
        self.catalog.peak_share(kernel, target)
    }

    fn tables(&self, target: &Target) -> Vec<String> {
        self.catalog.tables(target)
    }

    fn fixed_overhead_bytes(&self, target: &Target, calls: &[Call]) -> usize {
        self.catalog.fixed_overhead_bytes(target, calls)
    }
}

/// Answers by operands, then by op and device.
struct Answers<T>(RefCell<HashMap<Vec<OperandType>, Vec<Answer<T>>>>);

struct Answer<T> {
    op: Op,
    input_count: usize,
    /// The target without ranks.
    device: Target,
    answer: T,
}

impl<T> Default for Answers<T> {
    fn default() -> Self {
        Answers(RefCell::default())
    }
}

impl<T: Clone> Answers<T> {
    fn get(&self, request: &KernelRequest<'_>, target: &Target, ask: impl FnOnce() -> T) -> T {
        let KernelRequest { op, operands, input_count } = *request;
        let is_same = |known: &&Answer<T>| {
            known.input_count == input_count && known.op == *op && is_device(&known.device, target)
        };
        let known = self.0.borrow();
        if let Some(known) = known.get(operands).and_then(|it| it.iter().find(is_same)) {
            return known.answer.clone();
        }
        drop(known);
        let answer = ask();
        let device = Target { ranks: Ranks::default(), ..target.clone() };
        let new = Answer { op: op.clone(), input_count, device, answer: answer.clone() };
        self.0.borrow_mut().entry(operands.to_vec()).or_default().push(new);
        answer
    }
}

/// Whether a target is this device, for any rank.
fn is_device(device: &Target, target: &Target) -> bool {
    let Target { arch, features, libraries, workers, gpu, gpu_name, ranks: _ } = target;
    (&device.arch, &device.features, &device.libraries) == (arch, features, libraries)
        && (device.workers, device.gpu, &device.gpu_name) == (*workers, *gpu, gpu_name)
}
