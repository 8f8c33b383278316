/** Layout of the prefix tree of turns: a turn is to the right of the turn that it continues. */
import type { Turn } from './api'

export interface Node {
  turn: Turn
  /** Distance from its root. */
  column: number
  row: number
}

export interface Edge {
  from: Node
  to: Node
  /** It starts a branch after `from` instead of continuing it: drawn dashed, with the reason. */
  branch: boolean
}

export interface Layout {
  nodes: Node[]
  edges: Edge[]
  columns: number
  rows: number
}

/**
 * The first continuation of a turn stays in its row; each further one gets its own row below. Roots are ordered from
 * top to bottom, grouped by agent. Not recursive, because episodes have thousands of turns.
 */
export function layout(turns: Turn[]): Layout {
  const known = new Set(turns.map((turn) => turn.index))
  const children = new Map<number, Turn[]>()
  const roots: Turn[] = []
  for (const turn of turns) {
    if (turn.continues === null || !known.has(turn.continues) || turn.continues >= turn.index) roots.push(turn)
    else children.set(turn.continues, [...(children.get(turn.continues) ?? []), turn])
  }
  const nodes = new Map<number, Node>()
  let rows = 0
  for (const root of byAgent(roots)) {
    // depth first; the row of a turn is assigned when it is popped
    const waiting: { turn: Turn; column: number; first: boolean; above: Node | null }[] = [
      { turn: root, column: 0, first: false, above: null },
    ]
    while (waiting.length > 0) {
      const { turn, column, first, above } = waiting.pop() as (typeof waiting)[number]
      const row = first && above ? above.row : rows++
      const node = { turn, column, row }
      nodes.set(turn.index, node)
      const next = children.get(turn.index) ?? []
      for (let i = next.length - 1; i >= 0; i--) {
        waiting.push({ turn: next[i] as Turn, column: column + 1, first: i === 0, above: node })
      }
    }
  }
  const edges: Edge[] = []
  const last = new Map<string, Node>()
  for (const turn of turns) {
    const to = nodes.get(turn.index) as Node
    const from = turn.continues === null ? undefined : nodes.get(turn.continues)
    const before = last.get(turn.agent)
    if (from && from !== to) edges.push({ from, to, branch: false })
    else if (before && turn.branch_reason) edges.push({ from: before, to, branch: true })
    last.set(turn.agent, to)
  }
  const all = turns.map((turn) => nodes.get(turn.index) as Node)
  const columns = all.reduce((most, node) => Math.max(most, node.column + 1), 0)
  return { nodes: all, edges, columns, rows }
}

function byAgent(roots: Turn[]): Turn[] {
  const agents = new Map<string, Turn[]>()
  for (const root of roots) agents.set(root.agent, [...(agents.get(root.agent) ?? []), root])
  return [...agents.values()].flat()
}

export interface Branch {
  /** Index of the last turn. */
  leaf: number
  agent: string
  /** Indices, from the first turn to the leaf. */
  path: number[]
}

/** The conversations: every path from a root to a leaf, in the order of their last turns. */
export function branches(turns: Turn[]): Branch[] {
  const byIndex = new Map(turns.map((turn) => [turn.index, turn]))
  const inner = new Set(turns.map((turn) => turn.continues))
  return turns
    .filter((turn) => !inner.has(turn.index))
    .map((leaf) => {
      const path: number[] = []
      for (let at: Turn | undefined = leaf; at; ) {
        path.push(at.index)
        const before: number | null = at.continues
        at = before === null || before >= at.index ? undefined : byIndex.get(before)
      }
      return { leaf: leaf.index, agent: leaf.agent, path: path.reverse() }
    })
}

export interface Lane {
  name: string
  external: boolean
  trained: boolean
  model: string
  turns: Turn[]
  tokens: number
}

/** A lane per agent, in the order of first turns; an external model has its own lane. */
export function lanes(turns: Turn[]): Lane[] {
  const found = new Map<string, Lane>()
  for (const turn of turns) {
    const model = turn.external ? (turn.model ?? 'external model') : turn.policy
    const key = JSON.stringify([turn.agent, turn.external ? model : null])
    let lane = found.get(key)
    if (!lane) {
      lane = { name: turn.agent, external: turn.external, trained: false, model, turns: [], tokens: 0 }
      found.set(key, lane)
    }
    lane.trained ||= turn.trained && !turn.external
    lane.turns.push(turn)
    lane.tokens += turn.response_tokens
  }
  return [...found.values()]
}
