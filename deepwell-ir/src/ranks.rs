//! The rank of a program and the process groups of the rank.

use serde::{Deserialize, Serialize};

/// Index of a process group in its [`Ranks`].
///
/// Ranks may use the same index for different groups: each data-parallel group of a mesh is "group
/// 0" to its own members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupId(pub u32);

impl GroupId {
    /// The id as an index into [`Ranks::groups`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Ranks that take part in collectives together.
///
/// Two groups may have the same ranks. Each group is a separate communicator, and only the order of
/// collectives within one group is common to its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessGroup {
    /// Unique among the groups of a rank, `data` for example; the same on all members.
    pub name: String,
    /// Ranks in the order of sums, slices and positions.
    pub ranks: Vec<u32>,
}

impl ProcessGroup {
    /// Name of the group that replicates a model's weights and splits the batches of a step.
    pub const DATA: &str = "data";
    /// Name of the group that splits each layer.
    pub const TENSOR: &str = "tensor";
    /// Name of the group of pipeline stages, in layer order.
    pub const PIPELINE: &str = "pipeline";
    /// Name of the group of the first and the last stage, which both hold tied embeddings.
    pub const EMBEDDING: &str = "embedding";
    /// Name of the group of data-parallel ranks that split each sequence.
    pub const CONTEXT: &str = "context";
    /// Name of the group that splits the experts of a layer.
    pub const EXPERT: &str = "expert";
    /// Name of the group of data-parallel ranks that have the same experts.
    pub const EXPERT_DATA: &str = "expert_data";

    /// Name of the group of all ranks, for messages between hosts.
    pub const HOST: &str = "host";

    /// Position of a rank in the group.
    pub fn position_of(&self, rank: u32) -> Option<usize> {
        self.ranks.iter().position(|&member| member == rank)
    }
}

/// A rank as a member of a group that splits layers, experts or sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRank {
    /// The group, for collectives.
    pub group: GroupId,
    /// Position in the group.
    pub place: usize,
    /// Number of ranks in the group.
    pub ranks: usize,
}

/// One rank of a world of several; by default the only one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ranks {
    /// Index of the rank, counted from 0.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Groups that this rank is in.
    pub groups: Vec<ProcessGroup>,
}

impl Default for Ranks {
    fn default() -> Ranks {
        Ranks { rank: 0, world_size: 1, groups: Vec::new() }
    }
}

impl Ranks {
    /// Whether the world is one rank without groups.
    pub fn is_single(&self) -> bool {
        *self == Ranks::default()
    }

    /// Returns the group with this id.
    pub fn group(&self, id: GroupId) -> Option<&ProcessGroup> {
        self.groups.get(id.index())
    }

    /// Finds a group by name; returns the group and its id.
    pub fn named(&self, name: &str) -> Option<(GroupId, &ProcessGroup)> {
        let index = self.groups.iter().position(|group| group.name == name)?;
        Some((GroupId(index as u32), &self.groups[index]))
    }

    /// This rank's membership in the group of a name, if there is such a group.
    ///
    /// ```
    /// use deepwell_ir::{GroupId, GroupRank, ProcessGroup, Ranks};
    ///
    /// let tensor = ProcessGroup { name: ProcessGroup::TENSOR.to_string(), ranks: vec![2, 3] };
    /// let ranks = Ranks { rank: 3, world_size: 4, groups: vec![tensor] };
    /// let member = GroupRank { group: GroupId(0), place: 1, ranks: 2 };
    /// assert_eq!(ranks.member_of(ProcessGroup::TENSOR), Some(member));
    /// assert_eq!(ranks.member_of(ProcessGroup::EXPERT), None);
    /// ```
    pub fn member_of(&self, name: &str) -> Option<GroupRank> {
        let (group, members) = self.named(name)?;
        let place = members.position_of(self.rank)?;
        Some(GroupRank { group, place, ranks: members.ranks.len() })
    }

    /// Checks that the rank is in the world, and that each group has a unique name and distinct
    /// ranks of the world, including this one.
    ///
    /// # Errors
    /// The expected and the actual value.
    pub fn check(&self) -> Result<(), String> {
        let Ranks { rank, world_size, groups } = self;
        if rank >= world_size {
            return Err(format!("expected a rank below the world's size {world_size}, got {rank}"));
        }
        for (index, group) in groups.iter().enumerate() {
            let name = &group.name;
            if groups[..index].iter().any(|other| other.name == *name) {
                return Err(format!("expected groups of different names, got two `{name}`"));
            }
            if group.position_of(*rank).is_none() {
                return Err(format!(
                    "expected rank {rank} in its group `{name}`, got {:?}",
                    group.ranks
                ));
            }
            for (position, member) in group.ranks.iter().enumerate() {
                if member >= world_size || group.ranks[..position].contains(member) {
                    return Err(format!(
                        "expected different ranks below {world_size} in group `{name}`, got {:?}",
                        group.ranks
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_worlds_are_named() {
        let group = |name: &str, ranks: &[u32]| ProcessGroup {
            name: name.to_string(),
            ranks: ranks.to_vec(),
        };
        let ranks = |rank, groups| Ranks { rank, world_size: 4, groups };
        assert!(Ranks::default().is_single() && Ranks::default().check().is_ok());
        for (ranks, expected) in [
            (ranks(3, vec![group("data", &[1, 3]), group("model", &[3, 2])]), None),
            (ranks(4, vec![]), Some("expected a rank below the world's size 4, got 4")),
            (ranks(0, vec![group("data", &[1, 2])]), Some("expected rank 0 in its group `data`")),
            (ranks(0, vec![group("data", &[0, 4])]), Some("expected different ranks below 4")),
            (ranks(0, vec![group("data", &[0, 1, 1])]), Some("expected different ranks below 4")),
            (
                ranks(0, vec![group("data", &[0]), group("data", &[0, 1])]),
                Some("expected groups of different names, got two `data`"),
            ),
        ] {
            match (ranks.check(), expected) {
                (Ok(()), None) => {}
                (Err(got), Some(expected)) => assert!(got.starts_with(expected), "{got}"),
                (got, expected) => panic!("{ranks:?}: expected {expected:?}, got {got:?}"),
            }
        }
    }
}
