//! Logits of a model: the forward program over one window of tokens, and the output head.
//!
//! There is no KV cache: each token runs the same forward program over the whole window. The GEMV
//! with the head is computed here, for only the needed row.

use bytemuck::{cast_slice, cast_slice_mut};
use deepwell_ir::{DType, Graph, PrecisionPolicy, Program, ValueId};
use deepwell_kernels::{Executor, LoadedProgram, Observer};
use deepwell_plan::{Inference, lower_inference, lower_scoring};
use deepwell_probe::Hardware;
use half::bf16;
use rayon::prelude::*;

use crate::documents::loss_scale;
use crate::weights::MasterWeights;
use crate::{Device, TrainError};

/// A model on a device, for computing logits.
pub struct Forward {
    executor: Executor,
    weights: LoadedProgram,
    forward: LoadedProgram,
    rows: ValueId,
    head: ValueId,
    /// The head with the device's values, `[vocab, hidden]`.
    head_values: Vec<f32>,
    /// Host copy of the rows, where the host does not see the device's memory.
    buffer: Vec<u8>,
    logits: Vec<f32>,
}

impl Forward {
    /// Lowers and loads the forward pass of a captured graph for windows of `window` tokens. The
    /// weights are zero until written.
    ///
    /// # Errors
    /// No such device, no kernel for an op, or insufficient memory.
    pub fn open(
        graph: &Graph,
        policy: &PrecisionPolicy,
        window: usize,
        device: Device,
        hardware: &Hardware,
    ) -> Result<Forward, TrainError> {
        Forward::open_as(graph, policy, window, device, hardware, false)
    }

    /// [`Forward::open`]; with `scores`, the program also computes the loss of a window, for
    /// [`Forward::loss`].
    ///
    /// # Errors
    /// As [`Forward::open`].
    pub fn open_as(
        graph: &Graph,
        policy: &PrecisionPolicy,
        window: usize,
        device: Device,
        hardware: &Hardware,
        scores: bool,
    ) -> Result<Forward, TrainError> {
        let open = device.open(hardware)?;
        let catalog = open.catalog.as_ref();
        let lower = if scores { lower_scoring } else { lower_inference };
        let Inference { weights, forward, rows, head } =
            lower(graph, policy, window, catalog, &open.target)?;
        let arena_bytes = weights.arena.bytes.max(forward.arena.bytes);
        let vocab = weights.value(head).shape[0];
        let mut executor = Executor::new(open.backend, arena_bytes)?;
        Ok(Forward {
            weights: executor.load(weights)?,
            forward: executor.load(forward)?,
            executor,
            rows,
            head,
            head_values: Vec::new(),
            buffer: Vec::new(),
            logits: vec![0.0; vocab],
        })
    }

    /// Maximum number of tokens in a window.
    pub fn window(&self) -> usize {
        self.forward.program().seq
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.logits.len()
    }

    /// The forward program.
    pub fn forward_program(&self) -> &Program {
        self.forward.program()
    }

