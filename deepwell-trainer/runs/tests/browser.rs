//! The page in Chromium, without a screen. Where there is none the tests are reported as ignored.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use deepwell_runs::{Run, dashboard, read_runs};
use deepwell_trials::{skip, trial};
use serde_json::json;

fn main() -> ExitCode {
    deepwell_trials::run()
}

/// Names of the browser on several systems.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

fn browser() -> &'static str {
    let is_there = |name: &&&str| {
        let mut command = Command::new(name);
        let asked = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        asked.status().is_ok_and(|status| status.success())
    };
    match BROWSERS.iter().find(is_there) {
        Some(name) => name,
        None => skip("there is no Chromium: Debian's package chromium has it"),
    }
}

/// The page's elements after its script has run, and the time of the whole process.
fn load(page: &Path, hash: &str, options: &[&str]) -> (String, Duration) {
    let profile = tempfile::tempdir().expect("a temporary folder");
    let begun = Instant::now();
    let output = Command::new(browser())
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .args(["--window-size=1400,1000"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(options)
        .arg(format!("file://{}#{hash}", page.display()))
        .stdin(Stdio::null())
        .output()
        .expect("the browser starts");
    let took = begun.elapsed();
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (dom, took)
}

/// The same with as much time as timers and drawing need.
fn dom(page: &Path, hash: &str) -> String {
    let (dom, _) = load(page, hash, &["--virtual-time-budget=3000"]);
    assert!(dom.contains("data-ready=\""), "the script ended with an error");
    dom
}

/// Pseudo-random numbers from 0 to 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }
}

/// Writes the folder of a run as `deepwell train` does, with made-up numbers.
fn write_run(folder: &Path, seed: u64, steps: u64) {
    fs::create_dir_all(folder).expect("a folder");
    let write = |name: &str, text: String| fs::write(folder.join(name), text).expect("a file");
    let mixture = seed % 10 == 3;
    let precision = ["mxfp8", "bf16", "nvfp4"][seed as usize % 3];
    let learning_rate = 1e-3 * 2f64.powi((seed % 5) as i32 - 2);
    let tensor = |layer: u64, name: &str| {
        let format = if layer == 0 { "bf16" } else { precision };
        json!({"tensor": format!("model.layers.{layer}.{name}.weight"), "format": format,
            "reason": "default of the precision"})
    };
    let kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let tensors: Vec<_> = (0..12).flat_map(|layer| kinds.map(|name| tensor(layer, name))).collect();
    let settings = json!({"model": if mixture { "moe-1b-a300m" } else { "llama-134m" },
        "precision": precision, "steps": steps, "seq_len": 1024, "batch_size": 32, "seed": seed,
        "learning_rate": learning_rate, "device": "cuda:0"});
    let facts = json!({"settings": settings, "machine": {"name": "NVIDIA H200",
        "memory_bytes": 150_754_820_096u64, "cores": 96, "driver": "580.159.04",
        "peak_bf16_flops": 989.5e12, "peak_source": "datasheet"}, "params": 134_105_856,
        "tokens_per_step": 32_768, "ranks": 1, "flops_per_step": 31_000_000_000_000u64,
        "recompute": "none", "peak_bytes_predicted": 13_500_000_000u64,
        "bytes_at_peak": {"weights": 400_000_000, "gradients": 540_000_000,
            "optimizer": 1_610_000_000, "activations": 10_200_000_000u64, "workspace": 70_000_000},
        "quantized_flop_share_planned": 0.9745, "precision": tensors});
    let print = json!({"steps": steps, "seq_len": 1024, "batch_size": 32, "seed": seed});
    write(
        "run.json",
        json!({"id": format!("{seed:032x}"), "started": "2026-11-30T10:00:00Z",
        "version": "0.1.0", "fingerprint": print})
        .to_string(),
    );
    write("facts.json", facts.to_string());
    write("metrics.jsonl", metrics(seed, steps, mixture, learning_rate));
}

/// A log with noise, a spike, a guard event and, of a mixture, loads of experts.
fn metrics(seed: u64, steps: u64, mixture: bool, learning_rate: f64) -> String {
    let mut noise = Noise(seed + 1);
    let mut unix_s = 1_796_032_800.0 + 20.0;
    let mut text = String::new();
    for step in 1..=steps {
        let step_s = 0.05 + 0.004 * noise.next();
        unix_s += step_s;
        let floor = 1.8 + 0.02 * (seed % 7) as f64;
        let mut loss = floor + 8.0 * (-(step as f64) / (0.06 * steps as f64)).exp();
        loss += 0.12 * noise.next();
        if step == 7 * steps / 10 && seed.is_multiple_of(6) {
            loss += 3.0;
            let _ = writeln!(
                text,
                "{}",
                json!({"step": step, "unix_s": unix_s, "guard": {
                "step": step, "gemm": "model.layers.3.mlp.up_proj.weight", "reason":
                "41.2 % of the activations became zero", "kind": {"to_bf16": {"until_step":
                step + 200, "fallbacks": 1}}}})
            );
        }
        let warm = (step as f64 / (0.1 * steps as f64)).min(1.0);
        let experts: Vec<_> = (0..if mixture { 8 } else { 0 })
            .map(|layer| {
                json!({"layer": layer, "chosen": [5, 3, 2, 1], "dropped": 0, "dead": 0,
                "entropy": 0.9 + 0.09 * noise.next(), "largest_over_mean": 1.2 + noise.next()})
            })
            .collect();
        let (grad_norm, rate) =
            (0.4 + noise.next() * 0.3 + 4.0 / step as f64, learning_rate * warm);
        // Formatting by hand: half a million lines take seconds otherwise.
        let _ = write!(
            text,
            "{{\"step\":{step},\"unix_s\":{unix_s:.3},\"loss\":{loss},\"grad_norm\":{grad_norm},\
             \"learning_rate\":{rate},\"tokens_per_s\":{},\"speed_of_light\":{}",
            32_768.0 / step_s,
            0.5 * 0.05 / step_s
        );
        if mixture {
            let _ = write!(text, ",\"experts\":{}", json!(experts));
        }
        text.push_str("}\n");
        if step % (steps / 10).max(1) == 0 {
            unix_s += 3.0;
            let _ = writeln!(
                text,
                "{}",
                json!({"step": step, "unix_s": unix_s,
                "val_loss": loss + 0.02, "val_ppl": loss.exp(), "val_tokens": 131_072})
            );
        }
    }
    text
}

/// A page over runs with made-up numbers, and the runs.
fn page(folder: &Path, runs: u64, steps: u64) -> (PathBuf, Vec<Run>) {
    let root = folder.join("runs");
    for seed in 0..runs {
        write_run(&root.join(format!("seed-{seed:02}")), seed, steps);
    }
    let read = read_runs(&[root]).expect("runs");
    let path = folder.join("page.html");
    fs::write(&path, dashboard(&read, "Seeds", None).to_html()).expect("a page");
    (path, read)
}

/// Text of the element with this id.
fn text_of<'a>(dom: &'a str, id: &str) -> &'a str {
    let (_, rest) = dom.split_once(&format!("id=\"{id}\"")).expect(id);
    let (_, rest) = rest.split_once('>').expect("an element");
    rest.split('<').next().unwrap_or_default()
}

