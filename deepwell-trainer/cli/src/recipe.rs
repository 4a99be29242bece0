//! `deepwell recipe`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use deepwell_runs::read_runs;
use deepwell_runs::recipe::{Basis, Check, Recipe, RecipeData};
use deepwell_trainer::{Device, Settings};

use crate::Outcome;
use crate::commands::TrainArgs;
use crate::output::{note, print, print_json};
use crate::train::run_train;

/// Train by recipes with expected curves and figures
#[derive(Args, Debug)]
pub(crate) struct RecipeArgs {
    #[command(subcommand)]
    command: RecipeCommand,
}

#[derive(Debug, Subcommand)]
enum RecipeCommand {
    List(ListArgs),
    Show(ShowArgs),
    Run(Box<RunArgs>),
    Check(CheckArgs),
}

const LIST_AFTER_HELP: &str = "\
Examples:
  deepwell recipe list
  deepwell recipe list --json

Exit codes: 0 listed";

/// List the recipes
#[derive(Args, Debug)]
#[command(after_help = LIST_AFTER_HELP)]
struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const SHOW_AFTER_HELP: &str = "\
Every figure says whether it was measured or predicted, and names its record: a file in benchmarks/
of the repository, or the command that predicts it.

Examples:
  deepwell recipe show llama-134m
  deepwell recipe show ./mine.toml --json

Exit codes: 0 shown, 2 no such recipe, or its file is invalid";

