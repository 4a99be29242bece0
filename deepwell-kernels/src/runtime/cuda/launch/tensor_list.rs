//! Many tensors as a list of chunks, for kernels that process all parameters in one launch.

use deepwell_ir::DType;

use crate::KernelError;
use crate::runtime::cuda::prepare::CallView;

/// Builds a table with a row of `u64` words per tensor, and counts chunks.
#[derive(Debug)]
pub(crate) struct TensorList {
    chunk_elements: usize,
    words: Vec<u64>,
    tensors: usize,
    chunks: usize,
}

impl TensorList {
    /// An empty list with chunks of `chunk_elements` elements.
    pub(crate) fn new(chunk_elements: usize) -> TensorList {
        TensorList { chunk_elements, words: Vec::new(), tensors: 0, chunks: 0 }
    }

    /// Adds a row for a tensor of `elements` elements, which may have several addresses: the
    /// addresses, the number of elements, the first chunk, and `last`. Empty tensors are skipped.
    pub(crate) fn push(&mut self, addresses: &[u64], elements: usize, last: &[u64]) {
        if elements == 0 {
            return;
        }
        self.words.extend_from_slice(addresses);
        self.words.extend([elements as u64, self.chunks as u64]);
        self.words.extend_from_slice(last);
        self.tensors += 1;
        self.chunks += elements.div_ceil(self.chunk_elements);
    }

    /// The table in the layout of the device.
    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Rows of the table.
    pub(crate) fn tensors(&self) -> usize {
        self.tensors
    }

    /// Chunks of all tensors.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks
    }
}

/// Address and length of operand `index`, which must be FP32.
pub(crate) fn f32_operand(call: &CallView<'_>, index: usize) -> Result<(u64, usize), KernelError> {
    let tensor = call.operand(index);
    if tensor.dtype != DType::F32 {
        return Err(KernelError::OperandType {
            call: call.call.name.clone(),
            operand: index,
            expected: DType::F32.to_string(),
            got: tensor.dtype,
        });
    }
    Ok((tensor.pointer.0, tensor.elements()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_each_other_and_empty_tensors_have_none() {
        let mut list = TensorList::new(4);
        for (address, elements) in [(64, 4), (128, 0), (192, 5), (256, 1)] {
            list.push(&[address], elements, &[7]);
        }
        let words: &[u64] = bytemuck::cast_slice(list.bytes());
        assert_eq!(words, [64, 4, 0, 7, 192, 5, 1, 7, 256, 1, 3, 7]);
        assert_eq!((list.tensors(), list.chunks()), (3, 4));
    }
}
