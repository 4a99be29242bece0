//! Runs on one page, in MLflow's store, and against recipes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use super::*;

/// A folder with a short run in `out`.
fn trained(steps: &str) -> Folder {
    let folder = Folder::new();
    stdout_of(&folder.training("llama-micro", steps));
    folder
}

#[test]
fn a_page_over_real_runs() {
    let folder = trained("4");
    let (out, page) = (folder.path("out"), folder.path("page.html"));
    let output = deepwell(&["report", &out, "--out", &page]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(text(&output.stdout), "");
    assert!(stderr.contains("page.html: 1 run, ") && !stderr.contains("note: "), "{stderr}");
    let html = fs::read_to_string(&page).expect("a page");
    for part in ["<title>Runs</title>", "finished", "llama-micro", "predicted peak", "bf16"] {
        assert!(html.contains(part), "{part}");
    }
    // A new run has everything but guard events and a GPU's driver.
    assert!(!html.contains(">not recorded<"), "{html}");

    let rows = json_of(&["report", &out, "--json"]);
    let row = &rows[0];
    assert_eq!(
        (&row["state"], &row["step"], &row["steps"]),
        (&json!("finished"), &json!(4), &json!(4))
    );
    assert_eq!(row["tokens"], json!(4.0 * 4.0 * 32.0));
    for key in ["loss", "val_loss", "tokens_per_s", "mfu", "goodput", "wall_s", "machine"] {
        assert!(!row[key].is_null(), "{key}: {row}");
    }
    let share = |key: &str| row[key].as_f64().expect(key);
    assert!((0.0..=1.0).contains(&share("goodput")) && share("goodput") > 0.0, "{row}");
    let table = stdout_of(&["report", &out, "--markdown"]);
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.starts_with("| run | model | precision |"), "{table}");
}

/// A run that is still being written, one that was killed within a line, one of an earlier version.
#[test]
fn a_page_over_runs_that_lack_something() {
    let folder = trained("4");
    let out = folder.path("out");
    let metrics = format!("{out}/metrics.jsonl");
    let log = fs::read_to_string(&metrics).expect("metrics");
    let cut = log.rfind("\"loss\"").expect("a loss");
    fs::write(&metrics, &log[..cut]).expect("metrics");
    for file in ["summary.json", "facts.json"] {
        fs::remove_file(format!("{out}/{file}")).expect(file);
    }
    let output = deepwell(&["report", &out, "--out", &folder.path("page.html")]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    for part in ["of metrics.jsonl is cut; it is left out", "neither facts.json nor summary.json"] {
        assert!(stderr.contains(part), "expected `{part}` in: {stderr}");
    }
    let html = fs::read_to_string(folder.path("page.html")).expect("a page");
    for part in ["ended early", ">not recorded<", "the peak of the hardware is unknown"] {
        assert!(html.contains(part), "{part}");
    }
    let row = &json_of(&["report", &out, "--json"])[0];
    assert_eq!((&row["mfu"], &row["precision"]), (&Value::Null, &json!("mxfp8")));
}

#[test]
fn reports_that_cannot_be_made() {
    let folder = Folder::new();
    let empty = folder.path(".");
    check_error(&["report", &folder.path("none")], 2, &["no run at `", "hint: "]);
    check_error(&["report", &empty], 2, &["no run in `", "got neither", "hint: "]);
    check_error(&["export", "mlflow", &empty], 2, &["no run in `"]);
    check_error(&["report", &empty, "--json", "--markdown"], 2, &["cannot be used with"]);
    check_error(&["report", &empty, "--port", "1"], 2, &["--serve"]);
    check_error(&["report", &empty, "--refresh", "0"], 2, &["--refresh"]);
    let run = folder.file("metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    let in_file = format!("{run}/page.html");
    check_error(&["report", &empty, "--out", &in_file], 2, &["cannot write `", "caused by"]);
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let expected = ["cannot listen on 127.0.0.1:", "hint: `--port 0`"];
    check_error(&["report", &empty, "--serve", "--port", &port], 2, &expected);
}

/// Sends a request to a server, and gives the status line and the body.
fn ask(address: &str, path: &str, host: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("a server");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().unwrap_or_default().to_string(), body.to_string())
}

#[cfg(unix)]
#[test]
fn a_server_shows_what_runs_have_now() {
    let folder = Folder::new();
    folder.file("metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    let mut child = Command::new(env!("CARGO_BIN_EXE_deepwell"))
        .args(["report", &folder.path("."), "--serve", "--port", "0", "--refresh", "5"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command was built with this test");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    let address = loop {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).expect("stderr"), 0, "no address");
        if let Some(rest) = line.strip_prefix("http://") {
            break rest.split('/').next().unwrap_or_default().to_string();
        }
    };
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let (status, body) = ask(&address, "/", &address);
    assert!(
        status.contains(" 200 ") && body.contains("http-equiv=\"refresh\""),
        "{status}\n{body}"
    );
    // The next request sees the next line.
    folder.file("metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n{\"step\":7,\"loss\":1.5}\n");
    let (status, body) = ask(&address, "/runs.json?x=1", "localhost");
    let rows: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    assert!(status.contains(" 200 "), "{status}");
    assert_eq!((&rows[0]["step"], &rows[0]["loss"]), (&json!(7), &json!(2.0)));
    assert!(ask(&address, "/metrics.jsonl", &address).0.contains(" 404 "));
    assert!(ask(&address, "/", "runs.example:80").0.contains(" 403 "));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("`kill`").success());
    assert_eq!(child.wait().expect("the command ends").code(), Some(0));
}

#[test]
fn runs_in_the_store_of_mlflow() {
    let folder = trained("3");
    let (out, store) = (folder.path("out"), folder.path("mlruns"));
    let export = ["export", "mlflow", &out, "--to", &store, "--experiment", "e", "--json"];
    let exported = json_of(&export);
    let run = PathBuf::from(exported[0]["folder"].as_str().expect("a folder"));
    let losses = fs::read_to_string(run.join("metrics/train/loss")).expect("losses");
    let log = fs::read_to_string(format!("{out}/metrics.jsonl")).expect("metrics");
    let expected: Vec<f64> = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).expect("a line")["loss"].as_f64())
        .collect();
    let found: Vec<f64> = losses
        .lines()
        .map(|line| line.split(' ').nth(1).expect("a value").parse().expect("a number"))
        .collect();
    assert_eq!((found.len(), found), (3, expected));
    assert_eq!(fs::read_to_string(run.join("params/steps")).expect("a parameter"), "3");
    assert!(run.join("artifacts/report.html").is_file());
    check_error(&export, 2, &["is there already", "hint: delete the folder"]);
}

