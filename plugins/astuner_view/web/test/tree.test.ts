import { describe, expect, it } from 'vitest'

import type { Turn } from '../src/lib/api'
import { branches, lanes, layout } from '../src/lib/tree'

type Spec = [agent: string, continues: number | null, more?: Partial<Turn>]
const turns = (...specs: Spec[]): Turn[] =>
  specs.map(
    ([agent, continues, more], index) =>
      ({ index, agent, continues, branch_reason: '', external: false, trained: true, policy: 'default', response_tokens: 10, ...more }) as Turn,
  )
const places = (all: Turn[]): [number, number][] => layout(all).nodes.map((node) => [node.column, node.row])

describe('the layout of the tree', () => {
  it('puts a conversation into one row', () => {
    expect(places(turns(['a', null], ['a', 0], ['a', 1]))).toEqual([[0, 0], [1, 0], [2, 0]])
  })
  it('gives a fork a row of its own below', () => {
    const all = turns(['a', null], ['a', 0], ['a', 0], ['a', 1], ['a', 2])
    expect(places(all)).toEqual([[0, 0], [1, 0], [1, 1], [2, 0], [2, 1]])
    expect(layout(all).edges.every((edge) => !edge.branch)).toBe(true)
  })
  it('keeps the roots of an agent together and links a branch to the turn before it', () => {
    const all = turns(['a', null], ['b', null], ['a', 0], ['a', null, { branch_reason: 'history_rewritten' }])
    expect(places(all)).toEqual([[0, 0], [0, 2], [1, 0], [0, 1]])
    const dashed = layout(all).edges.filter((edge) => edge.branch)
    expect(dashed.map(({ from, to }) => [from.turn.index, to.turn.index])).toEqual([[2, 3]])
  })
  it('never puts two turns into one place', () => {
    const all = turns(...Array.from({ length: 400 }, (_, i): Spec => [`a${i % 3}`, i < 3 ? null : Math.floor((i * 7) % (i - 1))]))
    expect(new Set(places(all).map(String)).size).toBe(all.length)
  })
  it('stands a chain of 20,000 turns, and a turn that continues nothing that is there', () => {
    const chain = turns(...Array.from({ length: 20_000 }, (_, i): Spec => ['a', i === 0 ? null : i - 1]))
    expect(layout(chain)).toMatchObject({ columns: 20_000, rows: 1 })
    expect(places(turns(['a', 17], ['a', 1]))).toEqual([[0, 0], [0, 1]])
  })
  it('is empty without turns', () => {
    expect(layout([])).toEqual({ nodes: [], edges: [], columns: 0, rows: 0 })
  })
})

describe('branches', () => {
  it('are the paths from roots to leaves', () => {
    const all = turns(['a', null], ['a', 0], ['a', 0], ['b', null], ['a', 1])
    expect(branches(all).map(({ path, agent }) => [agent, path])).toEqual([['a', [0, 2]], ['b', [3]], ['a', [0, 1, 4]]])
  })
})

describe('lanes', () => {
  it('are one per agent, and one for each outside model', () => {
    const outside = { external: true, model: 'm', trained: false }
    const all = turns(['a', null], ['b', null], ['a', 0], ['b', null, outside], ['b', null, { ...outside, model: 'n' }])
    expect(lanes(all).map(({ name, external, model, turns }) => [name, external, model, turns.length])).toEqual([
      ['a', false, 'default', 2],
      ['b', false, 'default', 1],
      ['b', true, 'm', 1],
      ['b', true, 'n', 1],
    ])
  })
})
