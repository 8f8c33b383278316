/** Tokens of an episode: colors, texts and the blocks in which they are drawn. Independent of the DOM. */
import type { Episode, EpisodeTokens, Turn, TurnTokens } from './api'

/** Surprise, -logprob in nats, at which a color is saturated. */
export const FULL_SURPRISE = 5
/** Levels of saturation, so that colors are CSS classes instead of inline styles. */
export const LEVELS = 10

export type Kind = 'trained' | 'untrained' | 'prompt'

export interface Token {
  id: number
  text: string
  kind: Kind
  /** Null for prompts. */
  logprob: number | null
  /** Computed by the trainer before the update. */
  trainerLogprob: number | null
}

/** 0 for a certain token or an unknown logprob, `LEVELS` from 5 nats. */
export function level(logprob: number | null): number {
  if (logprob === null || !Number.isFinite(logprob)) return 0
  return Math.round((Math.min(Math.max(-logprob, 0), FULL_SURPRISE) / FULL_SURPRISE) * LEVELS)
}

/** exp(trainer - rollout): importance ratio of the trainer's weights to the generating ones. */
export function ratio(logprob: number | null, trainerLogprob: number | null): number | null {
  return logprob === null || trainerLogprob === null ? null : Math.exp(trainerLogprob - logprob)
}

/** Number of shown tokens of a turn: new prompt tokens and the response. */
export function shown(turn: TurnTokens): number {
  return turn.prompt.ids.length + turn.response.ids.length
}

/** The token at an index of a turn's shown tokens; undefined beyond the end. */
export function tokenAt(turn: TurnTokens, index: number): Token | undefined {
  const { prompt, response } = turn
  if (index < 0 || index >= shown(turn)) return undefined
  if (index < prompt.ids.length) {
    const text = prompt.texts[index] ?? ''
    return { id: prompt.ids[index] as number, text, kind: 'prompt', logprob: null, trainerLogprob: null }
  }
  const i = index - prompt.ids.length
  return {
    id: response.ids[i] as number,
    text: response.texts[i] ?? '',
    kind: response.trained[i] ? 'trained' : 'untrained',
    logprob: response.logprobs[i] ?? null,
    trainerLogprob: response.trainer_logprobs?.[i] ?? null,
  }
}

const MARKS: Record<string, string> = { ' ': '·', '\t': '→', '\r': '␍', '\n': '↵', '\u00a0': '⍽' }
// Invisible characters and direction overrides, which an attacker can use to disguise text.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g

/** The text to draw; `marked` makes white space visible. Newlines are kept, so that lines break there. */
export function visible(text: string, marked: boolean): string {
  const safe = text.replace(HIDDEN, spelled)
  if (!marked) return safe
  return safe.replace(/[ \t\r\n\u00a0]/g, (c) => (c === '\n' ? '↵\n' : (MARKS[c] ?? c)))
}

// In messages, joiners and direction marks are part of some languages; direction overrides are not.
const OVERRIDES = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g

/** Make any displayed text safe; `build/spelled.ts` applies it to all components. */
export function readable<T>(shown: T): T | string {
  return typeof shown === 'string' ? shown.replace(OVERRIDES, spelled) : shown
}

function spelled(character: string): string {
  return `⟨${character.codePointAt(0)?.toString(16).padStart(2, '0')}⟩`
}

/** For the tooltip: one line, in quotation marks, with every control character spelled out. */
export function quoted(text: string): string {
  return JSON.stringify(text).replace(HIDDEN, (c) => `\\u${c.codePointAt(0)?.toString(16).padStart(4, '0')}`)
}

export interface Block {
  turn: number
  /** Index in `EpisodeTokens.turns`. */
  at: number
  part: 'head' | 'prompt' | 'response' | 'folded'
  /** Shown tokens `from` … `to` (exclusive) of the turn. */
  from: number
  to: number
  /** The previous block ended in the middle of a line. */
  torn: boolean
}

const LEAST = 120
const MOST = 360

/**
 * The blocks in which a long episode is drawn; only visible blocks are rendered. A block ends at the end of a line
 * if possible, so that the boundary is not visible.
 *
 * @param folded leave out the tokens of prompts.
 */
export function blocks(tokens: EpisodeTokens, folded: boolean): Block[] {
  const all: Block[] = []
  tokens.turns.forEach((turn, at) => {
    const split = turn.prompt.ids.length
    all.push({ turn: turn.index, at, part: 'head', from: 0, to: 0, torn: false })
    if (folded && split > 0) all.push({ turn: turn.index, at, part: 'folded', from: 0, to: split, torn: false })
    else all.push(...cut(turn, at, 'prompt', turn.prompt.texts, 0, split))
    all.push(...cut(turn, at, 'response', turn.response.texts, split, split + turn.response.ids.length))
  })
  return all
}

function cut(
  turn: TurnTokens,
  at: number,
  part: 'prompt' | 'response',
  texts: string[],
  start: number,
  end: number,
): Block[] {
  const found: Block[] = []
  let from = start
  let torn = false
  while (from < end) {
    let to = Math.min(from + MOST, end)
    let whole = to === end
    if (!whole) {
      for (let i = from + LEAST; i < to; i++) {
        if (texts[i - start]?.endsWith('\n')) {
          to = i + 1
          whole = true
          break
        }
      }
    }
    found.push({ turn: turn.index, at, part, from, to, torn })
    torn = !whole
    from = to
  }
  return found
}

/** Index of the block with a token, else of its turn's heading; -1 for an unknown turn. */
export function blockOf(all: Block[], turn: number, token: number | null): number {
  const head = all.findIndex((block) => block.turn === turn)
  if (head < 0 || token === null) return head
  const found = all.findIndex((block) => block.turn === turn && block.from <= token && token < block.to)
  return found < 0 ? head : found
}

/** Why generated tokens of a turn are not trained. */
export function whyUntrained(turn: Turn, episode: Episode): string {
  if (turn.external) return 'generated by an external model'
  if (!turn.trained) return `the agent ${turn.agent || turn.role} is not trained`
  if (turn.lost) return 'the reply was not delivered'
  if (episode.split === 'validation') return 'validation episodes are never trained on'
  if (episode.reward === null) return 'the episode was not scored'
  if (episode.samples.length === 0) return 'no sample of this episode was credited (not yet, or its group had no learning signal)'
  const of = episode.samples.find((sample) => sample.turns.includes(turn.index))
  if (!of) return 'no credited sample contains this turn'
  return 'the loss mask of its sample excludes it'
}

export interface Surprise {
  tokens: number
  trained: number
  /** Mean logprob of the generated tokens; null without any. */
  mean: number | null
}

/** Summary in the heading of a turn. */
export function surprise(turn: TurnTokens): Surprise {
  const { logprobs, trained, ids } = turn.response
  const known = logprobs.filter((value): value is number => value !== null && Number.isFinite(value))
  const sum = known.reduce((all, value) => all + value, 0)
  return {
    tokens: ids.length,
    trained: trained.reduce<number>((all, value) => all + value, 0),
    mean: known.length ? sum / known.length : null,
  }
}
