//! Tags each node with a part of a transformer, based on the graph structure.
//!
//! Residual sums and norms divide a transformer into blocks. A block with attention is an attention
//! block, any other block is a feed-forward block; module names are ignored.

use std::collections::HashSet;

use petgraph::unionfind::UnionFind;

use crate::{Op, Tag};

/// A node, and the indices of its input nodes.
pub(super) struct TagNode<'a> {
    pub(super) op: &'a Op,
    pub(super) reads: Vec<usize>,
}

/// Whether readers of the node belong to another block.
fn ends_block(op: &Op) -> bool {
    is_norm(op) || is_embedding(op) || matches!(op, Op::Add(_))
}

fn is_norm(op: &Op) -> bool {
    matches!(op, Op::RmsNorm(_) | Op::LayerNorm(_))
}

fn is_embedding(op: &Op) -> bool {
    matches!(op, Op::Embedding(_) | Op::AddPositions(_))
}

/// The tag of each node.
pub(super) fn tags(nodes: &[TagNode<'_>]) -> Vec<Tag> {
    let mut blocks = UnionFind::new(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        if is_norm(node.op) || is_embedding(node.op) {
            continue;
        }
        for &read in node.reads.iter().filter(|&&read| !ends_block(nodes[read].op)) {
            blocks.union(index, read);
        }
    }
    let blocks: Vec<usize> = blocks.into_labeling();
    let is_attention = |op: &Op| matches!(op, Op::Attention(_));
    let attending: HashSet<usize> =
        nodes.iter().zip(&blocks).filter(|(p, _)| is_attention(p.op)).map(|(_, &of)| of).collect();
    let last = nodes.len().saturating_sub(1);
    nodes
        .iter()
        .zip(&blocks)
        .enumerate()
        .map(|(index, (node, &of))| match node.op {
            op if is_embedding(op) => Tag::Embed,
            op if is_norm(op) => Tag::Norm,
            Op::HeadRmsNorm(_) => Tag::Norm,
            Op::LinearCrossEntropy(_) => Tag::Head,
            _ if attending.contains(&of) => Tag::Attn,
            // The last linear layer of a graph without loss.
            Op::Linear(_) if index == last => Tag::Head,
            _ => Tag::Mlp,
        })
        .collect()
}
