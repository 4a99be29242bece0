//! The page over many runs as HTML.

use std::fmt::Write as _;

use super::model::{Curve, Dashboard};
use super::{data, tables};
use crate::escape;
use crate::page::{push_blocks, push_end, push_head};

const SCRIPT: &str = include_str!("script.js");
const STYLE: &str = include_str!("style.css");
const CONTROLS: &str = include_str!("controls.html");

/// Points of all curves of a page together, at most: about 3 MB of JSON.
const POINTS_MAX: usize = 250_000;
/// Intervals of a curve at most, each with two points: more than a screen has pixels.
const BUCKETS_MAX: usize = 1000;
/// Intervals of a curve at least.
const BUCKETS_MIN: usize = 25;

impl Dashboard {
    /// Returns the page as one file.
    pub fn to_html(&self) -> String {
        let mut out = String::new();
        push_head(&mut out, &self.title, STYLE, self.refresh_s);
        for remark in &self.remarks {
            let _ = writeln!(out, "<p class=\"remark\">{}</p>", escape(remark));
        }
        out.push_str(CONTROLS);
        out.push_str("<section>\n<h2>Runs</h2>\n");
        tables::push_runs(&mut out, self);
        out.push_str("</section>\n<section>\n<h2>Curves</h2>\n");
        self.push_charts(&mut out);
        out.push_str("</section>\n<section>\n<h2>Settings that differ</h2>\n");
        tables::push_settings(&mut out, &self.runs);
        out.push_str("</section>\n<section>\n<h2>Each run</h2>\n");
        for (index, run) in self.runs.iter().enumerate() {
            let name = escape(&run.name);
            let _ = writeln!(
                out,
                "<details class=\"run\" id=\"run-{index}\" data-run=\"{index}\"><summary>{name}\
                 </summary>"
            );
            push_blocks(&mut out, &run.details);
            out.push_str("</details>\n");
        }
        out.push_str("</section>\n");
        let _ = write!(
            out,
            "<script type=\"application/json\" id=\"data\">{}</script>\n<script>\n{SCRIPT}\
             </script>\n",
            data::json(self, self.buckets())
        );
        push_end(&mut out);
        out
    }

    /// Intervals of each curve.
    fn buckets(&self) -> usize {
        let is_drawn = |curve: &&Curve| matches!(curve, Curve::Points(_));
        let curves = self.runs.iter().flat_map(|run| &run.curves).filter(is_drawn).count();
        (POINTS_MAX / 2 / curves.max(1)).clamp(BUCKETS_MIN, BUCKETS_MAX)
    }

    /// Writes an empty figure for each chart; the script draws it.
    fn push_charts(&self, out: &mut String) {
        out.push_str("<div class=\"charts\">\n");
        for (index, chart) in self.charts.iter().enumerate() {
            let (title, help) = (escape(&chart.title), escape(&chart.help));
            let _ = writeln!(
                out,
                "<figure class=\"plot\" data-chart=\"{index}\"><figcaption>{title}\
                 <label><input type=\"checkbox\" class=\"log\"/> log</label></figcaption>\
                 <div class=\"canvas\"></div><p class=\"help\">{help}</p></figure>"
            );
        }
        let longest = self.runs.iter().flat_map(|run| &run.curves).map(Curve::len).max();
        let buckets = self.buckets();
        let thinned = match longest.unwrap_or(0) > 2 * buckets {
            true => format!(
                "Curves are thinned: of each of {buckets} intervals of steps the lowest and the \
                 highest value are shown, so that no spike is lost. The complete values are in \
                 the metrics.jsonl of each run."
            ),
            false => "Curves show every recorded value.".to_owned(),
        };
        let _ = writeln!(
            out,
            "</div>\n<noscript><p>Charts need scripts; tables and details do not.</p></noscript>\n\
             <p class=\"help\">{thinned} Ticks on the horizontal axis are guard events.</p>"
        );
    }
}