/// A recipe runs and is checked from one end to the other; another learning rate is not within.
#[test]
fn a_recipe_is_run_and_checked() {
    let folder = Folder::new();
    let out = folder.path("micro");
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepwell"));
    // The text of the recipe and its tokens go below the working directory.
    command.args(["recipe", "run", "llama-micro", "--out", &out]).current_dir(folder.0.path());
    let output = command.stdin(Stdio::null()).output().expect("the command was built");
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("note: afterwards: deepwell recipe check llama-micro "), "{stderr}");
    let check = json_of(&["recipe", "check", "llama-micro", &out, "--json"]);
    assert_eq!(check["within"], true, "{check:#}");
    let rows = check["rows"].as_array().expect("rows");
    let is_within = |row: &&Value| row["verdict"] == "within";
    assert!(rows.iter().filter(is_within).count() >= 6, "{check:#}");

    // The same run against a recipe with another rate, and against another model's.
    let shown = json_of(&["recipe", "show", "llama-micro", "--json"]);
    assert_eq!(shown["run"]["model"], "llama-micro");
    let other = folder.file(
        "other.toml",
        "summary = \"a\"\nhardware = \"b\"\ncommand = \"c\"\ndata = \"own\"\n\
         [run]\nlearning_rate = 0.5\n",
    );
    let output = deepwell(&["recipe", "check", &other, &out]);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert!(stdout.contains("OUTSIDE  settings of the recipe"), "{stdout}");
    assert!(stdout.contains("is 0.002, not 0.5"), "{stdout}");
    assert!(stdout.ends_with("micro: not within recipe other\n"), "{stdout}");
    check_error(&["recipe", "run", &other], 2, &["expected `--data`, got none"]);
}

#[test]
fn recipes_on_the_command_line() {
    let list = stdout_of(&["recipe", "list"]);
    assert!(list.starts_with("llama-micro "), "{list}");
    assert_eq!(list.lines().count(), 10, "{list}");
    check_error(&["recipe", "show", "llama"], 2, &["no recipe `llama`", "llama-134m"]);
    check_error(&["recipe", "run", "llama-3-70b"], 2, &["expected one that a machine runs"]);
    let folder = Folder::new();
    folder.file("metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    let output = deepwell(&["recipe", "check", "llama-3-70b", &folder.path(".")]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
    insta::assert_snapshot!("recipe_show", stdout_of(&["recipe", "show", "llama-micro"]));
    insta::assert_snapshot!("recipe_list", list);
}
