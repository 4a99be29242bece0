//! Plans for whole clusters as they are read: pages, and what other frameworks would count.

use deepwell_plan::ModelShape;
use deepwell_plan::search::{
    Accounting, ClusterPlan, Count, Machines, SearchAids, SearchRequest, explanation, replan,
    search, what_if,
};
use deepwell_probe::Cluster;

fn request(model: &str, cluster: &str, seq: usize, batch: usize) -> SearchRequest {
    let machines = Machines::of_cluster(&Cluster::from_name(cluster).unwrap()).unwrap();
    let shape = ModelShape::known(model).unwrap();
    SearchRequest { fp8: true, ..SearchRequest::new(shape, seq, batch, machines) }
}

/// A page without what the trainer runs of it, which is another test's subject.
fn page(plan: &ClusterPlan) -> String {
    let text = plan.to_string();
    let lines = text.lines().filter(|line| !line.starts_with("  the trainer "));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The request of the specification: eight GPUs, eight experts, sequences of 16,384 tokens.
#[test]
fn eight_experts_on_eight_gpus() {
    for machine in ["h200-x8", "b200-x8"] {
        let request = request("mixtral-8x7b", &format!("{machine}:price=3"), 16384, 64);
        let found = search(&request).unwrap();
        let plan = ClusterPlan::new(&request, &found, Some(1e12)).unwrap();
        let numbers = what_if(&request, &found, &SearchAids::default()).unwrap();
        let page = format!("{}{}", page(&plan), explanation(&found, &numbers));
        insta::assert_snapshot!(format!("mixtral_{machine}"), page);
    }
}

#[test]
fn plans_over_nodes() {
    let mut request = request("llama-3-70b", "h100:nodes=16,price=2.5", 8192, 512);
    let found = search(&request).unwrap();
    let plan = ClusterPlan::new(&request, &found, Some(15e12)).unwrap();
    let counted = Count::of(&plan, Accounting::Megatron).unwrap();
    insta::assert_snapshot!("llama_nodes", format!("{}{counted}", page(&plan)));
    let half = Machines::of_cluster(&Cluster::from_name("h100:nodes=8").unwrap()).unwrap();
    let smaller = SearchRequest { gpus: vec![half.gpus], machines: half, ..request.clone() };
    let then = ClusterPlan::new(&smaller, &search(&smaller).unwrap(), None).unwrap();
    insta::assert_snapshot!("llama_replan", replan(&plan, &then).to_string());
    request.gpus = vec![128, 64, 32];
    let front = search(&request).unwrap().front_table(&request);
    insta::assert_snapshot!("llama_front", front);
}

#[test]
fn a_rack_and_a_mixture() {
    let request = request("deepseek-v3", "gb200-nvl72-x4", 4096, 4096);
    let found = search(&request).unwrap();
    let plan = ClusterPlan::new(&request, &found, Some(14.8e12)).unwrap();
    insta::assert_snapshot!("deepseek_racks", page(&plan));
}
