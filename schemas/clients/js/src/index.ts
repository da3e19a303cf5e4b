export { Client, type ConnectOptions, type PublishOptions, type SubmitOptions } from "./client.js";
export { decodeControl, decodeOutcome, decodeReference, encodeSubmission } from "./control.js";
export { ConnectionError, DecodeError, NoSuchRunError, TimeoutError, TrinityMQError } from "./errors.js";
export * from "./experiences.js";
export type { SubmitResult } from "./submission.js";
export type { ExperienceReference, Outcome, SubmissionOutcome, TaskBody, TaskSubmission } from "./types.js";
