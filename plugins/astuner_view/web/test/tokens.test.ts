import { describe, expect, it } from 'vitest'

import type { Episode, EpisodeTokens, Turn, TurnTokens } from '../src/lib/api'
import { blockOf, blocks, level, LEVELS, quoted, ratio, readable, shown, surprise, tokenAt, visible, whyUntrained } from '../src/lib/tokens'

function turn(index: number, prompt: string[], response: string[], more: Partial<TurnTokens['response']> = {}): TurnTokens {
  const ids = (texts: string[], start: number): number[] => texts.map((_, i) => start + i)
  return {
    index,
    prompt: { ids: ids(prompt, 100), texts: prompt },
    response: {
      ids: ids(response, 500),
      texts: response,
      logprobs: response.map(() => -0.5),
      trained: response.map(() => 1 as const),
      trainer_logprobs: null,
      ...more,
    },
    advantage: 1,
    sample: 0,
  }
}
const episode = (...turns: TurnTokens[]): EpisodeTokens => ({ has_text: true, note: '', turns })

describe('the colour of a token', () => {
  it('is pale where the model was certain and full from 5 nats on', () => {
    expect(level(0)).toBe(0)
    expect(level(-2.5)).toBe(LEVELS / 2)
    expect(level(-5)).toBe(LEVELS)
    expect(level(-50)).toBe(LEVELS)
  })
  it('grows with surprise', () => {
    const levels = [0, -0.6, -1.2, -2, -3, -4, -6].map(level)
    expect(levels).toEqual(levels.toSorted((a, b) => a - b))
    expect(new Set(levels).size).toBe(levels.length)
  })
  it('is pale where nothing sensible is known', () => {
    for (const logprob of [null, Number.NaN, Number.NEGATIVE_INFINITY, 0.2]) expect(level(logprob)).toBe(0)
  })
  it('follows the mask of the response, and prompts have none', () => {
    const of = turn(0, ['a'], ['b', 'c'], { trained: [1, 0] })
    expect([0, 1, 2].map((i) => tokenAt(of, i)?.kind)).toEqual(['prompt', 'trained', 'untrained'])
    expect([tokenAt(of, -1), tokenAt(of, 3)]).toEqual([undefined, undefined])
  })
  it('knows logprobs of both sides and their ratio', () => {
    const token = tokenAt(turn(0, [], ['b'], { logprobs: [-1], trainer_logprobs: [-0.5] }), 0)
    expect(ratio(token?.logprob ?? null, token?.trainerLogprob ?? null)).toBeCloseTo(Math.exp(0.5))
    expect(ratio(-1, null)).toBeNull()
  })
})

describe('the text of a token', () => {
  it('shows white space on demand, and lines still break', () => {
    expect(visible(' a\tb\n', false)).toBe(' a\tb\n')
    expect(visible(' a\tb\n', true)).toBe('·a→b↵\n')
  })
  it('spells out what hides or turns text around', () => {
    expect(visible('a\u202eb\u200bc\u0000', false)).toBe('a⟨202e⟩b⟨200b⟩c⟨00⟩')
    expect(readable('a\u202eb')).toBe('a⟨202e⟩b')
    expect(quoted('a\n\u202e')).toBe('"a\\n\\u202e"')
  })
  it('leaves joined characters of a message alone', () => {
    expect(readable('👩\u200d🔬')).toBe('👩\u200d🔬')
  })
})

describe('blocks', () => {
  const many = Array.from({ length: 5000 }, (_, i) => (i % 150 === 149 ? 'x\n' : 'x'))
  it('hold every token once, in order', () => {
    const data = episode(turn(0, many, many), turn(3, ['p'], many))
    for (const of of data.turns) {
      const own = blocks(data, false).filter((block) => block.turn === of.index && block.part !== 'head')
      expect(own[0]?.from).toBe(0)
      expect(own.at(-1)?.to).toBe(shown(of))
      own.slice(1).forEach((block, i) => expect(block.from).toBe(own[i]?.to))
      expect(Math.max(...own.map((block) => block.to - block.from))).toBeLessThanOrEqual(360)
    }
  })
  it('end at the end of a line where there is one, and say where there is none', () => {
    expect(blocks(episode(turn(0, [], many)), false).filter((block) => block.torn)).toEqual([])
    const torn = blocks(episode(turn(0, [], new Array<string>(1000).fill('x'))), false)
    expect(torn.map((block) => block.torn)).toEqual([false, false, true, true])
  })
  it('do not mix prompt and response', () => {
    const found = blocks(episode(turn(0, ['p', 'q'], ['r'])), false)
    expect(found.map(({ part, from, to }) => [part, from, to])).toEqual([['head', 0, 0], ['prompt', 0, 2], ['response', 2, 3]])
  })
  it('fold prompts to one', () => {
    expect(blocks(episode(turn(0, many, ['r'])), true).map((block) => block.part)).toEqual(['head', 'folded', 'response'])
  })
  it('are found by token', () => {
    const all = blocks(episode(turn(0, many, many), turn(7, [], ['r'])), false)
    expect(all[blockOf(all, 0, 6000)]).toMatchObject({ turn: 0, part: 'response' })
    expect(all[blockOf(all, 7, null)]).toMatchObject({ turn: 7, part: 'head' })
    expect(all[blockOf(all, 7, 99)]).toMatchObject({ turn: 7, part: 'head' })
    expect(blockOf(all, 8, 0)).toBe(-1)
  })
})

describe('why a token is not trained', () => {
  const of = { index: 2, agent: 'wolf', role: 'wolf', external: false, trained: true, lost: false } as Turn
  const good = { split: 'train', reward: 1, samples: [{ turns: [0, 2] }] } as Episode
  it.each([
    [{ ...of, external: true }, good, 'external model'],
    [{ ...of, trained: false }, good, 'wolf is not trained'],
    [{ ...of, lost: true }, good, 'not delivered'],
    [of, { ...good, split: 'validation' }, 'validation'],
    [of, { ...good, reward: null }, 'not scored'],
    [of, { ...good, samples: [] }, 'no sample'],
    [{ ...of, index: 9 }, good, 'contains this turn'],
    [of, good, 'loss mask'],
  ])('%#', (turn, episode, words) => {
    expect(whyUntrained(turn, episode as Episode)).toContain(words)
  })
})

it('sums up a turn', () => {
  expect(surprise(turn(0, ['p'], ['a', 'b'], { logprobs: [-1, null], trained: [1, 0] }))).toEqual({ tokens: 2, trained: 1, mean: -1 })
  expect(surprise(turn(0, ['p'], [])).mean).toBeNull()
})
