//! The conformance suite on the memory store.

use iop_durable::testing::MemoryFixture;

iop_durable::conformance_tests!(MemoryFixture::new());

iop_durable::host_clock_tests!({
    let fixture = MemoryFixture::new();
    let clock = fixture.clock.clone();
    (fixture, clock)
});