/// Show a recipe: run file, expected curve, figures with their origin
#[derive(Args, Debug)]
#[command(after_help = SHOW_AFTER_HELP)]
struct ShowArgs {
    /// Name of a recipe, or path of a recipe file in TOML
    recipe: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const RUN_AFTER_HELP: &str = "\
Trains with the settings of the recipe, as `deepwell train` with its run file. llama-micro brings
its text and runs on every processor in seconds. Recipes for a cluster are predictions: run
the command that `deepwell recipe show` prints.

Examples:
  deepwell recipe run llama-micro --out runs/micro
  deepwell recipe run llama-134m --tokenizer tokenizer.json --device cuda
  deepwell recipe check llama-micro runs/micro

Exit codes: 0 done, 1 a guard stopped the run or no plan fits into memory, 2 an input cannot be
used, 130 interrupted";

/// Train a recipe
#[derive(Args, Debug)]
#[command(after_help = RUN_AFTER_HELP)]
struct RunArgs {
    /// Name of a recipe, or path of a recipe file in TOML
    recipe: String,
    /// Output folder [default: target/recipes/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Training data in place of the recipe's; the expected curve is then of other data
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// tokenizer.json of the run
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Device in place of the recipe's
    #[arg(long)]
    device: Option<Device>,
    /// Seed in place of the recipe's; expected intervals hold for every seed
    #[arg(long)]
    seed: Option<u64>,
    /// Resume from the newest checkpoint in the output folder
    #[arg(long)]
    resume: bool,
    /// Delete the results of another run in the output folder
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    json: bool,
}

const CHECK_AFTER_HELP: &str = "\
Compares settings, tokens, losses and figures. A figure of a machine is compared only with a run on
such a machine, and a figure without an interval with none; the reason is printed.

Examples:
  deepwell recipe check llama-micro runs/micro
  deepwell recipe check ./mine.toml runs/mine --json

Exit codes: 0 within, 1 a compared value is outside, 2 an input cannot be used, 3 nothing could be
compared";

/// Compare a run with the curve and the figures of a recipe
#[derive(Args, Debug)]
#[command(after_help = CHECK_AFTER_HELP)]
struct CheckArgs {
    /// Name of a recipe, or path of a recipe file in TOML
    recipe: String,
    /// Output folder of the run
    run: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &RecipeArgs) -> Result<Outcome> {
    match &args.command {
        RecipeCommand::List(args) => list(args),
        RecipeCommand::Show(args) => show(args),
        RecipeCommand::Run(args) => train(args),
        RecipeCommand::Check(args) => check(args),
    }
}

fn list(args: &ListArgs) -> Result<Outcome> {
    let all: Vec<Recipe> = Recipe::names().map(Recipe::find).collect::<Result<_, _>>()?;
    if args.json {
        print_json(&all)?;
        return Ok(Outcome::Success);
    }
    let wide = all.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for recipe in &all {
        let bases = recipe.points.iter().map(|point| point.basis);
        let bases = bases.chain(recipe.figures.iter().map(|figure| figure.basis));
        let measured = if bases.clone().any(|it| it == Basis::Measured) { "measured" } else { "" };
        let predicted =
            if bases.clone().any(|it| it == Basis::Predicted) { "predicted" } else { "" };
        let basis = [measured, predicted].map(str::to_owned).join(" ");
        let (name, basis) = (&recipe.name, basis.trim());
        text.push_str(&format!("{name:<wide$}  {basis:<18}  {}\n", recipe.summary));
    }
    print(&text)?;
    Ok(Outcome::Success)
}

fn show(args: &ShowArgs) -> Result<Outcome> {
    let recipe = Recipe::find(&args.recipe)?;
    if args.json {
        print_json(&recipe)?
    } else {
        print(&recipe)?
    }
    Ok(Outcome::Success)
}

fn train(args: &RunArgs) -> Result<Outcome> {
    let recipe = Recipe::find(&args.recipe)?;
    if !recipe.is_runnable() {
        bail!(
            "recipe `{}`: expected one that a machine runs, got a prediction for {}\nhint: {}",
            recipe.name,
            recipe.hardware,
            recipe.command
        );
    }
    let file = &recipe.run;
    let cache = file.get("cache_dir").and_then(|it| it.as_str()).map(PathBuf::from);
    let cache = cache.unwrap_or_else(|| Settings::default().cache_dir);
    let data = match (args.data.is_empty(), recipe.text()) {
        (true, Some(text)) => vec![write_text(&cache, &recipe.name, text)?],
        (true, None) if recipe.data == RecipeData::Own => {
            bail!("recipe `{}`: expected `--data`, got none", recipe.name)
        }
        _ => args.data.clone(),
    };
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let run_file = folder.path().join(format!("{}.toml", recipe.name));
    let text = toml::to_string(file).context("cannot write the run file")?;
    fs::write(&run_file, text).with_context(|| format!("cannot write `{}`", run_file.display()))?;
    let out = args.out.clone();
    let out = out.unwrap_or_else(|| Path::new("target/recipes").join(&recipe.name));
    note(format_args!("afterwards: deepwell recipe check {} {}", args.recipe, out.display()));
    run_train(TrainArgs {
        run_file: Some(run_file),
        data,
        tokenizer: args.tokenizer.clone(),
        device: args.device,
        seed: args.seed,
        out: Some(out),
        resume: args.resume,
        overwrite: args.overwrite,
        json: args.json,
        label: recipe.name,
        ..TrainArgs::default()
    })
}

/// Writes the text of a recipe to the folder of cached tokens.
fn write_text(cache: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let folder = cache.join("recipes");
    let path = folder.join(format!("{name}.txt"));
    let write = || fs::create_dir_all(&folder).and_then(|()| fs::write(&path, text));
    write().with_context(|| format!("cannot write `{}`", path.display()))?;
    Ok(path)
}

fn check(args: &CheckArgs) -> Result<Outcome> {
    let recipe = Recipe::find(&args.recipe)?;
    let runs = read_runs(std::slice::from_ref(&args.run))?;
    let [run] = &runs[..] else {
        bail!(
            "`{}`: expected one run, got {}\nhint: name the folder of one",
            args.run.display(),
            runs.len()
        );
    };
    let check = Check::of(&recipe, run);
    if args.json {
        print_json(&check)?
    } else {
        print(&check)?
    }
    Ok(match check.within {
        Some(true) => Outcome::Success,
        Some(false) => Outcome::Failed,
        None => Outcome::Open,
    })
}
