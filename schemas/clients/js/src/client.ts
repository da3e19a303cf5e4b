/** Submits tasks to a run over AMQP 0-9-1. */
import { randomUUID } from "node:crypto";

import { type ChannelModel, type ConfirmChannel, connect, type ConsumeMessage } from "amqplib";

import { encodeSubmission, MSGPACK } from "./control.js";
import { ConnectionError, NoSuchRunError, TimeoutError, TrinityMQError } from "./errors.js";
import { Submission, type SubmitResult } from "./submission.js";
import type { TaskBody, TaskSubmission } from "./types.js";

const RUN_NAME = /^[a-z0-9-]{1,40}$/;
const ROUTING_KEY = "submit";
const NOT_FOUND = 404;
const HEARTBEAT_SECONDS = "10";

export interface ConnectOptions {
  /** For reaching the broker, 10 seconds unless given. */
  connectTimeoutMs?: number;
}

export interface PublishOptions {
  /** Names the submission: a run does the same id once, however often it is published. A new uuid unless given. */
  submissionId?: string;
  /** For all that is waited for; no limit unless given. */
  timeoutMs?: number;
}

export interface SubmitOptions extends PublishOptions {
  /** Wait for the experiences of the task too. */
  wantExperiences?: boolean;
}

/** A connection to the broker of one run. Many submissions may be under way at once. */
export class Client {
  readonly #run: string;
  readonly #connection: ChannelModel;
  readonly #replies: string;
  readonly #waiting = new Map<string, Submission>();
  #publisher: Promise<ConfirmChannel> | null = null;
  /** Why the broker closed a channel for publishing, which its confirms do not say. */
  readonly #refusals = new WeakMap<ConfirmChannel, Error>();
  /** Messages that no queue took; their confirms come after. */
  readonly #returned = new Set<string>();
  #end: ConnectionError | null = null;

  private constructor(run: string, connection: ChannelModel, replies: string) {
    this.#run = run;
    this.#connection = connection;
    this.#replies = replies;
  }

