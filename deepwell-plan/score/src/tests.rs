//! Tests of the scores.

use super::*;

/// Bounds that the scores may not pass, a little above what they are (docs/planner.md). Who
/// makes a score better lowers its bound.
#[test]
fn scores_do_not_get_worse() {
    // File, largest mean error, largest 90th percentile.
    let rows = [
        ("zero_bubble_rates.csv", 0.0006, 0.002),
        ("megatron_small_memory.csv", 0.0539, 0.044),
        ("korthikanti_time.csv", 0.0376, 0.08),
        ("megatron_sc21_time.csv", 0.0557, 0.097),
        ("megatron_h100_weak_scaling.csv", 0.0441, 0.072),
        ("vtrain_time.csv", 0.0889, 0.227),
        ("foundry_fsdp_h100.csv", 0.067, 0.131),
        ("megatron_sc21_zero3.csv", 0.304, 0.79),
        ("zero_bubble_memory.csv", 0.036, 0.074),
        ("deepwell_h200.csv", 0.03, 0.048),
        ("deepwell_ranks_h100.csv", 0.07, 0.15),
        ("foundry_fsdp_a100.csv", 0.073, 0.138),
        ("megatron_bridge.csv", 0.265, 1.2),
    ];
    for ((file, text), (name, mean, p90)) in TABLES.into_iter().zip(rows) {
        let scored = score(file, text).unwrap();
        assert_eq!(file, name);
        assert!(scored.mean_error() <= mean, "{file}: mean {}", scored.mean_error());
        let found = scored.error_quantile(0.9);
        assert!(found <= p90, "{file}: p90 {found}");
        for group in scored.groups() {
            let most = [("13b on a100", 0.031), ("760m on a100", 0.102)];
            let most = most.iter().find(|(name, _)| group.group == *name);
            assert!(group.regret <= most.map_or(0.02, |(_, most)| *most), "{file}: {group:?}");
            let least = [
                ("39.1B on 512", 0.5),
                ("7b on h100", 0.72),
                ("13b on a100", 0.86),
                ("760m on a100", 0.78),
            ];
            let least = least.iter().find(|(name, _)| group.group == *name);
            let least = least.map_or(0.88, |(_, tau)| *tau);
            assert!(group.tau >= least, "{file}: {group:?}");
        }
    }
    let mut memory = score(TABLES[1].0, TABLES[1].1).unwrap();
    memory.rows.retain(|row| row.unmodelled.is_none());
    assert!(memory.error_quantile(0.9) <= 0.014);
    let mut zero3 = score(TABLES[7].0, TABLES[7].1).unwrap();
    zero3.rows.retain(|row| row.unmodelled.is_none());
    assert!(zero3.rows.len() == 6 && zero3.error_quantile(1.0) <= 0.038);
    let bubbles = score(TABLES[0].0, TABLES[0].1).unwrap();
    assert!(bubbles.error_quantile(1.0) <= 0.005);
}

/// Of vTrain's plans on 512 GPUs the ranking is that of those whose tensor-parallel groups fill
/// their nodes; the others were measured far apart from their own neighbours.
#[test]
fn plans_that_fill_nodes_are_ranked() {
    let mut table = score(TABLES[5].0, TABLES[5].1).unwrap();
    table.rows.retain(|row| row.group.ends_with("512") && row.label.contains(" TP8 "));
    let found = table.groups().remove(0);
    assert!(found.rows == 26 && found.tau >= 0.8, "{found:?}");
    assert!(table.mean_error() <= 0.014, "{}", table.mean_error());
}

/// What others took for their micro-batch fits, and twice of it does not where that much can be
/// said.
#[test]
fn micro_batches_fit_where_they_did() {
    let table = score(TABLES[6].0, TABLES[6].1).unwrap();
    let fits = table.fits.unwrap();
    assert_eq!((fits.rows, fits.fits, fits.twice_does_not), (32, 32, 24), "{fits:?}");
    assert_eq!((fits.refuted, fits.next_does_not_of_others), (11, 8), "{fits:?}");
}

/// Plans of our own that no calibration saw.
#[test]
fn own_runs_are_near() {
    let (file, text) = TABLES[9];
    let scored = score(file, text).unwrap();
    let within = |group: &str, limit: f64| {
        let rows = scored.rows.iter().filter(|row| row.group == group);
        let errors: Vec<f64> = rows.map(|row| scored.error(row).abs()).collect();
        (errors.len(), errors.iter().filter(|error| **error <= limit).count())
    };
    assert_eq!(within("time", 0.05), (6, 5));
    assert_eq!(within("time", 0.054), (6, 6));
    assert_eq!(within("memory", 0.03), (4, 4));
    let header = "model,seq,gbs,mbs,precision,step_ms";
    for (cells, part) in [
        ("llama-9b,1024,8,8,bf16,1", "`model`: expected a preset"),
        ("llama-1.1b,1024,8,3,bf16,1", "gbs: expected a multiple of 3"),
        ("llama-1.1b,1024,8,8,int8,1", "`precision`: expected bf16 or mxfp8, got `int8`"),
    ] {
        let error = score("t.csv", &format!("{header}\n{cells}\n")).unwrap_err().to_string();
        assert!(error.starts_with("t.csv, line 2: ") && error.contains(part), "{error}");
    }
}

