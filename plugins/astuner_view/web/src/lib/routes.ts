/** The route in the hash of the address. Invariant: `parse(format(route))` is `route`. */
import type { Query } from './api'

export const VIEWS = ['messages', 'tokens', 'tree', 'lanes'] as const
export type View = (typeof VIEWS)[number]
export const TABS = ['overview', 'tasks', 'steps', 'config'] as const
export type Tab = (typeof TABS)[number]

export interface RunsRoute {
  page: 'runs'
}

export interface RunRoute {
  page: 'run'
  run: string
  tab: Tab
  /** In the steps tab: the step whose groups are shown. */
  step: number | null
  split: string
  /** Metrics added by the user. */
  metrics: string[]
  /** In the tasks tab: steps of the compared validations; null: the first, and the last. */
  before: number | null
  after: number | null
}

export interface EpisodesRoute extends Query {
  page: 'episodes'
  run: string
}

export interface EpisodeRoute {
  page: 'episode'
  run: string
  episode: string
  view: View
  turn: number | null
  /** Index in the turn's new tokens: first those of the prompt, then those of the response. */
  token: number | null
  /** The leaf turn of the selected branch; null: all turns. */
  branch: number | null
}

/** An episode of a run. */
export interface Place {
  run: string
  episode: string
}

export interface CompareRoute {
  page: 'compare'
  runs: string[]
  /** The groups whose tasks are paired, counted from 0. */
  a: number
  b: number
  /** Whose validation after which step; null: the newest. */
  stepA: number | null
  stepB: number | null
  /** Match tasks by text only. */
  byText: boolean
  metrics: string[]
  /** Two episodes to show side by side instead. */
  episodes: [Place, Place] | null
}

export interface UnknownRoute {
  page: 'unknown'
  hash: string
}

export type Route = RunsRoute | RunRoute | EpisodesRoute | EpisodeRoute | CompareRoute | UnknownRoute

export const WRITTEN = 'written'

