//! `include/deepwell_engine.h` is what cbindgen makes of the exported functions.

use std::path::Path;

/// Written anew by `DEEPWELL_WRITE_HEADER=1 cargo test -p deepwell-engine --test header`.
#[test]
fn header_is_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut header = Vec::new();
    // Of a source it reads the modules, too.
    let builder = cbindgen::Builder::new().with_config(config).with_src(folder.join("src/lib.rs"));
    builder.generate().unwrap().write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = folder.join("include/deepwell_engine.h");
    if std::env::var_os("DEEPWELL_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    assert_eq!(found, header, "write it anew: DEEPWELL_WRITE_HEADER=1 cargo test --test header");
}
