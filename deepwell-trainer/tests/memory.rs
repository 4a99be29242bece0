//! The sampler of memory, alone in its process: other tests would allocate and free meanwhile.

#[cfg(target_os = "linux")]
#[test]
fn moves_with_32_mib_of_hidden_scratch() {
    use deepwell_trainer::Device;
    use deepwell_trainer::memory_sampler::MemorySampler;

    let Some(sampler) = MemorySampler::start(Device::Cpu) else { return };
    let before = sampler.peak_over_baseline_bytes();
    let scratch = vec![1u8; 32 << 20];
    std::hint::black_box(&scratch);
    let moved = sampler.peak_over_baseline_bytes() - before;
    // The test runner's own threads hold far less than the rest.
    assert!((31 << 20..40 << 20).contains(&moved), "{moved}");
}
