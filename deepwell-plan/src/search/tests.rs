//! Tests of the search.

use std::time::Instant;

use super::*;
use crate::gpu_model::GpuModel;

fn request(model: &str, seq: usize, batch: usize, gpu: GpuModel, gpus: usize) -> SearchRequest {
    SearchRequest::new(known_model(model).unwrap(), seq, batch, gpu, gpus)
}

#[test]
fn eight_gpus_and_eight_experts() {
    for gpu in [GpuModel::h200(), GpuModel::b200()] {
        let name = format!("mixtral_{}_x8", gpu.name);
        let request = request("mixtral-8x7b", 16384, 64, gpu, 8);
        let found = search(&request).unwrap();
        insta::assert_snapshot!(name, found.describe(&request, true).to_string());
    }
}

#[test]
fn large_worlds_take_a_second() {
    // The bar is 1 s on one core; tests share two with others.
    for (model, seq) in [("llama3.1-405b", 8192), ("deepseek-v3", 4096)] {
        let request = request(model, seq, 16384, GpuModel::h100(), 16384);
        let start = Instant::now();
        let found = search(&request).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        println!("{model}: {seconds:.2} s\n{}", found.describe(&request, true));
        assert!(seconds < 5.0, "{model}: {seconds} s");
        assert_eq!(found.best.at.gpus(), 16384);
        assert!(found.best.memory_bytes <= request.memory_limit_bytes());
    }
}

#[test]
fn pins_hold_and_lose() {
    let free = request("llama3-70b", 8192, 256, GpuModel::h100(), 64);
    let best = search(&free).unwrap().best;
    let check = |pin: &str, holds: fn(&Parallelism) -> bool| {
        let pinned = SearchRequest { pins: vec![pin.parse().unwrap()], ..free.clone() };
        let found = search(&pinned).unwrap().best;
        assert!(holds(&found.at), "{pin}: {}", found.at);
        assert!(found.seconds >= best.seconds * 0.98, "{pin}: {} {}", found.seconds, best.seconds);
    };
    check("tp=2", |at| at.tp == 2);
    check("pp=4", |at| at.pp == 4);
    check("recompute=full", |at| at.recompute == crate::ActivationRecompute::Full);
    check("schedule!=1f1b", |at| at.schedule != crate::schedule::PipelineSchedule::OneFOneB);
    for wrong in ["tp", "xp=4", "tp=four", "schedule=fast"] {
        assert!(wrong.parse::<Pin>().is_err(), "{wrong}");
    }
}

#[test]
fn nothing_fits_says_why() {
    let mut request = request("llama3-70b", 8192, 8, GpuModel::h100(), 8);
    request.gpu_memory_bytes = Some(20e9);
    let message = search(&request).unwrap_err().to_string();
    assert!(message.contains("needs more memory than a GPU has"), "{message}");
}

#[test]
fn another_world_says_what_moves() {
    let request = request("llama3-8b", 8192, 128, GpuModel::h200(), 16);
    let now = search(&request).unwrap().best;
    let (found, changes, moved) = replan(&request, &now, 8).unwrap();
    assert_eq!(found.best.at.gpus(), 8);
    assert!(changes.iter().any(|change| change.dimension == Dimension::Gpus), "{changes:?}");
    assert!((0.0..=1.0).contains(&moved));
    let (_, changes, moved) = replan(&request, &now, 16).unwrap();
    assert!(changes.is_empty() && moved == 0.0, "{changes:?} {moved}");
}

#[test]
fn the_front_has_nothing_beaten() {
    let request = request("llama3-8b", 8192, 128, GpuModel::h200(), 16);
    let front = search(&request).unwrap().front;
    for (at, a) in front.iter().enumerate() {
        for b in &front[at + 1..] {
            assert!(b.seconds >= a.seconds && b.memory_bytes < a.memory_bytes);
        }
    }
}
