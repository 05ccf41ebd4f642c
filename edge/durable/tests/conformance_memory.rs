//! The conformance suite on the memory store.

use iop_durable::testing::MemoryFixture;

iop_durable::conformance_tests!(MemoryFixture::new());