/// Markup of the figure of the chart with this index.
fn figure(dom: &str, index: usize) -> &str {
    let (_, rest) = dom.split_once(&format!("data-chart=\"{index}\"")).expect("a figure");
    rest.split("</figure>").next().unwrap_or_default()
}

trial!(charts_show_what_the_address_asks_for);
fn charts_show_what_the_address_asks_for() {
    browser();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (page, _) = page(folder.path(), 4, 300);
    let whole = dom(&page, "");
    assert_eq!(text_of(&whole, "count"), "4 of 4 runs");
    let loss = figure(&whole, 0);
    assert_eq!(loss.matches("class=\"line\"").count(), 4, "a curve of each run");
    assert_eq!(loss.matches("class=\"event\"").count(), 1, "one guard event");
    assert!(loss.contains(">300</text>") && loss.contains(">step</text>"), "{loss}");
    assert!(!loss.contains("NaN") && !loss.contains("undefined"), "{loss}");
    // Another axis: 300 steps of 32,768 tokens are 9.83 M.
    let tokens = dom(&page, "axis=tokens");
    assert!(figure(&tokens, 0).contains(">8M</text>"), "{}", figure(&tokens, 0));
    let time = dom(&page, "axis=time");
    assert!(figure(&time, 0).contains(" s</text>"), "{}", figure(&time, 0));
    // A filter by a setting, and by its opposite.
    let filtered = dom(&page, "filter=precision%3Dbf16");
    assert_eq!(text_of(&filtered, "count"), "1 of 4 runs");
    assert_eq!(figure(&filtered, 0).matches("class=\"line\"").count(), 1);
    assert_eq!(text_of(&dom(&page, "filter=-precision%3Dbf16+-moe"), "count"), "2 of 4 runs");
    // Runs without a box are not drawn, and stay in the table.
    let off = dom(&page, "off=seed-00%0Aseed-01");
    assert_eq!(text_of(&off, "count"), "4 of 4 runs");
    assert_eq!(figure(&off, 0).matches("class=\"line\"").count(), 2);
    // A window of steps has other ticks.
    let zoomed = dom(&page, "from=100&to=120");
    assert!(figure(&zoomed, 0).contains(">105</text>"), "{}", figure(&zoomed, 0));
    // Smoothing draws two lines of each noisy curve.
    let smooth = dom(&page, "smooth=0.9&log=0");
    assert_eq!(figure(&smooth, 0).matches("class=\"line raw\"").count(), 4);
    assert_eq!(figure(&smooth, 1).matches("class=\"line raw\"").count(), 0, "held-out loss");
}

