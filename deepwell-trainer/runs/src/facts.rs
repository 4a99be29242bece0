//! Facts of a run: machine, sizes, memory, precision.
//!
//! A finished run has them in `summary.json`, a running one in `facts.json`, a run of an earlier
//! version in part in the fingerprint of `run.json`. Each value is read by its own key: a file of
//! another version gives the values in common.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::settings::flatten;

/// Facts of a run; `None` where no file has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// 32 hexadecimal digits.
    pub id: Option<String>,
    /// Time of the start as text.
    pub started: Option<String>,
    /// Version of Deepwell.
    pub version: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// Name of the precision.
    pub precision_name: Option<String>,
    /// The device, as in `cuda:0`.
    pub device: Option<String>,
    /// GPU or processor.
    pub machine: Option<String>,
    /// Version of the GPU's driver.
    pub driver: Option<String>,
    /// Memory of the GPU, otherwise of the machine, bytes.
    pub memory_bytes: Option<f64>,
    /// Dense BF16 peak of a rank, FLOP/s.
    pub peak_bf16_flops: Option<f64>,
    /// Origin of the peak.
    pub peak_source: Option<String>,
    /// Number of ranks.
    pub ranks: Option<u64>,
    /// Trained values.
    pub params: Option<f64>,
    /// Tokens of a step.
    pub tokens_per_step: Option<f64>,
    /// FLOPs of a step of a rank.
    pub flops_per_step: Option<f64>,
    /// Recomputation in the backward pass.
    pub recompute: Option<String>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Predicted peak memory, bytes.
    pub peak_bytes_predicted: Option<f64>,
    /// Measured peak memory, bytes.
    pub peak_bytes_measured: Option<f64>,
    /// Predicted bytes by kind at the peak.
    pub bytes_at_peak: BTreeMap<String, f64>,
    /// Quantized share of the FLOPs of linear layers, 0 to 1.
    pub quantized_share: Option<f64>,
    /// Format of each tensor: name, format, reason.
    pub precision: Vec<[String; 3]>,
    /// Parts of the precision that the device does not serve.
    pub fallbacks: Vec<String>,
    /// Whether the run was stopped on request; `None` without a summary.
    pub interrupted: Option<bool>,
    /// Step of the summary.
    pub summary_step: Option<u64>,
    /// Wall time, of a run that never resumed.
    pub wall_s: Option<f64>,
    /// Stalls for checkpoints, seconds.
    pub checkpoint_stalls_s: Option<f64>,
    /// Hash of the tokens.
    pub data_hash: Option<String>,
    /// Source of the data.
    pub data_source: Option<String>,
}

/// The three files of a run, null where one is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Files {
    pub(crate) record: Value,
    pub(crate) facts: Value,
    pub(crate) summary: Value,
}

impl Files {
    /// The first value that is not null.
    fn first(&self, pointers: &[(&Value, &str)]) -> Option<Value> {
        let values = pointers.iter().filter_map(|(file, pointer)| file.pointer(pointer));
        values.filter(|value| !value.is_null()).map(Value::clone).next()
    }

    /// A value of `facts.json`, otherwise of `summary.json`, under one key.
    fn of_either(&self, pointer: &str) -> Option<Value> {
        // A summary of an earlier process is older than the facts of a resumed run.
        self.first(&[(&self.facts, pointer), (&self.summary, pointer)])
    }

    fn print(&self, key: &str) -> Option<Value> {
        self.first(&[(&self.record, &format!("/fingerprint/{key}"))])
    }

