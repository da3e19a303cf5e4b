/** One submitted task: what has come back for it, in whatever order and however often. */
import { decodeOutcome, decodeReference } from "./control.js";
import { DecodeError } from "./errors.js";
import { CONTENT_TYPE, decodeExperiences, type ExperienceBatch } from "./experiences.js";
import type { ExperienceReference, SubmissionOutcome } from "./types.js";

const REFERENCE_TYPE = "application/vnd.trinity-mq.reference";

/** What a submitter gets. */
export interface SubmitResult {
  readonly outcome: SubmissionOutcome;
  /** With `wantExperiences`: one batch per part sent, those of one attempt in their order. */
  readonly experiences?: ExperienceBatch[];
  /** With `wantExperiences`: parts too large for a message, to be fetched from the run's blob store. */
  readonly references?: ExperienceReference[];
}

/** An answer as it came from the broker. */
export interface Answer {
  readonly body: Uint8Array;
  readonly contentType: string | undefined;
  readonly messageId: string | undefined;
  readonly attempt: string;
  readonly part: number;
}

interface Part {
  readonly attempt: string;
  readonly part: number;
  readonly value: ExperienceBatch | ExperienceReference;
}

export class Submission {
  /** Settles when all has come, or with why it cannot come. */
  readonly result: Promise<SubmitResult>;
  readonly #parts = new Map<string, Part>();
  #outcome: SubmissionOutcome | null = null;
  #resolve!: (result: SubmitResult) => void;
  #reject!: (error: Error) => void;

  constructor(
    readonly id: string,
    readonly wantExperiences: boolean,
  ) {
    this.result = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
  }

  fail(error: Error): void {
    this.#reject(error);
  }

  /** Take in an answer. The broker gives each at least once, and parts may overtake the outcome. */
  take(answer: Answer): void {
    try {
      if (answer.contentType === CONTENT_TYPE || answer.contentType === REFERENCE_TYPE) this.#takePart(answer);
      else this.#outcome ??= decodeOutcome(answer.body, answer.contentType);
    } catch (error) {
      const reason = (error as Error).message;
      this.#reject(new DecodeError(`an answer to submission ${this.id} does not decode: ${reason}`, { cause: error }));
      return;
    }
    this.#finishIfComplete();
  }

  /** What is still missing, in words. */
  get missing(): string {
    if (!this.#outcome) return "its outcome has not come";
    const { experiences, outcome } = this.#outcome;
    return `its outcome, ${outcome}, has come with ${this.#parts.size} of ${experiences} experience parts`;
  }

  #takePart({ attempt, body, contentType, messageId, part }: Answer): void {
    const key = messageId ?? `${attempt}-${part}`;
    if (this.#parts.has(key)) return;
    const value = contentType === CONTENT_TYPE ? decodeExperiences(body) : decodeReference(body);
    this.#parts.set(key, { attempt, part, value });
  }

  #finishIfComplete(): void {
    const outcome = this.#outcome;
    if (!outcome) return;
    if (!this.wantExperiences) {
      this.#resolve({ outcome });
      return;
    }
    if (this.#parts.size < outcome.experiences) return;
    const experiences: ExperienceBatch[] = [];
    const references: ExperienceReference[] = [];
    for (const { value } of inOrder([...this.#parts.values()])) {
      if ("sha256" in value) references.push(value);
      else experiences.push(value);
    }
    this.#resolve({ outcome, experiences, references });
  }
}

/** Return parts by attempt, in the order in which the attempts' first ones came, and by number within. */
function inOrder(parts: Part[]): Part[] {
  const attempts = [...new Set(parts.map(({ attempt }) => attempt))];
  return parts.sort((a, b) => attempts.indexOf(a.attempt) - attempts.indexOf(b.attempt) || a.part - b.part);
}
