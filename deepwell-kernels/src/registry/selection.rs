//! The choice among kernels of a request: the least predicted time, with reasons for all
//! rejections.

use deepwell_ir::{KernelChoice, Rejected, Selection, Tile};

use crate::registry::tuned::TunedTime;

/// Predicted time, tile and workspace of a kernel that serves a request.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) predicted_s: f64,
    pub(crate) tile: Option<Tile>,
    pub(crate) workspace_bytes: usize,
}

/// A kernel of the requested op.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) kernel: String,
    /// Rejected tiles, with reasons.
    pub(crate) tiles: Vec<(Tile, String)>,
    /// The offer, or why the kernel does not serve the request.
    pub(crate) offer: Result<Offer, String>,
}

/// Selects the fastest candidate; the first of equally fast candidates.
///
/// # Errors
/// All candidates with their reasons, if none serves the request.
pub(crate) fn fastest(candidates: Vec<Candidate>) -> Result<Selection, Vec<Rejected>> {
    let mut best: Option<(usize, f64)> = None;
    for (index, candidate) in candidates.iter().enumerate() {
        if let Ok(Offer { predicted_s, .. }) = candidate.offer
            && best.is_none_or(|(_, least_s)| predicted_s < least_s)
        {
            best = Some((index, predicted_s));
        }
    }
    let mut rejected = Vec::with_capacity(candidates.len());
    let mut choice = None;
    for (index, Candidate { kernel, tiles, offer }) in candidates.into_iter().enumerate() {
        match (offer, best) {
            (Err(reason), _) => rejected.push(Rejected { kernel, reason }),
            (Ok(offer), Some((chosen, _))) if index == chosen => {
                for (tile, reason) in tiles {
                    rejected.push(Rejected { kernel: format!("{kernel} with {tile}"), reason });
                }
                let Offer { tile, workspace_bytes, .. } = offer;
                choice = Some(KernelChoice { kernel, tile, workspace_bytes });
            }
            (Ok(offer), best) => {
                let least_s = best.map_or(0.0, |(_, least_s)| least_s);
                rejected.push(Rejected { kernel, reason: slower(offer.predicted_s, least_s) });
            }
        }
    }
    match choice {
        Some(choice) => Ok(Selection { choice, rejected }),
        None => Err(rejected),
    }
}

/// Measured times of kernels on a shape, the preferred kernel first.
pub(crate) struct Measured<'a> {
    pub(crate) times: &'a [TunedTime],
    /// Table and row of the measurement, for the reasons.
    pub(crate) place: String,
}

/// Selects the first measured kernel that serves the request with its tile; the fastest by
/// prediction if there is none.
///
/// # Errors
/// As [`fastest`].
pub(crate) fn measured(
    candidates: Vec<Candidate>,
    measured: &Measured<'_>,
) -> Result<Selection, Vec<Rejected>> {
    let of = |candidate: &Candidate, time: &TunedTime| -> bool {
        let Ok(offer) = &candidate.offer else { return false };
        let other_tiles = candidate.tiles.iter().map(|(tile, _)| Some(*tile));
        candidate.kernel == time.kernel
            && [offer.tile].into_iter().chain(other_tiles).any(|tile| tile == time.tile)
    };
    let Some(taken) =
        measured.times.iter().find(|time| candidates.iter().any(|candidate| of(candidate, time)))
    else {
        return fastest(candidates);
    };
    let time_of = |kernel: &str, tile: Option<Option<Tile>>| {
        measured
            .times
            .iter()
            .find(|time| time.kernel == kernel && tile.is_none_or(|tile| tile == time.tile))
    };
    let slower = |time: Option<&TunedTime>| match time {
        Some(time) => format!(
            "tuned: {:.4} us against {:.4} us, {:+.1} % ({})",
            time.time_s * 1e6,
            taken.time_s * 1e6,
            100.0 * (time.time_s / taken.time_s - 1.0),
            measured.place
        ),
        None => format!("tuned: not measured ({})", measured.place),
    };
    let mut choice = None;
    let mut rejected = Vec::with_capacity(candidates.len());
    for Candidate { kernel, tiles, offer } in candidates {
        let offer = match offer {
            Ok(offer) => offer,
            Err(reason) => {
                rejected.push(Rejected { kernel, reason });
                continue;
            }
        };
        if kernel != taken.kernel {
            let reason = slower(time_of(&kernel, None));
            rejected.push(Rejected { kernel, reason });
            continue;
        }
        let all = [offer.tile].into_iter().chain(tiles.into_iter().map(|(tile, _)| Some(tile)));
        for tile in all.filter(|tile| *tile != taken.tile).flatten() {
            let reason = slower(time_of(&kernel, Some(Some(tile))));
            rejected.push(Rejected { kernel: format!("{kernel} with {tile}"), reason });
        }
        let (tile, workspace_bytes) = (taken.tile, offer.workspace_bytes);
        choice = Some(KernelChoice { kernel, tile, workspace_bytes });
    }
    match choice {
        Some(choice) => Ok(Selection { choice, rejected }),
        None => Err(rejected),
    }
}

/// The least predicted time; `None` if no kernel serves the request.
pub(crate) fn least_s(candidates: &[Candidate]) -> Option<f64> {
    let offers = candidates.iter().filter_map(|candidate| candidate.offer.as_ref().ok());
    offers.map(|offer| offer.predicted_s).min_by(f64::total_cmp)
}

fn slower(predicted_s: f64, least_s: f64) -> String {
    match predicted_s > least_s {
        true => {
            format!("predicted {:.4} us against {:.4} us", predicted_s * 1e6, least_s * 1e6)
        }
        false => "no faster by prediction".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_time_wins_and_the_others_keep_their_reasons() {
        let offer = |microseconds: f64| {
            Ok(Offer { predicted_s: microseconds * 1e-6, tile: None, workspace_bytes: 0 })
        };
        let refusal = || Err("takes no such thing".to_string());
        for (offers, expected, reasons) in [
            (
                vec![refusal(), offer(3.0), offer(2.0)],
                Some("2"),
                vec!["0: takes no such thing", "1: predicted 3.0000 us against 2.0000 us"],
            ),
            (vec![offer(2.0), offer(2.0)], Some("0"), vec!["1: no faster by prediction"]),
            (vec![refusal()], None, vec!["0: takes no such thing"]),
            (vec![], None, vec![]),
        ] {
            let candidates: Vec<Candidate> = offers
                .into_iter()
                .enumerate()
                .map(|(index, offer)| Candidate {
                    kernel: index.to_string(),
                    tiles: Vec::new(),
                    offer,
                })
                .collect();
            let least = least_s(&candidates);
            let (kernel, rejected) = match fastest(candidates) {
                Ok(selection) => (Some(selection.choice.kernel), selection.rejected),
                Err(rejected) => (None, rejected),
            };
            assert_eq!((kernel.as_deref(), least.is_some()), (expected, expected.is_some()));
            let rejected: Vec<String> = rejected.iter().map(Rejected::to_string).collect();
            assert_eq!(rejected, reasons);
        }
    }
}
