//! Clusters: several machines and the network between them, described in TOML.

use serde::Deserialize;
use toml::Spanned;

use crate::skus::RACK_TRAYS;
use crate::{Hardware, ProbeError};

/// Machines, possibly of several kinds, and the network between the machines.
///
/// ```
/// use deepwell_probe::Cluster;
///
/// let cluster = Cluster::from_toml(
///     r#"
///     name = "sixteen boards"
///     rails = 8
///
///     [[nodes]]
///     count = 16
///     preset = "h200-x8"
///     nics = 8
///     nic_gbit_per_s = 400
///     "#,
/// )?;
/// assert_eq!(cluster.gpu_count(), 128);
/// assert_eq!(cluster.nodes[0].network_gbps(), 400.0);
/// assert_eq!(cluster.nodes[0].network_gbps_per_gpu(), Some(50.0));
/// # Ok::<(), deepwell_probe::ProbeError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Display name; may be empty.
    pub name: String,
    /// Number of rails, that is, networks joined only at the top level: NIC `i` of every node is on
    /// rail `i % rails`, and traffic between two rails first crosses NVLink within a node. 1 if
    /// every NIC reaches every other NIC alike.
    pub rails: u32,
    /// Kinds of machines, at least one.
    pub nodes: Vec<Nodes>,
    /// Price of a GPU per hour, in any currency; `None` if unknown.
    pub price_per_gpu_hour: Option<f64>,
}

/// Machines of one kind in a [`Cluster`].
#[derive(Clone, Debug, PartialEq)]
pub struct Nodes {
    /// Number of machines.
    pub count: u32,
    /// The [preset](Hardware::preset) of each machine.
    pub preset: String,
    /// Hardware of each machine.
    pub hardware: Hardware,
    /// Network interfaces per machine for GPU traffic.
    pub nics: u32,
    /// Line rate of an interface per direction, in Gbit/s as in its name (400 for NDR).
    pub nic_gbit_per_s: f64,
    /// Machines per NVLink domain: 18 in a GB200 NVL72 rack, 1 if NVLink does not leave the
    /// machine.
    pub nvlink_domain_nodes: u32,
}

impl Nodes {
    /// Number of GPUs of all these machines.
    pub fn gpu_count(&self) -> u32 {
        self.count * self.hardware.gpus.len() as u32
    }

    /// GB/s of all interfaces of a machine, per direction.
    pub fn network_gbps(&self) -> f64 {
        f64::from(self.nics) * self.nic_gbit_per_s / 8.0
    }

    /// Network GB/s per GPU in one direction while all GPUs use the network; `None` without GPUs.
    pub fn network_gbps_per_gpu(&self) -> Option<f64> {
        let gpus = self.hardware.gpus.len();
        (gpus > 0).then(|| self.network_gbps() / gpus as f64)
    }

    /// GPUs per NVLink domain; `None` if the GPUs have no NVLink.
    pub fn nvlink_domain_gpus(&self) -> Option<u32> {
        let has_nvlink = self.hardware.gpus.iter().any(|gpu| gpu.nvlinks_active > 0);
        has_nvlink.then_some(self.hardware.gpus.len() as u32 * self.nvlink_domain_nodes)
    }
}

/// The TOML file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    #[serde(default)]
    name: String,
    rails: Option<Spanned<u32>>,
    price_per_gpu_hour: Option<Spanned<f64>>,
    nodes: Spanned<Vec<NodesFile>>,
}

/// One `[[nodes]]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodesFile {
    count: Spanned<u32>,
    preset: Spanned<String>,
    nics: Spanned<u32>,
    nic_gbit_per_s: Spanned<f64>,
    nvlink_domain_nodes: Option<Spanned<u32>>,
}

/// Maximum number of machines of a kind, so that sums do not overflow.
pub(crate) const COUNT_MAX: u32 = 1_000_000;

