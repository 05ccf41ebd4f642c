//! The official Python SDK sees through the gateway what it sees at the provider itself, in both shapes.

use iop_tests::{openai_like, run, sdk};

#[test]
fn python_sdk_sees_the_same_as_at_the_provider() {
    run(300, async {
        let stub = openai_like::start().await;
        sdk::compared("promises.py", &stub, &["unexpected"]).await;
    });
}
