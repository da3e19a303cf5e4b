/** The columns of a batch that are no tensors. */
import {
  type Column,
  unpackDocuments,
  unpackFloats,
  unpackIds,
  unpackInts,
  unpackTexts,
  unpackVersions,
  type VersionRow,
} from "./columns.js";
import { DecodeError, short } from "./errors.js";
import { EXPERIENCE_TYPES, type ExperienceType, TRUNCATE_STATUSES, type TruncateStatus } from "./fields.js";
import { Budget, type Extension, type Int } from "./msgpack.js";

/** A map of free-form values: texts, numbers, bigints, booleans, null, bytes, lists, maps, {@link Tensor}. */
export type Document = Record<string, unknown>;

/** Which batch, task, run and step an experience comes from. */
export interface Eid {
  readonly batch: Int | string;
  readonly task: Int | string;
  readonly run: Int;
  readonly step: Int;
  readonly suffix: string;
}

/** Carries `info[source]` into the training batch as `destination` of type `dtype`. */
export type CustomField = readonly [source: string, destination: string, dtype: string];

/** The columns of a batch that are no tensors, one value per experience. */
export interface Plain {
  readonly eid: readonly Eid[];
  readonly experience_type: readonly ExperienceType[];
  readonly prompt_length: readonly number[];
  readonly reward: readonly (number | null)[];
  readonly temperature: readonly (number | null)[];
  readonly truncate_status: readonly (TruncateStatus | null)[];
  readonly response_text: readonly (string | null)[];
  readonly prompt_text: readonly (string | null)[];
  readonly taskset: readonly (string | null)[];
  readonly index: readonly (Int | null)[];
  readonly versions: readonly (readonly VersionRow[] | null)[];
  readonly info: readonly Document[];
  readonly metrics: readonly Document[];
  readonly messages: readonly (unknown[] | null)[];
  readonly tools: readonly (unknown[] | null)[];
  readonly chosen_messages: readonly (unknown[] | null)[];
  readonly rejected_messages: readonly (unknown[] | null)[];
  readonly custom_fields: readonly (readonly CustomField[])[];
}

/** A map as msgpack gives it. */
export type MapValue = Readonly<Record<string, unknown>>;

export function isMap(value: unknown): value is MapValue {
  return typeof value === "object" && value !== null && Object.getPrototypeOf(value) === Object.prototype;
}

type Unpack<T> = (column: Column, count: number, name: string) => T[];

/** Reads them. */
export class PlainReader {
  readonly #budget = new Budget();

  constructor(
    readonly columns: MapValue,
    readonly count: number,
    readonly extension: Extension,
  ) {}

  read(): Plain {
    const texts = (name: string) => this.#column(name, unpackTexts);
    return {
      eid: this.#eids(),
      experience_type: this.#known("experience_type", EXPERIENCE_TYPES) as ExperienceType[],
      prompt_length: this.#promptLengths(),
      reward: this.#column("reward", unpackFloats),
      temperature: this.#column("temperature", unpackFloats),
      truncate_status: this.#known("truncate_status", [...TRUNCATE_STATUSES, null]),
      response_text: texts("response_text"),
      prompt_text: texts("prompt_text"),
      taskset: texts("taskset"),
      index: this.#column("index", unpackInts),
      versions: this.#column("versions", unpackVersions),
      info: this.#maps("info"),
      metrics: this.#maps("metrics"),
      messages: this.#lists("messages"),
      tools: this.#lists("tools"),
      chosen_messages: this.#lists("chosen_messages"),
      rejected_messages: this.#lists("rejected_messages"),
      custom_fields: this.#customFields(),
    };
  }

  /** Return the values of a column, null for all where it is absent. */
  #column<T>(name: string, unpack: Unpack<T | null>): (T | null)[] {
    const found = Object.hasOwn(this.columns, name) ? this.columns[name] : undefined;
    if (found === undefined) return new Array(this.count).fill(null);
    if (!isMap(found)) throw new DecodeError(`${name}: ${short(found)}, wanted a column`);
    return unpack(found, this.count, name);
  }

  #known<T extends string | null>(name: string, wanted: readonly T[]): T[] {
    const values = this.#column(name, unpackTexts);
    const wrong = values.findIndex((value) => !wanted.includes(value as T));
    if (wrong >= 0) {
      throw new DecodeError(`experience ${wrong}: ${name} is ${short(values[wrong])}, wanted ${wanted.join(", ")}`);
    }
    return values as T[];
  }

  #promptLengths(): number[] {
    const values = this.#column("prompt_length", unpackInts);
    const wrong = values.findIndex((value) => typeof value !== "number");
    if (wrong >= 0)
      throw new DecodeError(`experience ${wrong}: prompt_length is ${values[wrong]}, wanted a number of tokens`);
    return values as number[];
  }

  #eids(): Eid[] {
    const batch = this.#column("eid.batch", unpackIds);
    const task = this.#column("eid.task", unpackIds);
    const run = this.#column("eid.run", unpackInts);
    const step = this.#column("eid.step", unpackInts);
    const suffix = this.#column("eid.suffix", unpackTexts);
    return batch.map((_, index) => {
      const eid = { batch: batch[index], task: task[index], run: run[index], step: step[index], suffix: suffix[index] };
      if (Object.values(eid).includes(null)) throw new DecodeError(`experience ${index}: a part of its eid is missing`);
      return eid as Eid;
    });
  }

  #documents(name: string, wanted: string, fits: (value: unknown) => boolean): unknown[] {
    const values = this.#column(name, (found, count) =>
      unpackDocuments(found, count, name, this.#budget, this.extension),
    );
    const wrong = values.findIndex((value) => value !== null && !fits(value));
    if (wrong >= 0) throw new DecodeError(`experience ${wrong}: ${name} is ${short(values[wrong])}, wanted ${wanted}`);
    return values;
  }

  #maps(name: string): Document[] {
    return this.#documents(name, "a map", isMap).map((value) => (value ?? {}) as Document);
  }

  #lists(name: string): (unknown[] | null)[] {
    return this.#documents(name, "a list", Array.isArray) as (unknown[] | null)[];
  }

  #customFields(): (readonly CustomField[])[] {
    const isField = (item: unknown) =>
      Array.isArray(item) && item.length === 3 && item.every((part) => typeof part === "string");
    const fits = (value: unknown) => Array.isArray(value) && value.every(isField);
    const values = this.#documents("custom_fields", "a list of source, destination and dtype", fits);
    return values.map((value) => (value ?? []) as CustomField[]);
  }
}
