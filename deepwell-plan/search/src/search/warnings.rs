//! Warnings about a plan, each with a remedy.

use super::page::grouped;
use super::{BUBBLE_MAX, Found, SearchRequest};
use crate::Strategy;

/// Largest multiple of the batch tried against a bubble.
const BATCHES_MAX: usize = 64;
/// Share of the memory limit above which a plan is nearly full.
const FULL: f64 = 0.98;

/// The warnings of a found plan.
pub(super) fn of(request: &SearchRequest, found: &Found) -> Vec<String> {
    let mut warnings = Vec::new();
    let at = &found.best.at;
    if found.step.bubble > BUBBLE_MAX {
        warnings.push(bubble(request, found));
    }
    let limit = request.memory_limit_bytes();
    if found.best.memory_bytes > FULL * limit {
        let left = (limit - found.best.memory_bytes) / 1e9;
        let less = found.front.iter().find(|other| other.memory_bytes < 0.9 * limit);
        let cure = less.map_or(String::new(), |other| {
            let slower = 100.0 * (other.seconds / found.best.seconds - 1.0);
            let gigabytes = other.memory_bytes / 1e9;
            format!("; {} needs {gigabytes:.1} GB and is {slower:.1} % slower", other.at)
        });
        warnings.push(format!("{left:.1} GB of the fullest GPU are left{cure}"));
    }
    warnings.extend(indivisible_batch(request, at.gpus()));
    let used = request.gpus.iter().copied().max().unwrap_or(0);
    if at.gpus() < used {
        warnings.push(format!("{} of {used} GPUs have nothing to do", used - at.gpus()));
    }
    warnings
}

/// Warns if the GPUs do not divide the batch, and names the two nearest batches that they divide.
///
/// With fewer sequences than GPUs, the warning is about the largest number of GPUs with a sequence
/// each.
fn indivisible_batch(request: &SearchRequest, gpus: usize) -> Option<String> {
    let batch = request.global_batch;
    let most = (1..=gpus.min(batch)).rev().find(|ranks| gpus.is_multiple_of(*ranks))?;
    if batch.is_multiple_of(most) {
        return None;
    }
    let ranks = (1..most)
        .rev()
        .find(|ranks| gpus.is_multiple_of(*ranks) && batch.is_multiple_of(*ranks))?;
    let below = batch / most * most;
    Some(format!(
        "{gpus} GPUs share a batch of {} sequences among {ranks} data-parallel ranks at most; \
         with `--batch {below}` or `--batch {}` among {most}",
        grouped(batch as f64),
        below + most
    ))
}

/// Warns of the bubble and lists the changes that make it small.
fn bubble(request: &SearchRequest, found: &Found) -> String {
    let at = &found.best.at;
    let mut cures = Vec::new();
    let larger = (2..=BATCHES_MAX).find_map(|times| {
        let at = Strategy { micro_batches: at.micro_batches * times, ..*at };
        let bubble = request.estimate(&at).bubble;
        (bubble <= BUBBLE_MAX).then_some((at.global_batch(), bubble))
    });
    if let Some((batch, bubble)) = larger {
        let percent = 100.0 * bubble;
        cures.push(format!("`--batch {batch}` would make it {percent:.1} %"));
    }
    if let Some(other) = &found.small_bubble {
        let slower = 100.0 * (other.seconds / found.best.seconds - 1.0);
        let percent = 100.0 * other.bubble;
        cures.push(format!("{} has {percent:.1} % and is {slower:.1} % slower", other.at));
    }
    if cures.is_empty() {
        cures.push("no batch and no other plan that fits has a smaller one".to_string());
    }
    format!("the bubble is {:.1} %: {}", 100.0 * found.step.bubble, cures.join("; "))
}
