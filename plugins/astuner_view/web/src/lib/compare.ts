/** Comparison of runs and of two episodes. Independent of the DOM. */
import type { Comparison, EpisodeTokens, RunGroup } from './api'
import { type Card, type Column, metricsShown, type Shown, type Table } from './curves'
import { shown, type Token, tokenAt } from './tokens'

/** Number of group colors, `--series-g0` …; further groups reuse them, dashed. */
export const COLOURS = 10
/** Metrics of every comparison; users can add more. */
export const METRICS = metricsShown()

/** A card for each metric that any group has, and the columns of all cards. */
export function curvesOf(found: Comparison, added: string[]): { cards: Card[]; table: Table } {
  const columns = new Map<string, Column>()
  const cards: Card[] = []
  const all: Shown[] = [...METRICS, ...added.map((name) => ({ name, title: name }))]
  for (const { name, title, share, points } of all) {
    const card: Card = { title, share: !!share, series: [] }
    found.groups.forEach((group, i) => {
      const curve = group.curves[name]
      if (!curve) return
      const [key, low, high] = ['', ' low', ' high'].map((end) => `${name} ${i}${end}`) as [string, string, string]
      columns.set(key, curve.mean)
      if (curve.low && curve.high) columns.set(low, curve.low).set(high, curve.high)
      card.series.push({
        name: key,
        label: nameOf(group),
        colour: `g${i % COLOURS}`,
        dashed: i >= COLOURS,
        points: !!points,
        ...(curve.low ? { band: [low, high] as [string, string] } : {}),
      })
    })
    if (card.series.length > 0) cards.push(card)
  }
  return { cards, table: { steps: found.steps, columns } }
}

/** Names of a group's runs, for legends. */
export function nameOf(group: RunGroup): string {
  const name = group.runs[0]?.name ?? ''
  return group.runs.length > 1 ? `${name} × ${group.runs.length} seeds` : name
}

/** A token with its turn and its index in the shown tokens. */
export type Placed = Token & { turn: number; index: number }

export function flat(tokens: EpisodeTokens): Placed[] {
  return tokens.turns.flatMap((turn) =>
    Array.from({ length: shown(turn) }, (_, index) => ({ ...(tokenAt(turn, index) as Token), turn: turn.index, index })),
  )
}

/**
 * Indices of the first different token in each episode, by ID or by kind (prompt, generated); null if both are equal.
 * One beyond the last token: that episode ends there.
 *
 * @param byText compare characters, for tokenizers that cut the same text differently.
 */
export function parted(a: Placed[], b: Placed[], byText: boolean): [number, number] | null {
  if (byText) {
    const [left, right] = [a, b].map((all) => all.map((token) => token.text).join('')) as [string, string]
    let same = 0
    while (same < left.length && left[same] === right[same]) same++
    return same === left.length && same === right.length ? null : [holder(a, same), holder(b, same)]
  }
  let i = 0
  while (i < a.length && i < b.length && a[i]?.id === b[i]?.id && isPrompt(a[i]) === isPrompt(b[i])) i++
  return i === a.length && i === b.length ? null : [i, i]
}

/** Whether tokens cannot be compared by ID, because the first prompts have different tokens. */
export function hasOtherTokens(a: EpisodeTokens, b: EpisodeTokens): boolean {
  const [left, right] = [a, b].map((tokens) => tokens.turns[0]?.prompt.ids ?? [])
  return a.has_text && b.has_text && String(left) !== String(right)
}

const isPrompt = (token: Placed | undefined): boolean => token?.kind === 'prompt'

/** Index of the token with a character of the joined text. */
function holder(all: Placed[], character: number): number {
  let end = 0
  const found = all.findIndex((token) => (end += token.text.length) > character)
  return found < 0 ? all.length : found
}
