//! Peak memory of small models recorded by Megatron-LM's functional tests: bytes allocated on the
//! last rank.

use super::table::{Row, Table};
use super::{Scored, ScoredRow};
use deepwell_lower::PlanError;
use deepwell_lower::schedule::{PipelineSchedule, orders};
use deepwell_search::memory::{
    AttentionKernel, MemoryRules, RecomputedModules, StageLayers, expand, stage_memory,
};
use deepwell_search::model_shape::{ExpertShape, LatentAttention};
use deepwell_search::{ActivationRecompute, ModelShape, Strategy};

/// Columns of this kind.
pub(super) const COLUMNS: [&str; 5] = ["peakB", "flags", "L", "h", "a"];

const MIB: f64 = (1u64 << 20) as f64;
/// Tokens of GPT-2's vocabulary.
const GPT2_VOCAB: usize = 50257;

pub(super) fn score(table: &Table) -> Result<Scored, PlanError> {
    let mut scored = Scored::new("peak memory, Megatron's accounting", "bytes", false);
    for row in table.rows() {
        let measured = row.positive("peakB")?;
        let run = Run::of(&row)?;
        let label = format!("{} {}", row.text("case"), row.text("env"));
        let mut scored_row = ScoredRow::new(row.line, label, "peak", run.peak(&row)?, measured);
        scored_row.unmodelled = run.unmodelled;
        scored.rows.push(scored_row);
    }
    scored.notes.push(
        "rows marked in the column `unmodelled` use a feature whose memory is not counted; they \
         are in the figures all the same"
            .to_string(),
    );
    Ok(scored)
}

/// The run described by a row.
struct Run {
    shape: ModelShape,
    at: Strategy,
    rules: MemoryRules,
    seq: usize,
    layers: StageLayers,
    unmodelled: Option<&'static str>,
}

/// The flags of a row, with or without values.
struct Flags<'a>(&'a str);

impl<'a> Flags<'a> {
    fn has(&self, word: &str) -> bool {
        self.0.split_whitespace().any(|flag| flag == word)
    }

    fn value(&self, word: &str) -> Option<&'a str> {
        self.0.split_whitespace().find_map(|flag| flag.strip_prefix(word)?.strip_prefix('='))
    }

    fn size(&self, row: &Row<'_>, word: &str) -> Result<Option<usize>, PlanError> {
        let Some(text) = self.value(word) else { return Ok(None) };
        let wrong = || row.refuse(format!("`{word}`: expected a whole number, got `{text}`"));
        text.parse().map(Some).map_err(|_| wrong())
    }
}

impl Run {
    fn of(row: &Row<'_>) -> Result<Run, PlanError> {
        let flags = Flags(row.text("flags"));
        let shape = shape(row, &flags)?;
        let seq = row.size_or("seq", 1024)?;
        let at = parallelism(row, &flags, &shape)?;
        let vocab_unit = flags.size(row, "vdiv")?.unwrap_or(128).max(1) * at.tp;
        let vocab = row.size_or("V", GPT2_VOCAB)?.div_ceil(vocab_unit) * vocab_unit;
        let mut shape = ModelShape { vocab, ..shape };
        if flags.value("pe") != Some("rope") {
            shape.positions = seq;
        }
        let layers = last_stage(row, &flags, &shape, &at)?;
        let at = Strategy { vpp: layers.chunks.len(), ..at };
        let case = row.text("case");
        let unmodelled = [
            (flags.has("mfsdp"), "Megatron-FSDP's own buffers"),
            (case.contains("offload"), "offloaded activations"),
            (flags.value("cg").is_some(), "CUDA graphs' pools"),
            (flags.value("fp8").is_some(), "FP8 copies and overlap buffers"),
            (flags.value("opt") == Some("muon"), "Muon's states"),
            (case.split('_').any(|word| word == "defer"), "deferred gradients of the embedding"),
            (flags.value("impl") == Some("local"), "buffers of the local implementation"),
        ];
        let unmodelled = unmodelled.into_iter().find(|(used, _)| *used).map(|(_, what)| what);
        let rules = rules(row, &flags, case)?;
        Ok(Run { shape, at, rules, seq, layers, unmodelled })
    }

    fn peak(&self, row: &Row<'_>) -> Result<f64, PlanError> {
        let schedule = PipelineSchedule::OneFOneB;
        let orders = orders(schedule, self.at.pp, self.at.micro_batches, self.at.vpp);
        let orders = orders.map_err(|error| row.refuse(error.to_string()))?;
        let order = &orders[self.at.pp - 1];
        let memory =
            stage_memory(&self.shape, &self.at, &self.rules, self.seq, &self.layers, order);
        Ok(memory.allocated())
    }
}

