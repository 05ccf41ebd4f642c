//! Random scripts of operations, on the memory store and on a naive model.

use iop_durable::testing::MemoryFixture;

iop_durable::model_test!(256, MemoryFixture::new());
