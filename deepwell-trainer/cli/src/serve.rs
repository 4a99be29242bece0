//! A server of one page on the loopback address.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use deepwell_runs::{Run, RunRow, read_runs};
use tiny_http::{Header, Method, Request, Response, Server};

use crate::output::{note, say};

/// Longest wait for Ctrl-C.
const POLL: Duration = Duration::from_millis(200);

const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// Serves the page over the runs at `paths`, read at each request, until `stop` is set: `/` is the
/// page, `/runs.json` the table of runs.
///
/// # Errors
/// The port is taken.
pub(crate) fn serve(
    port: u16,
    paths: &[PathBuf],
    page: &dyn Fn(&[Run]) -> String,
    stop: &AtomicBool,
) -> Result<()> {
    let server = Server::http(("127.0.0.1", port)).map_err(|error| {
        anyhow!("cannot listen on 127.0.0.1:{port}: {error}\nhint: `--port 0` takes a free port")
    })?;
    let address = server.server_addr().to_ip().context("a server without an address")?;
    say(format_args!("http://{address}/  (Ctrl-C ends)"));
    while !stop.load(Ordering::Relaxed) {
        let Some(request) = server.recv_timeout(POLL).context("cannot receive requests")? else {
            continue;
        };
        let (status, kind, body) = answer(&request, paths, page);
        let header = Header::from_bytes("Content-Type", kind).map_err(|()| anyhow!("a header"))?;
        let response = Response::from_string(body).with_status_code(status).with_header(header);
        // A reader that goes away is no error of the server.
        if let Err(error) = request.respond(response) {
            note(format_args!("an answer was not read: {error}"));
        }
    }
    Ok(())
}

/// Status, type and body of an answer.
fn answer(
    request: &Request,
    paths: &[PathBuf],
    page: &dyn Fn(&[Run]) -> String,
) -> (u16, &'static str, String) {
    if !is_local(request) {
        let text = "expected the host 127.0.0.1 or localhost\n";
        return (403, TEXT, text.to_owned());
    }
    if *request.method() != Method::Get {
        return (405, TEXT, "expected GET\n".to_owned());
    }
    let path = request.url().split('?').next().unwrap_or_default();
    if !matches!(path, "/" | "/runs.json") {
        return (404, TEXT, "expected / or /runs.json\n".to_owned());
    }
    let runs = match read_runs(paths) {
        Ok(runs) => runs,
        Err(error) => return (503, TEXT, format!("{error}\n")),
    };
    match path {
        "/" => (200, HTML, page(&runs)),
        _ => {
            let rows: Vec<RunRow> = runs.iter().map(RunRow::of).collect();
            match serde_json::to_string_pretty(&rows) {
                Ok(text) => (200, JSON, text),
                Err(error) => (500, TEXT, format!("{error}\n")),
            }
        }
    }
}

/// Whether the request names this machine: a page of another site that resolves its name to the
/// loopback address must not read runs.
fn is_local(request: &Request) -> bool {
    let host = request.headers().iter().find(|header| header.field.equiv("Host"));
    host.is_some_and(|header| {
        let host = header.value.as_str();
        let site = host.rsplit_once(':').map_or(host, |(site, _)| site);
        matches!(site, "127.0.0.1" | "localhost")
    })
}