impl Cluster {
    /// Reads a description.
    ///
    /// Keys are `rails` (default 1), `price_per_gpu_hour` and one or more `[[nodes]]`, each with
    /// `count`, `preset` (a name of [`Hardware::preset`]), `nics` (0 for machines without a
    /// network), `nic_gbit_per_s` and, if NVLink spans machines, `nvlink_domain_nodes`. Other keys
    /// are errors.
    ///
    /// # Errors
    ///
    /// [`ProbeError::Cluster`] with line and column, for invalid TOML and for values that do not
    /// describe a cluster.
    pub fn from_toml(text: &str) -> Result<Cluster, ProbeError> {
        let refuse = |start: usize, what: String| {
            let (line, column) = line_and_column(text, start);
            ProbeError::Cluster { line, column, what }
        };
        let file: ClusterFile = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(text.len(), |span| span.start);
            refuse(start, error.message().trim_end().to_owned())
        })?;
        let rails = file.rails.as_ref().map_or(1, |rails| *rails.get_ref());
        if let Some(spanned) = file.rails.as_ref().filter(|_| rails == 0) {
            let what = "expected 1 rail or more, got `0`".to_owned();
            return Err(refuse(spanned.span().start, what));
        }
        let price = file.price_per_gpu_hour.as_ref();
        let is_price = |price: f64| price >= 0.0 && price.is_finite();
        if let Some(spanned) = price.filter(|price| !is_price(*price.get_ref())) {
            let what = format!("expected a price of 0 or more, got `{}`", spanned.get_ref());
            return Err(refuse(spanned.span().start, what));
        }
        let price_per_gpu_hour = price.map(|price| *price.get_ref());
        if file.nodes.get_ref().is_empty() {
            let what = "expected at least one `[[nodes]]`, got none".to_owned();
            return Err(refuse(file.nodes.span().start, what));
        }
        let nodes = file.nodes.into_inner().into_iter();
        let nodes = nodes.map(|file| nodes_of(&file, rails, &refuse)).collect::<Result<_, _>>()?;
        Ok(Cluster { name: file.name, rails, nodes, price_per_gpu_hour })
    }

    /// Returns the description as TOML; [`Cluster::from_toml`] restores the cluster, with the
    /// hardware of its presets.
    pub fn to_toml(&self) -> String {
        let name = toml::Value::from(self.name.clone());
        let mut text = format!("name = {name}\nrails = {}\n", self.rails);
        if let Some(price) = self.price_per_gpu_hour {
            text += &format!("price_per_gpu_hour = {}\n", toml::Value::from(price));
        }
        for nodes in &self.nodes {
            let preset = toml::Value::from(nodes.preset.clone());
            text += &format!(
                "\n[[nodes]]\ncount = {}\npreset = {preset}\nnics = {}\nnic_gbit_per_s = {}\n\
                 nvlink_domain_nodes = {}\n",
                nodes.count,
                nodes.nics,
                toml::Value::from(nodes.nic_gbit_per_s),
                nodes.nvlink_domain_nodes,
            );
        }
        text
    }

    /// Number of machines of all kinds.
    pub fn node_count(&self) -> u32 {
        self.nodes.iter().map(|nodes| nodes.count).sum()
    }

    /// Number of GPUs of all machines.
    pub fn gpu_count(&self) -> u32 {
        self.nodes.iter().map(Nodes::gpu_count).sum()
    }
}

/// Checks one `[[nodes]]`; `refuse` creates an error from an offset and a message.
fn nodes_of(
    file: &NodesFile,
    rails: u32,
    refuse: &dyn Fn(usize, String) -> ProbeError,
) -> Result<Nodes, ProbeError> {
    let count = *file.count.get_ref();
    if !(1..=COUNT_MAX).contains(&count) {
        let what = format!("expected 1 to {COUNT_MAX} nodes, got `{count}`");
        return Err(refuse(file.count.span().start, what));
    }
    let preset = file.preset.get_ref().clone();
    let hardware = Hardware::preset(&preset)
        .map_err(|error| refuse(file.preset.span().start, error.to_string()))?;
    if hardware.gpus.iter().any(|gpu| gpu.nvlink_domain.is_some()) {
        let what = format!(
            "expected a preset of one machine, got `{preset}`, a rack of {RACK_TRAYS}\n\
             hint: use `{}-x4` with `nvlink_domain_nodes = {RACK_TRAYS}`",
            preset.trim_end_matches("-nvl72")
        );
        return Err(refuse(file.preset.span().start, what));
    }
    let nics = *file.nics.get_ref();
    if nics > 0 && !nics.is_multiple_of(rails) {
        let what = format!(
            "expected as many NICs on each rail, a multiple of {rails}, got `{nics}`\n\
             hint: set `rails` to a divisor of `nics`"
        );
        return Err(refuse(file.nics.span().start, what));
    }
    let nic_gbit_per_s = *file.nic_gbit_per_s.get_ref();
    if !(nic_gbit_per_s > 0.0 && nic_gbit_per_s.is_finite()) {
        let what = format!("expected a rate above 0 in Gbit/s, got `{nic_gbit_per_s}`");
        return Err(refuse(file.nic_gbit_per_s.span().start, what));
    }
    let domain = file.nvlink_domain_nodes.as_ref();
    let nvlink_domain_nodes = domain.map_or(1, |nodes| *nodes.get_ref());
    let has_nvlink = hardware.gpus.iter().any(|gpu| gpu.nvlinks_active > 0);
    if let Some(spanned) = domain {
        let what = if nvlink_domain_nodes == 0 || !count.is_multiple_of(nvlink_domain_nodes) {
            Some(format!("expected a divisor of the {count} nodes, got `{nvlink_domain_nodes}`"))
        } else if nvlink_domain_nodes > 1 && !has_nvlink {
            Some(format!(
                "expected `1`, since `{preset}` has no NVLink, got `{nvlink_domain_nodes}`"
            ))
        } else {
            None
        };
        if let Some(what) = what {
            return Err(refuse(spanned.span().start, what));
        }
    }
    Ok(Nodes { count, preset, hardware, nics, nic_gbit_per_s, nvlink_domain_nodes })
}