/// Runs of several ranks, which were measured before the model knew of them: steps with experts
/// were predicted 25 and 41 % too fast, one of tensor-parallel ranks 19 %. Small rings, of
/// llama-134m, were 36 and 62 % too fast before the FP32 gradients that they send and the rate of
/// their messages were counted. Memory of mixtures was up to 33 % too low before buffers for any
/// routing were counted.
#[test]
fn runs_of_several_ranks_are_near() {
    let (file, text) = TABLES[10];
    let scored = score(file, text).unwrap();
    for row in &scored.rows {
        let error = scored.error(row);
        let is_small = row.label.starts_with("llama-134m");
        let is_ring = row.label.contains(" CP");
        let limit = match (row.group.as_str(), is_small, row.label.starts_with("moe")) {
            ("time", true, _) if is_ring => 0.32,
            ("time", ..) => 0.14,
            // Of 4.5 to 5.5 GB.
            (_, true, _) => 0.2,
            (_, _, true) => 0.12,
            _ => 0.08,
        };
        assert!(error.abs() <= limit, "{}: {error}", row.label);
    }
}

/// NVIDIA's runs, which no calibration saw. Mixtures of small experts at small micro-batches are
/// not near: what their hosts do between kernels is not in the model (docs/planner.md).
#[test]
fn runs_of_megatron_bridge_are_near() {
    let (file, text) = TABLES[12];
    let scored = score(file, text).unwrap();
    for row in &scored.rows {
        let error = scored.error(row);
        let label = &row.label;
        let is_small = label.starts_with("qwen3-30b-a3b")
            && ["h100", "b200 "].iter().any(|gpu| label.contains(gpu))
            && !label.contains("gb200");
        let (least, most) = if is_small { (1.1, 1.5) } else { (-0.26, 0.23) };
        assert!((least..most).contains(&error), "{label}: {error}");
    }
    let error =
        score("t.csv", "model,seq,nGPU,precision,TP,PP,gbs,mbs,tok_s_gpu\nx,1,1,bf16,1,1,1,1,1\n");
    assert!(error.unwrap_err().to_string().contains("`model`: expected a preset, got `x`"));
}

/// PyTorch's GEMMs and attention on A100s are what their efficiencies were published for. With a
/// factor of whole steps of an H200 these runs were predicted 18 % too slow on average.
#[test]
fn efficiencies_of_a100s_are_pytorchs() {
    let (file, text) = TABLES[11];
    let scored = score(file, text).unwrap();
    let errors = scored.rows.iter().map(|row| scored.error(row));
    let near = errors.filter(|error| error.abs() <= 0.14).count();
    assert_eq!((scored.rows.len(), near), (59, 54));
}

/// Columns that a table may have: others take the place of what the kind of table says.
#[test]
fn optional_columns_are_read() {
    let label = |columns: &str, cells: &str| {
        let header = "a,h,L,TP,PP,nGPU,gbs,TF_per_GPU";
        let text = format!("{header},{columns}\n40,5120,48,8,2,64,64,140,{cells}\n");
        let scored = score("t.csv", &text).map_err(|error| error.to_string())?;
        Ok::<_, String>((scored.rows[0].label.clone(), scored.rows[0].predicted))
    };
    let (_, free) = label("params", "1B").unwrap();
    let (text, small) = label("params,mbs,VP", "1B,1,3").unwrap();
    assert!(text.contains("VPP3") && text.contains("micro-batch 1 x 16"), "{text}");
    assert!(small > free, "{small} {free}");
    let (_, long) = label("params,s", "1B,8192").unwrap();
    assert!(long > 1.9 * free, "{long} {free}");
    let (_, fast) = label("params,gpu", "1B,b200").unwrap();
    assert!(fast < 0.7 * free, "{fast} {free}");
    let error = label("params,mbs", "1B,3").unwrap_err();
    assert!(error.starts_with("t.csv, line 2: gbs of a data-parallel rank"), "{error}");
    assert!(label("params,kv", "1B,7").unwrap_err().contains("`kv`: expected a divisor of 40"));
}

/// Neighbouring rows differ by one feature; the bytes between them are a formula's.
#[test]
fn differences_of_neighbours_are_exact() {
    let header = "case,env,world,peakB,L,h,a,seq,mbs,gbs,TP,PP,flags\n";
    let peak = |flags: &str| {
        let row = format!("x,H100,8,1,12,512,8,1024,4,32,1,1,{flags}\n");
        score("t.csv", &format!("{header}{row}")).unwrap().rows[0].predicted
    };
    let tokens = 4.0 * 1024.0;
    let check = |a: &str, b: &str, bytes: f64| assert_eq!(peak(a) - peak(b), bytes, "{a}, {b}");
    // Scores, probabilities and masks, less the log-sum-exp: 12 layers of 8 heads.
    let scores = 12.0 * 8.0 * tokens * (5.0 * 1024.0);
    check("do det attn=unfused te", "do det te", scores);
    check("cef te", "te", tokens * 50304.0 * 4.0);
    check("det gg te", "det te", 128.0 * 1_048_576.0);
    check("det untie te", "det te", 18.0 * 50304.0 * 512.0);
}

