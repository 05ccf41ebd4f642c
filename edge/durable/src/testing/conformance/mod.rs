//! The suite: what every adapter promises, one case per promise, each on an empty store of its own.

pub mod creation;

/// Every case as a `#[tokio::test]` of the calling file, in a module per theme. The argument is an expression that makes one
/// `Fixture`; it stands in an `async` block and may await.
#[macro_export]
macro_rules! conformance_tests {
    ($fixture:expr) => {
        $crate::conformance_tests! { @tests $fixture;
            creation: [
                a_new_run_is_loaded_as_it_was_written,
            ];
        }
    };
    (@tests $fixture:expr; $($theme:ident: [$($case:ident),* $(,)?];)*) => {
        $(mod $theme {
            use super::*;

            $(#[tokio::test]
            async fn $case() {
                let fixture = $fixture;
                $crate::testing::conformance::$theme::$case(&fixture).await;
            })*
        })*
    };
}
