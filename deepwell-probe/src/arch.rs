//! Architecture of a device, as one word.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The architecture that a kernel must be built for to run on a device.
///
/// As text (and in JSON) it is the family and the compute capability, `hopper-sm90` or
/// `blackwell-sm100`; a processor is `cpu`. A capability without a name is kept as the text of
/// [`Arch::Other`], so that JSON loses nothing.
///
/// ```
/// use deepwell_probe::Arch;
///
/// assert_eq!(Arch::from_compute_capability((10, 0)), Arch::BlackwellSm100);
/// assert_eq!("hopper-sm90".parse(), Ok(Arch::HopperSm90));
/// assert_eq!(Arch::from_compute_capability((13, 7)).to_string(), "sm137");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// The processor itself.
    Cpu,
    /// Compute capability 7.0: V100.
    VoltaSm70,
    /// Compute capability 7.5: T4, RTX 20.
    TuringSm75,
    /// Compute capability 8.0: A100, A30.
    AmpereSm80,
    /// Compute capability 8.6: A10, A40, RTX 30.
    AmpereSm86,
    /// Compute capability 8.7: Jetson Orin.
    AmpereSm87,
    /// Compute capability 8.9: L4, L40S, RTX 40.
    AdaSm89,
    /// Compute capability 9.0: H100, H200, GH200.
    HopperSm90,
    /// Compute capability 10.0: B100, B200, GB200.
    BlackwellSm100,
    /// Compute capability 10.3: B300, GB300.
    BlackwellSm103,
    /// Compute capability 11.0: Jetson Thor.
    BlackwellSm110,
    /// Compute capability 12.0: RTX 50, RTX PRO 6000 Blackwell.
    BlackwellSm120,
    /// Compute capability 12.1: GB10.
    BlackwellSm121,
    /// Any other architecture, as text.
    Other(String),
}

/// An architecture with text and compute capability.
type Named = (Arch, &'static str, Option<(u32, u32)>);

/// Every architecture except [`Arch::Other`].
const NAMED: [Named; 13] = [
    (Arch::Cpu, "cpu", None),
    (Arch::VoltaSm70, "volta-sm70", Some((7, 0))),
    (Arch::TuringSm75, "turing-sm75", Some((7, 5))),
    (Arch::AmpereSm80, "ampere-sm80", Some((8, 0))),
    (Arch::AmpereSm86, "ampere-sm86", Some((8, 6))),
    (Arch::AmpereSm87, "ampere-sm87", Some((8, 7))),
    (Arch::AdaSm89, "ada-sm89", Some((8, 9))),
    (Arch::HopperSm90, "hopper-sm90", Some((9, 0))),
    (Arch::BlackwellSm100, "blackwell-sm100", Some((10, 0))),
    (Arch::BlackwellSm103, "blackwell-sm103", Some((10, 3))),
    (Arch::BlackwellSm110, "blackwell-sm110", Some((11, 0))),
    (Arch::BlackwellSm120, "blackwell-sm120", Some((12, 0))),
    (Arch::BlackwellSm121, "blackwell-sm121", Some((12, 1))),
];

impl Arch {
    /// The architecture of a CUDA compute capability, `(major, minor)`.
    pub fn from_compute_capability(capability: (u32, u32)) -> Arch {
        NAMED
            .iter()
            .find(|(_, _, named)| *named == Some(capability))
            .map(|(arch, _, _)| arch.clone())
            .unwrap_or_else(|| Arch::Other(format!("sm{}{}", capability.0, capability.1)))
    }

    /// The CUDA compute capability, `None` for a processor and for [`Arch::Other`].
    pub fn compute_capability(&self) -> Option<(u32, u32)> {
        NAMED.iter().find(|(arch, _, _)| arch == self).and_then(|(_, _, capability)| *capability)
    }

    /// Whether this is a Blackwell architecture.
    pub fn is_blackwell(&self) -> bool {
        matches!(
            self,
            Arch::BlackwellSm100
                | Arch::BlackwellSm103
                | Arch::BlackwellSm110
                | Arch::BlackwellSm120
                | Arch::BlackwellSm121
        )
    }

    /// Whether matrix units apply the block scales of MXFP8 operands.
    pub fn has_block_scaled_matrix_units(&self) -> bool {
        self.is_blackwell()
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = NAMED.iter().find(|(arch, _, _)| arch == self);
        match (named, self) {
            (Some((_, text, _)), _) => formatter.pad(text),
            (None, Arch::Other(text)) => formatter.pad(text),
            (None, _) => unreachable!("every architecture but `Other` is in `NAMED`"),
        }
    }
}

impl FromStr for Arch {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Arch, Infallible> {
        Ok(NAMED
            .iter()
            .find(|(_, named, _)| *named == text)
            .map(|(arch, _, _)| arch.clone())
            .unwrap_or_else(|| Arch::Other(text.to_owned())))
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Arch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Arch, D::Error> {
        let text = String::deserialize(deserializer)?;
        let Ok(arch) = text.parse();
        Ok(arch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_capability_go_both_ways() {
        for (arch, text, capability) in NAMED {
            assert_eq!(arch.to_string(), text);
            assert_eq!(text.parse(), Ok(arch.clone()));
            assert_eq!(arch.compute_capability(), capability);
            if let Some(capability) = capability {
                assert_eq!(Arch::from_compute_capability(capability), arch);
            }
            let json = serde_json::to_string(&arch).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<Arch>(&json).unwrap(), arch);
        }
    }

    #[test]
    fn an_unknown_architecture_keeps_its_text() {
        let arch = Arch::from_compute_capability((14, 2));
        assert_eq!(arch, Arch::Other("sm142".to_owned()));
        let json = serde_json::to_string(&arch).unwrap();
        assert_eq!(serde_json::from_str::<Arch>(&json).unwrap(), arch);
        assert!(!arch.has_block_scaled_matrix_units());
    }
}