/// `V` was read by no memory table, and a row without `gbs` refused its whole table.
#[test]
fn memory_rows_have_a_vocabulary_and_need_no_batch() {
    let peak = |columns: &str, cells: &str| {
        let header = format!("case,env,world,peakB,L,h,a,seq,mbs,TP,PP,flags,{columns}\n");
        let row = format!("x,H100,2,1,12,512,8,1024,4,1,2,te,{cells}\n");
        score("t.csv", &(header + &row)).unwrap().rows[0].predicted
    };
    let given = peak("gbs,V", "8,50257");
    assert_eq!(peak("gbs,V", ",50257"), given);
    assert_eq!(peak("gbs,V", "8,"), given);
    assert_eq!(peak("gbs", "16"), given);
    // The head of the last stage is at least 18 bytes a parameter larger.
    let larger = peak("gbs,V", "8,100352");
    assert!(larger - given > 18.0 * (100_352.0 - 50304.0) * 512.0, "{larger} and {given}");
}

#[test]
fn ranks_and_regret() {
    let row = |predicted, measured| ScoredRow::new(1, String::new(), "g", predicted, measured);
    let scored = |rows: &[(f64, f64)]| {
        let mut scored = Scored::new("", "", false);
        scored.ranks = true;
        scored.rows = rows.iter().map(|&(predicted, measured)| row(predicted, measured)).collect();
        scored.groups().remove(0)
    };
    let check = |rows: &[(f64, f64)], regret: f64, tau: f64| {
        let found = scored(rows);
        assert!((found.regret - regret).abs() < 1e-12, "{found:?}");
        assert!((found.tau - tau).abs() < 1e-12, "{found:?}");
    };
    check(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)], 0.0, 1.0);
    check(&[(2.0, 10.0), (1.0, 11.0)], 0.1, -1.0);
    check(&[(1.0, 10.0), (3.0, 20.0), (2.0, 30.0)], 0.0, 1.0 / 3.0);
}

#[test]
fn tables_of_no_kind_are_refused() {
    let check = |text: &str, part: &str| {
        let message = score("t.csv", text).unwrap_err().to_string();
        assert!(message.contains(part) && message.starts_with("t.csv, line "), "{message}");
    };
    check("a,b\n1,2\n", "line 1: expected the columns p, m, T_F");
    check("params_B,nGPU,gbs,mbs,h,a,L,TP,DP,PP,iter_ms\n1,8,8,1,64,4,2,2,2,4,1\n", "`nGPU`");
    check("params_B,nGPU,gbs,mbs,h,a,L,TP,DP,PP,iter_ms\n1,8,8,1,65,4,8,2,2,2,1\n", "`h`");
    let fsdp = "model,seq,nGPU,gpu,mbs,tok_s_gpu,shard\n";
    check(&format!("{fsdp}9b,2048,8,h100,1,1,FS\n"), "`model`: expected one of 125m");
    check(&format!("{fsdp}7b,2048,8,t4,1,1,FS\n"), "`gpu`: expected one of a100");
    check("model,1F1B,1F1B-I\n2B,30,40\n", "`model`: expected one of 1.5B");
    check("model,L,a,h,p,mbs,1F1B,1F1B-I\n2B,22,24,2304,7,6,30,40\n", "stages that divide L + 2");
    let many = "model,seq,nGPU,mbs,GA,tok_s_gpu,shard\n7b,2048,8,1,999999999,1,FS\n";
    check(many, "expected at most 4,000,000 passes");
    let none = "model,a,h,L,TP,PP,nGPU,gbs,mbs,iter_present_s\nx,8,512,8,1,1,1,1,1,0\n";
    check(none, "`iter_present_s`: expected a number above 0");
    let header = "model,seq,nGPU,mbs,tok_s_gpu,shard,AC\n";
    check(&format!("{header}7b,2048,8,1,1,FS,maybe\n"), "`AC`: expected 0 or 1, got `maybe`");
    // A model of another size, activations on the host: predicted, and marked.
    let header = "model,L,h,a,seq,nGPU,mbs,tok_s_gpu,shard,AC,offload\n";
    let text = format!("{header}9b,32,4608,36,2048,8,1,9000,FS,True,True\n,,,,,,,,,,\n");
    let scored = score("t.csv", &text).unwrap();
    assert_eq!(scored.rows[0].unmodelled, Some("activations on the host"));
    assert_eq!((scored.rows.len(), scored.fits.unwrap().rows), (1, 0));
}
