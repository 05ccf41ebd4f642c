//! The suite: what every adapter promises, one case per promise, each on an empty store of its own.

pub mod atomicity;
pub mod claims;
pub mod corruption;
pub mod counts;
pub mod creation;
pub mod definitions;
pub mod gates;
pub mod hints;
pub mod history;
pub mod host_clock;
pub mod inbox;
pub mod leases;
pub mod lifecycle;
pub mod lists;
pub mod payloads;
pub mod revisions;
pub mod rows;
mod support;
#[cfg(test)]
mod tests;

/// Every case as a `#[tokio::test]` of the calling file, in a module per theme. The argument is an expression that makes one
/// `Fixture`; it stands in an `async` block and may await.
#[macro_export]
macro_rules! conformance_tests {
    ($fixture:expr) => {
        $crate::conformance_tests! { @tests $fixture;
            creation: [
                a_new_run_is_loaded_as_it_was_written,
                a_new_run_may_be_held_from_its_first_moment,
                the_first_revision_is_the_stores,
                a_taken_id_is_told_and_nothing_is_written,
                the_same_key_and_request_make_one_run,
                the_same_key_with_another_request_conflicts,
                keys_of_two_callers_are_two_keys,
                old_keys_are_forgotten_when_their_run_is_over_or_gone,
                the_oldest_keys_are_forgotten_first,
                concurrent_twins_make_one_run,
                concurrent_creations_of_one_id_make_one_run,
                a_deleted_id_is_never_used_again,
                events_of_a_new_run_start_at_one,
                an_unknown_run_is_not_found,
            ];
            revisions: [
                a_commit_is_loaded_as_it_was_written,
                the_next_revision_is_the_stores_not_the_callers,
                a_stale_revision_conflicts_and_writes_nothing,
                of_commits_on_one_revision_one_wins,
                of_idle_commits_on_one_revision_one_wins,
                the_last_revision_is_an_end_and_never_wraps,
            ];
            leases: [
                each_acquisition_has_a_new_incarnation_also_for_the_same_owner,
                a_live_lease_is_busy_for_everybody_also_its_owner,
                of_concurrent_acquisitions_one_wins,
                a_stale_handle_cannot_renew_release_or_commit,
                an_expired_lease_is_lost_although_nobody_took_it,
                an_expired_lease_can_be_taken,
                owner_and_expiry_in_a_handle_are_no_authority,
                a_released_run_is_free_at_once,
                a_commit_may_give_the_lease_back,
                renewals_are_answered_lease_by_lease_in_order,
                a_lease_lasts_at_least_a_moment,
                a_fence_survives_deletion,
                a_run_that_is_over_can_be_held,
                an_idle_commit_is_refused_while_somebody_holds_the_run,
                an_idle_commit_is_allowed_when_the_lease_has_expired,
            ];
            inbox: [
                a_post_grows_the_signal_and_leaves_the_revision,
                a_post_is_allowed_while_somebody_holds_the_run,
                a_post_on_an_old_signal_conflicts_and_writes_nothing,
                of_concurrent_posts_on_one_signal_one_wins,
                a_commit_that_saw_an_old_inbox_is_refused,
                a_post_wakes_a_parked_run,
                a_post_that_changes_nothing_wakes_nobody,
                a_post_wakes_no_run_that_is_over,
                parking_and_posting_at_once_lose_no_wake_up,
                the_first_request_to_cancel_stays,
                a_delivery_settles_a_gate_beside_the_holder,
                of_a_timer_and_a_delivery_one_settles_the_wait,
                nothing_is_posted_to_a_deleted_run,
                a_parked_run_can_be_taken_without_being_due,
            ];
            atomicity: [
                a_commit_writes_rows_of_every_kind,
                a_duplicate_decision_rolls_the_whole_commit_back,
                one_decision_twice_in_a_commit_is_refused,
                one_decision_id_in_two_ledgers_is_two_decisions,
                a_life_has_one_terminal_event,
                two_terminal_events_in_one_commit_are_refused,
                event_numbers_have_no_gaps_and_no_twins,
                a_refused_guard_writes_no_row,
                refusals_stay_alone_among_commits_that_arrive_together,
            ];
            claims: [
                the_longest_due_comes_first,
                a_claim_takes_no_more_than_asked,
                a_claimed_run_comes_with_everything,
                what_is_not_due_yet_is_left,
                a_timer_comes_due,
                a_waiting_run_without_a_time_is_never_claimed,
                a_run_that_is_over_is_never_claimed,
                only_known_definitions_are_claimed,
                named_runs_are_passed_over,
                a_held_run_is_skipped,
                the_run_of_a_lost_worker_is_claimed,
                a_run_set_aside_is_skipped,
                claimers_share_without_overlap,
                claiming_and_acquiring_at_once_have_one_winner,
                a_run_goes_on_being_due_until_a_commit_says_otherwise,
            ];
            rows: [
                a_journal_has_its_activation_and_whatever_is_open,
                activities_come_in_pages_in_order,
                an_activity_is_written_over_its_earlier_self,
                waits_come_in_the_order_they_were_armed,
                armed_waits_are_found_by_correlation_over_all_runs,
                a_delivery_is_found_again_over_all_runs,
                decisions_come_in_order_per_ledger,
                steps_come_in_pages_in_order,
                events_come_in_pages_in_order,
            ];
            payloads: [
                payloads_of_every_size_come_back,
                a_state_of_64_mib_comes_back_or_is_refused,
                bytes_are_never_read_or_converted,
                documents_come_back_byte_for_byte,
                one_long_payload_is_stored_once_per_run,
                a_payload_read_from_one_run_is_whole_in_another,
                a_state_whose_checkpoint_was_pruned_can_be_committed_again,
                awkward_run_ids_are_all_different,
                awkward_texts_are_kept_in_every_place,
                awkward_ids_can_be_deleted_one_by_one,
            ];
            history: [
                history_is_gapless_newest_first,
                a_checkpoint_is_exactly_what_was_committed,
                a_revision_never_written_is_unavailable,
                a_pruned_checkpoint_is_unavailable_and_stays_listed,
                pruning_again_prunes_what_is_new,
                pruning_keeps_what_the_head_and_the_journal_need,
                an_unknown_runs_history_is_not_another_ones,
            ];
            corruption: [
                a_changed_state_is_corrupt,
                a_changed_body_is_corrupt,
                a_missing_seal_is_corrupt,
                a_copied_head_is_corrupt,
                a_changed_sealed_column_is_corrupt,
                a_changed_owner_is_corrupt,
                a_changed_long_state_is_corrupt,
                a_missing_long_state_is_corrupt,
                an_older_schema_than_the_first_is_corrupt,
                acquiring_a_corrupt_run_sets_it_aside,
                a_corrupt_run_does_not_hide_others_from_a_list,
                a_newer_schema_is_refused_and_left_to_those_who_know_it,
                a_corrupt_checkpoint_is_corrupt_and_the_others_are_not,
                a_corrupt_activity_is_corrupt,
                a_corrupt_wait_is_corrupt_and_does_not_hide_others,
                a_run_set_aside_is_listed_with_its_reason_and_freed_when_whole,
                a_run_with_a_corrupt_journal_stays_aside,
                a_wrecked_index_is_rebuilt_from_sealed_heads,
                a_rebuild_sets_corrupt_runs_aside,
            ];
            lifecycle: [
                a_held_run_is_not_deleted,
                a_run_that_is_not_over_is_not_deleted,
                every_end_can_be_deleted,
                an_expired_lease_does_not_keep_a_run,
                nothing_of_a_deleted_run_is_left,
                deleting_and_acquiring_at_once_have_one_winner,
                deleting_twice_at_once_deletes_once,
            ];
            lists: [
                a_list_is_in_order_of_creation_then_id,
                a_list_can_be_filtered,
                a_list_can_be_of_one_owner,
                a_list_can_be_of_what_is_due,
                a_listed_head_is_the_loaded_head,
                due_work_comes_in_pages_in_order,
                due_work_says_whether_it_is_held,
            ];
            gates: [
                gates_come_in_order_over_all_runs,
                gates_can_be_filtered,
                a_settled_gate_is_not_armed_and_stays_among_all,
                a_gate_comes_whole_with_the_definition_of_its_run,
                what_is_corrupt_or_set_aside_hides_no_gate,
                a_gate_under_a_wrong_kind_is_not_shown_and_is_found_again,
            ];
            counts: [
                what_is_not_over_is_counted_by_status,
                what_is_set_aside_is_not_counted,
                armed_waits_are_counted_by_kind,
            ];
            definitions: [
                a_definition_comes_back_byte_for_byte,
                the_newest_digest_again_is_the_same_version,
                a_digest_of_before_is_a_new_version,
                what_is_no_definition_is_refused,
                a_name_is_withdrawn_once_and_restored_by_either,
                kinds_keep_their_names_apart,
                of_concurrent_twins_one_is_new,
                concurrent_definitions_are_all_kept,
                definitions_come_in_pages_by_name,
                versions_come_in_pages_in_order,
                a_changed_body_is_corrupt_and_hides_nothing,
            ];
            hints: [
                a_new_run_is_hinted_at,
                a_post_is_hinted_at,
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

/// The cases for stores that live by the host's clocks. The argument makes a pair: the `Fixture` and an
/// `Arc<ManualClock>` that its store reads.
#[macro_export]
macro_rules! host_clock_tests {
    ($fixture:expr) => {
        $crate::host_clock_tests! { @tests $fixture;
            host_clock: [
                a_wall_clock_that_steps_does_not_end_a_lease,
                a_wall_clock_that_stands_or_steps_back_does_not_keep_a_lease,
                a_lease_is_live_to_its_last_moment_and_not_at_its_end,
                a_renewed_lease_outlives_its_first_end,
                due_work_follows_the_wall_clock,
            ];
        }
    };
    (@tests $fixture:expr; $theme:ident: [$($case:ident),* $(,)?];) => {
        mod $theme {
            use super::*;

            $(#[tokio::test]
            async fn $case() {
                let (fixture, clock) = $fixture;
                $crate::testing::conformance::$theme::$case(&fixture, &clock).await;
            })*
        }
    };
}
