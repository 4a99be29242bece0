//! A slice of a tensor has the tensor scale of the whole tensor: that of one rank, to the bit.

use bytemuck::cast_slice_mut;
use deepwell_ir::{MemoryKind, Plane, Value, ValueId};
use deepwell_trainer::{Engine, Parallel};

use crate::fault::Fault;
use crate::model::model;
use crate::train::{options, world};

#[test]
fn tensor_scales_are_those_of_whole_weights() {
    let scales = |parallel: Parallel, fault: Fault| -> Vec<Vec<(String, u32)>> {
        let mut world = world(&model("llama"), &options("nvfp4", parallel, 4), fault);
        let of_rank = |engine: &mut Engine| {
            engine.initialize(7)?;
            let program = engine.program().clone();
            let is_scale = |value: &Value| {
                let is_weight = value.memory == MemoryKind::Weights;
                is_weight && value.link.and_then(|link| link.plane()) == Some(Plane::TensorScale)
            };
            let ids = (0..program.values.len() as u32).map(ValueId);
            let mut scales = Vec::new();
            for id in ids.filter(|&id| is_scale(program.value(id))) {
                let mut value = [0f32];
                engine.read_value(id, cast_slice_mut(&mut value))?;
                scales.push((program.value(id).name.to_string(), value[0].to_bits()));
            }
            Ok(scales)
        };
        world.on_all(of_rank).expect("scales")
    };
    let alone = scales(Parallel::default(), Fault::None).remove(0);
    assert!(alone.len() > 4, "{alone:?}");
    let two = Parallel { tensor: 2, ..Parallel::data(1) };
    for of_rank in scales(two, Fault::None) {
        assert_eq!(of_rank, alone);
    }
    let own = scales(two, Fault::OwnAmax);
    assert!(own.iter().any(|of_rank| *of_rank != alone), "an own amax goes unnoticed");
}
