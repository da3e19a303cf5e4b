"""Old names of modules, classes, functions and methods. They still work: they refer to the new objects, and most warn.
docs/renamed.md lists them.

The aliases stay until release 0.3. :data:`CHANGED_NAMES` lists names in configurations that mean something else now.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RENAMED = {
    "trinity_agents.engine.auxiliary": "trinity_agents.engine.agent",
    "trinity_agents.explorer.in_flight": "trinity_agents.explorer.state",
    "trinity_agents.explorer.run_beginning": "trinity_agents.explorer.agent",
    "trinity_agents.gateway.acting": "trinity_agents.gateway.acting_gateway",
    "trinity_agents.gateway.stream_book": "trinity_agents.gateway.session_stream",
    "trinity_agents.gateway.submissions": "trinity_agents.gateway.acting_gateway",
    "trinity_agents.operator.batch_publisher": "trinity_agents.operator.agent",
    "trinity_agents.operator.batch_reader": "trinity_agents.operator.agent",
    "trinity_agents.operator.reviews": "trinity_agents.operator.chain_run",
    "trinity_agents.runner.slice_group": "trinity_agents.runner.in_flight_slice",
    "trinity_agents.runner.watchdog": "trinity_agents.runner.agent",
    "trinity_agents.simulation.sessions.oracle": "trinity_agents.simulation.sessions.invariants",
    "trinity_agents.trainer.presenter": "trinity_agents.trainer.modes",
    "trinity_agents.trainer.recorder": "trinity_agents.trainer.modes",
    "trinity_agents.trainer.samples": "trinity_agents.trainer.batch_result",
    "trinity_agents.trainer.saving": "trinity_agents.trainer.loop",
    "trinity_agents.trainer.sources.beside": "trinity_agents.trainer.sources.rollout_extension",
    "trinity_agents.trainer.sources.replay_index": "trinity_agents.trainer.sources.replay",
    "trinity_mq.algorithms.estimators.penalties": "trinity_mq.algorithms.estimators.group",
    "trinity_mq.algorithms.estimators.registry": "trinity_mq.algorithms.estimators",
    "trinity_mq.algorithms.pairs": "trinity_mq.algorithms.evaluator",
    "trinity_mq.algorithms.ratios": "trinity_mq.algorithms.evaluator",
    "trinity_mq.algorithms.values": "trinity_mq.algorithms.surrogates",
    "trinity_mq.api": "trinity_mq.launch.api",
    "trinity_mq.bus.rabbit.admin": "trinity_mq.bus.rabbit.bus",
    "trinity_mq.cli.commands": "trinity_mq.cli",
    "trinity_mq.cli.errors": "trinity_mq.errors",
    "trinity_mq.cli.interrupts": "trinity_mq.runtime.event_loop",
    "trinity_mq.cli.listening": "trinity_mq.runtime.http",
    "trinity_mq.cli.output": "trinity_mq.terminal",
    "trinity_mq.cli.run_folder": "trinity_mq.targets.run_folder",
    "trinity_mq.cli.target": "trinity_mq.targets.target",
    "trinity_mq.config.loading.from_trinity": "trinity_mq.config.trinity_names",
    "trinity_mq.config.migration": "trinity_mq.trinity_rft.migration",
    "trinity_mq.config.modes.bench": "trinity_mq.config.modes.mode",
    "trinity_mq.config.modes.tap": "trinity_mq.config.modes.mode",
    "trinity_mq.data.sinks.base": "trinity_mq.data.storage",
    "trinity_mq.diagnosis": "trinity_mq.observability.diagnosis",
    "trinity_mq.dispatch.failures": "trinity_mq.dispatch.batch_metrics",
    "trinity_mq.engines.generation.messages": "trinity_mq.families.messages",
    "trinity_mq.engines.server.openai.groups": "trinity_mq.engines.server.openai.api",
    "trinity_mq.engines.server.openai.tools": "trinity_mq.families.hermes",
    "trinity_mq.engines.torch.decoding": "trinity_mq.engines.torch.generator",
    "trinity_mq.engines.vllm.choices": "trinity_mq.engines.vllm.flow",
    "trinity_mq.experience.codec.from_records": "trinity_mq.experience.codec.content",
    "trinity_mq.gateway.agenda": "trinity_mq.gateway.ledger",
    "trinity_mq.gateway.book": "trinity_mq.gateway.session_store",
    "trinity_mq.models.auxiliary_clients": "trinity_agents.operator.chain_run",
    "trinity_mq.models.engines": "trinity_mq.engines",
    "trinity_mq.models.recording.answer_columns": "trinity_mq.models.recording.responses",
    "trinity_mq.models.recording.history": "trinity_mq.models.recording.calls",
    "trinity_mq.observability.diagnosis.settings": "trinity_mq.observability.diagnosis.facts",
    "trinity_mq.observability.diagnosis.steady": "trinity_mq.observability.diagnosis.flicker_filter",
    "trinity_mq.observability.evaluations": "trinity_mq.observability.experiences.evaluations",
    "trinity_mq.observability.logs.lines": "trinity_mq.observability.logs.files",
    "trinity_mq.observability.trackers.forward": "trinity_mq.observability.trackers.base",
    "trinity_mq.operations.broker": "trinity_mq.targets.private_broker",
    "trinity_mq.operations.debug.show_call": "trinity_mq.operations.debug.report",
    "trinity_mq.operations.debug.task": "trinity_mq.operations.debug.run",
    "trinity_mq.operations.regrade.text": "trinity_mq.operations.regrade.comparison",
    "trinity_mq.operators.outcome_metrics": "trinity_agents.operator.chain_run",
    "trinity_mq.page.broker_runs": "trinity_mq.page.actions",
    "trinity_mq.page.contents": "trinity_mq.page.app",
    "trinity_mq.proof.chaos.launch": "trinity_mq.proof.chaos.scenes",
    "trinity_mq.rewards.math.judge": "trinity_mq.rewards.math.answers",
    "trinity_mq.rewards.truth": "trinity_mq.rewards.ground_truth",
    "trinity_mq.rollout.instances": "trinity_mq.rollout.attempts",
    "trinity_mq.runtime.service": "trinity_mq.runtime.serve",
    "trinity_mq.scheduler.heartbeats": "trinity_mq.scheduler.scheduler",
    "trinity_mq.sync.channels.memory.server": "trinity_mq.sync.channels.memory.channel",
    "trinity_mq.sync.gate.catch_up": "trinity_mq.sync.gate.coordinator",
    "trinity_mq.targets.tapped_broker": "trinity_mq.launch.session",
    "trinity_mq.telemetry.timeline": "trinity_mq.observability.timeline",
    "trinity_mq.telemetry.waterfall": "trinity_mq.observability.waterfall",
    "trinity_mq.thoughts": "trinity_mq.families.thoughts",
    "trinity_mq.training.checkpoints.metadata": "trinity_mq.training.checkpoints.state",
    "trinity_mq.training.data_metrics": "trinity_mq.training.update",
    "trinity_mq.training.model.token_scorer": "trinity_mq.training.model.policy",
    "trinity_mq.training.prefixes": "trinity_mq.training.packing",
    "trinity_mq.transport.batched_publish": "trinity_agents.runner.result_publisher",
    "trinity_mq.transport.co_batched_parts": "trinity_mq.transport.experience_parts",
    "trinity_mq.workflows.builtin.boxed": "trinity_mq.workflows.builtin.math",
    "trinity_mq.workflows.builtin.math_eval": "trinity_mq.workflows.builtin.math",
    "trinity_mq.workflows.dual": "trinity_mq.workflows.sync_async",
    "trinity_mq.workflows.environments.spaces": "trinity_mq.workflows.environments.workflow",
}
"""New names of modules by their old names. The modules of a package are renamed with it."""
NAMES = {
    "trinity_agents.explorer.loop": ".see_off=announce_end",
    "trinity_agents.explorer.state": "Observation=TicketStatistics",
    "trinity_agents.explorer.training_batches": ".are_all_consumed=all_consumed",
    "trinity_agents.gateway.acting_gateway": "Acting=ActingGateway all_of=gather_limited",
    "trinity_agents.gateway.session_stream": (
        ".carry=republish .say=report .tell_time=publish_time_mark NotTaken=RefusedMessage StreamBook=SessionStream"
    ),
    "trinity_agents.operator.agent": "BatchUnusable=UnusableBatch",
    "trinity_agents.runner.circuit": "Circuit=CircuitBreaker",
    "trinity_agents.runner.in_flight_slice": ".take_apart=publish_separately",
    "trinity_agents.runner.result_publisher": "size_at_most=max_encoded_size",
    "trinity_agents.simulation.explore": "Played=ScheduleOutcome play=play_schedule shrink=minimize_faults",
    "trinity_agents.simulation.faulty_bus": ".lateness=next_delay",
    "trinity_agents.simulation.harness": "killed_once=kill_and_replace_trainer",
    "trinity_agents.simulation.invariants": (
        "fresh_enough=within_staleness_bound no_task_is_left=no_asyncio_task_left tasks_once=each_task_once"
    ),
    "trinity_agents.simulation.schedule": (
        "Alarm=BrokerAlarm Cut=ConnectionLoss KeptWeights=StaleWeightsFault Outage=SandboxOutage "
        "Repeats=RepeatedPublishes Schedule=FaultSchedule Sessions=SessionLoad"
    ),
    "trinity_agents.simulation.scheduled_run": ".is_calm=is_undisturbed Hang=RunHung played=play_to_end",
    "trinity_agents.simulation.sessions.gateways": "answer_of=answer_number version_of=token_version",
    "trinity_agents.simulation.sessions.invariants": (
        ".told_late=tickets_consumed_late few_copies=each_task_submitted_once one_acts=only_lock_holder_acts "
        "refused_are_dead=refused_events_dead_lettered"
    ),
    "trinity_agents.simulation.sessions.run": (
        ".at_the_end=gateways_at_end .gateways_ended_late=no_gateway_finished .read_by=read_offset"
    ),
    "trinity_agents.simulation.sessions.users": "Asked=UserRequest Diary=SessionDiary Said=SentReward",
    "trinity_agents.simulation.stand_ins": ".come_back=restart Workflows=FakeWorkflowRunner",
    "trinity_agents.trainer.agent": "follow=run_follower_rank",
    "trinity_agents.trainer.batch_result": "Samples=TrainSamples keep_for_a_look=dump_batch",
    "trinity_agents.trainer.decisions": "Decider=TicketDecider Decision=TicketDecision",
    "trinity_agents.trainer.history": "Line=Lineage StreamPlace=StreamPosition",
    "trinity_agents.trainer.loop": ".excuse_step=withdraw_attempt .follow_gate=watch_gate",
    "trinity_agents.trainer.modes": "Presenter=CheckpointServer without_training=weights_only_config",
    "trinity_agents.trainer.pinning": "evaluation_ended=wait_for_evaluation",
    "trinity_agents.trainer.sources.base": "LostError=ExperiencesLost",
    "trinity_agents.trainer.sources.last_batch": ".has_come=is_complete .run_ends=set_batch_count",
    "trinity_agents.trainer.sources.mix": "experts_in_a_step=experts_per_step",
    "trinity_agents.trainer.sources.replay": (
        "Group=ReplayGroup Rereadable=RereadableSource replayed_in_a_step=replayed_groups_per_step"
    ),
    "trinity_agents.trainer.sources.rollout_extension": "BesideRollouts=RolloutExtension",
    "trinity_agents.trainer.sources.stream": "Tapped=TapRules",
    "trinity_agents.trainer.sources.tap": "as_sampled=without_training_fields",
    "trinity_mq.algorithms.estimators": "Entry=EstimatorEntry",
    "trinity_mq.algorithms.estimators.group": (
        "Sizes=RunSizes length_penalised=apply_length_penalty moved=update_average rank_penalised=apply_rank_penalty"
    ),
    "trinity_mq.algorithms.estimators.plugin": "EstimatorError=PluginError",
    "trinity_mq.algorithms.estimators.runs": "centred=center",
    "trinity_mq.algorithms.evaluator": "over_step=needs_whole_step scheduled=schedule_value",
    "trinity_mq.algorithms.mismatch": "of_age=age_mask",
    "trinity_mq.algorithms.plugins": "loaded=load_function",
    "trinity_mq.algorithms.regularisers": "adapted=adapt_coefficient",
    "trinity_mq.algorithms.scoring": "AfterHead=HeadOperation",
    "trinity_mq.algorithms.view": "limited=clamp_log_ratio",
    "trinity_mq.bus.properties": "said_left_out=omitted_headers_text",
    "trinity_mq.cli.algorithms": "line_of=pieces_line",
    "trinity_mq.cli.health": "judge=check_health",
    "trinity_mq.cli.review": "give=send_verdict",
    "trinity_mq.cli.schema": "drifted=schema_differences",
    "trinity_mq.config.algorithm.checks": "contradictions=algorithm_problems",
    "trinity_mq.config.algorithm.pieces": (
        "Gate=SigmoidGate Plugin=PluginPiece Square=SquaredLogRatio Weight=ImportanceWeight"
    ),
    "trinity_mq.config.algorithm.resolve": "canonical=canonical_name resolved=resolve_algorithm",
    "trinity_mq.config.algorithm.section": ".advantages_in=advantage_agent",
    "trinity_mq.config.algorithm.translate": "translated=take_trinity_names with_critic=move_critic_settings",
    "trinity_mq.config.loading.load": "literal=escape_interpolations title=config_title validated=validate_settings",
    "trinity_mq.config.modes.mode": "beside=with_bench_folder trains_on_tap=with_tap_mode",
    "trinity_mq.config.run": ".not_sharded=sharding_obstacle .takes_any_age=accepts_any_age",
    "trinity_mq.config.trinity_names": "counterpart=trinity_key_advice",
    "trinity_mq.data.formatters.base": "fitted=fit_to_length",
    "trinity_mq.data.formatters.cpt": "text_of=format_text",
    "trinity_mq.data.formatters.dpo": "pair_of=format_pair",
    "trinity_mq.data.formatters.sft": "answer_of=format_answer",
    "trinity_mq.data.records": "check_identity=check_records_unchanged",
    "trinity_mq.data.selectors.base": "Draws=DrawPosition given_of=returned_count",
    "trinity_mq.dispatch.pacing": "Counters=TrainerCounters",
    "trinity_mq.engines.generation.pause": "BatchCutOff=BatchStepAborted",
    "trinity_mq.engines.generation.stopping": "without_end=without_stop_token",
    "trinity_mq.engines.generation.text": ".placed=messages_for_template",
    "trinity_mq.engines.generation.token_stream": "stamped=with_versions",
    "trinity_mq.engines.host.process": ".leave_alone=detach",
    "trinity_mq.engines.host.ready_file": "announce=write_ready kept_descriptor=ready_descriptor",
    "trinity_mq.engines.server.http_server": "Body=EngineRequestBody guarded=with_token_check parsed=read_request",
    "trinity_mq.engines.state": ".hold_for_good=serve_fixed_weights",
    "trinity_mq.engines.torch.generator": (
        "Sampled=SampledRow fixed_generator=auxiliary_generator takes_no_weights=refuse_transfer"
    ),
    "trinity_mq.engines.vllm.adapters": "Adapters=VllmAdapters",
    "trinity_mq.engines.vllm.api": "Choice=VllmCompletion put_in=load_tensors",
    "trinity_mq.engines.vllm.flow": "Flow=VllmBatcher Served=ServingWeights as_tokens=stream_tokens",
    "trinity_mq.experience.batch": ".into_list=to_shared_list",
    "trinity_mq.experience.codec.column_rules": "sound_versions=are_versions_valid",
    "trinity_mq.experience.codec.columns": "without_gaps=required",
    "trinity_mq.experience.codec.lazy": ".mapped=map .put_off=set_lazy",
    "trinity_mq.experience.codec.tail": "part_of=entry_part",
    "trinity_mq.experience.fields": "same=values_equal short=short_repr",
    "trinity_mq.experience.legacy.reader": "max_unfolded=max_unfolded_bytes",
    "trinity_mq.experience.ragged": "joined=concatenate",
    "trinity_mq.experience.record": ".from_checked=from_valid_fields",
    "trinity_mq.experience.rules": "eid_of=as_eid",
    "trinity_mq.families.hermes": "calls_in=parse_tool_calls",
    "trinity_mq.families.messages": "Turn=MessageOutline",
    "trinity_mq.families.thoughts": "opened_by=opening_tag_of",
    "trinity_mq.gateway.access": "given_key=key_from_headers",
    "trinity_mq.gateway.ledger": "Applied=EventEffect",
    "trinity_mq.gateway.session": ".too_late=refusal_reason",
    "trinity_mq.gateway.session_store": (
        ".say=report Book=SessionStore BookUnavailable=SessionsUnavailable MemoryBook=MemorySessionStore "
        "Said=OutsideEvent"
    ),
    "trinity_mq.launch.earlier_start": (
        "check_data=check_data_unchanged extension=describe_extension go_back=rewind_to_checkpoint "
        "start_anew=discard_earlier_run"
    ),
    "trinity_mq.launch.session": "Session=RunSession",
    "trinity_mq.local_broker.choose": "own_kind=local_broker_class",
    "trinity_mq.local_broker.container": "docker_answers=is_docker_available",
    "trinity_mq.local_broker.node_files": "before_boot=boot_script",
    "trinity_mq.local_broker.ports": "accepts=accepts_connections",
    "trinity_mq.messages.compatibility": "conflicts=release_conflicts misfit=incompatibility_reason",
    "trinity_mq.messages.msgpack_scan": "is_plain=is_within_limits mended=repair_surrogates",
    "trinity_mq.messages.status": "Status=AgentStatus",
    "trinity_mq.models.clients": "base_of=base_url understood=parse_answer",
    "trinity_mq.models.engine_selection": "Answering=AuxiliaryAsPolicy known_model=announced_model",
    "trinity_mq.models.model_folder": "known_folder=local_model_folder",
    "trinity_mq.models.recording.calls": ".answered_by=note_version Call=RecordedCall History=ExperienceHistory",
    "trinity_mq.models.recording.responses": "experiences_at_once=experiences_from_columns",
    "trinity_mq.models.recording.sse": "Gathered=AnswerAssembler PieceMender=SurrogateRepairer",
    "trinity_mq.models.request_groups": "NoGroups=GroupsNotSupported",
    "trinity_mq.models.retried": "retried=call_with_retries",
    "trinity_mq.models.wrapper": ".become=adopt_settings",
    "trinity_mq.observability.diagnosis.facts": (
        ".slices_are_nowhere=has_lost_slices .unprocessed=has_unprocessed_batch Facts=ObservationIndex "
        "text_of=duration_text"
    ),
    "trinity_mq.observability.diagnosis.flicker_filter": (
        "Steady=FlickerFilter steady_finding=finding_filter steady_limit=bottleneck_filter"
    ),
    "trinity_mq.observability.diagnosis.records": "Finding=RunFinding",
    "trinity_mq.observability.display": "figures=main_figures picture=render_table plain_line=format_status_line",
    "trinity_mq.observability.experiences.evaluations": (
        "answers_to=question_history chosen_of=select_evaluations sets_of=evaluation_sets"
    ),
    "trinity_mq.observability.experiences.printer": "known_texts=open_token_texts",
    "trinity_mq.observability.experiences.show_experience": "rule=print_title show=print_experience",
    "trinity_mq.observability.experiences.stream": "Choice=ExperienceFilter",
    "trinity_mq.observability.experiences.tap": "Lines=ExperienceLinePrinter selected=select_fields",
    "trinity_mq.observability.follow": "follow=follow_telemetry listen=consume_messages metrics_of=parse_metrics",
    "trinity_mq.observability.logs.files": ".appended=read_appended in_words=format_line",
    "trinity_mq.observability.prometheus.families": "Rising=MonotonicCounters",
    "trinity_mq.observability.report.curves": "thinned=downsample",
    "trinity_mq.observability.report.figures": "duration=format_duration",
    "trinity_mq.observability.report.text": "curve=metric_curve lost=loss_counts",
    "trinity_mq.observability.run_list": "found_runs=find_runs",
    "trinity_mq.observability.run_state": (
        ".explain=diagnose_stall .forget_rates=clear_momentary_metrics Watch=RunState"
    ),
    "trinity_mq.observability.samples": "decoded_latest=decode_latest",
    "trinity_mq.observability.spans.collector": (
        "Collector=OtlpClient SpansRefused=SpansRejected collector_of=open_collector headers_of=parse_headers"
    ),
    "trinity_mq.observability.waterfall": "typical=median_waterfall",
    "trinity_mq.operations.debug.engine": "given_engine=external_engine own_engine=child_engine",
    "trinity_mq.operations.debug.errors": "Failure=WorkflowFailure",
    "trinity_mq.operations.debug.proxy": "Call=ProxiedCall",
    "trinity_mq.operations.debug.report": "Choice=AnswerChoice",
    "trinity_mq.operations.doctor.checks": "Check=DoctorCheck Finding=DoctorFinding",
    "trinity_mq.operations.doctor.facts": "Facts=DoctorFacts",
    "trinity_mq.operations.regrade.comparison": "Graded=RegradedExperience show=print_figures",
    "trinity_mq.operations.regrade.grading": "NotGradable=NotRegradable Tasks=TaskRecords answer_of=rewarded_text",
    "trinity_mq.operations.regrade.regrading": "Regrading=BatchRegrader",
    "trinity_mq.operations.review": "as_page=full_text in_short=summary_lines",
    "trinity_mq.operations.submit": "Replies=SubmissionReplies",
    "trinity_mq.operators.base": "of_tasks=rows_of_tasks",
    "trinity_mq.operators.human_review": "Choice=ReviewConditions",
    "trinity_mq.page.actions": "Actions=BrokerActions",
    "trinity_mq.page.run_page": "Observatory=RunPage",
    "trinity_mq.proof.chaos.injector": "Done=InjectedFault",
    "trinity_mq.proof.chaos.scenes": ("attached=try_local_run launched=launch_run started=try_new_run"),
    "trinity_mq.proof.chaos.schedule": "Schedule=ChaosSchedule",
    "trinity_mq.proof.chaos.sessions.clients": "Asked=ClientRequest Told=ClientSession",
    "trinity_mq.proof.chaos.sessions.verdicts": "nothing_waits=sessions_settle told_is_kept=answers_match_stream",
    "trinity_mq.proof.chaos.targets.base": "NotOursError=VictimGoneError Targets=FaultTargets",
    "trinity_mq.proof.chaos.targets.marks": "Marks=ArmedPoints",
    "trinity_mq.proof.chaos.tokens": "KeptWeights=WeightArchive",
    "trinity_mq.proof.chaos.trial": "Outcome=TrialOutcome play=run_trial",
    "trinity_mq.proof.chaos.witness": "Witness=RunObserver",
    "trinity_mq.proof.invariants": (
        "Strikes=FaultCounts Verdict=InvariantVerdict decodes=streams_decode judged=verdict_of"
    ),
    "trinity_mq.reviews.ledger": "Applied=EventEffect in_words=verdict_text",
    "trinity_mq.rewards.ground_truth": "shortened=truncate_middle takes_any_truth=accept_any_truth_type",
    "trinity_mq.rewards.math.answers": (
        "Answer=StatedAnswer Judge=AnswerComparer correct=is_correct stated=extract_answer wanted=truth_answer"
    ),
    "trinity_mq.rewards.outsiders": "allowed_task=restrict_task",
    "trinity_mq.rewards.reasoning_gym_scores": "registered=registered_datasets",
    "trinity_mq.rewards.registry": "fault_of=invalid_parts_reason",
    "trinity_mq.rewards.text": "boxed=last_boxed tagged=last_tagged",
    "trinity_mq.rollout.attempts": (
        ".take_over=reassign Job=SliceJob Limits=AttemptLimits consecutive=consecutive_blocks "
        "engine_trouble=engine_unavailable_error"
    ),
    "trinity_mq.rollout.run_results": "answers_of=answer_texts",
    "trinity_mq.rollout.status": "Failure=RunFailure",
    "trinity_mq.runtime.agent": ".restart_without_lock=restart_when_lock_lost .with_background=run_with_background",
    "trinity_mq.runtime.deliveries": (
        "CrashNotes=CrashLog PastDeliveries=DeliveryHistory drop_foreign=acknowledge_foreign "
        "give_back=return_delivery in_hand=message_in_hand publish_again=republish"
    ),
    "trinity_mq.runtime.errors": (
        "EndsProcessError=CrashingMessageError RecycleMe=RecycleRequested RestartMe=RestartRequested "
        "described=describe_error is_of_content=is_content_error is_own=is_user_code reason_of=dead_letter_reason "
        "shown=display_path"
    ),
    "trinity_mq.runtime.event_loop": "run_to_the_end=run_until_complete",
    "trinity_mq.runtime.http": "forged=forgery_error from_this_site=same_site_middleware listening=serve_app",
    "trinity_mq.runtime.peers": ".soon=send_soon",
    "trinity_mq.runtime.process": (
        "claimed_run=claimed_run_id disk_full=disk_full_message folder_run=read_run_id "
        "give_back_freed_memory=trim_memory_periodically note_run=write_run_id note_trainer=ensure_trainer_id "
        "other_run=other_run_error own_trainer=read_trainer_id when_parent_ends=call_when_parent_ends"
    ),
    "trinity_mq.runtime.processes.chaos_points": "passed=pass_point",
    "trinity_mq.runtime.processes.children": "ChildSilentError=ChildTimeoutError",
    "trinity_mq.runtime.processes.exit_reasons": (
        "end_of=read_output_tail ended_by=describe_exit_code last_words=exit_reason"
    ),
    "trinity_mq.runtime.processes.fork_server": "become=apply_request",
    "trinity_mq.runtime.processes.forking": "orphans_of=adopted_orphans",
    "trinity_mq.runtime.serve": "LifeSigns=LivenessReporter collect_seldom=tune_garbage_collection",
    "trinity_mq.runtime.state_formats": "refuse_newer=check_readable_format",
    "trinity_mq.sync.channels.buckets": "ahead=prefetch whole=gathered",
    "trinity_mq.sync.channels.receiver": "Receiver=WeightReceiver",
    "trinity_mq.sync.gate.coordinator": ".free_quarantined=release_quarantined .unchanged=commit_progress",
    "trinity_mq.sync.gate.coordinator_driver": ".someone_is_behind=needs_full_sync",
    "trinity_mq.sync.gate.member": "Stage=MemberStage",
    "trinity_mq.sync.gate.records": "Member=MemberRecord Phases=AttemptTimes",
    "trinity_mq.targets.connection": "connected=connect_bus known_broker=find_broker_url reached=open_bus",
    "trinity_mq.targets.private_broker": "own_broker=private_broker",
    "trinity_mq.targets.probe": "broker_trouble=broker_problem",
    "trinity_mq.targets.run_folder": (
        ".adopt=write_configuration .forget_broker=remove_broker_url .known_broker=saved_broker_url "
        ".last_taken=last_locked_ns .live_broker=live_broker_url .note_broker=save_broker_url"
    ),
    "trinity_mq.targets.target": (
        "broker_of_name=default_broker configuration=load_target_configuration known_runs=run_list_suffix "
        "name_newest=select_newest_run staged=load_target_stages"
    ),
    "trinity_mq.telemetry.evaluations.log": "Answer=EvaluationAnswer Question=EvaluationQuestion",
    "trinity_mq.terminal": (
        "Guarded=EscapingStream indented=escape_and_indent one_line=escape_to_one_line visible=escape_unsafe"
    ),
    "trinity_mq.testing.fakes": "one_experience=small_experience",
    "trinity_mq.testing.tcp_proxy": "CuttingProxy=FaultProxy",
    "trinity_mq.testing.virtual_time": "StandsStill=DeadlockError",
    "trinity_mq.training.advantages": "Advantages=AdvantageResult",
    "trinity_mq.training.checkpoints.benchmarked": "benchmarked=select_checkpoints",
    "trinity_mq.training.checkpoints.checkpoint": (
        "Damaged=DamagedCheckpoint TrainerState=TrainerProgress first_of_each=milestones named=find_by_name"
    ),
    "trinity_mq.training.checkpoints.old_checkpoint": "is_old=is_legacy",
    "trinity_mq.training.checkpoints.state": "Part=StatePart",
    "trinity_mq.training.model.policy": "after_head=detect_head_operation chosen_device=select_device",
    "trinity_mq.training.model.shared_prefixes": "with_prefixes=prefix_inputs",
    "trinity_mq.training.packing": (
        "Division=DivisionSettings TrainTokens=StepTokens flatten=train_tokens without_unknown=mask_nonfinite_logprobs"
    ),
    "trinity_mq.training.parallel.ranks": ".agreed=voting .meet=connect_store Command=RankCommand",
    "trinity_mq.training.parallel.sharding": "like=shard_like whole=gathered",
    "trinity_mq.transport.batch_blobs": "Sweep=BlobSweep stored=store_large_bodies",
    "trinity_mq.transport.blobs": (
        "BlobGone=BlobMissing carried_bytes=resolved_size patiently=run_with_store_retries resolve=resolve_body"
    ),
    "trinity_mq.transport.experience_parts": "Member=PartMember Part=ReceivedPart",
    "trinity_mq.trinity_rft.migration.transfer": (
        "Move=SettingsTransfer is_ours=is_config_key known=resolve_environment"
    ),
    "trinity_mq.workflows.auxiliary": "asking=auxiliary_errors auxiliary_place=auxiliary_index",
    "trinity_mq.workflows.builtin.distill": (
        "AsyncOnPolicyDistillMathWorkflow=AsyncMathDistillWorkflow "
        "AsyncOnPolicyDistillWorkflow=AsyncDistillWorkflow OnPolicyDistillMathWorkflow=MathDistillWorkflow "
        "OnPolicyDistillWorkflow=DistillWorkflow"
    ),
    "trinity_mq.workflows.builtin.judging": (
        "Verdict=JudgeScores ending=answer_format_instruction judgeable=has_answer keep_gold=record_rule_rewards "
        "key_of=delimiter_of quoted=delimited"
    ),
    "trinity_mq.workflows.builtin.math": (
        "AsyncMathBoxedWorkflow=AsyncBoxedAnswerWorkflow AsyncMathEvalWorkflow=AsyncMathBenchmarkWorkflow "
        "AsyncMathWorkflow=AsyncMathAnswerWorkflow MathBoxedWorkflow=BoxedAnswerWorkflow "
        "MathEvalWorkflow=MathBenchmarkWorkflow MathWorkflow=MathAnswerWorkflow"
    ),
    "trinity_mq.workflows.builtin.rubric": (
        "settle=assign_rubric_rewards AsyncRubricJudgeWorkflow=AsyncRubricWorkflow RubricJudgeWorkflow=RubricWorkflow"
    ),
    "trinity_mq.workflows.builtin.ruler": "settle=assign_ruler_rewards",
    "trinity_mq.workflows.builtin.simple": "give_reward=set_reward",
    "trinity_mq.workflows.builtin.tool_call": (
        "AsyncToolCallWorkflow=AsyncToolChoiceWorkflow ToolCallWorkflow=ToolChoiceWorkflow"
    ),
    "trinity_mq.workflows.builtin.tools": ".need_synchronous=check_synchronous",
    "trinity_mq.workflows.environments.workflow": "Actions=ActionParser",
    "trinity_mq.workflows.sessions.children": (
        "KeptProgram=PersistentProgram close_kept=close_persistent_programs program_of=make_program"
    ),
    "trinity_mq.workflows.sessions.verifiers_child": "named=import_object",
    "trinity_mq.workflows.step_wise": "RewardedAtTheEnd=FinalRewardWorkflow",
    "trinity_mq.workflows.sync_async": "completed=run_to_completion compute=run_in_thread_if_async",
    "trinity_mq.workflows.workflow": ".own_copy=copy_for_run .sample_from=inherit_sampling",
}
"""Old and new names, by the present name of their module: ``old=new`` at the top level, ``.old=new`` for methods."""


CHANGED_NAMES: dict[str, dict[str, str]] = {
    "workflow": {
        "frozen_lake_workflow": "frozen_lake_game_workflow",
        "math_boxed_workflow": "boxed_answer_workflow",
        "math_eval_workflow": "math_benchmark_workflow",
        "math_rm_workflow": "reward_model_workflow",
        "math_ruler_workflow": "math_answer_ruler_workflow",
        "math_trainable_ruler_workflow": "self_ruler_workflow",
        "math_workflow": "math_answer_workflow",
        "on_policy_distill_math_workflow": "math_distill_workflow",
        "on_policy_distill_workflow": "distill_workflow",
        "rubric_judge_workflow": "rubric_workflow",
        "sudoku_workflow": "sudoku_game_workflow",
        "tool_call_workflow": "tool_choice_workflow",
    },
    "reward_fn": {
        "accuracy_reward": "math_equal",
        "countdown_reward": "countdown",
        "format_reward": "text_format",
        "math_boxed_reward": "math_boxed",
        "math_dapo_reward": "math_dapo",
        "math_reward": "math_equal_format",
    },
}
"""Present names of the project's own workflows and rewards, by the key of a taskset and by their name in release 0.2.
Since 0.3, that earlier name means the workflow or reward of Trinity-RFT. Names of workflows may also begin with
``async_``."""


def own_name(key: str, name: str) -> str | None:
    """Return the present name of the workflow or reward that ``name`` meant in release 0.2, None if it is the same.

    >>> own_name("workflow", "async_math_workflow"), own_name("reward_fn", "exact_match")
    ('async_math_answer_workflow', None)
    """
    names = CHANGED_NAMES.get(key, {})
    prefix = "async_" if key == "workflow" and name.startswith("async_") else ""
    new = names.get(name.removeprefix(prefix))
    return None if new is None else prefix + new


def changed_meanings(settings: Any, place: str = "") -> list[str]:
    """Return one line for each name in ``settings`` that meant something else in release 0.2.

    Args:
        settings: The settings as maps, lists and values.
        place: Key of ``settings``, with a dot behind it.

    >>> changed_meanings({"taskset": {"reward_fn": "countdown_reward"}}, "buffer.")
    ["buffer.taskset.reward_fn: countdown_reward is now Trinity-RFT's; release 0.2's is named countdown"]
    """
    lines: list[str] = []
    items = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
    for key, value in items:
        new = own_name(str(key), value) if isinstance(value, str) else None
        if new is not None:
            lines.append(f"{place}{key}: {value} is now Trinity-RFT's; release 0.2's is named {new}")
        elif isinstance(value, Mapping | list | tuple):
            lines += changed_meanings(value, f"{place}{key}.")
    return lines


def new_name(module: str) -> str | None:
    """Return the new name of a module, None if ``module`` is not an old name.

    >>> new_name("trinity_mq.models.engines.state"), new_name("trinity_mq.models")
    ('trinity_mq.engines.state', None)
    """
    for old, new in RENAMED.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return None


class RenamedFinder:
    """Finds modules by their old names, and adds old names to modules.

    ``importlib.abc`` is not imported: it would double the time of ``--help``.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module behind an old name, or a module with old names.

        The spec is None for all other modules.
        """
        if not fullname.startswith(("trinity_mq.", "trinity_agents.")):
            return None
        if (name := new_name(fullname)) is not None:
            return ModuleSpec(fullname, _AliasLoader(fullname, name))  # type: ignore[arg-type]  # duck-typed
        if fullname not in NAMES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _NamesLoader(spec.loader)  # type: ignore[assignment]  # duck-typed
        return spec


class _NamesLoader:
    """Loads a module as ``loader`` does, and adds its old names."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then add its old names."""
        self._loader.exec_module(module)
        _add_old_names(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _add_old_names(module: ModuleType) -> None:
    words = NAMES[module.__name__].split()
    pairs = [word.split("=") for word in words]
    names = {old: new for old, new in pairs if not old.startswith(".")}
    following = module.__dict__.get("__getattr__")

    def find_attribute(name: str) -> Any:
        if name in names:
            _warn(f"{module.__name__}.{name}", names[name])
            return getattr(module, names[name])
        if following is not None:
            return following(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__dict__["__getattr__"] = find_attribute
    for old, new in pairs:
        for cls in [value for value in vars(module).values() if isinstance(value, type)] if old[0] == "." else ():
            if new in vars(cls) and cls.__module__ == module.__name__:
                setattr(cls, old[1:], vars(cls)[new])


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with release 0.3", DeprecationWarning, stacklevel=3)


class _AliasLoader:
    """Returns the new module instead of the old module."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the new module."""
        _warn(self._old, self._new)
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the new module, which the import system has replaced."""
        module.__spec__ = self._spec


def install() -> None:
    """Have the import system find modules by their old names, before the folders that an update may have left."""
    if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedFinder())
