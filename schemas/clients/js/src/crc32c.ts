/** CRC-32C (Castagnoli; reflected polynomial 0x82F63B78), eight bytes a step: Node has none of its own. */

const POLYNOMIAL = 0x82f63b78;

const TABLES = Array.from({ length: 8 }, () => new Uint32Array(256));
for (let byte = 0; byte < 256; byte++) {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ POLYNOMIAL : value >>> 1;
  TABLES[0][byte] = value;
}
for (let byte = 0; byte < 256; byte++) {
  for (let step = 1; step < 8; step++) {
    const before = TABLES[step - 1][byte];
    TABLES[step][byte] = (before >>> 8) ^ TABLES[0][before & 0xff];
  }
}

/** Return the CRC-32C of `data`. */
export function crc32c(data: Uint8Array): number {
  const [t0, t1, t2, t3, t4, t5, t6, t7] = TABLES;
  let crc = -1;
  let at = 0;
  for (const end = data.length - 7; at < end; at += 8) {
    crc ^= data[at] | (data[at + 1] << 8) | (data[at + 2] << 16) | (data[at + 3] << 24);
    crc =
      t7[crc & 0xff] ^
      t6[(crc >>> 8) & 0xff] ^
      t5[(crc >>> 16) & 0xff] ^
      t4[crc >>> 24] ^
      t3[data[at + 4]] ^
      t2[data[at + 5]] ^
      t1[data[at + 6]] ^
      t0[data[at + 7]];
  }
  for (; at < data.length; at++) crc = (crc >>> 8) ^ t0[(crc ^ data[at]) & 0xff];
  return ~crc >>> 0;
}