/// What a reader does with the pointer, and the values that the page has then.
const READER: &str = r##"<script>
addEventListener("load", () => {
  const say = (name, value) => { document.body.setAttribute(`data-${name}`, value); };
  const canvas = document.querySelector(".plot .canvas");
  const at = (type, share) => {
    const box = canvas.querySelector("svg").getBoundingClientRect();
    const clientX = box.left + 60 + share * (box.width - 80);
    canvas.dispatchEvent(new PointerEvent(type,
      { bubbles: true, button: 0, pointerId: 1, clientX, clientY: box.top + 60 }));
  };
  at("pointermove", 0.5);
  say("tip", document.querySelector(".tip").innerText);
  at("pointerdown", 0.25);
  at("pointermove", 0.4);
  at("pointerup", 0.5);
  const ends = () => ["#from", "#to"].map((id) => document.querySelector(id).value).join(" ");
  say("zoomed", ends());
  canvas.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  say("whole", ends());
  const heading = (title) => [...document.querySelectorAll("table.runs thead button")]
    .find((button) => button.textContent === title);
  const order = () => [...document.querySelectorAll("table.runs tbody th")]
    .map((cell) => cell.textContent).join(" ");
  heading("run").click();
  heading("run").click();
  say("order", order());
  heading("peak memory").click();
  say("missing", order());
  document.querySelector("table.runs tbody input").click();
  say("lines", canvas.querySelectorAll(".line").length);
  const filter = document.querySelector("#filter");
  filter.value = "seed=2";
  filter.dispatchEvent(new Event("input"));
  say("filtered", document.querySelector("#count").textContent);
  say("address", location.hash);
});
</script>"##;

trial!(a_reader_zooms_sorts_and_hides);
fn a_reader_zooms_sorts_and_hides() {
    browser();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (page, _) = page(folder.path(), 3, 300);
    let text = fs::read_to_string(&page).expect("a page");
    fs::write(&page, text.replace("</body>", &format!("{READER}</body>"))).expect("a page");
    let dom = dom(&page, "");
    let said = |name: &str| {
        let (_, rest) = dom.split_once(&format!("data-{name}=\"")).expect(name);
        rest.split('"').next().unwrap_or_default().to_owned()
    };
    let tip = said("tip");
    assert!(tip.contains("seed-00") && tip.contains(" at 15"), "{tip}");
    let zoomed = said("zoomed");
    let ends: Vec<f64> = zoomed.split(' ').map(|end| end.parse().expect("a number")).collect();
    // Steps 1 to 300: a quarter is 75.75 and a half 150.5.
    assert!((ends[0] - 75.75).abs() < 1.0 && (ends[1] - 150.5).abs() < 1.0, "{zoomed}");
    assert_eq!(said("whole"), " ");
    assert_eq!(said("order"), "seed-02 seed-01 seed-00");
    // No run has measured memory yet: rows without a value keep their order.
    assert_eq!(said("missing"), "seed-00 seed-01 seed-02");
    assert_eq!(said("lines"), "2");
    assert_eq!(said("filtered"), "1 of 3 runs");
    assert!(said("address").contains("filter=seed%3D2"), "{}", said("address"));
}

trial!(a_page_over_fifty_long_runs_is_small_and_opens_at_once);
fn a_page_over_fifty_long_runs_is_small_and_opens_at_once() {
    browser();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dashboard");
    fs::create_dir_all(&folder).expect("a folder");
    let (page, runs) = page(&folder, 50, 10_000);
    assert_eq!(runs.len(), 50);
    let bytes = fs::metadata(&page).expect("a page").len();
    assert!(bytes < 5_000_000, "{bytes} bytes");
    let empty = folder.join("empty.html");
    fs::write(&empty, "<!DOCTYPE html><title>empty</title>").expect("a page");
    // The first start of a browser reads its files from the disk.
    load(&empty, "", &[]);
    let (_, base) = load(&empty, "", &[]);
    let (dom, took) = load(&page, "", &[]);
    let (_, rest) = dom.split_once("data-ready=\"").expect("the script ended with an error");
    let ready: u64 = rest.split('"').next().unwrap_or_default().parse().expect("milliseconds");
    let more = took.saturating_sub(base);
    println!("{bytes} bytes, first charts after {ready} ms, {more:?} more than an empty page");
    assert_eq!(figure(&dom, 0).matches("class=\"line\"").count(), 50);
    // The aim is a second on a machine that does nothing else; a test has neighbours.
    assert!(ready < 5_000, "{ready} ms");
}
