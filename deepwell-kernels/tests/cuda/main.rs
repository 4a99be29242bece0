//! Tests that need a GPU. Without one each says so and passes.
