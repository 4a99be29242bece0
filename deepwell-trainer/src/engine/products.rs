//! The program of the steps that measure the error of quantized GEMMs: the same plan with the same
//! state, whose GEMMs are compared with the products of unquantized operands on one tile each.

use std::sync::Arc;

use deepwell_ir::{Body, Call, GemmKind, Op, Program, ValueId};
use deepwell_kernels::{Executor, LoadedProgram};
use deepwell_plan::place_state_as;

use super::RunCounts;
use super::gemms::{Gemm, Statistics, statistics_of};
use super::routing::{LoadCounters, load_counters};
use crate::TrainError;

/// Signal and error of a GEMM in a step, over all micro-batches: sums of squares of the product and
/// of its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductSums {
    /// Index into [`Engine::gemms`](crate::Engine::gemms).
    pub gemm: usize,
    /// GEMM of the linear layer.
    pub kind: GemmKind,
    /// Sum of squares of the product of the unquantized operands.
    pub signal: f64,
    /// Sum of squares of the difference between the product of the quantized operands and that.
    pub error: f64,
}

/// Sums of a GEMM that the device writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) id: ValueId,
    gemm: usize,
    kind: GemmKind,
}

/// The products of one body.
pub(super) type Products = Arc<[Product]>;

impl Product {
    pub(super) fn decode(&self, [signal, error]: [f32; 2]) -> ProductSums {
        let (signal, error) = (signal.into(), error.into());
        ProductSums { gemm: self.gemm, kind: self.kind, signal, error }
    }
}

/// Adds sums to those of the same GEMM.
pub(super) fn add_products(all: &mut Vec<ProductSums>, other: ProductSums) {
    let is_same = |sums: &&mut ProductSums| (sums.gemm, sums.kind) == (other.gemm, other.kind);
    match all.iter_mut().find(is_same) {
        None => all.push(other),
        Some(sums) => {
            sums.signal += other.signal;
            sums.error += other.error;
        }
    }
}

/// The program of the steps that measure.
pub(super) struct Measuring {
    pub(super) program: LoadedProgram,
    pub(super) statistics: Vec<Statistics>,
    pub(super) loads: Vec<Arc<[LoadCounters]>>,
    pub(super) per_step: RunCounts,
    pub(super) products: Vec<Products>,
}

impl Measuring {
    /// Loads a program that measures beside `training`; `None` if it has no product to measure or
    /// does not fit in the arena.
    pub(super) fn load(
        executor: &mut Executor,
        mut program: Program,
        training: &Program,
        gemms: &[Gemm],
    ) -> Result<Option<Measuring>, TrainError> {
        let products = products_of(&program, gemms);
        let fits = program.arena.bytes <= executor.arena_bytes();
        if !fits || products.iter().all(|products| products.is_empty()) {
            return Ok(None);
        }
        place_state_as(&mut program, training)?;
        Ok(Some(Measuring {
            statistics: statistics_of(&program, gemms),
            loads: load_counters(&program),
            per_step: RunCounts::of_step(&program),
            products,
            program: executor.load(program)?,
        }))
    }
}

/// The products that each body measures.
fn products_of(program: &Program, gemms: &[Gemm]) -> Vec<Products> {
    let of_call = |call: &Call| {
        let Op::ProductError(op) = &call.op else { return None };
        let gemm = gemms.iter().position(|gemm| gemm.weight == op.weight)?;
        Some(Product { id: call.outputs()[0].value, gemm, kind: op.kind })
    };
    let of_body = |body: &Body| program.calls[body.calls.clone()].iter().filter_map(of_call);
    program.bodies.iter().map(|body| of_body(body).collect()).collect()
}
