/** The control-plane bodies that a submitter writes and reads; `schemas/*.schema.json` describe them all. */

/** What a workflow is made from. Everything may be left out that the run's configuration says. */
export interface TaskBody {
  /** Registered name or dotted path; empty means the taskset's default. */
  workflow?: string;
  /** The record as a dataset would give it. */
  raw_task?: Record<string, unknown>;
  /** Runs of this task, the group size of group-relative algorithms; training uses the run's own. */
  repeat_times?: number;
  format_args?: Record<string, unknown>;
  rollout_args?: Record<string, unknown>;
  workflow_args?: Record<string, unknown>;
  reward_fn?: string | null;
  reward_fn_args?: Record<string, unknown>;
  is_eval?: boolean;
  /** `{taskset, index}` of the record, where it has one. */
  index?: Record<string, unknown>;
}

export interface TaskSubmission {
  readonly kind: "task_submission";
  readonly version_number: 1;
  readonly task: TaskBody;
  /** De-duplicates repeated publishes. */
  readonly submission_id: string;
  /** Send the experiences to `reply_to` too. */
  readonly want_experiences: boolean;
  /** `repeat_times` is meant as it is; else 1 stands for the group size of the run. */
  readonly exact_runs?: boolean;
}

export type Outcome = "finished" | "partial" | "failed" | "cancelled" | "poisoned" | "late";

/** What became of a submitted task. */
export interface SubmissionOutcome {
  readonly submission_id: string;
  readonly batch: number | bigint | string;
  readonly ticket: string;
  readonly outcome: Outcome;
  readonly completed_runs: number;
  readonly total_runs: number;
  readonly metrics: Readonly<Record<string, number>>;
  readonly message: string | null;
  /** How many experience parts are sent for it. */
  readonly experiences: number;
}

/** Stands for an experience body over the size limit of messages, which lies in the run's blob store. */
export interface ExperienceReference {
  readonly url: string;
  /** Size of the body. */
  readonly bytes: number;
  /** Of the body, in hexadecimal. */
  readonly sha256: string;
  readonly experiences: number;
}