    /// All settings by key.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
        let mut flat = BTreeMap::new();
        match self.of_either("/settings") {
            Some(settings) => flatten("", &settings, &mut flat),
            // The fingerprint has those that change the numbers, and hashes and kernels.
            None => {
                let print = self.record.get("fingerprint").cloned().unwrap_or_default();
                flatten("", &print, &mut flat);
                flat.retain(|key, _| !key.starts_with("kernels."));
            }
        }
        // Another folder is another run, but no other setting.
        flat.retain(|key, _| !matches!(key.as_str(), "out" | "cache_dir"));
        flat
    }

    /// The facts.
    pub(crate) fn facts(&self) -> Facts {
        let text = |value: Option<Value>| value.and_then(|it| it.as_str().map(str::to_owned));
        let number = |value: Option<Value>| value.and_then(|it| it.as_f64());
        let whole = |value: Option<Value>| value.and_then(|it| it.as_u64());
        let of_print = number(self.print("seq_len")).zip(number(self.print("batch_size")));
        let resumed = self.summary.pointer("/fit/resumed_after").is_some_and(Value::is_u64);
        let stalls = self.summary.pointer("/fit/checkpoint_stalls_s").and_then(Value::as_array);
        let summary = |pointer: &str| self.first(&[(&self.summary, pointer)]);
        let record = |pointer: &str| self.first(&[(&self.record, pointer)]);
        Facts {
            id: text(record("/id")),
            started: text(record("/started")),
            version: text(record("/version")),
            model: text(self.of_either("/settings/model")),
            precision_name: self.precision_name(),
            device: text(self.of_either("/settings/device")).or(text(self.print("device"))),
            machine: text(self.of_either("/machine/name")),
            driver: text(self.of_either("/machine/driver")),
            memory_bytes: number(self.of_either("/machine/memory_bytes")),
            peak_bf16_flops: number(self.of_either("/machine/peak_bf16_flops")),
            peak_source: text(self.of_either("/machine/peak_source")),
            ranks: whole(self.of_either("/ranks")),
            params: number(self.of_either("/params")),
            tokens_per_step: number(self.of_either("/tokens_per_step"))
                .or(of_print.map(|(seq, batch)| seq * batch)),
            flops_per_step: number(self.of_either("/flops_per_step")),
            recompute: text(self.of_either("/recompute")),
            steps: whole(self.of_either("/settings/steps")).or(whole(self.print("steps"))),
            peak_bytes_predicted: number(self.of_either("/peak_bytes_predicted")),
            peak_bytes_measured: number(summary("/peak_bytes_measured")),
            bytes_at_peak: self.bytes_at_peak(),
            quantized_share: number(summary("/quantized_flop_share"))
                .or(number(summary("/mxfp8_flop_share")))
                .or(number(self.of_either("/quantized_flop_share_planned"))),
            precision: self.precision(),
            fallbacks: self.fallbacks(),
            interrupted: summary("/fit/interrupted").and_then(|it| it.as_bool()),
            summary_step: whole(summary("/fit/step")),
            wall_s: number(summary("/wall_s")).filter(|_| !resumed),
            checkpoint_stalls_s: stalls.map(|all| all.iter().filter_map(Value::as_f64).sum()),
            data_hash: text(self.print("data")),
            data_source: text(summary("/data/source")),
        }
    }

    /// Name of the precision; of a policy file its format.
    fn precision_name(&self) -> Option<String> {
        let of_policy = self.print("policy/format");
        let policy = self.of_either("/settings/policy");
        let name = match policy {
            Some(_) => of_policy,
            None => self.of_either("/settings/precision").or(of_policy),
        };
        name.and_then(|name| name.as_str().map(str::to_owned))
    }

    fn bytes_at_peak(&self) -> BTreeMap<String, f64> {
        let bytes = self.of_either("/bytes_at_peak");
        let kinds = bytes.as_ref().and_then(Value::as_object).into_iter().flatten();
        kinds.filter_map(|(kind, bytes)| Some((kind.clone(), bytes.as_f64()?))).collect()
    }

    fn precision(&self) -> Vec<[String; 3]> {
        let tensors = self.of_either("/precision");
        let tensors = tensors.as_ref().and_then(Value::as_array).into_iter().flatten();
        let text = |tensor: &Value, key: &str| tensor[key].as_str().unwrap_or("").to_owned();
        tensors.map(|it| ["tensor", "format", "reason"].map(|key| text(it, key))).collect()
    }

    fn fallbacks(&self) -> Vec<String> {
        let all = self.of_either("/precision_fallbacks");
        let all = all.as_ref().and_then(Value::as_array).into_iter().flatten();
        let describe = |it: &Value| {
            let text = |key: &str| it[key].as_str().unwrap_or("?").to_owned();
            format!("{} runs in {}: {}", text("asked"), text("format"), text("reason"))
        };
        all.map(describe).collect()
    }
}
