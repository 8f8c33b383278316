/** Metric rows as curves. */
import type { MetricRow } from './api'

export type Column = (number | null)[]

export interface Table {
  steps: number[]
  columns: Map<string, Column>
}

/**
 * A row per step: a validation at step n is a line of its own in metrics.jsonl, with other names, and shares the row
 * of step n. Where a name occurs twice at a step, the later line counts.
 */
export function table(rows: MetricRow[]): Table {
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b)
  const at = new Map(steps.map((step, i) => [step, i]))
  const columns = new Map<string, Column>()
  for (const row of rows) {
    const i = at.get(row.step) as number
    for (const [name, value] of Object.entries(row)) {
      if (name === 'step' || name === 'time' || typeof value !== 'number' || !Number.isFinite(value)) continue
      let column = columns.get(name)
      if (!column) columns.set(name, (column = new Array<number | null>(steps.length).fill(null)))
      column[i] = value
    }
  }
  return { steps, columns }
}

/**
 * Exponential moving average, corrected for its start as Adam's moments are, so that the first value is itself.
 *
 * @param weight of what came before, 0 … 1; 0 changes nothing.
 */
export function smooth(column: Column, weight: number): Column {
  if (weight <= 0) return column
  let [mean, corrected] = [0, 0]
  return column.map((value) => {
    if (value === null) return null
    mean = weight * mean + (1 - weight) * value
    corrected = weight * corrected + (1 - weight)
    return mean / corrected
  })
}

export interface Series {
  name: string
  label: string
  /** Color `--series-…` of the page. */
  colour: string
  dashed?: boolean
  /** Measured rarely: drawn as points without smoothing. */
  points?: boolean
  /** Names of its lower and upper end. */
  band?: [string, string]
}

export interface Card {
  title: string
  /** Shares are written in percent. */
  share?: boolean
  series: Series[]
}

const validation = { colour: 'b', points: true } as const

/** Cards of every run; of alternatives in a list, the first one with data. */
const CARDS: (Omit<Card, 'series'> & { series: Series[][] })[] = [
  {
    title: 'Reward',
    series: [
      [{ name: 'reward/mean', label: 'train', colour: 'a' }],
      [{ name: 'val/reward/mean', label: 'val', ...validation }],
    ],
  },
  {
    title: 'Success',
    share: true,
    series: [
      [{ name: 'success/mean', label: 'train', colour: 'a' }],
      [
        {
          name: 'val/success',
          label: 'val',
          band: ['val/success_ci_low', 'val/success_ci_high'],
          ...validation,
        },
      ],
    ],
  },
  { title: 'Loss', series: [[{ name: 'loss', label: 'loss', colour: 'a' }]] },
  {
    title: 'KL',
    series: [
      [
        { name: 'kl', label: 'kl', colour: 'a' },
        { name: 'kl/ref', label: 'to reference', colour: 'a' },
      ],
      [{ name: 'kl/mismatch_mean', label: 'mismatch', colour: 'c' }],
    ],
  },
  { title: 'Entropy', series: [[{ name: 'entropy', label: 'nats', colour: 'a' }]] },
  {
    title: 'Lengths',
    series: [
      [{ name: 'response_length/mean', label: 'tokens per episode', colour: 'a' }],
    ],
  },
  {
    title: 'Throughput',
    series: [[{ name: 'throughput/tokens_per_s', label: 'tokens/s', colour: 'a' }]],
  },
  {
    title: 'Groups without a signal',
    share: true,
    series: [[{ name: 'adv/zero_group_frac', label: 'share', colour: 'a' }]],
  },
]

export interface Shown {
  name: string
  title: string
  share?: boolean
  points?: boolean
}

/** The metrics of all cards, each with its own title, for comparisons. */
export function metricsShown(): Shown[] {
  return CARDS.flatMap(({ title, share, series }) =>
    series.flat().map(({ name, label, points }, _, all) => ({
      name,
      title: all.length > 1 ? `${title}: ${label}` : title,
      ...(share ? { share } : {}),
      ...(points ? { points } : {}),
    })),
  )
}

/** Success on held-out tasks, and their reward; only cards with data. */
export function heldOut(columns: ReadonlyMap<string, Column>): Card[] {
  const success = CARDS[1]?.series[1] ?? []
  const reward = CARDS[0]?.series[1] ?? []
  const all: Card[] = [
    { title: 'Held-out success', share: true, series: success },
    { title: 'Held-out reward', series: reward },
  ]
  return all.filter((card) => card.series.every((one) => columns.has(one.name)))
}

/** The cards of a run and of added metrics; only cards with data. */
export function cards(columns: ReadonlyMap<string, Column>, added: string[]): Card[] {
  const found: Card[] = []
  for (const { title, share, series } of CARDS) {
    const present = series.map((either) => either.find((one) => columns.has(one.name))).filter((one) => !!one)
    if (present.length > 0) found.push({ title, ...(share ? { share } : {}), series: present })
  }
  for (const name of added) {
    if (columns.has(name)) found.push({ title: name, series: [{ name, label: name, colour: 'a' }] })
  }
  return found
}

/** Success of the tasks with one value of a metadata field, in all validations. */
export interface Slice {
  field: string
  value: string
  /** Name of its success. */
  name: string
  tasks: number | null
  /** Step and success. */
  points: [step: number, success: number][]
}

export function slices({ steps, columns }: Table): Slice[] {
  const found: Slice[] = []
  for (const [name, column] of columns) {
    const match = /^val\/slice\/([^/]+)\/([^/]+)\/success$/.exec(name)
    if (!match) continue
    const [, field = '', value = ''] = match
    const tasks = columns.get(`val/slice/${field}/${value}/tasks`) ?? []
    const points = steps.flatMap((step, i): [number, number][] => (column[i] == null ? [] : [[step, column[i]]]))
    if (points.length > 0) found.push({ field, value, name, tasks: tasks[lastOf(tasks)] ?? null, points })
  }
  return found
}

/** Index of the last value, or -1. */
export function lastOf(column: Column): number {
  for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return i
  return -1
}