fn shape(row: &Row<'_>, flags: &Flags<'_>) -> Result<ModelShape, PlanError> {
    let (layers, hidden, heads) = (row.size("L")?, row.size("h")?, row.size("a")?);
    let gated = flags.has("swiglu");
    // Megatron-LM's default for a gated layer: two thirds, rounded down to a multiple of 64.
    let default_ffn = if gated { hidden * 8 / 3 / 64 * 64 } else { 4 * hidden };
    let ffn = row.size_or("ffn", default_ffn)?;
    let head_dim = flags.size(row, "kvch")?.unwrap_or(hidden / heads);
    let latent = if flags.has("mla") {
        // Megatron-LM's defaults if the head width is given, as for the large models.
        let rope_dim = if flags.value("kvch").is_some() { 64 } else { head_dim / 2 };
        Some(LatentAttention {
            q_rank: flags.size(row, "qlora")?.unwrap_or(0),
            kv_rank: flags.size(row, "kvlora")?.unwrap_or(512),
            qk_dim: head_dim,
            rope_dim,
            v_dim: head_dim,
        })
    } else {
        None
    };
    let experts = match row.size_or("E", 0)? {
        0 => None,
        count => Some(ExpertShape {
            experts: count,
            top_k: row.size_or("topk", 1)?,
            ffn: row.size_or("moeffn", ffn)?,
            shared_ffn: flags.size(row, "shexp")?.unwrap_or(0),
            dense_layers: dense_layers(row, flags.value("freq"))?,
        }),
    };
    Ok(ModelShape {
        ffn,
        kv_heads: row.size_or("kv", heads)?,
        head_dim,
        gated,
        tied: !flags.has("untie"),
        bias: !flags.has("nobias"),
        norm_vectors: if flags.value("norm") == Some("RMSNorm") { 1 } else { 2 },
        positions: 0,
        latent,
        experts,
        ..ModelShape::gpt(layers, hidden, heads, GPT2_VOCAB, 0)
    })
}

/// Number of leading layers without experts in `([0]*3+[1]*12)`.
fn dense_layers(row: &Row<'_>, pattern: Option<&str>) -> Result<usize, PlanError> {
    let Some(pattern) = pattern else { return Ok(0) };
    let wrong = || row.refuse(format!("`freq`: expected `([0]*N+[1]*M)`, got `{pattern}`"));
    let inner = pattern.trim_start_matches('(').trim_end_matches(')');
    match inner.split_once('+') {
        Some((zeros, ones)) if ones.starts_with("[1]") => {
            let count = zeros.strip_prefix("[0]*").ok_or_else(wrong)?;
            count.parse().map_err(|_| wrong())
        }
        None if inner.starts_with("[1]") || inner == "1" => Ok(0),
        _ => Err(wrong()),
    }
}

fn parallelism(
    row: &Row<'_>,
    flags: &Flags<'_>,
    shape: &ModelShape,
) -> Result<Strategy, PlanError> {
    let world = row.size_or("world", 8)?;
    let (tp, pp, cp) = (row.size_or("TP", 1)?, row.size_or("PP", 1)?, row.size_or("CP", 1)?);
    let dp = row.share("GPUs", world, tp * pp * cp)?;
    let (ep, etp) = (row.size_or("EP", 1)?, row.size_or("ETP", tp)?);
    let micro_batch = row.size("mbs")?;
    // As many micro-batches as stages fill a pipeline; more do not increase memory.
    let global_batch = row.size_or("gbs", micro_batch * dp * pp)?;
    let micro_batches = row.share("gbs", global_batch, micro_batch * dp)?;
    let expert_ranks = if shape.experts.is_some() { ep * etp } else { 1 };
    row.share("GPUs of a stage", world / pp, expert_ranks)?;
    let recompute = match flags.value("rc") {
        None => ActivationRecompute::None,
        Some("selective") => ActivationRecompute::Selective,
        Some("full") => ActivationRecompute::Full,
        Some(other) => {
            let what = format!("`rc`: expected selective or full, got `{other}`");
            return Err(row.refuse(what));
        }
    };
    let zero = match (flags.has("mfsdp"), flags.value("shard"), flags.has("do")) {
        (true, Some("optim_grads_params") | None, _) => 3,
        (true, Some("optim_grads"), _) => 2,
        (true, _, _) | (_, _, true) => 1,
        (false, _, false) => 0,
    };
    Ok(Strategy {
        pp,
        tp,
        sp: flags.has("sp") && tp > 1,
        cp,
        ep,
        etp,
        dp,
        zero,
        micro_batch,
        micro_batches,
        recompute,
        ..Strategy::SINGLE
    })
}

