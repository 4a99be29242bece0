//! What goes wrong between ranks.

use deepwell_ir::ops::{CollectiveKind, Reduction};
use deepwell_ir::{DType, ProcessGroup};
use deepwell_kernels::Exchange;

use crate::rank_faults::{self, first_for_all, own_for_all, own_part};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// A control: the last bits of sums are flipped.
    Flips(u64),
    /// What a group sums is each rank's own part alone.
    NoSum(&'static str),
    /// Gradients that tensor-parallel ranks have parts of are not summed.
    NoGradientSum,
    /// Whose experts tokens chose is what the first rank's chose, for the losses of routers.
    ChoicesOfFirst,
    /// Each rank sorts the tokens of others by what its own chose.
    ChoicesStay,
    /// What the first rank gives counts for the whole group.
    NormOfFirst(&'static str),
    /// What goes around a ring is lost.
    KeysStay,
    /// Rows and gates of other ranks are this rank's own.
    RowsStay,
    /// Rows that were sent do not come back.
    NotReturned,
    /// A slice's largest magnitude counts for the whole tensor.
    OwnAmax,
}

impl Fault {
    /// Whether ranks still see the same losses and weights.
    pub(crate) fn is_sound(self) -> bool {
        matches!(self, Fault::None | Fault::Flips(_))
    }

    /// What it does to the result of an exchange. `sent` counts the exchanges that send rows, which
    /// go and come in turns.
    pub(crate) fn tamper(
        self,
        sent: &mut u64,
        rank: u32,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
    ) {
        use CollectiveKind as Kind;
        use ProcessGroup as Group;
        let (group, dtype, kind) = (exchange.group.name.as_str(), exchange.dtype, &exchange.kind);
        let is_max = *kind == Kind::AllReduce { reduction: Reduction::Max };
        let is_sent = dtype == DType::Bf16 && *kind == Kind::AllToAll;
        *sent += u64::from(is_sent);
        match (self, kind) {
            (Fault::Flips(seed), Kind::ReduceScatter { .. } | Kind::AllReduce { .. })
                if group != Group::PIPELINE && !is_max =>
            {
                flip(dtype, seed, output);
            }
            // Sums of gradients, and in BF16 keys and values.
            (Fault::Flips(seed), Kind::Shift { .. }) if group == Group::CONTEXT => {
                flip(dtype, seed, output);
            }
            (Fault::KeysStay, Kind::Shift { .. }) if group == Group::CONTEXT => output.fill(0),
            (Fault::NoSum(name), Kind::ReduceScatter { .. }) if group == name => {
                own_part(rank, exchange, input, output);
            }
            (Fault::NoSum(name), Kind::AllReduce { .. }) if group == name => {
                output.copy_from_slice(input);
            }
            (Fault::NoGradientSum, Kind::AllReduce { .. }) if group == Group::TENSOR => {
                output.copy_from_slice(input);
            }
            (Fault::OwnAmax, _) if is_max && output.len() == size_of::<f32>() => {
                output.copy_from_slice(input);
            }
            (Fault::ChoicesOfFirst, Kind::AllGather)
                if group == Group::TENSOR && dtype == DType::I32 =>
            {
                first_for_all(input, output);
            }
            (Fault::ChoicesStay, Kind::AllGather)
                if group == Group::EXPERT && dtype == DType::I32 =>
            {
                own_for_all(input, output);
            }
            (Fault::ChoicesStay, Kind::AllToAll) if dtype == DType::I32 => {
                output.copy_from_slice(input);
            }
            (Fault::NormOfFirst(name), Kind::AllGather) if group == name && dtype == DType::U64 => {
                first_for_all(input, output);
            }
            (Fault::RowsStay, Kind::AllGather) if group == Group::EXPERT && dtype == DType::F32 => {
                own_for_all(input, output);
            }
            (Fault::NotReturned, _) if is_sent && sent.is_multiple_of(2) => {
                output.copy_from_slice(input);
            }
            _ => {}
        }
    }
}

/// Flips the last bit of about half of BF16 numbers: a sum of rounded parts is off by about that.
/// Of F32 numbers the last three bits are drawn anew: a sum of K = 128 terms in another order is
/// off by about the root of K in units of half the last place.
fn flip(dtype: DType, seed: u64, output: &mut [u8]) {
    rank_faults::flip(dtype, if dtype == DType::Bf16 { 1 } else { 7 }, seed, output);
}