  /**
   * Connect to the broker at `url` (`amqp://user:password@host:port/vhost`, or `amqps:`) for `run`.
   *
   * @throws ConnectionError if it cannot be reached or refuses; its message holds no password
   */
  static async connect(url: string, run: string, options: ConnectOptions = {}): Promise<Client> {
    if (!RUN_NAME.test(run)) {
      throw new TrinityMQError(`run name ${JSON.stringify(run)}, wanted 1 to 40 of a-z, 0-9 and "-"`);
    }
    const target = brokerUrl(url);
    try {
      const connection = await connect(target.href, { noDelay: true, timeout: options.connectTimeoutMs ?? 10_000 });
      // Errors of the connection come with its close; unheard they would end the process.
      connection.on("error", () => undefined);
      const channel = await connection.createChannel();
      const { queue } = await channel.assertQueue("", { exclusive: true });
      const client = new Client(run, connection, queue);
      connection.on("close", (error?: Error) =>
        client.#lost(`the connection was closed: ${error?.message ?? "by the broker"}`),
      );
      channel.on("error", (error: Error) => client.#lost(`the channel for answers was closed: ${error.message}`));
      await channel.consume(queue, (message) => client.#answer(message), { noAck: true });
      return client;
    } catch (error) {
      throw new ConnectionError(`broker ${target.host}: ${(error as Error).message}`, { cause: error });
    }
  }

  /**
   * Publish `task` and wait for what becomes of it.
   *
   * @throws NoSuchRunError, ConnectionError, TimeoutError, or DecodeError if an answer cannot be read
   */
  async submit(task: TaskBody, options: SubmitOptions = {}): Promise<SubmitResult> {
    const submission = new Submission(options.submissionId ?? randomUUID(), options.wantExperiences ?? false);
    if (this.#waiting.has(submission.id)) {
      throw new TrinityMQError(`submission ${submission.id} is waited for already; give another submissionId`);
    }
    this.#waiting.set(submission.id, submission);
    this.#publish(task, submission.id, submission.wantExperiences, this.#replies).catch((error) =>
      submission.fail(error),
    );
    const late = () => `no answer to submission ${submission.id} within ${options.timeoutMs} ms: ${submission.missing}`;
    try {
      return await within(submission.result, options.timeoutMs, late);
    } finally {
      this.#waiting.delete(submission.id);
    }
  }

  /**
   * Publish `task` for whoever wants its experiences; nothing comes back. Returns the submission's id once the broker
   * has stored it.
   *
   * @throws NoSuchRunError, ConnectionError or TimeoutError
   */
  async publish(task: TaskBody, options: PublishOptions = {}): Promise<string> {
    const id = options.submissionId ?? randomUUID();
    const late = () => `the broker has not confirmed submission ${id} within ${options.timeoutMs} ms`;
    await within(this.#publish(task, id, false), options.timeoutMs, late);
    return id;
  }

  /** Close the connection. What is still waited for is given up; its tasks are done all the same. */
  async close(): Promise<void> {
    if (this.#end) return;
    this.#lost("the client was closed");
    await this.#connection.close();
  }

  async #publish(task: TaskBody, id: string, wantExperiences: boolean, replyTo?: string): Promise<void> {
    if (this.#end) throw this.#end;
    const submission: TaskSubmission = {
      kind: "task_submission",
      version_number: 1,
      task,
      submission_id: id,
      want_experiences: wantExperiences,
    };
    const body = encodeSubmission(submission);
    const channel = await this.#channel();
    const options = {
      contentType: MSGPACK,
      correlationId: id,
      headers: { kind: submission.kind, version: submission.version_number, run: this.#run },
      mandatory: true,
      messageId: id,
      persistent: true,
      replyTo,
    };
    await new Promise<void>((resolve, reject) => {
      const confirmed = (error: Error | null) => {
        if (error) reject(this.#explained(channel, error));
        else if (this.#returned.delete(id)) reject(this.#noSuchRun());
        else resolve();
      };
      channel.publish(
        `tmq.${this.#run}.tasks`,
        ROUTING_KEY,
        Buffer.from(body.buffer, body.byteOffset, body.length),
        options,
        confirmed,
      );
    });
  }

  /** Return the channel for publishing, a new one where the broker has closed the last one. */
  #channel(): Promise<ConfirmChannel> {
    this.#publisher ??= this.#openChannel();
    return this.#publisher;
  }

  async #openChannel(): Promise<ConfirmChannel> {
    try {
      const channel = await this.#connection.createConfirmChannel();
      channel.on("return", (message) => this.#returned.add(message.properties.messageId));
      channel.on("error", (error: Error) => this.#refusals.set(channel, error));
      channel.on("close", () => (this.#publisher = null));
      return channel;
    } catch (error) {
      this.#publisher = null;
      throw this.#end ?? new ConnectionError((error as Error).message, { cause: error });
    }
  }

  #explained(channel: ConfirmChannel, error: Error): Error {
    const refusal = this.#refusals.get(channel) as (Error & { code?: number }) | undefined;
    if (refusal?.code === NOT_FOUND) return this.#noSuchRun();
    if (refusal) return new ConnectionError(`the broker refused it: ${refusal.message}`, { cause: refusal });
    return this.#end ?? new ConnectionError(`the broker did not store it: ${error.message}`, { cause: error });
  }

  #noSuchRun(): NoSuchRunError {
    return new NoSuchRunError(
      `no run ${JSON.stringify(this.#run)} takes tasks on this broker; check its name, and that it was started there ` +
        "(trinity-mq run ...)",
    );
  }

  #answer(message: ConsumeMessage | null): void {
    if (message === null) {
      this.#lost("the queue for answers was deleted");
      return;
    }
    const { contentType, correlationId, headers, messageId } = message.properties;
    this.#waiting.get(correlationId)?.take({
      body: message.content,
      contentType,
      messageId,
      attempt: String(headers?.attempt ?? ""),
      part: Number(headers?.part ?? 0),
    });
  }

  /** Nothing comes any more: tell all who wait. */
  #lost(reason: string): void {
    this.#end ??= new ConnectionError(
      `${reason}; tasks that were published are done all the same, but what becomes of them cannot be told here`,
    );
    for (const submission of this.#waiting.values()) submission.fail(this.#end);
  }
}

function brokerUrl(url: string): URL {
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch {
    throw new ConnectionError("the broker's address is no URL, wanted amqp://user:password@host:port/vhost");
  }
  if (parsed.protocol !== "amqp:" && parsed.protocol !== "amqps:") {
    throw new ConnectionError(`the broker's address starts with ${parsed.protocol}, wanted amqp: or amqps:`);
  }
  if (!parsed.searchParams.has("heartbeat")) parsed.searchParams.set("heartbeat", HEARTBEAT_SECONDS);
  return parsed;
}

/** Return what `promise` gives, or fail after `timeoutMs`. */
async function within<T>(promise: Promise<T>, timeoutMs: number | undefined, message: () => string): Promise<T> {
  if (timeoutMs === undefined) return promise;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new TimeoutError(message())), timeoutMs);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}
