//! Model graph, autodiff and the lowered Program: the data that every other Deepwell crate leans on
