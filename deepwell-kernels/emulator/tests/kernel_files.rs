//! Every kernel of a folder of PTX files decodes.

use std::path::{Path, PathBuf};

use deepwell_emulator::{decode, ptx};

fn ptx_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the folder can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            ptx_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "ptx") {
            found.push(path);
        }
    }
}

#[test]
fn every_kernel_of_the_folder_decodes() {
    let Some(folder) = std::env::var_os("DEEPWELL_PTX") else {
        eprintln!("skipped: DEEPWELL_PTX names no folder of PTX");
        return;
    };
    let mut files = Vec::new();
    ptx_files(Path::new(&folder), &mut files);
    assert!(!files.is_empty(), "no PTX is in the folder");
    let mut wrong = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("PTX is text");
        let module = match ptx::parse(&text) {
            Ok(module) => module,
            Err(error) => {
                wrong.push(format!("{}: {error}", path.display()));
                continue;
            }
        };
        let globals = decode::global_variables(&module)
            .into_iter()
            .enumerate()
            .map(|(position, variable)| (variable.name, (position as u64 + 1) << 32))
            .collect();
        for kernel in module.kernels() {
            if let Err(error) = decode::decode(&module, &kernel.name, &globals) {
                wrong.push(format!("{}: {}: {error}", path.display(), kernel.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
