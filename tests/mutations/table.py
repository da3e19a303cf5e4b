"""Changes of the code that a test must notice, each with the test that does.

A mutation is found by its code, which occurs once in its file: when that code changes, its row here changes with it.
"""

# ruff: noqa: E501  # code is compared as it is written
from __future__ import annotations

from typing import NamedTuple

TRAINER = "agents/trinity_agents/trainer"
RUNNER, OPERATOR, GATEWAY = (
    "agents/trinity_agents/runner",
    "agents/trinity_agents/operator",
    "agents/trinity_agents/gateway",
)
ACTING = "unit/agents/gateway/test_acting_lock.py"
OUTAGES = "unit/agents/gateway/test_outages.py"
CHECKPOINTS = "trinity_mq/training/checkpoints"
GATE = "trinity_mq/sync/gate"
DEADLY = "unit/agents/trainer/test_deadly_steps.py"


class Mutation(NamedTuple):
    """A change, and the test that must fail with it."""

    name: str
    file: str
    code: str
    """Occurs once in the file."""
    becomes: str
    test: str
    """Below ``tests/``, as pytest names it; with parameters or without."""


MUTATIONS = [
    # -- the trainer's data
    Mutation(
        "a group that is one step too old is trained on",
        f"{TRAINER}/batch_result.py",
        "stale = {tid for tid, age in zip(tids, ages, strict=True) if age > max_staleness}",
        "stale = {tid for tid, age in zip(tids, ages, strict=True) if age > max_staleness + 1}",
        "unit/agents/trainer/test_batch_result.py::test_what_is_fit_is_trained_on_and_the_rest_told",
    ),
    Mutation(
        "staleness counts from the newest token",
        f"{TRAINER}/batch_result.py",
        "oldest = min((generation, stamped)",
        "oldest = max((generation, stamped)",
        "unit/agents/trainer/test_staleness.py::test_the_oldest_token_decides_and_nothing_is_younger_than_zero",
    ),
    Mutation(
        "a batch that kills is given one start more",
        f"{TRAINER}/batch_result.py",
        "    if starts < max_starts:\n",
        "    if starts <= max_starts:\n",
        "unit/agents/trainer/test_batch_result.py::test_what_trainers_did_not_survive_is_left_alone_and_stays_on_record",
    ),
    Mutation(
        "uses of replayed groups are not counted",
        f"{TRAINER}/sources/replay.py",
        "            self._index.use(groups, self._step)\n",
        "            pass\n",
        "unit/agents/trainer/test_replay.py::test_the_uses_of_replayed_groups_are_counted",
    ),
    Mutation(
        "a skipped batch is replayed",
        f"{TRAINER}/sources/replay.py",
        "if part.trained and part.ticket in fresh]",
        "if part.experiences and part.ticket in fresh]",
        f"{DEADLY}::test_a_batch_that_kills_is_not_replayed_and_groups_beside_it_are",
    ),
    Mutation(
        "a group that kills when it is replayed stays in the index",
        f"{TRAINER}/sources/replay.py",
        "if self._reader.starts(replayed_key(group.tid)) >= MAX_STARTS]",
        "if self._reader.starts(replayed_key(group.tid)) >= 1000]",
        f"{DEADLY}::test_a_group_that_kills_when_it_is_replayed_is_forgotten_and_every_batch_trained_on",
    ),
    Mutation(
        "the company of a batch that kills is not tried apart",
        f"{TRAINER}/sources/stream.py",
        "        return self.has_company and self.starts(decision.ready.ticket) >= MAX_STARTS\n",
        "        return False\n",
        f"{DEADLY}::test_of_several_batches_in_a_step_only_those_that_kill_are_skipped",
    ),
    Mutation(
        "the position of experts is not saved",
        f"{TRAINER}/sources/mix.py",
        'return {**self._rollouts.state(), "experts": self._experts.state()}',
        "return self._rollouts.state()",
        "unit/agents/trainer/test_mix.py::test_killed_anywhere_each_expert_comes_once_an_epoch",
    ),
    Mutation(
        "the replay index is not saved",
        f"{TRAINER}/sources/replay.py",
        'return {**self._rollouts.state(), "replay": {"step": self._step, **self._index.state()}}',
        "return self._rollouts.state()",
        "unit/agents/trainer/test_replay.py::test_killed_anywhere_the_same_groups_are_chosen",
    ),
    Mutation(
        "a tap's checkpoint counts as begun only with the id of the other run",
        f"{TRAINER}/sources/tap.py",
        "            if self._state:  # the",
        "            if self._run_id:  # the",
        "unit/agents/trainer/test_tap_position.py::test_a_run_that_begins_later_is_trained_on_once",
    ),
    Mutation(
        "the id of a run that was met later is not saved",
        f"{TRAINER}/sources/tap.py",
        '"run_id": self._stream.run_id,',
        '"run_id": self._run_id,',
        "unit/agents/trainer/test_tap_position.py::test_a_run_that_begins_later_is_trained_on_once",
    ),
    Mutation(
        "a trained ticket is trained on again where its chunks come again",
        f"{TRAINER}/decisions.py",
        "return ticket in self.consumed or ticket in self._held or",
        "return ticket in self._held or",
        "unit/agents/trainer/test_decisions.py::test_repeated_chunks_and_readies_are_nothing_new",
    ),
    Mutation(
        "the second set of a ticket counts too",
        f"{TRAINER}/decisions.py",
        "return ticket in self.consumed or ticket in self._held or",
        "return ticket in self.consumed or",
        "unit/agents/trainer/test_decisions.py::test_only_a_failed_ticket_is_repaired",
    ),
    Mutation(
        "a restart reads from the newest offset on",
        f"{TRAINER}/decisions.py",
        "return min([*firsts, *self._held.values()], default=self.next_offset)",
        "return self.next_offset",
        "unit/agents/trainer/test_decisions.py::test_resume_offset_is_the_lowest_thing_still_needed",
    ),
    Mutation(
        "a set without all of its chunks decides",
        f"{TRAINER}/decisions.py",
        "        if chunks is None:\n            return None",
        "        if chunks is None:\n            chunks = ()",
        "unit/agents/trainer/test_decisions.py::test_the_first_complete_set_decides_and_sets_never_mix",
    ),
    # -- the trainer's state
    Mutation(
        "the history is not synced before a checkpoint",
        f"{TRAINER}/loop.py",
        "        await asyncio.to_thread(self._history.sync)\n",
        "",
        "unit/agents/trainer/test_history.py::test_the_lines_of_a_checkpoint_are_on_disk_before_it_is_committed",
    ),
    Mutation(
        "a trainer that was cut off saves over the one that went on",
        f"{CHECKPOINTS}/checkpoint.py",
        "if (newest := self._last_generation()) > state.generation:",
        "if (newest := self._last_generation()) > state.generation + 1:",
        "unit/training/test_checkpoint.py::test_a_trainer_that_was_cut_off_saves_nothing",
    ),
    Mutation(
        "a step that is called off counts against its batch",
        f"{CHECKPOINTS}/checkpoint.py",
        "        except (asyncio.CancelledError, TrainingStopped):\n            self.withdraw()\n",
        "        except (asyncio.CancelledError, TrainingStopped):\n",
        "unit/training/test_checkpoint.py::test_a_start_that_is_called_off_takes_back_itself_only",
    ),
    Mutation(
        "a checkpoint whose content has changed is loaded",
        f"{CHECKPOINTS}/checkpoint.py",
        "        if checksum != expected:\n",
        "        if not checksum:\n",
        "unit/training/test_checkpoint.py::test_a_changed_byte_shows_before_anything_is_loaded",
    ),
    Mutation(
        "the index of a checkpoint may name anything",
        f"{CHECKPOINTS}/metadata.py",
        "            return _ADMITTED[module, name]\n",
        "            return _ADMITTED.get((module, name)) or super().find_class(module, name)\n",
        "unit/training/test_checkpoint.py::test_an_index_with_a_program_runs_nothing_and_is_named",
    ),
    Mutation(
        "entries of a checkpoint that are no tensors are loaded",
        f"{CHECKPOINTS}/metadata.py",
        "if not isinstance(entry, dcp.TensorStorageMetadata):",
        "if entry is None:",
        "unit/training/test_checkpoint.py::test_an_entry_that_is_no_tensor_is_not_loaded",
    ),
    Mutation(
        "a rank goes on where a command failed on another",
        "trinity_mq/training/parallel/ranks.py",
        '        if worst.kind == "failed":\n',
        '        if worst.kind == "none":\n',
        "unit/training/test_sharded_learner.py::test_a_checkpoint_that_one_rank_alone_cannot_read_is_passed_over_by_all",
    ),
    # -- algorithms
    Mutation(
        "the sign of a group's advantages is turned",
        "trinity_mq/algorithms/estimators/runs.py",
        "    return values - mean\n",
        "    return mean - values\n",
        "unit/algorithms/test_estimators.py::test_divides_by_nothing",
    ),
    Mutation(
        "the likelihood is minimised",
        "trinity_mq/algorithms/surrogates.py",
        "    return TokenLoss(-weight * bounded)\n",
        "    return TokenLoss(weight * bounded)\n",
        "unit/algorithms/test_values.py::test_sure_tokens_have_no_gradient_above_the_cutoff",
    ),
    Mutation(
        "a square pushes the ratio away from 1",
        "trinity_mq/algorithms/surrogates.py",
        "-advantage * logprob + args.beta / 2 * log_ratio.square()",
        "-advantage * logprob - args.beta / 2 * log_ratio.square()",
        "unit/algorithms/test_vectors.py::test_policy_losses[dro]",
    ),
    # -- weight sync
    Mutation(
        "the canary is ignored",
        f"{GATE}/coordinator.py",
        "        if canary_error is not None:\n            self.canary_failures += 1\n            if event.sender",
        "        if canary_error is not None and not event.sender:\n            self.canary_failures += 1\n            if event.sender",
        "unit/sync/test_gate.py::test_an_engine_that_keeps_its_old_weights_is_left_out_in_that_round_and_freed_once_it_has_them",
    ),
    Mutation(
        "a member that failed the canary while it caught up serves on",
        f"{GATE}/coordinator.py",
        "            member.quarantined = True\n            return self._catch_up_failed",
        "            member.quarantined = False\n            return self._catch_up_failed",
        "unit/sync/test_gate.py::test_an_engine_that_keeps_its_old_weights_is_left_out_in_that_round_and_freed_once_it_has_them",
    ),
    Mutation(
        "a version is committed before all have applied it",
        f"{GATE}/coordinator.py",
        "or self._applied != set(self._taking_part):",
        "or not self._applied:",
        "unit/sync/test_gate.py::test_commit_needs_everybody_and_our_own_side",
    ),
    Mutation(
        "the collective begins before all are ready",
        f"{GATE}/coordinator.py",
        "        if self._ready != set(self._taking_part):\n",
        "        if not self._ready:\n",
        "unit/sync/test_gate.py::test_commit_needs_everybody_and_our_own_side",
    ),
    Mutation(
        "an answer to another try counts",
        f"{GATE}/coordinator.py",
        "return key_of(event) == (self._version, self.epoch, self.attempt) and event.sender",
        "return event.sender",
        "unit/sync/test_gate.py::test_answers_to_another_life_of_the_trainer_do_not_count",
    ),
    Mutation(
        "a member whose lease ended is waited for",
        f"{GATE}/coordinator.py",
        "if member.lease_ends <= now]",
        "if member.lease_ends <= 0 * now]",
        "unit/sync/test_gate.py::test_an_ended_lease_is_a_leave",
    ),
    Mutation(
        "a member that was touched resumes its old version",
        f"{GATE}/member.py",
        "        self._touched = True\n",
        "        self._touched = False\n",
        "unit/sync/test_gate.py::test_member_that_was_touched_when_a_try_is_aborted_asks_again",
    ),
    Mutation(
        "older weights pass the canary",
        f"{GATE}/canary.py",
        "        if not arrived >= HALF:\n",
        "        if not arrived >= -HALF:\n",
        "unit/sync/test_canary.py::test_an_engine_that_keeps_its_weights_is_found_as_soon_as_the_change_is_more_than_rounding",
    ),
    Mutation(
        "weights with another checksum are taken",
        "trinity_mq/sync/channels/checkpoint/files.py",
        "    if (checksum := digest(body)) != expected:\n",
        "    if not (checksum := digest(body)):\n",
        "unit/sync/test_channels.py::test_files_that_a_try_could_not_use_are_written_anew",
    ),
    # -- tickets, slices and results
    Mutation(
        "the last outcome of a slice counts",
        "trinity_mq/dispatch/tickets.py",
        "            self.duplicates += task_slice.result.attempt != result.attempt\n            return False\n",
        "            self.duplicates += task_slice.result.attempt != result.attempt\n            task_slice.result = result\n            return False\n",
        "unit/dispatch/test_batch_metrics.py::test_a_training_batch_from_the_runs_up",
    ),
    Mutation(
        "experiences of cut off tasks count where only whole tasks do",
        "trinity_mq/dispatch/tickets.py",
        "return not (self.whole_tasks_only and",
        "return not (False and",
        "unit/scheduler/test_cutting_short.py::test_finished_slices_of_a_task_that_was_cut_off_count_only_if_they_are_to",
    ),
    Mutation(
        "the explorer opens a batch too early",
        "trinity_mq/dispatch/pacing.py",
        "    return progress >= required_progress(batch, config)\n",
        "    return progress + 1 >= required_progress(batch, config)\n",
        "unit/dispatch/test_pacing.py::test_no_order_of_events_hangs_or_makes_older_data_than_promised",
    ),
    Mutation(
        "a slice is not saved before it is published",
        "trinity_mq/dispatch/dispatcher.py",
        '            with span("save state", ticket.batch, wait=True):\n                await self._save()\n',
        '            with span("save state", ticket.batch, wait=True):\n                pass\n',
        "unit/agents/explorer/test_rules_explorer.py::test_open_is_save_then_queue_then_slices_then_save",
    ),
    Mutation(
        "a runner acknowledges before its experiences are confirmed",
        f"{RUNNER}/agent.py",
        '        try:\n            with span("hand over experiences", wait=True):\n',
        '        await acknowledge(in_flight.delivery)\n        try:\n            with span("hand over experiences", wait=True):\n',
        "unit/agents/runner/test_runner.py::test_parts_are_confirmed_before_the_result_and_the_result_before_the_ack",
    ),
    Mutation(
        "a runner reports a slice twice that comes back",
        f"{RUNNER}/agent.py",
        "            if key in self._reported:\n",
        "            if key is None:\n",
        "unit/agents/runner/test_runner.py::test_an_acknowledgement_lost_on_its_way_costs_no_second_run",
    ),
    Mutation(
        "a result that no stream took counts as reported",
        f"{RUNNER}/result_publisher.py",
        "        if not taken:\n            raise RestartRequested",
        "        if taken is None:\n            raise RestartRequested",
        "unit/agents/runner/test_runner.py::test_nothing_is_acknowledged_when_nobody_keeps_results",
    ),
    Mutation(
        "a poisonous slice is tried for ever",
        "trinity_mq/runtime/deliveries.py",
        "return self.suspect >= limit and bool(self.failed or crashes)",
        "return self.suspect > limit and bool(self.failed or crashes)",
        "unit/agents/runner/test_rules_runner.py::test_the_limit_is_five_deliveries_one_of_which_was_seen_to_fail",
    ),
    Mutation(
        "a slice that is given back in good order counts as a try",
        "trinity_mq/runtime/deliveries.py",
        "return replace(self, given_back=self.given_back + 1)",
        "return replace(self, failed=self.failed + 1)",
        "unit/runtime/test_deliveries.py::test_given_back_it_comes_again_under_its_id_and_says_so",
    ),
    Mutation(
        "messages of another run are taken",
        "trinity_mq/runtime/deliveries.py",
        "    if not bus.is_foreign(delivery):\n        return False\n",
        "    if bus.run_id != delivery.run_id or not bus.is_foreign(delivery):\n        return False\n",
        "unit/agents/trainer/test_tap_position.py::test_the_run_that_was_met_first_is_kept_to_after_a_restart",
    ),
    # -- operators
    Mutation(
        "a manifest is acknowledged before its batch is published",
        f"{OPERATOR}/agent.py",
        "        await self._publisher.publish(manifest, batch, delivery.run_id)\n",
        "        await acknowledge(delivery)\n        await self._publisher.publish(manifest, batch, delivery.run_id)\n",
        "unit/agents/operator/test_operator.py::test_chunks_are_confirmed_before_the_ready_and_that_before_the_ack_and_the_queue_lives_a_second_more",
    ),
    Mutation(
        "a batch counts as published where there is no stream",
        f"{OPERATOR}/batch_publisher.py",
        '            raise RestartRequested(f"{self._topology.ready.name} does not exist any more',
        '            log.warning(f"{self._topology.ready.name} does not exist any more',
        "unit/agents/operator/test_operator.py::test_nothing_is_acknowledged_or_deleted_when_nobody_keeps_what_is_ready",
    ),
    # -- bodies
    Mutation(
        "a damaged body of experiences is read",
        "trinity_mq/experience/codec/body.py",
        "    if actual != checksum:\n",
        "    if actual == -checksum:\n",
        "unit/experience/test_codec.py::test_every_flipped_bit_is_refused",
    ),
    Mutation(
        "a damaged blob is read",
        "trinity_mq/transport/blobs.py",
        " or hashlib.sha256(body).hexdigest() != reference.sha256:",
        ":",
        "unit/transport/test_blobs.py::test_a_damaged_blob_is_told_by_size_and_checksum",
    ),
    # -- reviews
    Mutation(
        "a later verdict of a person counts",
        "trinity_mq/reviews/ledger.py",
        "        if earlier is not None:\n",
        "        if earlier is None and review is None:\n",
        "unit/reviews/test_ledger.py::test_the_first_verdict_counts_and_later_ones_are_told_why_not",
    ),
    # -- sessions
    Mutation(
        "every gateway acts without a lock",
        f"{GATEWAY}/agent.py",
        'if not await self.take_lock("gateway", "working", "", until=self.draining.is_set):',
        "if self.draining.is_set():",
        f"{ACTING}::test_a_gateway_acts_only_while_no_other_one_holds_the_lock",
    ),
    Mutation(
        "carried events do not say where their first copy was",
        f"{GATEWAY}/session_stream.py",
        "{ORIGIN: event.origin}",
        "{}",
        f"{ACTING}::test_what_is_carried_over_retention_says_where_its_first_copy_was",
    ),
    Mutation(
        "a gateway that is back after retention keeps its sessions",
        f"{GATEWAY}/session_stream.py",
        "        self.ledger = Ledger()\n        self.not_taken.clear()",
        "        self.not_taken.clear()",
        f"{OUTAGES}::test_a_gateway_that_is_back_after_retention_builds_its_sessions_anew",
    ),
    Mutation(
        "tasks whose copy waits in the queue are submitted again",
        f"{GATEWAY}/submissions.py",
        "dict.fromkeys(names[:lost])",
        "dict.fromkeys(names)",
        f"{OUTAGES}::test_a_task_waits_in_the_queue_once_however_long_training_is_behind",
    ),
    Mutation(
        "limits of time run while the broker is away",
        f"{GATEWAY}/acting_gateway.py",
        "step > LONGEST_STEP or not (is_usable and self._was_usable)",
        "step > LONGEST_STEP",
        f"{OUTAGES}::test_limits_of_time_stand_still_while_the_broker_is_away",
    ),
    Mutation(
        "an outsider's message id is taken for one of a gateway",
        "trinity_mq/gateway/session.py",
        "self.message_id == other.message_id and self.outside == other.outside",
        "self.message_id == other.message_id",
        f"{OUTAGES}::test_the_id_of_an_outsiders_message_blocks_nothing_of_ours",
    ),
    Mutation(
        "a key may do everything in its session",
        "trinity_mq/gateway/access.py",
        "else scope in opened.scopes",
        "else bool(opened)",
        "unit/gateway/test_app.py::test_keys_and_scopes",
    ),
    Mutation(
        "a mistyped key opens sessions on loopback",
        "trinity_mq/gateway/access.py",
        "            return not key\n",
        "            return True\n",
        "unit/gateway/test_app.py::test_a_mistyped_key_is_refused_on_loopback_too",
    ),
    Mutation(
        "what could not be given back is acknowledged",
        "trinity_mq/runtime/deliveries.py",
        "    if await republish(bus, delivery, past):\n",
        "    if await republish(bus, delivery, past) or past:\n",
        "unit/runtime/test_deliveries.py::test_what_cannot_be_published_again_is_requeued",
    ),
    # -- outsiders
    Mutation(
        "outsiders name any workflow and reward",
        "trinity_mq/rewards/outsiders.py",
        "    if name not in allowed:\n",
        "    if not name:\n",
        "unit/rewards/test_outsiders.py::test_what_is_not_open_is_refused_with_the_setting_that_opens_it",
    ),
    Mutation(
        "outsiders set any argument",
        "trinity_mq/rewards/outsiders.py",
        "    if closed:\n",
        "    if closed and not given:\n",
        "unit/rewards/test_outsiders.py::test_what_is_not_open_is_refused_with_the_setting_that_opens_it",
    ),
    Mutation(
        "a reward of any class is made before it is looked at",
        "trinity_mq/rewards/registry.py",
        "        if inspect.isclass(target):\n",
        "        if target is None:\n",
        "unit/rewards/test_registry.py::test_a_class_of_another_kind_is_not_made",
    ),
    # -- thoughts and prompts
    Mutation(
        "a call inside thoughts is executed",
        "trinity_mq/engines/server/openai/tools.py",
        " for start, end in answer_spans(text, prompt_end)]\n",
        " for start, end in [(0, len(text))]]\n",
        "unit/models/test_tools.py::test_a_call_inside_thoughts_is_text",
    ),
    Mutation(
        "a prompt that is too long is a finished run",
        "trinity_mq/rollout/attempts.py",
        " if not is_asked(listed)]\n",
        " if not listed]\n",
        "unit/rollout/test_workflow_runner.py::test_a_prompt_that_is_too_long_is_a_failure_of_the_task",
    ),
]
