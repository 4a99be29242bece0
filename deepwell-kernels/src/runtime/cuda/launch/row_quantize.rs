//! Shared by launchers of kernels that quantize the rows they compute: `layout/row_quantize.cuh`
//! and `layout/gradient_pair_quantize.cuh`.

use deepwell_ir::ops::{Fused, QuantizeStep};
use deepwell_ir::{KernelRequest, Op};

use super::mx;
use super::support::all_bf16;
use crate::KernelError;
use crate::runtime::cuda::architecture::Architecture;
use crate::runtime::cuda::driver::{Argument, DevicePtr, Launch};
use crate::runtime::cuda::prepare::{CallView, Device, Step};
use crate::runtime::epilogue::EpilogueSet;

/// Elements of a vector, 16 bytes of BF16.
const VECTOR: usize = 8;

/// Quantizes all results that are activation matrices.
pub(crate) fn epilogue(core: &Op) -> EpilogueSet {
    match core {
        Op::SwiGluBackward(_) | Op::StoredSwiGluBackward(_) | Op::ExpertSwiGluBackward(_) => {
            EpilogueSet::quantizing(&[0, 1])
        }
        _ => EpilogueSet::quantizing(&[0]),
    }
}

/// The fused op, and its quantizations in result order.
fn parts(op: &Op) -> Option<(&Fused, Vec<QuantizeStep<'_>>)> {
    let Op::Fused(op) = op else { return None };
    let mut steps: Vec<QuantizeStep<'_>> = op.quantizations().collect();
    steps.sort_by_key(|step| step.of);
    Some((op, steps))
}

/// Why a request for an elementwise function that [`epilogue`] accepts cannot be served.
pub(crate) fn reject(request: &KernelRequest<'_>) -> Option<String> {
    let inputs: Vec<usize> = (0..request.input_count).collect();
    reject_rows(request, &inputs, &request.operands[0].shape)
}

/// Why a request that [`epilogue`] accepts cannot be served; `matrices` are the activation matrices
/// among its inputs, `shape` is the shape of its results.
pub(crate) fn reject_rows(
    request: &KernelRequest<'_>,
    matrices: &[usize],
    shape: &[usize],
) -> Option<String> {
    let Some((op, steps)) = parts(request.op) else {
        return Some("quantizes its results".to_string());
    };
    if let &[_, columns] = shape
        && !columns.is_multiple_of(VECTOR)
    {
        return Some(format!("takes rows that are multiples of {VECTOR} elements, not {columns}"));
    }
    let kept = steps.iter().filter_map(|step| op.position(step.of));
    let kept = kept.map(|position| request.input_count + position);
    let floats: Vec<usize> = matrices.iter().copied().chain(kept).collect();
    let of_steps = || steps.iter().find_map(|step| mx::reject(step.quantize, shape));
    all_bf16(request, &floats).or_else(of_steps)
}

/// Prepares a call of an elementwise function with no other arguments than its inputs.
pub(crate) fn prepare(
    call: &CallView<'_>,
    device: &mut Device<'_>,
    file: &'static str,
    entry: &str,
    pipe: Option<Pipe>,
) -> Result<Vec<Step>, KernelError> {
    let shape = call.input(0).shape;
    let inputs = (0..call.call.input_count).map(|index| call.input(index).argument()).collect();
    let rows = Rows { shape: &shape, inputs, rest: Vec::new(), tiles: Tiles::OneEach, pipe };
    Ok(vec![rows.launch(call, device, file, entry)?])
}

/// Assignment of tiles that satisfy [`mx::is_plain`] to CTAs. A CTA gets a single tile of any other
/// kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tiles {
    /// One tile per CTA, so that SMs take tiles as they become free.
    OneEach,
    /// A grid-stride loop with as many CTAs as the device holds: for rows that are gathered by
    /// index, where a CTA loads the indices of the next tile in advance.
    Walked,
}

/// Hopper variants of kernels, with the same names and arguments, for tiles that satisfy
/// [`mx::is_plain`]. A CTA loads the next tile while it processes the current one, in a grid-stride
/// loop with as many CTAs as the device holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pipe {
    /// The `.cu` file.
    pub(crate) file: &'static str,
    /// Threads of a CTA along y; the threads along x are those of a tile.
    pub(crate) parts: u32,
    /// Dynamic shared memory.
    pub(crate) shared_bytes: u32,
}

impl Pipe {
    /// The variant in `layout/gradient_pair_pipe.cuh`.
    pub(crate) const fn of_gradients(file: &'static str) -> Pipe {
        Pipe { file, parts: 2, shared_bytes: 2 * (mx::BF16_TILE_BYTES + mx::STAGE_BYTES) }
    }
}

/// Arguments of a kernel in addition to the quantized outputs.
pub(crate) struct Rows<'a> {
    /// Shape of the results.
    pub(crate) shape: &'a [usize],
    /// Inputs from which the rows are computed.
    pub(crate) inputs: Vec<Argument>,
    /// Last arguments of the kernel.
    pub(crate) rest: Vec<Argument>,
    pub(crate) tiles: Tiles,
    pub(crate) pipe: Option<Pipe>,
}

