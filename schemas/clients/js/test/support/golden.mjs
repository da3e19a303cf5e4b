/** The golden bodies, and decoded values in the form that their .json files have. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { Tensor, Timestamp, toFloat32 } from "../../dist/index.js";

const FOLDER = process.env.TRINITY_MQ_GOLDEN ?? fileURLToPath(new URL("../../../../golden", import.meta.url));

/** Return `[name, body, wanted]` of each golden body of a kind. */
export function goldens(kind, extension) {
  const folder = join(FOLDER, kind);
  const names = readdirSync(folder).filter((name) => name.endsWith(extension));
  return names.map((name) => {
    const wanted = JSON.parse(readFileSync(join(folder, name.replace(extension, ".json")), "utf8"));
    return [name, readFileSync(join(folder, name)), wanted];
  });
}

/** Return a value as JSON can hold it. */
export function plain(value) {
  if (typeof value === "bigint") return String(value);
  if (typeof value === "number") return Number.isFinite(value) ? value : String(value);
  if (value instanceof Uint8Array) return { $bytes: Buffer.from(value).toString("base64") };
  if (value instanceof Timestamp)
    return { $timestamp: { seconds: plain(value.seconds), nanoseconds: value.nanoseconds } };
  if (value instanceof Tensor) return { [value.origin === "numpy" ? "$array" : "$tensor"]: flat(value) };
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
}

/** Return a tensor with its elements as JSON can hold them. */
export function flat({ dtype, shape, data }) {
  const isRaw = dtype.includes("float") && !(data instanceof Float64Array);
  const values = Array.from(isRaw ? toFloat32({ dtype, data }) : data);
  return { dtype, shape: [...shape], data: dtype === "bool" ? values.map(Boolean) : values.map(exact) };
}

function exact(value) {
  return plain(typeof value === "bigint" && Number.isSafeInteger(Number(value)) ? Number(value) : value);
}

/** Return an experience in the form of the golden files: what is absent is left out, tensors by name under one key. */
export function described(experience) {
  const found = { tensors: {} };
  for (const [name, value] of Object.entries(experience)) {
    if (name === "eid") {
      // ids may be text too, so here a large whole number stays one, as far as JSON.parse keeps it
      const number = (item) => (typeof item === "bigint" ? Number(item) : item);
      found[name] = Object.fromEntries(Object.entries(value).map(([key, item]) => [key, number(item)]));
    } else if (value === null || (name === "custom_fields" && value.length === 0)) {
      continue;
    } else if (name === "multi_modal_inputs") {
      found[name] = Object.fromEntries(Object.entries(value).map(([key, tensor]) => [key, flat(tensor)]));
    } else if (value instanceof Tensor) {
      found.tensors[name] = flat(value);
    } else {
      found[name] = plain(value);
    }
  }
  return found;
}
