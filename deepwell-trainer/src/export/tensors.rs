//! Master weights of a checkpoint as the tensors of weight files.

use std::collections::{BTreeSet, HashMap};

use deepwell_ckpt::hf::FolderTensor;
use deepwell_ckpt::{Checkpoint, CkptDtype, Section};
use deepwell_ir::capture::{ArchiveTensor, StoredSlice};

use crate::source::StoredParameter;
use crate::{ModelSource, TrainError};

/// A master weight that forms part of a stored tensor.
#[derive(Clone, Debug)]
struct Member {
    parameter: String,
    shape: Vec<usize>,
    part: StoredSlice,
}

/// The tensors of the weight files, each with its master weights.
pub(super) struct Tensors<'a> {
    model: &'a mut ModelSource,
    list: Vec<FolderTensor>,
    members: HashMap<String, Vec<Member>>,
    /// Remarks for the user; sentences.
    pub(super) remarks: Vec<String>,
}

impl<'a> Tensors<'a> {
    /// The tensors of `model`, whose parameters must match the master weights of `checkpoint`.
    pub(super) fn of(
        checkpoint: &Checkpoint,
        model: &'a mut ModelSource,
    ) -> Result<Tensors<'a>, TrainError> {
        let mut tensors =
            Tensors { list: Vec::new(), members: HashMap::new(), remarks: Vec::new(), model };
        let mut expected = BTreeSet::new();
        for stored in tensors.model.stored_slices()? {
            let StoredParameter { name: parameter, shape, part, keeps_f32 } = stored;
            checkpoint.expect(Section::Master, &parameter, CkptDtype::F32, &shape)?;
            expected.insert(parameter.clone());
            let members = tensors.members.entry(part.name.clone()).or_default();
            if members.is_empty() {
                let (name, shape) = (part.name.clone(), part.shape.clone());
                tensors.list.push(FolderTensor { name, shape, keeps_f32 });
            }
            members.push(Member { parameter, shape, part });
        }
        let stray = checkpoint.tensors().iter().find(|tensor| {
            tensor.section == Section::Master && !expected.contains(tensor.name.as_str())
        });
        if let Some(stray) = stray {
            return Err(TrainError::Setting {
                setting: "checkpoint",
                expected: format!("the parameters of `{}`", tensors.model.name()),
                got: format!("`{}` too", stray.name),
                hint: Some("`--model` names the model that the run trained".to_string()),
            });
        }
        tensors.add_untrained();
        Ok(tensors)
    }

    /// Adds an archive's other tensors: aliases of trained tensors, buffers, and parameters that do
    /// not affect the logits.
    fn add_untrained(&mut self) {
        for ArchiveTensor { name, shape, holds_floats, aliases } in self.model.archive_tensors() {
            if self.members.contains_key(&name) {
                continue;
            }
            let tied = aliases.iter().find_map(|alias| self.members.get(alias));
            if let Some(members) = tied.cloned() {
                self.members.insert(name.clone(), members);
                self.list.push(FolderTensor { name, shape, keeps_f32: false });
            } else if holds_floats {
                self.remarks.push(format!("`{name}` was not trained: it is as in the archive"));
                self.list.push(FolderTensor { name, shape, keeps_f32: false });
            } else {
                self.remarks.push(format!("`{name}` is left out: it holds no floats"));
            }
        }
    }

    pub(super) fn model(&self) -> &ModelSource {
        self.model
    }

    pub(super) fn list(&self) -> Vec<FolderTensor> {
        self.list.clone()
    }

    /// Bytes of all tensors in `dtype`.
    pub(super) fn bytes(&self, dtype: CkptDtype) -> u64 {
        let bytes = |tensor: &FolderTensor| tensor.bytes(dtype).unwrap_or(usize::MAX) as u64;
        self.list.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Returns a function that fills the elements of one tensor at a time.
    pub(super) fn reader(
        self,
        checkpoint: &Checkpoint,
    ) -> impl FnMut(&FolderTensor, &mut [f32]) -> Result<(), TrainError> {
        let mut buffer: Vec<f32> = Vec::new();
        // Name of the parameter in the buffer: a stack of experts serves many tensors.
        let mut held = String::new();
        move |tensor, elements| {
            let members = self.members.get(&tensor.name).map(Vec::as_slice).unwrap_or_default();
            let covered: usize =
                members.iter().map(|member| member.part.elements_of(&member.shape).0.len()).sum();
            if covered < elements.len() {
                // The rest keeps its exported values.
                elements.copy_from_slice(&self.model.read_stored(&tensor.name)?);
            }
            for Member { parameter, shape, part } in members {
                if *part == StoredSlice::whole(&part.name, shape) {
                    checkpoint.read_f32_into(Section::Master, parameter, shape, elements)?;
                    continue;
                }
                if held != *parameter {
                    held.clear();
                    buffer.clear();
                    buffer.resize(shape.iter().product(), 0.0);
                    checkpoint.read_f32_into(Section::Master, parameter, shape, &mut buffer)?;
                    held.push_str(parameter);
                }
                let (own, shape) = part.elements_of(shape);
                part.insert(&buffer[own], shape, elements).ok_or_else(|| TrainError::Setting {
                    setting: "checkpoint",
                    expected: format!("`{parameter}` to be a part of `{}`", tensor.name),
                    got: format!("{shape:?} for {:?}", tensor.shape),
                    hint: None,
                })?;
            }
            Ok(())
        }
    }
}