impl Rows<'_> {
    /// Builds the launch of kernel `<entry>_quantize_<axis>` of `<file>.cu`. Arguments: the inputs;
    /// the results that are quantized, or null; four pointers to quantized operands per result;
    /// rows and columns; flags per result; totals; statistics per result; the rest.
    pub(crate) fn launch(
        self,
        call: &CallView<'_>,
        device: &mut Device<'_>,
        file: &'static str,
        entry: &str,
    ) -> Result<Step, KernelError> {
        let Some((op, steps)) = parts(&call.call.op) else {
            return Err(call.refuse("expected an op and its quantization"));
        };
        let &[rows, columns] = self.shape else {
            return Err(call.refuse("expected a matrix"));
        };
        let results = epilogue(&op.core).quantizes;
        if !steps.iter().map(|step| step.of).eq(results.iter().copied()) {
            return Err(call.refuse(format!("expected results {results:?} quantized once")));
        }
        let axis = steps[0].quantize.axis;
        let kernel = format!("{entry}_quantize_{}", axis.name());
        let flags: Vec<u32> = steps.iter().map(|step| mx::flags(&step.quantize.format)).collect();
        let is_plain = flags.iter().all(|&of| of == flags[0] && mx::is_plain(rows, columns, of));
        let shared_bytes = match flags.as_slice() {
            &[flags] => mx::shared_bytes(rows, columns, flags),
            // The tiles of all results are in shared memory.
            _ => results.len() as u32 * mx::BF16_TILE_BYTES,
        };
        let pipe = self.pipe.filter(|_| is_plain && is_hopper(device));
        let file = pipe.map_or(file, |pipe| pipe.file);
        let shared_bytes = pipe.map_or(shared_bytes, |pipe| pipe.shared_bytes);
        let function = device.function(file, &kernel, shared_bytes)?;

        let targets = steps.iter().map(|step| mx::outputs(call, axis, step.positions.start));
        let targets: Vec<mx::Outputs> = targets.collect();
        let mut arguments = self.inputs;
        arguments.extend(results.iter().map(|&result| match op.position(result) {
            Some(position) => call.output(position).argument(),
            None => Argument::Pointer(DevicePtr(0)),
        }));
        arguments.extend(targets.iter().flat_map(|targets| targets.places));
        arguments.extend([Argument::U32(rows as u32), Argument::U32(columns as u32)]);
        arguments.extend(flags.into_iter().map(Argument::U32));
        arguments.push(mx::totals(device, results.len())?);
        arguments.extend(targets.iter().map(|targets| targets.statistics));
        arguments.extend(self.rest);
        let mut ctas = mx::ctas(rows, columns);
        let block = [mx::BF16_TILE_THREADS, pipe.map_or(1, |pipe| pipe.parts), 1];
        if pipe.is_some() || (self.tiles == Tiles::Walked && is_plain) {
            let threads = block.iter().product();
            ctas = ctas.min(device.resident_ctas(function, threads, shared_bytes)?);
        }
        Ok(Step::Launch(Launch {
            function,
            grid: [ctas, 1, 1],
            block,
            cluster: [1, 1, 1],
            shared_bytes,
            programmatic: false,
            arguments,
        }))
    }
}

fn is_hopper(device: &Device<'_>) -> bool {
    let capability = device.driver.properties().capability;
    Architecture::of_capability(capability) == Some(Architecture::Sm90a)
}

#[cfg(test)]
mod tests {
    use deepwell_ir::ops::{Axis, Epilogue, Gelu, Quantize, SwiGlu, SwiGluBackward};
    use deepwell_ir::{DType, OperandType};
    use deepwell_precision::QuantFormat;

    use super::*;

    /// All but the second result are skipped.
    fn fused(core: impl Into<Op>, results: &[(usize, Axis)]) -> Op {
        let step = |&(of, axis): &(usize, Axis)| Epilogue::Quantize {
            of,
            quantize: Quantize { format: QuantFormat::MXFP8, axis },
        };
        let epilogue = results.iter().map(step).collect();
        let skipped = results.iter().map(|&(of, _)| of).filter(|&of| of != 1).collect();
        Fused { core: Box::new(core.into()), epilogue, skipped }.into()
    }

    #[test]
    fn requests_that_kernels_serve() {
        let check =
            |op: Op, inputs: usize, columns: usize, dtype: DType, expected: Option<&str>| {
                let matrix = OperandType { dtype, shape: vec![40, columns] };
                let inputs = vec![matrix; inputs];
                let mut operands = inputs.clone();
                operands.extend(op.outputs_of(&inputs).unwrap());
                let request =
                    KernelRequest { op: &op, operands: &operands, input_count: inputs.len() };
                let set = epilogue(op.leading());
                let reason = set.reject(&op).or_else(|| reject(&request));
                match expected {
                    None => assert_eq!(reason, None),
                    Some(part) => {
                        let reason = reason.unwrap_or_default();
                        assert!(reason.contains(part), "`{reason}` lacks `{part}`");
                    }
                }
            };
        let bf16 = DType::Bf16;
        let gelu = || fused(Gelu { tanh: true }, &[(0, Axis::Column)]);
        check(gelu(), 1, 96, bf16, None);
        check(gelu(), 1, 100, bf16, Some("multiples of 8 elements, not 100"));
        check(gelu(), 1, 96, DType::F32, Some("bf16 operands, not f32"));
        check(fused(SwiGlu {}, &[(0, Axis::Both)]), 2, 0, bf16, None);
        let backward = |outputs: &[(usize, Axis)]| fused(SwiGluBackward {}, outputs);
        check(backward(&[(1, Axis::Both), (0, Axis::Both)]), 3, 64, bf16, None);
        check(backward(&[(1, Axis::Both)]), 3, 64, bf16, Some("together"));
        check(backward(&[(0, Axis::Row), (1, Axis::Both)]), 3, 64, bf16, Some("together"));
    }
}
