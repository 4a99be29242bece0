//! Selection of a survey's mistakes, and of the kernel for each.
//!
//! Deletions are made in every kernel, except with `once`. A mistake made once stands for all
//! kernels that a template of one source generates for one cluster size. It is made in the kernel
//! with the smallest launch, in all unrolled copies of the statement (a deletion only in the first
//! copy). The selection is deterministic.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::ValueEnum;
use deepwell_emulator::launch_file::{PreparedLaunch, SourceLine};
use deepwell_emulator::mutation::{Class, Mutation, mutations};
use rayon::prelude::*;

use crate::mutate::{Group, is_asked};

/// How many mistakes a survey makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mutations {
    /// Deletions only, each once per template and cluster size
    Once,
    /// Deletions only, in every kernel
    Deletions,
    /// Deletions in every kernel, other mistakes once per template and cluster size
    Sampled,
    /// All mistakes, in every kernel and every copy of a statement
    Full,
}

/// Key of equivalent mistakes: name, source file, CTAs of a cluster, source lines.
type Site = (&'static str, String, u32, Vec<SourceLine>);

/// Returns the mistakes to make in each kernel.
pub(crate) fn choose(
    groups: &[Group],
    mutated: &[bool],
    how: Mutations,
    classes: &[Class],
) -> Result<Vec<Vec<Mutation>>> {
    let found: Vec<(Vec<Mutation>, BTreeMap<Site, Mutation>)> = groups
        .par_iter()
        .zip(mutated)
        .map(|(group, is_mutated)| match is_mutated {
            true => Ok(divided(&group.smallest()?, how, classes)),
            false => Ok(Default::default()),
        })
        .collect::<Result<_>>()?;
    let mut chosen: Vec<Vec<Mutation>> = found.iter().map(|(all, _)| all.clone()).collect();
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|at| (groups[*at].fewest_instructions(), groups[*at].kernel.clone()));
    let mut first: BTreeMap<&Site, (usize, &Mutation)> = BTreeMap::new();
    for at in order {
        for (site, mutation) in &found[at].1 {
            first.entry(site).or_insert((at, mutation));
        }
    }
    for (at, mutation) in first.into_values() {
        chosen[at].push(mutation.clone());
    }
    Ok(chosen)
}

/// Splits a kernel's mistakes into those made in every kernel and those made once, by site.
fn divided(
    launch: &PreparedLaunch,
    how: Mutations,
    classes: &[Class],
) -> (Vec<Mutation>, BTreeMap<Site, Mutation>) {
    let mut found = launch.program().map(mutations).unwrap_or_default();
    found.retain(|mutation| is_asked(classes, mutation.class));
    let (always, others): (Vec<Mutation>, Vec<Mutation>) =
        found.into_iter().partition(|mutation| match how {
            Mutations::Full => true,
            Mutations::Once => false,
            Mutations::Deletions | Mutations::Sampled => mutation.class == Class::Deletion,
        });
    let is_made = |mutation: &Mutation| match how {
        Mutations::Once => mutation.class == Class::Deletion,
        other => other == Mutations::Sampled,
    };
    let mut sites = BTreeMap::<Site, Mutation>::new();
    for mutation in others.into_iter().filter(is_made) {
        let chain = launch.lines().chain(mutation.ptx_line);
        let source = chain.last().map(|line| line.file.clone()).unwrap_or_default();
        let inner: Vec<SourceLine> =
            chain.iter().filter(|line| line.file != source).cloned().collect();
        let lines = if inner.is_empty() { chain } else { inner };
        let site = (mutation.what, source, launch.cluster_ctas(), lines);
        match sites.get_mut(&site) {
            // Delete one copy only: if all copies of a barrier that only orders turns are deleted,
            // no check notices.
            Some(_) if mutation.class == Class::Deletion => {}
            Some(known) => known.join(mutation),
            None => drop(sites.insert(site, mutation)),
        }
    }
    (always, sites)
}