    /// Computes the logits of the token after `tokens`, one for each token of the vocabulary, from
    /// the last [`Forward::window`] tokens.
    ///
    /// # Errors
    /// No token, a token outside of the vocabulary, or the device fails.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<&[f32], TrainError> {
        let window = self.window();
        let seen = &tokens[tokens.len().saturating_sub(window)..];
        let refuse = |expected: String, got: String| {
            Err(TrainError::Setting { setting: "tokens", expected, got, hint: None })
        };
        if seen.is_empty() {
            return refuse("at least one".to_string(), "none".to_string());
        }
        let vocab = self.vocab_size();
        if let Some(&token) = seen.iter().find(|&&token| token as usize >= vocab) {
            return refuse(format!("tokens below {vocab}"), token.to_string());
        }
        // Tokens after the last one have no influence: attention is causal.
        let mut inputs = vec![0i32; window];
        for (input, &token) in inputs.iter_mut().zip(seen) {
            *input = token as i32;
        }
        let program = self.forward.program();
        if let Some(id) = program.host.tokens {
            self.executor.write(program, id, cast_slice(&inputs))?;
        }
        self.executor.run(&self.forward)?;
        self.multiply_head(seen.len() - 1)?;
        Ok(&self.logits)
    }

    /// Computes the mean loss of a whole window in nats, over the targets that are not ignored; for
    /// a model opened to score by [`Forward::open_as`]. 0 without counted targets.
    ///
    /// # Errors
    /// Another number of tokens, or the device fails.
    pub fn loss(&mut self, tokens: &[i32], targets: &[i32]) -> Result<f32, TrainError> {
        let program = self.forward.program();
        let host = program.host.clone();
        for (id, values) in [(host.tokens, tokens), (host.targets, targets)] {
            if let Some(id) = id {
                self.executor.write(program, id, cast_slice(values))?;
            }
        }
        if let Some(id) = host.loss_scale {
            self.executor.write(program, id, cast_slice(&[loss_scale(targets)]))?;
        }
        self.executor.run(&self.forward)?;
        let mut loss = [0f32; 1];
        if let Some(id) = host.loss {
            self.executor.read(self.forward.program(), id, cast_slice_mut(&mut loss))?;
        }
        Ok(loss[0])
    }

    /// Runs the forward pass over a whole window, call by call.
    ///
    /// # Errors
    /// Another number of tokens, or the device or the observer fails.
    pub(crate) fn run_observed(
        &mut self,
        tokens: &[i32],
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let program = self.forward.program();
        if let Some(id) = program.host.tokens {
            self.executor.write(program, id, cast_slice(tokens))?;
        }
        Ok(self.executor.run_observed(&self.forward, observer)?)
    }

    /// Multiplies the head with one row.
    fn multiply_head(&mut self, row: usize) -> Result<(), TrainError> {
        let program = self.forward.program();
        let value = program.value(self.rows);
        let hidden = value.shape[1];
        if self.executor.backend().host_view(value.range).is_none() {
            self.buffer.resize(value.range.bytes, 0);
            self.executor.read(program, self.rows, &mut self.buffer)?;
        }
        let bytes = self.executor.backend().host_view(value.range).unwrap_or(&self.buffer);
        let row_bytes = bytes.len() / value.shape[0];
        let row = to_f32(value.dtype, &bytes[row * row_bytes..][..row_bytes]);
        let head = &self.head_values;
        self.logits
            .par_iter_mut()
            .zip(head.par_chunks_exact(hidden))
            .with_min_len(64)
            .for_each(|(logit, column)| *logit = dot(&row, column));
        Ok(())
    }
}

impl MasterWeights for Forward {
    fn program(&self) -> &Program {
        self.weights.program()
    }

    fn write_master(&mut self, id: ValueId, bytes: &[u8]) -> Result<(), TrainError> {
        Ok(self.executor.write(self.weights.program(), id, bytes)?)
    }

    fn refresh_copies(&mut self) -> Result<(), TrainError> {
        self.executor.run(&self.weights)?;
        let program = self.weights.program();
        let value = program.value(self.head);
        let mut bytes = vec![0; value.range.bytes];
        self.executor.read(program, self.head, &mut bytes)?;
        self.head_values = to_f32(value.dtype, &bytes);
        Ok(())
    }
}

/// Elements as FP32; heads and norms' outputs are BF16 or F32 under every policy.
fn to_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => {
            let element = |pair: &[u8]| bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
            bytes.chunks_exact(2).map(element).collect()
        }
        _ => {
            let element = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            bytes.chunks_exact(4).map(element).collect()
        }
    }
}

/// A dot product of rows in FP32, summed in sixteen lanes and then in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let mut a_chunks = a.chunks_exact(LANES);
    let mut b_chunks = b.chunks_exact(LANES);
    for (a, b) in (&mut a_chunks).zip(&mut b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    lanes.iter().sum::<f32>() + rest.map(|(a, b)| a * b).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::dot;

    #[test]
    fn dot_products_of_rows() {
        for width in [0, 1, 15, 16, 17, 100] {
            let a: Vec<f32> = (0..width).map(|index| index as f32).collect();
            let b: Vec<f32> = (0..width).map(|index| (index % 3) as f32).collect();
            // Integers far below 2^24: every summation order gives the same result.
            let expected: usize = (0..width).map(|index| index * (index % 3)).sum();
            assert_eq!(dot(&a, &b), expected as f32, "{width}");
        }
    }
}
