//! The dimensions of the search, and pins: fixed or forbidden values.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{ActivationRecompute, LayerSplit, Strategy};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::PipelineSchedule;

/// A dimension of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dimension {
    /// Pipeline stages.
    Pp,
    /// Chunks per stage.
    Vpp,
    /// Schedule, by index in [`PipelineSchedule::ALL`].
    Schedule,
    /// Distribution of layers over stages, by index in [`crate::LayerSplit::ALL`].
    Split,
    /// Tensor-parallel ranks.
    Tp,
    /// Whether tensor-parallel ranks split the sequence between the GEMMs.
    Sp,
    /// Context-parallel ranks.
    Cp,
    /// Expert-parallel ranks.
    Ep,
    /// Tensor-parallel ranks of an expert.
    Etp,
    /// Data-parallel ranks.
    Dp,
    /// ZeRO stage.
    Zero,
    /// Sequences per micro-batch.
    Mbs,
    /// Recomputation, by index in [`ActivationRecompute::ALL`].
    Recompute,
    /// Whether the optimizer is on the host.
    Offload,
    /// GPUs.
    Gpus,
}

impl Dimension {
    /// All dimensions.
    pub const ALL: [Dimension; 15] = [
        Dimension::Pp,
        Dimension::Vpp,
        Dimension::Schedule,
        Dimension::Split,
        Dimension::Tp,
        Dimension::Sp,
        Dimension::Cp,
        Dimension::Ep,
        Dimension::Etp,
        Dimension::Dp,
        Dimension::Zero,
        Dimension::Mbs,
        Dimension::Recompute,
        Dimension::Offload,
        Dimension::Gpus,
    ];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Dimension::Pp => "pp",
            Dimension::Vpp => "vpp",
            Dimension::Schedule => "schedule",
            Dimension::Split => "split",
            Dimension::Tp => "tp",
            Dimension::Sp => "sp",
            Dimension::Cp => "cp",
            Dimension::Ep => "ep",
            Dimension::Etp => "etp",
            Dimension::Dp => "dp",
            Dimension::Zero => "zero",
            Dimension::Mbs => "mbs",
            Dimension::Recompute => "recompute",
            Dimension::Offload => "offload",
            Dimension::Gpus => "gpus",
        }
    }

    /// The dimension's value in a plan.
    pub fn of(self, at: &Strategy) -> usize {
        match self {
            Dimension::Pp => at.pp,
            Dimension::Vpp => at.vpp,
            Dimension::Schedule => at.schedule as usize,
            Dimension::Split => at.split as usize,
            Dimension::Tp => at.tp,
            Dimension::Sp => usize::from(at.sp),
            Dimension::Cp => at.cp,
            Dimension::Ep => at.ep,
            Dimension::Etp => at.etp,
            Dimension::Dp => at.dp,
            Dimension::Zero => usize::from(at.zero),
            Dimension::Mbs => at.micro_batch,
            Dimension::Recompute => at.recompute as usize,
            Dimension::Offload => usize::from(at.offload),
            Dimension::Gpus => at.gpus(),
        }
    }

    /// The dimension's value in a plan, in the syntax of a pin.
    pub fn text_of(self, at: &Strategy) -> String {
        match self {
            Dimension::Schedule => at.schedule.name().to_string(),
            Dimension::Recompute => at.recompute.name().to_string(),
            Dimension::Split => at.split.name().to_string(),
            _ => self.of(at).to_string(),
        }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A fixed value of a dimension, `tp=4`, or a forbidden value, `tp!=4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The dimension.
    pub dimension: Dimension,
    /// The value.
    pub value: usize,
    /// Whether the value is forbidden.
    pub forbidden: bool,
}

impl Pin {
    /// Whether a plan satisfies the pin.
    pub fn allows(&self, at: &Strategy) -> bool {
        (self.dimension.of(at) == self.value) != self.forbidden
    }

    /// Forbids a dimension, `cp`, or a single value, `cp=4`.
    ///
    /// # Errors
    /// A dimension without an off value, or text that is not a pin.
    pub fn forbid(text: &str) -> Result<Pin, PlanError> {
        if text.contains('=') {
            return Ok(Pin { forbidden: true, ..text.parse()? });
        }
        let without = match text {
            "pp" | "vpp" | "tp" | "cp" | "ep" | "etp" | "dp" => 1,
            "zero" | "recompute" | "split" | "sp" | "offload" => 0,
            _ => {
                return Err(PlanError::Request {
                    what: "dimension to forbid",
                    expected: "pp, vpp, split, tp, sp, cp, ep, etp, dp, zero, recompute or \
                               offload, or a value of any dimension such as schedule=zb-h2"
                        .to_string(),
                    got: format!("`{text}`"),
                });
            }
        };
        format!("{text}={without}").parse()
    }
}

impl fmt::Display for Pin {
    /// In the syntax of the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pin { dimension, value, forbidden } = *self;
        let value = match dimension {
            Dimension::Schedule => PipelineSchedule::ALL.get(value).map(ToString::to_string),
            Dimension::Split => LayerSplit::ALL.get(value).map(|split| split.name().to_string()),
            Dimension::Recompute => {
                ActivationRecompute::ALL.get(value).map(|rule| rule.name().to_string())
            }
            _ => Some(value.to_string()),
        };
        let sign = if forbidden { "!=" } else { "=" };
        write!(f, "{dimension}{sign}{}", value.unwrap_or_default())
    }
}

impl FromStr for Pin {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Pin, PlanError> {
        let wrong = || PlanError::Request {
            what: "pin",
            expected: format!(
                "one of {}, then `=` or `!=`, then a number or name",
                Dimension::ALL.map(Dimension::name).join(", ")
            ),
            got: format!("`{text}`"),
        };
        let (left, value) = text.split_once('=').ok_or_else(wrong)?;
        let forbidden = left.ends_with('!');
        let left = left.trim_end_matches('!').trim();
        let dimension = Dimension::ALL.into_iter().find(|known| known.name() == left);
        let dimension = dimension.ok_or_else(wrong)?;
        let value = match (dimension, value.trim()) {
            (Dimension::Schedule, value) => value.parse::<PipelineSchedule>()? as usize,
            (Dimension::Split, value) => {
                let place = LayerSplit::ALL.iter().position(|of| of.name() == value);
                place.or_else(|| value.parse().ok()).ok_or_else(wrong)?
            }
            (Dimension::Recompute, value) => {
                let place = ActivationRecompute::ALL.iter().position(|of| of.name() == value);
                place.or_else(|| value.parse().ok()).ok_or_else(wrong)?
            }
            (_, value) => value.parse().map_err(|_| wrong())?,
        };
        Ok(Pin { dimension, value, forbidden })
    }
}
