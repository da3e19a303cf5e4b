/** The root of what this package raises. */
export class TrinityMQError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** Bytes are not what they should be; the message says what was seen and what was wanted. */
export class DecodeError extends TrinityMQError {}

/** The broker cannot be reached, refuses us, or the connection to it is gone. */
export class ConnectionError extends TrinityMQError {}

/** The broker knows no run of this name that takes tasks. */
export class NoSuchRunError extends TrinityMQError {}

/** What was waited for did not come in the time given; the task may still be done. */
export class TimeoutError extends TrinityMQError {}

/** The shortest useful form of a value, at a cost that does not grow with it. */
export function short(value: unknown): string {
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  if (typeof value === "string") return JSON.stringify(value.length > 60 ? `${value.slice(0, 57)}...` : value);
  if (Array.isArray(value)) return `a list of ${value.length}`;
  if (typeof value === "object" && value !== null) {
    const keys = Object.keys(value);
    return `a map of ${keys.length} (${keys.slice(0, 4).map(short).join(", ")}${keys.length > 4 ? ", …" : ""})`;
  }
  return String(value);
}
