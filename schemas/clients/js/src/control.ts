/** Control-plane bodies to bytes and back. */
import { encode } from "@msgpack/msgpack";

import { DecodeError, short } from "./errors.js";
import { decodeUtf8, unpack } from "./msgpack.js";
import type { ExperienceReference, Outcome, SubmissionOutcome, TaskSubmission } from "./types.js";

export const MSGPACK = "application/msgpack";
export const JSON_TYPE = "application/json";

const OUTCOMES: readonly string[] = [
  "finished",
  "partial",
  "failed",
  "cancelled",
  "poisoned",
  "late",
] satisfies Outcome[];

/**
 * Return the map in a control-plane body.
 *
 * @param contentType JSON where it says `application/json`, else msgpack
 * @throws DecodeError if it is no map of that kind
 */
export function decodeControl(body: Uint8Array, contentType: string = MSGPACK): Record<string, unknown> {
  const fields = contentType === JSON_TYPE ? parseJson(body) : unpack(body);
  if (typeof fields !== "object" || fields === null || Array.isArray(fields) || fields instanceof Uint8Array) {
    throw new DecodeError(`the body is ${short(fields)}, wanted a map with named fields`);
  }
  return fields as Record<string, unknown>;
}

function parseJson(body: Uint8Array): unknown {
  try {
    return JSON.parse(decodeUtf8(body, "a JSON body"));
  } catch (error) {
    if (error instanceof DecodeError) throw error;
    throw new DecodeError(`a body of ${body.length} bytes is not JSON`, { cause: error });
  }
}

/** Return the msgpack body of a submission. */
export function encodeSubmission(submission: TaskSubmission): Uint8Array {
  // bigint as int64, and no key for what is undefined: the reader then takes its own default
  return encode(submission, { useBigInt64: true, ignoreUndefined: true });
}

/** Return the outcome in a body; fields that are absent have their defaults. */
export function decodeOutcome(body: Uint8Array, contentType?: string): SubmissionOutcome {
  const field = reader(decodeControl(body, contentType), "submission_outcome");
  const isText = (value: unknown) => typeof value === "string";
  const isBatch = (value: unknown) => isText(value) || typeof value === "bigint" || Number.isSafeInteger(value);
  return {
    submission_id: field("submission_id", "text", isText) as string,
    batch: field("batch", "a whole number or text", isBatch) as number | bigint | string,
    ticket: field("ticket", "text", isText) as string,
    outcome: field("outcome", OUTCOMES.join(", "), (value) => OUTCOMES.includes(value as string)) as Outcome,
    completed_runs: field("completed_runs", "a count", isCount, 0) as number,
    total_runs: field("total_runs", "a count", isCount, 0) as number,
    metrics: field("metrics", "numbers by name", isMetrics, {}) as Record<string, number>,
    message: field("message", "text or null", (value) => value === null || isText(value), null) as string | null,
    experiences: field("experiences", "a count", isCount, 0) as number,
  };
}

/** Return the reference in a body. */
export function decodeReference(body: Uint8Array, contentType?: string): ExperienceReference {
  const field = reader(decodeControl(body, contentType), "experience_reference");
  return {
    url: field("url", "text", (value) => typeof value === "string") as string,
    bytes: field("bytes", "a count", isCount) as number,
    sha256: field("sha256", "64 hexadecimal digits", (value) => /^[0-9a-f]{64}$/.test(String(value))) as string,
    experiences: field("experiences", "a count", isCount, 1) as number,
  };
}

function isCount(value: unknown): boolean {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

function isMetrics(value: unknown): boolean {
  return typeof value === "object" && value !== null && Object.values(value).every((item) => typeof item === "number");
}

type Field = (name: string, wanted: string, fits: (value: unknown) => boolean, fallback?: unknown) => unknown;

/** Return what reads the fields of a body of `kind`, version 1. */
function reader(fields: Record<string, unknown>, kind: string): Field {
  const seen = [fields.kind ?? kind, fields.version_number ?? 1];
  if (seen[0] !== kind || seen[1] !== 1) {
    throw new DecodeError(`a body of kind ${short(seen[0])}, version ${short(seen[1])}, wanted ${kind}, version 1`);
  }
  return (name, wanted, fits, fallback) => {
    const value = Object.hasOwn(fields, name) ? fields[name] : fallback;
    if (!fits(value)) throw new DecodeError(`${kind}: ${name} is ${short(value)}, wanted ${wanted}`);
    return value;
  };
}