fn rules(row: &Row<'_>, flags: &Flags<'_>, case: &str) -> Result<MemoryRules, PlanError> {
    let env = row.text("env");
    let is_blackwell = env.starts_with("GB") || env.starts_with('B');
    let unfused = flags.value("attn") == Some("unfused") || flags.value("impl") == Some("local");
    let attention = match flags.value("attn") {
        _ if unfused => AttentionKernel::Unfused,
        Some("flash") => AttentionKernel::Flash,
        _ if is_blackwell => AttentionKernel::FusedWithCopy,
        _ => AttentionKernel::Flash,
    };
    // PyTorch's default is 32 MiB on Hopper and 8.125 MiB elsewhere; deterministic runs set 32.
    let flash_pair = flags.value("attn") == Some("flash") && !case.contains("nondeterministic");
    let is_deterministic = flags.has("det") || flash_pair;
    let torch_mib = if is_blackwell && !is_deterministic { 8.125 } else { 32.0 };
    // cuBLAS handles are per thread: forward passes and backward passes run on different threads.
    let mut workspace_mib = 2.0 * torch_mib;
    if flags.has("te") {
        workspace_mib += 32.0;
    }
    // Transformer Engine runs grouped GEMMs on four streams, each with a workspace.
    if flags.has("gg") {
        workspace_mib += 4.0 * 32.0;
    }
    let modules = flags.value("rcmod").map(|text| RecomputedModules {
        core_attention: listed(text, "core_attn"),
        expert_activation: listed(text, "moe_act"),
        mlp: listed(text, "mlp"),
        norms: listed(text, "layernorm"),
        mla_up: listed(text, "mla_up_proj"),
        activation: false,
    });
    let base = MemoryRules::megatron();
    Ok(MemoryRules {
        attention,
        logit_bytes: if flags.has("cef") { 10.0 } else { 6.0 },
        workspace_bytes: workspace_mib * MIB,
        attention_mask: attention != AttentionKernel::Flash || flags.value("attn").is_none(),
        qk_norm: case.contains("qk_layernorm"),
        selective: modules.unwrap_or(base.selective),
        optimizer_instances: flags.size(row, "ndoi")?.unwrap_or(1),
        ..base
    })
}

/// Whether a list such as `[layernorm+mlp]` has a module.
fn listed(list: &str, module: &str) -> bool {
    list.trim_matches(['[', ']']).split('+').any(|known| known == module)
}

/// The last stage's layers: by a layout string, by virtual stages, or in equal parts.
fn last_stage(
    row: &Row<'_>,
    flags: &Flags<'_>,
    shape: &ModelShape,
    at: &Strategy,
) -> Result<StageLayers, PlanError> {
    let (pp, case) = (at.pp, row.text("case"));
    if let Some(layout) = flags.value("layout").filter(|_| pp > 1) {
        return layout_stage(row, layout, pp);
    }
    let parts = |chunks: usize| StageLayers::even(shape.layers, pp - 1, pp, chunks);
    let text = row.text("VP");
    let number = |text: &str| match text.parse::<usize>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(row.refuse(format!("`VP`: expected N, sN or lN, got `{}`", row.text("VP")))),
    };
    let chunks = match (text.strip_prefix('l'), text.strip_prefix('s')) {
        _ if text.is_empty() => 1,
        (Some(layers), _) => {
            let layers_each = number(layers)?;
            row.share("layers", shape.layers, pp * layers_each)?
        }
        (_, Some(stages)) => number(stages)?,
        _ => number(text)?,
    };
    if case.contains("account_for_embedding_loss") {
        // Embedding and loss each count as a layer of the split.
        let each = row.share("layers with embedding and loss", shape.layers + 2, pp * chunks)?;
        let of = |part: usize| {
            let start = (part * each).max(1) - 1;
            start..((part + 1) * each - 1).min(shape.layers)
        };
        let chunks = (0..chunks).map(|chunk| of(chunk * pp + pp - 1)).collect();
        return Ok(StageLayers { chunks, has_embedding: pp == 1, has_head: true });
    }
    if case.contains("uneven_pipeline") && pp > 1 {
        // These tests put two layers on the first and on the last stage.
        let last = shape.layers.saturating_sub(2)..shape.layers;
        return Ok(StageLayers { chunks: Vec::from([last]), has_embedding: false, has_head: true });
    }
    Ok(parts(chunks))
}

/// The last stage of a layout such as `Et*3|(tt|)*6mL`.
fn layout_stage(row: &Row<'_>, layout: &str, pp: usize) -> Result<StageLayers, PlanError> {
    let wrong =
        || row.refuse(format!("`layout`: expected stages of E, t, m and L, got `{layout}`"));
    let text = expand(layout).ok_or_else(wrong)?;
    let parts: Vec<&str> = text.split('|').collect();
    let vpp = row.share("stages of the layout", parts.len(), pp)?;
    let mut first = 0;
    let mut chunks = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let count = part.chars().filter(|&kind| kind == 't').count();
        if part.chars().any(|kind| !"EtmL".contains(kind)) {
            return Err(wrong());
        }
        if index % pp == pp - 1 {
            // A layer of multi-token prediction is as large as the last layer.
            let extra = part.chars().filter(|&kind| kind == 'm').count();
            chunks.push(first..first + count + extra);
        }
        first += count;
    }
    debug_assert_eq!(chunks.len(), vpp);
    Ok(StageLayers { chunks, has_embedding: pp == 1, has_head: true })
}