/// Line and column of a byte offset, both from 1, the column in characters.
fn line_and_column(text: &str, start: usize) -> (usize, usize) {
    let before = text.get(..start).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |place| place + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "rails = 4\n\n[[nodes]]\ncount = 36\npreset = \"gb200-x4\"\nnics = 4\n\
                        nic_gbit_per_s = 400\nnvlink_domain_nodes = 18\n";

    #[test]
    fn a_description_goes_both_ways() {
        let cluster = Cluster::from_toml(GOOD).unwrap();
        assert_eq!((cluster.node_count(), cluster.gpu_count(), cluster.rails), (36, 144, 4));
        assert_eq!(cluster.nodes[0].nvlink_domain_gpus(), Some(72));
        assert_eq!(cluster.nodes[0].network_gbps_per_gpu(), Some(50.0));
        let name = "a \"b\"\\".to_owned();
        let quoted = Cluster { name, price_per_gpu_hour: Some(2.25), ..cluster };
        assert_eq!(Cluster::from_toml(&quoted.to_toml()).unwrap(), quoted);
        for name in ["hgx-h100", "hgx-b300-x128", "gb200-nvl72", "gb300-nvl72-x8"] {
            let cluster = Cluster::preset(name).unwrap();
            assert_eq!(Cluster::from_toml(&cluster.to_toml()).unwrap(), cluster);
        }
    }

    #[test]
    fn kinds_add_up() {
        let text = "[[nodes]]\ncount = 2\npreset = \"h100-x8\"\nnics = 8\nnic_gbit_per_s = 400\n\
                    [[nodes]]\ncount = 1\npreset = \"cpu\"\nnics = 1\nnic_gbit_per_s = 25.5\n";
        let cluster = Cluster::from_toml(text).unwrap();
        assert_eq!((cluster.node_count(), cluster.gpu_count(), cluster.rails), (3, 16, 1));
        assert_eq!(cluster.nodes[1].network_gbps_per_gpu(), None);
        assert_eq!(cluster.nodes[1].nvlink_domain_gpus(), None);
    }

    #[test]
    fn errors_point_at_line_and_column() {
        // The text to replace in a valid file, the replacement, and position and text of the error.
        let rows = [
            ("rails = 4", "rails = 0", (1, 9), "1 rail or more"),
            ("rails = 4", "rails 4", (1, 7), ""),
            ("rails = 4", "rail = 4", (1, 1), "rail"),
            ("rails = 4", "rails = -4", (1, 9), ""),
            ("rails = 4", "price_per_gpu_hour = -1.0", (1, 22), "0 or more"),
            ("count = 36", "count = 0", (4, 9), "got `0`"),
            ("count = 36", "count = \"many\"", (4, 9), "string"),
            ("count = 36", "count = 20", (8, 23), "divisor of the 20 nodes"),
            ("\"gb200-x4\"", "\"gb200-x9\"", (5, 10), "got `gb200-x9`"),
            ("\"gb200-x4\"", "\"gb200-nvl72\"", (5, 10), "`gb200-x4` with `nvlink_domain_nodes"),
            ("\"gb200-x4\"", "\"rtx5090-x4\"", (8, 23), "has no NVLink"),
            ("\"gb200-x4\"", "\"gb200-x4", (5, 19), ""),
            ("nics = 4", "nics = 6", (6, 8), "multiple of 4"),
            ("nics = 4\n", "", (3, 1), "missing field `nics`"),
            ("= 400", "= 0", (7, 18), "above 0"),
            ("= 400", "= nan", (7, 18), "above 0"),
            ("= 18", "= 0", (8, 23), "divisor"),
        ];
        for (old, new, place, part) in rows {
            let text = GOOD.replacen(old, new, 1);
            assert_ne!(text, GOOD, "{old}");
            let error = Cluster::from_toml(&text).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(part), "{new}: {message}");
            let ProbeError::Cluster { line, column, .. } = error else { panic!("{error}") };
            assert_eq!((line, column), place, "{new}: {message}");
        }
        for (text, part) in [("", "nodes"), ("nodes = []", "at least one")] {
            let message = Cluster::from_toml(text).unwrap_err().to_string();
            assert!(message.contains("line 1") && message.contains(part), "{message}");
        }
    }

    #[test]
    fn columns_count_characters() {
        assert_eq!(line_and_column("a = \"ü\" x", 8), (1, 8));
        assert_eq!(line_and_column("a\n\nbc", 4), (3, 2));
        assert_eq!(line_and_column("", 9), (1, 1));
    }

    #[test]
    fn clusters_that_are_none_are_refused() {
        for name in ["", "h200", "hgx-gb200", "hgx-rtx5090", "h200-nvl72", "hgx-h200-x0"] {
            let message = Cluster::preset(name).unwrap_err().to_string();
            assert!(message.contains("gb200-nvl72"), "{name}: {message}");
        }
    }
}
