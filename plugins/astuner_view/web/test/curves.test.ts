import { describe, expect, it } from 'vitest'

import { cards, lastOf, slices, smooth, table } from '../src/lib/curves'

describe('the table of metrics', () => {
  it('puts a validation into the row of its step', () => {
    const { steps, columns } = table([{ step: 2, loss: 1 }, { step: 1, loss: 3 }, { step: 2, 'val/success': 0.5 }])
    expect(steps).toEqual([1, 2])
    expect(columns.get('loss')).toEqual([3, 1])
    expect(columns.get('val/success')).toEqual([null, 0.5])
  })
  it('takes the later of two lines, and numbers only', () => {
    const { columns } = table([{ step: 1, loss: 1, time: 5, note: 'x', bad: null }, { step: 1, loss: 2 }])
    expect([...columns]).toEqual([['loss', [2]]])
  })
})

describe('smoothing', () => {
  it('begins with the first value and keeps gaps', () => {
    expect(smooth([2, null, 2], 0.9)).toEqual([2, null, 2])
  })
  it('is corrected for its start', () => {
    const [first, second] = smooth([1, 0], 0.5)
    expect(first).toBeCloseTo(1)
    expect(second).toBeCloseTo(1 / 3)
  })
  it('of 0 changes nothing', () => expect(smooth([1, 5], 0)).toEqual([1, 5]))
})

describe('cards', () => {
  const columns = new Map([['reward/mean', [1]], ['kl/ref', [1]], ['val/success', [1]], ['grad_norm', [1]]])
  it('are of what there is, and what was added', () => {
    expect(cards(columns, ['grad_norm', 'gone']).map((card) => [card.title, card.series.map((one) => one.name)])).toEqual([
      ['Reward', ['reward/mean']],
      ['Success', ['val/success']],
      ['KL', ['kl/ref']],
      ['grad_norm', ['grad_norm']],
    ])
  })
  it('know the last value', () => {
    expect(lastOf([1, 2, null])).toBe(1)
    expect(lastOf([null])).toBe(-1)
  })
})

it('slices are read from the names of metrics', () => {
  const rows = [{ step: 0, 'val/slice/layout/two_columns/success': 0.5, 'val/slice/layout/two_columns/tasks': 8 }, { step: 2 }]
  const again = { step: 4, 'val/slice/layout/two_columns/success': 0.75, 'slice/layout/two_columns/success': 1 }
  expect(slices(table([...rows, again]))).toEqual([
    { field: 'layout', value: 'two_columns', name: 'val/slice/layout/two_columns/success', tasks: 8, points: [[0, 0.5], [4, 0.75]] },
  ])
})
