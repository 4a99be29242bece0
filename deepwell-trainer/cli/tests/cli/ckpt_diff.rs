//! `deepwell ckpt diff`.

use std::fs;

use deepwell_ckpt::{CheckpointContents, SaveOptions, Section, TensorView};
use serde_json::json;

use super::{Folder, check_error, deepwell, stdout_of, text};

impl Folder {
    /// Saves a checkpoint of two tensors below a folder of its own and gives its path.
    fn checkpoint_of(&self, name: &str, step: u64, seed: u64, head: &[f32]) -> String {
        let embed: Vec<u16> = (0..64).collect();
        let mut contents = CheckpointContents::new(step);
        contents.tensors = vec![
            TensorView::from_f32(Section::Master, "lm_head", &[head.len()], head),
            TensorView::from_bf16_bits(Section::Weights, "embed", &[8, 8], &embed),
        ];
        contents.run = json!({ "settings": { "seed": seed } });
        let root = self.0.path().join(name).join("checkpoints");
        fs::create_dir_all(&root).expect("a folder");
        deepwell_ckpt::save(&root, &contents, &SaveOptions::default()).expect("saved");
        self.path(name)
    }
}

#[test]
fn differences_as_a_table_and_as_json() {
    let folder = Folder::new();
    let a = folder.checkpoint_of("a", 20, 1, &[3.0, 4.0]);
    let same = folder.checkpoint_of("same", 20, 1, &[3.0, 4.0]);
    let later = folder.checkpoint_of("later", 40, 2, &[3.0, 4.0]);
    let other = folder.checkpoint_of("other", 20, 1, &[3.0, 4.5]);
    let longer = folder.checkpoint_of("longer", 20, 1, &[3.0, 4.0, 5.0]);
    let check = |args: &[&str], code: i32, contains: &[&str]| {
        let output = deepwell(&[&["ckpt", "diff"], args].concat());
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stdout}{stderr}");
        assert_eq!(stderr, "", "{args:?}");
        for part in contains {
            assert!(stdout.contains(part), "{args:?}: expected `{part}` in: {stdout}");
        }
    };
    check(&[&a, &same], 0, &["equal\n", "2 tensors equal, 0 differ"]);
    check(&[&a, &a, "--json"], 0, &["\"equal\": true"]);
    check(&[&a, &later], 1, &["different\n", "step 40", "run.settings.seed: 1 / 2"]);
    check(&[&a, &later, "--tensors"], 0, &["equal\n", "step 40"]);
    check(&[&a, &longer, "--tensors"], 1, &["lm_head F32 [2] / F32 [3]"]);
    check(&[&a, &other, "--json"], 1, &["\"max_abs\": 0.5", "\"differing\": 1"]);
    let output = deepwell(&["ckpt", "diff", &a, &other]);
    let here = folder.path("");
    insta::assert_snapshot!("ckpt_diff", text(&output.stdout).replace(&here, ""));
    let none = folder.path("none");
    check_error(&["ckpt", "diff", &a, &none], 2, &["is not a checkpoint: no such folder"]);
    assert!(stdout_of(&["ckpt", "diff", "--help"]).contains("Exit codes: 0 equal, 1 different"));
}
