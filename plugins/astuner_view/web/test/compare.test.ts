import { describe, expect, it } from 'vitest'

import type { Comparison, EpisodeTokens } from '../src/lib/api'
import { COLOURS, curvesOf, flat, hasOtherTokens, parted } from '../src/lib/compare'

type Said = [prompt: string[], response: string[]]

/** Each piece is a token; its id is looked up in `ids`, so that another tokenizer can be played. */
function episode(turns: Said[], ids: (piece: string) => number = (piece) => [...piece].reduce((n, c) => n * 131 + c.charCodeAt(0), 7)): EpisodeTokens {
  return {
    has_text: true,
    note: '',
    turns: turns.map(([prompt, response], index) => ({
      index,
      prompt: { ids: prompt.map(ids), texts: prompt },
      response: {
        ids: response.map(ids),
        texts: response,
        logprobs: response.map(() => -1),
        trained: response.map(() => 0 as const),
        trainer_logprobs: null,
      },
      advantage: null,
      sample: null,
    })),
  }
}

const part = (a: EpisodeTokens, b: EpisodeTokens): [number, number] | null => parted(flat(a), flat(b), hasOtherTokens(a, b))

describe('where episodes part', () => {
  const a = episode([[['What', ' is', ' 2+2?'], ['It', ' is', ' 4']], [[' sure?'], [' yes']]])
  it('is the first token that is another', () => {
    const b = episode([[['What', ' is', ' 2+2?'], ['It', ' is', ' 5', '!']], [[' sure?'], [' yes']]])
    expect(part(a, b)).toEqual([5, 5])
    expect(flat(a)[5]).toMatchObject({ turn: 0, index: 5, text: ' 4' })
  })
  it('is nowhere in the same', () => {
    expect(part(a, structuredClone(a))).toBeNull()
  })
  it('is the end of the shorter', () => {
    const b = episode([[['What', ' is', ' 2+2?'], ['It', ' is', ' 4']]])
    expect(part(a, b)).toEqual([6, 6])
  })
  it('is where somebody else says the same', () => {
    const b = episode([[['What', ' is', ' 2+2?'], ['It', ' is', ' 4', ' sure?']], [[], [' yes']]])
    expect(part(a, b)).toEqual([6, 6])
  })
  it('is found by text where tokenizers differ', () => {
    const b = episode([[['Wh', 'at is ', '2+2?'], ['It is', ' 4']], [[' su', 're?'], [' no']]])
    expect(hasOtherTokens(a, b)).toBe(true)
    expect(part(a, b)).toEqual([7, 7])
    expect([flat(a)[7]?.text, flat(b)[7]?.text]).toEqual([' yes', ' no'])
  })
  it('goes by ids where there is no text', () => {
    const b = { ...episode([[['Why', ' is', ' 2+2?'], ['It']]]), has_text: false }
    expect(part({ ...a, has_text: false }, b)).toEqual([0, 0])
  })
})

describe('curves of groups', () => {
  const group = (name: string, low?: (number | null)[]) => ({
    runs: [{ id: name, name }],
    curves: { 'reward/mean': { mean: [0.5, 1], ...(low ? { low, high: [1, 2] } : {}) } },
  })
  const found: Comparison = {
    groups: [group('a', [0, 0.5]), ...Array.from({ length: COLOURS }, (_, i) => group(`b${i}`))],
    steps: [1, 2],
    metrics: ['reward/mean'],
    settings: [],
    yardsticks: [],
    problems: [],
  }
  it('lie over one another, with a band where there are seeds', () => {
    const { cards, table } = curvesOf(found, [])
    expect(cards.map((card) => card.title)).toEqual(['Reward: train'])
    const [first, second, last] = [cards[0]?.series[0], cards[0]?.series[1], cards[0]?.series.at(-1)]
    expect(first?.band?.map((name) => table.columns.get(name))).toEqual([[0, 0.5], [1, 2]])
    expect(second?.band).toBeUndefined()
    expect(table.columns.get(first?.name ?? '')).toEqual([0.5, 1])
    expect([first?.colour, first?.dashed, last?.colour, last?.dashed]).toEqual(['g0', false, 'g0', true])
  })
})
