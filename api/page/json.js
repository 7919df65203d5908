// JSON whose integers are exact: a seed has 64 bits, and a number of JavaScript 53.

export function parse(text) {
  // `source` is the number as it was written. A browser without it rounds, as JSON.parse does.
  return JSON.parse(text, (_, value, { source } = {}) =>
    source && Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) ? BigInt(source) : value);
}

export function format(value, indent) {
  const exact = (_, one) => (typeof one === "bigint" ? JSON.rawJSON?.(String(one)) ?? String(one) : one);
  return JSON.stringify(value, exact, indent);
}
