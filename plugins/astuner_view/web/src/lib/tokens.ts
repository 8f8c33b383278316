/** Tokens of an episode: which colour, which words, and in which blocks they are drawn. No DOM here. */
import type { Episode, EpisodeTokens, Turn, TurnTokens } from './api'

/** Surprise, -logprob in nats, at which a colour is full. */
export const FULL_SURPRISE = 5
/** Steps of saturation, so that the colours are classes of the style sheet and no inline styles. */
export const LEVELS = 10

export type Kind = 'trained' | 'untrained' | 'prompt'

export interface Token {
  id: number
  text: string
  kind: Kind
  /** Null where none is known: of prompts. */
  logprob: number | null
  /** What the trainer computed before the update. */
  trainerLogprob: number | null
}

/** 0 for a token that was certain, `LEVELS` for one of 5 nats and more; 0 where nothing is known. */
export function level(logprob: number | null): number {
  if (logprob === null || !Number.isFinite(logprob)) return 0
  return Math.round((Math.min(Math.max(-logprob, 0), FULL_SURPRISE) / FULL_SURPRISE) * LEVELS)
}

/** exp(trainer - rollout): how much likelier the trainer's weights find the token than those that made it. */
export function ratio(logprob: number | null, trainerLogprob: number | null): number | null {
  return logprob === null || trainerLogprob === null ? null : Math.exp(trainerLogprob - logprob)
}

/** How many tokens of a turn are shown: those of its prompt that are new, and its response. */
export function shown(turn: TurnTokens): number {
  return turn.prompt.ids.length + turn.response.ids.length
}

/** The token at an index of a turn's shown ones; undefined beyond them. */
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
// Characters that are invisible, or turn the direction of what follows: an attacker's way to show another text.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g

/** The text as it is drawn; `marked` makes white space visible. A newline stays one, so that lines break there. */
export function visible(text: string, marked: boolean): string {
  const safe = text.replace(HIDDEN, spelled)
  if (!marked) return safe
  return safe.replace(/[ \t\r\n\u00a0]/g, (c) => (c === '\n' ? '↵\n' : (MARKS[c] ?? c)))
}

// In messages, joiners and marks of direction are somebody's language; overrides of direction are not.
const OVERRIDES = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g

/** What any component shows, as it is drawn: `build/spelled.ts` sends it through here. */
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
  /** Tokens `from` … `to` (exclusive) of the turn's shown ones. */
  from: number
  to: number
  /** The block before it ended in the middle of a line. */
  torn: boolean
}

const LEAST = 120
const MOST = 360

/**
 * The blocks in which a long episode is drawn: only those in sight are in the page. One ends at a line's end where
 * there is any, so that cutting cannot be seen.
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

/** Index of the block that holds a token, else of its turn's head; -1 for a turn that there is not. */
export function blockOf(all: Block[], turn: number, token: number | null): number {
  const head = all.findIndex((block) => block.turn === turn)
  if (head < 0 || token === null) return head
  const found = all.findIndex((block) => block.turn === turn && block.from <= token && token < block.to)
  return found < 0 ? head : found
}

/** In words, why tokens that the model generated are not trained. */
export function whyUntrained(turn: Turn, episode: Episode): string {
  if (turn.external) return 'a model outside of the run said it'
  if (!turn.trained) return `the agent ${turn.agent || turn.role} is not trained`
  if (turn.lost) return 'the reply reached nobody, so it is not trained'
  if (episode.split === 'validation') return 'validation episodes are never trained on'
  if (episode.reward === null) return 'the episode has no verdict, so nothing of it is trained'
  if (episode.samples.length === 0) return 'no sample of this episode was credited: not yet, or its group taught nothing'
  const of = episode.samples.find((sample) => sample.turns.includes(turn.index))
  if (!of) return 'no credited sample runs through this turn'
  return 'the loss mask of its sample leaves it out'
}

export interface Surprise {
  tokens: number
  trained: number
  /** Mean logprob of the generated tokens; null where there are none. */
  mean: number | null
}

/** What the head of a turn sums up. */
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
