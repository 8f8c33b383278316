// What the tool does: the same for all clients of JavaScript.

const SIGNS = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "×": (a, b) => a * b, "/": (a, b) => a / b };

export function calculate(expression) {
  const [, left, sign, right] = /^\s*(-?[\d.]+)\s*([-+*×/])\s*(-?[\d.]+)\s*$/.exec(expression) ?? [];
  return sign ? String(SIGNS[sign](Number(left), Number(right))) : `error: cannot read ${JSON.stringify(expression)}`;
}