export function parse(hash: string): Route {
  const text = hash.replace(/^#/, '')
  const mark = text.indexOf('?')
  const path = (mark < 0 ? text : text.slice(0, mark)).split('/').filter((part) => part !== '')
  const asked = new URLSearchParams(mark < 0 ? '' : text.slice(mark + 1))
  const names = decoded(path)
  if (names === null) return { page: 'unknown', hash }
  const [top, run, below, episode] = names
  if (names.length === 0) return { page: 'runs' }
  if (names.length === 1 && top === 'compare') {
    const [left, right] = [place(asked.get('left')), place(asked.get('right'))]
    return compareRoute(asked.getAll('run'), {
      a: whole(asked.get('a')) ?? 0,
      b: whole(asked.get('b')) ?? 1,
      stepA: whole(asked.get('step_a')),
      stepB: whole(asked.get('step_b')),
      byText: asked.get('by') === 'text',
      metrics: asked.getAll('m'),
      episodes: left && right ? [left, right] : null,
    })
  }
  if (top !== 'run' || run === undefined) return { page: 'unknown', hash }
  if (names.length === 2) {
    return {
      page: 'run',
      run,
      tab: oneOf(TABS, asked.get('tab')),
      step: whole(asked.get('step')),
      split: asked.get('split') ?? 'train',
      metrics: asked.getAll('m'),
      before: whole(asked.get('before')),
      after: whole(asked.get('after')),
    }
  }
  if (names.length === 3 && below === 'episodes') {
    return {
      page: 'episodes',
      run,
      where: asked.getAll('where'),
      order: asked.get('order') ?? WRITTEN,
      desc: asked.get('desc') === '1',
    }
  }
  if (names.length === 4 && below === 'episode' && episode !== undefined) {
    return {
      page: 'episode',
      run,
      episode,
      view: oneOf(VIEWS, asked.get('view')),
      turn: whole(asked.get('turn')),
      token: whole(asked.get('token')),
      branch: whole(asked.get('branch')),
    }
  }
  return { page: 'unknown', hash }
}

export function format(route: Route): string {
  const asked = new URLSearchParams()
  switch (route.page) {
    case 'runs':
      return '#/'
    case 'run':
      if (route.tab !== 'overview') asked.set('tab', route.tab)
      if (route.step !== null) asked.set('step', String(route.step))
      if (route.split !== 'train') asked.set('split', route.split)
      for (const name of route.metrics) asked.append('m', name)
      if (route.before !== null) asked.set('before', String(route.before))
      if (route.after !== null) asked.set('after', String(route.after))
      return `#/run/${encodeURIComponent(route.run)}${question(asked)}`
    case 'episodes':
      return `#/run/${encodeURIComponent(route.run)}/episodes${question(listed(route))}`
    case 'episode':
      asked.set('view', route.view)
      if (route.turn !== null) asked.set('turn', String(route.turn))
      if (route.token !== null) asked.set('token', String(route.token))
      if (route.branch !== null) asked.set('branch', String(route.branch))
      return `#/run/${encodeURIComponent(route.run)}/episode/${encodeURIComponent(route.episode)}${question(asked)}`
    case 'compare':
      for (const run of route.runs) asked.append('run', run)
      if (route.a !== 0) asked.set('a', String(route.a))
      if (route.b !== 1) asked.set('b', String(route.b))
      if (route.stepA !== null) asked.set('step_a', String(route.stepA))
      if (route.stepB !== null) asked.set('step_b', String(route.stepB))
      if (route.byText) asked.set('by', 'text')
      for (const name of route.metrics) asked.append('m', name)
      route.episodes?.forEach(({ run, episode }, i) => asked.set(i ? 'right' : 'left', `${run}/${episode}`))
      return `#/compare${question(asked)}`
    case 'unknown':
      return route.hash
  }
}

/** The query of an address, in the format of the API. */
export function listed(query: Query): URLSearchParams {
  const asked = new URLSearchParams()
  for (const condition of query.where) asked.append('where', condition)
  if (query.order !== WRITTEN) asked.set('order', query.order)
  if (query.desc) asked.set('desc', '1')
  return asked
}

export function runRoute(run: string, more: Partial<RunRoute> = {}): RunRoute {
  return { page: 'run', run, tab: 'overview', step: null, split: 'train', metrics: [], before: null, after: null, ...more }
}

export function episodesRoute(run: string, more: Partial<Query> = {}): EpisodesRoute {
  return { page: 'episodes', run, where: [], order: WRITTEN, desc: false, ...more }
}

export function episodeRoute(run: string, episode: string, more: Partial<EpisodeRoute> = {}): EpisodeRoute {
  return { page: 'episode', run, episode, view: 'messages', turn: null, token: null, branch: null, ...more }
}

export function compareRoute(runs: string[], more: Partial<CompareRoute> = {}): CompareRoute {
  const newest = { a: 0, b: 1, stepA: null, stepB: null, byText: false }
  return { page: 'compare', runs, ...newest, metrics: [], episodes: null, ...more }
}

/** One level up; null at the top. */
export function above(route: Route): Route | null {
  switch (route.page) {
    case 'runs':
      return null
    case 'run':
      return { page: 'runs' }
    case 'episodes':
      return runRoute(route.run)
    case 'episode':
      return episodesRoute(route.run)
    case 'compare':
      return route.episodes ? { ...route, episodes: null } : { page: 'runs' }
    case 'unknown':
      return { page: 'runs' }
  }
}

function question(asked: URLSearchParams): string {
  const text = asked.toString()
  return text === '' ? '' : `?${text}`
}

function decoded(parts: string[]): string[] | null {
  try {
    return parts.map(decodeURIComponent)
  } catch (e) {
    // an invalid % in a typed address
    if (e instanceof URIError) return null
    throw e
  }
}

/** RUN/EPISODE; run IDs do not contain /. */
function place(text: string | null): Place | null {
  const at = text?.indexOf('/') ?? -1
  return text !== null && at > 0 ? { run: text.slice(0, at), episode: text.slice(at + 1) } : null
}

function oneOf<T extends string>(names: readonly [T, ...T[]], asked: string | null): T {
  return names.find((name) => name === asked) ?? names[0]
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null
}
