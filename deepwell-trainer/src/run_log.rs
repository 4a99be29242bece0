//! Logs of a run: `metrics.jsonl` and the event file.

use std::path::Path;

use deepwell_precision::GuardEvent;

use crate::clock::unix_s;
use crate::engine::ExpertLoad;
use crate::metrics::{EventWriter, FlushPolicy, JsonlWriter, StepLine};
use crate::product_charts::ProductRecord;
use crate::progress::Progress;
use crate::record::Record;
use crate::run_paths;
use crate::{ExpertRecord, RankTime, TrainError};

/// `metrics.jsonl` and the event file, written together.
pub(crate) struct Log {
    jsonl: JsonlWriter,
    events: EventWriter,
}

impl Log {
    /// Creates the files, or continues them after `step`, dropping later entries of a killed
    /// process.
    pub(crate) fn open(
        out: &Path,
        step: u64,
        progress: &mut dyn Progress,
    ) -> Result<Log, TrainError> {
        let path = run_paths::metrics(out);
        let events = out.join("events");
        if step == 0 {
            // A run killed before its first checkpoint left events of its first steps.
            let is_first = !events.exists();
            return Ok(Log {
                jsonl: JsonlWriter::create(&path, FlushPolicy::EveryRecord)?,
                events: match is_first {
                    true => EventWriter::create(&events)?,
                    false => EventWriter::resume(&events, 0)?,
                },
            });
        }
        let truncated = JsonlWriter::truncate_after(&path, step)?;
        if truncated.step_max != Some(step) {
            // Lines reach the disk before the checkpoint does: they were removed by someone else.
            progress.note(&format!(
                "warning: `{}` has no line of step {step}, after which the run goes on: what is \
                 missing there stays missing",
                path.display()
            ));
        }
        Ok(Log {
            jsonl: JsonlWriter::append(&path, FlushPolicy::EveryRecord)?,
            events: EventWriter::resume(&events, step + 1)?,
        })
    }

    pub(crate) fn step(
        &mut self,
        line: &StepLine,
        learning_rate: f64,
        skipped: bool,
        loads: &[ExpertLoad],
        ranks: &[RankTime],
    ) -> Result<(), TrainError> {
        self.write(Record {
            ranks: ranks.to_vec(),
            experts: loads.iter().map(ExpertRecord::from).collect(),
            loss: line.loss,
            grad_norm: Some(line.grad_norm),
            learning_rate: Some(learning_rate),
            tokens_per_s: Some(line.tokens_per_s),
            speed_of_light: line.speed_of_light,
            skipped,
            ..Record::at(line.step)
        })?;
        let loss = line.loss.map(|loss| ("train/loss", loss as f32));
        let scalars = [
            ("train/grad_norm", line.grad_norm as f32),
            ("train/learning_rate", learning_rate as f32),
            ("train/tokens_per_s", line.tokens_per_s as f32),
        ];
        let of_ranks = ranks.iter().flat_map(rank_scalars);
        let of_experts: Vec<(String, f32)> =
            loads.iter().flat_map(expert_scalars).chain(of_ranks).collect();
        let of_experts = of_experts.iter().map(|(tag, value)| (tag.as_str(), *value));
        let scalars: Vec<(&str, f32)> = loss.into_iter().chain(scalars).chain(of_experts).collect();
        Ok(self.events.scalars(line.step, &scalars)?)
    }

    /// Logs an evaluation that predicted `tokens` held-out tokens; no loss for zero tokens.
    pub(crate) fn evaluation(
        &mut self,
        step: u64,
        val_loss: Option<f64>,
        tokens: u64,
    ) -> Result<(), TrainError> {
        self.write(Record {
            val_loss,
            val_ppl: val_loss.map(f64::exp),
            val_tokens: Some(tokens),
            ..Record::at(step)
        })?;
        match val_loss {
            Some(val_loss) => Ok(self.events.scalars(step, &[("val/loss", val_loss as f32)])?),
            None => Ok(()),
        }
    }

    pub(crate) fn guard(&mut self, event: &GuardEvent) -> Result<(), TrainError> {
        self.write(Record { guard: Some(event.clone()), ..Record::at(event.step) })
    }

    pub(crate) fn products(
        &mut self,
        step: u64,
        products: Vec<ProductRecord>,
    ) -> Result<(), TrainError> {
        self.write(Record { products, ..Record::at(step) })
    }

    /// Writes a line with the current time.
    fn write(&mut self, record: Record) -> Result<(), TrainError> {
        Ok(self.jsonl.write(&Record { unix_s: Some(unix_s()), ..record })?)
    }

    pub(crate) fn sync(&mut self) -> Result<(), TrainError> {
        self.jsonl.sync()?;
        Ok(self.events.flush()?)
    }
}

/// TensorBoard scalars of a rank.
fn rank_scalars(time: &RankTime) -> [(String, f32); 2] {
    [("busy_s", time.busy_s), ("waited_s", time.waited_s)]
        .map(|(name, value)| (format!("ranks/{name}/rank_{}", time.rank), value as f32))
}

