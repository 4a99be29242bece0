//! Contraction of products and sums into fused multiply-adds.
//!
//! The ISA allows fusing a `mul` and an `add` or `sub` without rounding modifiers, and ptxas does
//! so: the GPU rounds once where the text rounds twice. The rules below were observed on small
//! texts compiled by ptxas 13.0 for sm_90a and sm_100a:
//!
//! - neither has a rounding modifier, the product has no guard and no `.sat`, types and `.ftz`
//!   agree;
//! - every use of the product is such a sum, in the same run of instructions without a label or a
//!   jump, and each of these sums fuses this product;
//! - a sum of two such products fuses the one with fewer uses, or the first if both have equally
//!   many.

use std::collections::HashMap;

use super::types::Type;
use crate::ptx::{Instruction, Name, Operand, Statement, StatementKind};

/// A sum that is fused with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fused {
    /// Position of the product in the body.
    pub(super) product: usize,
    /// Operand of the sum that is the product: 1 or 2.
    pub(super) operand: usize,
}

struct Product {
    position: usize,
    run: usize,
    value_type: Type,
    flush: bool,
    uses: Vec<usize>,
    qualifies: bool,
}

struct Sum {
    /// The products that are operands 1 and 2.
    products: [Option<usize>; 2],
}

/// Returns the type and `.ftz` of an arithmetic instruction without a rounding modifier.
fn open_form(line: &Instruction, sums: bool) -> Option<(Type, bool)> {
    let words = &line.opcode.words;
    let known = if sums { matches!(&*words[0], "add" | "sub") } else { &*words[0] == "mul" };
    if !known || line.operands.len() != 3 {
        return None;
    }
    let mut flush = false;
    let mut value_type = None;
    for word in &words[1..] {
        match &**word {
            "ftz" => flush = true,
            "sat" if sums => {}
            "f32" | "f64" | "f16" | "f16x2" | "bf16" | "bf16x2" if value_type.is_none() => {
                value_type = Type::from_name(word);
            }
            _ => return None,
        }
    }
    Some((value_type?, flush))
}

/// Counts how often each name is a first operand, that is, a destination.
fn definitions(body: &[Statement]) -> HashMap<&Name, u32> {
    let mut counts = HashMap::new();
    for statement in body {
        if let StatementKind::Instruction(line) = &statement.kind
            && let Some(first) = line.operands.first()
        {
            visit(first, &mut |name| *counts.entry(name).or_insert(0) += 1);
        }
    }
    counts
}

fn name_of(operand: &Operand) -> Option<&Name> {
    match operand {
        Operand::Name(name) => Some(name),
        _ => None,
    }
}

/// Returns the fused sums of a body, by position.
pub(super) fn find(body: &[Statement]) -> HashMap<usize, Fused> {
    let definitions = definitions(body);
    let single = |operand: &Operand| match operand {
        Operand::Name(name) => definitions.get(name).is_none_or(|count| *count == 1),
        _ => true,
    };
    let mut products: Vec<Product> = Vec::new();
    let mut latest: HashMap<&Name, usize> = HashMap::new();
    let mut sums: HashMap<usize, Sum> = HashMap::new();
    let mut run = 0;
    for (position, statement) in body.iter().enumerate() {
        let line = match &statement.kind {
            StatementKind::Instruction(line) => line,
            StatementKind::Label(_) => {
                run += 1;
                continue;
            }
            _ => continue,
        };
        let sum = open_form(line, true);
        let mut operands_of_sum = [None, None];
        for (place, operand) in line.operands.iter().enumerate() {
            visit(operand, &mut |name| {
                let Some(&product) = latest.get(name) else { return };
                let found = &mut products[product];
                let fits = place > 0
                    && found.run == run
                    && sum == Some((found.value_type, found.flush))
                    && name_of(operand).is_some();
                found.uses.push(position);
                if fits {
                    operands_of_sum[place - 1] = Some(product);
                } else {
                    found.qualifies = false;
                }
            });
        }
        // `x + x` uses a product twice.
        if let [Some(first), Some(second)] = operands_of_sum
            && first == second
        {
            products[first].qualifies = false;
        }
        if sum.is_some() {
            sums.insert(position, Sum { products: operands_of_sum });
        }
        if let Some((value_type, flush)) = open_form(line, false)
            && let Some(name) = name_of(&line.operands[0])
        {
            latest.insert(name, products.len());
            products.push(Product {
                position,
                run,
                value_type,
                flush,
                uses: Vec::new(),
                // Names with a single definition have the same value at the sum.
                qualifies: line.guard.is_none() && line.operands.iter().all(single),
            });
        }
        if matches!(&*line.opcode.words[0], "bra" | "brx" | "call" | "ret" | "exit") {
            run += 1;
        }
    }
    choose(&mut products, &sums)
}

/// Chooses one product for every sum. Disqualifies a product that is not chosen by all its sums,
/// and repeats until nothing changes.
fn choose(products: &mut [Product], sums: &HashMap<usize, Sum>) -> HashMap<usize, Fused> {
    loop {
        let mut chosen: HashMap<usize, Fused> = HashMap::new();
        for (&position, sum) in sums {
            let mut best: Option<(usize, usize)> = None;
            for (place, product) in sum.products.iter().enumerate() {
                let Some(product) = *product else { continue };
                let fewer =
                    |other: usize| products[product].uses.len() < products[other].uses.len();
                if products[product].qualifies && best.is_none_or(|(_, other)| fewer(other)) {
                    best = Some((place + 1, product));
                }
            }
            if let Some((operand, product)) = best {
                chosen.insert(position, Fused { product, operand });
            }
        }
        let mut changed = false;
        for (index, product) in products.iter_mut().enumerate() {
            let fused =
                |position: &usize| chosen.get(position).is_some_and(|fused| fused.product == index);
            if product.qualifies && !product.uses.iter().all(fused) {
                product.qualifies = false;
                changed = true;
            }
        }
        if !changed {
            for fused in chosen.values_mut() {
                fused.product = products[fused.product].position;
            }
            return chosen;
        }
    }
}

fn visit<'a>(operand: &'a Operand, f: &mut impl FnMut(&'a Name)) {
    match operand {
        Operand::Name(name) | Operand::Offset(name, _) => f(name),
        Operand::Address { base: Some(name), .. } => f(name),
        Operand::TensorAddress { base, coordinates, .. } => {
            if let Some(name) = base {
                f(name);
            }
            coordinates.iter().for_each(|operand| visit(operand, f));
        }
        Operand::Vector(operands) | Operand::Group(operands) => {
            operands.iter().for_each(|operand| visit(operand, f));
        }
        Operand::Pair(first, second) => {
            visit(first, f);
            visit(second, f);
        }
        Operand::Negated(operand) => visit(operand, f),
        _ => {}
    }
}