/// TensorBoard scalars of a layer's experts.
fn expert_scalars(load: &ExpertLoad) -> [(String, f32); 4] {
    [
        ("entropy", load.entropy() as f32),
        ("largest_over_mean", load.largest_over_mean() as f32),
        ("dead", load.dead() as f32),
        ("dropped", load.dropped as f32),
    ]
    .map(|(name, value)| (format!("experts/{name}/layer_{}", load.layer), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::read_events;

    /// Records the notes.
    #[derive(Default)]
    struct Notes(Vec<String>);

    impl Progress for Notes {
        fn step(&mut self, _line: &StepLine) {}
        fn evaluation(&mut self, _step: u64, _val_loss: f64) {}
        fn note(&mut self, text: &str) {
            self.0.push(text.to_string());
        }
    }

    fn line(step: u64) -> StepLine {
        let (loss, grad_norm) = (Some(1.0 / step as f64), 1.0);
        StepLine { step, steps_total: 9, loss, grad_norm, tokens_per_s: 1.0, speed_of_light: None }
    }

    /// Steps of the training losses of all event files, without those that a later file voids.
    fn event_steps(out: &Path) -> Vec<u64> {
        let mut files: Vec<_> = std::fs::read_dir(out.join("events"))
            .unwrap()
            .map(|file| file.unwrap().path())
            .collect();
        files.sort();
        let mut steps: Vec<u64> = Vec::new();
        for file in files {
            // A file of a resumed run begins with its session: field 2 is the step, field 7 the
            // log.
            let bytes = std::fs::read(&file).unwrap();
            let session = bytes.windows(4).position(|bytes| bytes == [0x3a, 2, 8, 1]);
            if let Some(at) = session {
                steps.retain(|&step| step < u64::from(bytes[at - 1]));
            }
            let scalars = read_events(&file).unwrap();
            steps.extend(scalars.iter().filter(|s| s.tag == "train/loss").map(|s| s.step));
        }
        steps
    }

    /// Writes steps, is killed, and resumes after `resumed_after`.
    #[track_caller]
    fn check(written: u64, torn: &str, resumed_after: u64, warns: bool) {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let mut notes = Notes::default();
        let mut log = Log::open(out, 0, &mut notes).unwrap();
        for step in 1..=written {
            log.step(&line(step), 0.1, false, &[], &[]).unwrap();
            log.evaluation(step, Some(f64::NAN), 8).unwrap();
        }
        log.sync().unwrap();
        drop(log);
        let path = run_paths::metrics(out);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text + torn).unwrap();
        let mut log = Log::open(out, resumed_after, &mut notes).unwrap();
        for step in resumed_after + 1..=9 {
            log.step(&line(step), 0.1, false, &[], &[]).unwrap();
            log.evaluation(step, Some(f64::NAN), 8).unwrap();
        }
        log.sync().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let read = |line| serde_json::from_str::<Record>(line).expect("whole lines");
        let records: Vec<Record> = text.lines().map(read).collect();
        let steps: Vec<u64> = records.iter().map(|record| record.step).collect();
        let kept = written.min(resumed_after);
        let expected: Vec<u64> = (1..=kept).chain(resumed_after + 1..=9).collect();
        assert_eq!(steps, expected.iter().flat_map(|&s| [s, s]).collect::<Vec<_>>());
        assert!(records.iter().skip(1).step_by(2).all(|r| r.val_loss.is_some_and(f64::is_nan)));
        assert_eq!(event_steps(out), expected);
        assert_eq!(notes.0.len(), usize::from(warns), "{:?}", notes.0);
    }

    #[test]
    fn no_line_is_lost_or_doubled() {
        // Killed before the first checkpoint, at a checkpoint, and some steps after a checkpoint.
        check(3, "", 0, false);
        check(4, "", 4, false);
        check(7, "", 4, false);
        // The last line was cut.
        check(7, "{\"step\":8,\"lo", 4, false);
        check(4, "{\"step\":", 4, false);
        // Lines removed by someone else are reported.
        check(2, "", 4, true);
    }

    /// The mean over no target was 0, and its perplexity 1.
    #[test]
    fn issue_31_a_mean_over_nothing_has_no_value() {
        let out = tempfile::tempdir().unwrap();
        let mut log = Log::open(out.path(), 0, &mut Notes::default()).unwrap();
        log.step(&StepLine { loss: None, ..line(1) }, 0.1, false, &[], &[]).unwrap();
        log.evaluation(1, None, 0).unwrap();
        log.sync().unwrap();
        let scalars = read_events(log.events.path()).unwrap();
        assert!(scalars.iter().all(|scalar| !scalar.tag.contains("loss")), "{scalars:?}");
        let text = std::fs::read_to_string(run_paths::metrics(out.path())).unwrap();
        assert!(text.contains("\"val_tokens\":0"), "{text}");
        assert!(!text.contains("loss") && !text.contains("ppl"), "{text}");
    }

    #[test]
    fn experts_have_scalars_of_their_layer() {
        let out = tempfile::tempdir().unwrap();
        let mut log = Log::open(out.path(), 0, &mut Notes::default()).unwrap();
        let loads = [
            ExpertLoad { layer: 1, chosen: vec![8, 8, 0, 0], dropped: 3, ..ExpertLoad::default() },
            ExpertLoad { layer: 2, chosen: vec![4; 4], ..ExpertLoad::default() },
        ];
        log.step(&line(1), 0.1, false, &loads, &[]).unwrap();
        log.sync().unwrap();
        let scalars = read_events(log.events.path()).unwrap();
        let of_experts: Vec<(&str, f32)> = scalars
            .iter()
            .filter(|scalar| scalar.tag.starts_with("experts/"))
            .map(|scalar| (scalar.tag.as_str(), scalar.value))
            .collect();
        assert_eq!(
            of_experts,
            [
                ("experts/entropy/layer_1", 0.5),
                ("experts/largest_over_mean/layer_1", 2.0),
                ("experts/dead/layer_1", 2.0),
                ("experts/dropped/layer_1", 3.0),
                ("experts/entropy/layer_2", 1.0),
                ("experts/largest_over_mean/layer_2", 1.0),
                ("experts/dead/layer_2", 0.0),
                ("experts/dropped/layer_2", 0.0),
            ]
        );
        assert_eq!(scalars.len(), 4 + of_experts.len());
    }
}
