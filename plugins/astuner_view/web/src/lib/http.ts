/** The client that asks `astuner view`. */
import type {
  Alarm,
  Comparison,
  Episode,
  EpisodesPage,
  EpisodeTokens,
  Field,
  GroupsPage,
  Label,
  MetricsPage,
  Query,
  Run,
  RunDetail,
  Status,
  StepRow,
  TaskComparison,
  VerdictFacts,
} from './api'
import { type Client, type Listener, Refused } from './client'
import { type CompareRoute, listed } from './routes'

const FIRST_WAIT = 1000
const LONGEST_WAIT = 30_000

export class HttpClient implements Client {
  readonly exported = null

  async runs(): Promise<Run[]> {
    return (await ask<{ runs: Run[] }>('/api/runs')).runs
  }

  run(run: string): Promise<RunDetail> {
    return ask(of(run))
  }

  verdict(run: string): Promise<VerdictFacts> {
    return ask(`${of(run)}/verdict`)
  }

  async fields(run: string): Promise<Field[]> {
    return (await ask<{ fields: Field[] }>(`${of(run)}/fields`)).fields
  }

  metrics(run: string, cursor?: string): Promise<MetricsPage> {
    const asked = new URLSearchParams(cursor === undefined ? {} : { cursor })
    return ask(`${of(run)}/metrics`, asked)
  }

  async steps(run: string, split: string): Promise<StepRow[]> {
    return (await ask<{ steps: StepRow[] }>(`${of(run)}/steps`, new URLSearchParams({ split }))).steps
  }

  groups(run: string, where: string[], offset: number, limit: number): Promise<GroupsPage> {
    const asked = new URLSearchParams(where.map((condition) => ['where', condition]))
    return ask(`${of(run)}/groups`, paged(asked, offset, limit))
  }

  episodes(run: string, query: Query, offset: number, limit: number): Promise<EpisodesPage> {
    return ask(`${of(run)}/episodes`, paged(listed(query), offset, limit))
  }

  async position(run: string, query: Query, episode: string): Promise<number | null> {
    const asked = listed(query)
    asked.set('episode', episode)
    return (await ask<{ index: number | null }>(`${of(run)}/position`, asked)).index
  }

  episode(run: string, episode: string): Promise<Episode> {
    return ask(`${of(run)}/episodes/${encodeURIComponent(episode)}`)
  }

  tokens(run: string, episode: string): Promise<EpisodeTokens> {
    return ask(`${of(run)}/episodes/${encodeURIComponent(episode)}/tokens`)
  }

  live(run: string, cursor: string, listener: Listener): () => void {
    return follow((from) => `${of(run)}/live?${new URLSearchParams({ cursor: from })}`, cursor, listener)
  }

  compare(runs: string[], metrics: string[]): Promise<Comparison> {
    const names = metrics.map((name) => ['metric', name])
    return ask('/api/compare', new URLSearchParams([...runs.map((run) => ['run', run]), ...names]))
  }

  compareTasks(
    a: string[],
    b: string[],
    { stepA, stepB, byText }: Pick<CompareRoute, 'stepA' | 'stepB' | 'byText'>,
  ): Promise<TaskComparison> {
    const asked = new URLSearchParams([...a.map((run) => ['a', run]), ...b.map((run) => ['b', run])])
    if (stepA !== null) asked.set('step_a', String(stepA))
    if (stepB !== null) asked.set('step_b', String(stepB))
    if (byText) asked.set('by', 'text')
    return ask('/api/compare/tasks', asked)
  }

  label = (run: string, episode: string, label: string, why: string): Promise<Label> =>
    ask(`${of(run)}/episodes/${encodeURIComponent(episode)}/label`, undefined, { label, why })

  file(run: string, name: string): string {
    return `${of(run)}/files/${encodeURIComponent(name)}`
  }
}

function of(run: string): string {
  return `/api/runs/${encodeURIComponent(run)}`
}

function paged(asked: URLSearchParams, offset: number, limit: number): URLSearchParams {
  asked.set('offset', String(offset))
  asked.set('limit', String(limit))
  return asked
}

/** @param sent makes it a POST. */
async function ask<T>(path: string, asked = new URLSearchParams(), sent?: object): Promise<T> {
  const query = asked.toString()
  const headers = { Accept: 'application/json' }
  const how: RequestInit = sent
    ? { method: 'POST', body: JSON.stringify(sent), headers: { ...headers, 'Content-Type': 'application/json' } }
    : { headers }
  let answer: Response
  try {
    answer = await fetch(query === '' ? path : `${path}?${query}`, how)
  } catch (e) {
    if (e instanceof TypeError) throw new Refused('The server does not answer. Check that astuner view is still running.', 0)
    throw e
  }
  const text = await answer.text()
  let said: unknown
  try {
    said = JSON.parse(text)
  } catch {
    throw new Refused(`The server answered ${answer.status} without valid JSON.`, answer.status)
  }
  if (!answer.ok) {
    const sentence = (said as { error?: unknown }).error
    throw new Refused(typeof sentence === 'string' ? sentence : `The server answered ${answer.status}.`, answer.status)
  }
  return said as T
}

/**
 * Follows a stream of events. A disconnected EventSource would reconnect with the cursor of its first address, so it is
 * closed and a new one is opened at the last position, with increasing delays while that fails.
 */
function follow(address: (cursor: string) => string, cursor: string, listener: Listener): () => void {
  let source: EventSource | null = null
  let timer: ReturnType<typeof setTimeout> | undefined
  let wait = FIRST_WAIT
  let stopped = false

  const read = <T>(event: Event): T => {
    wait = FIRST_WAIT
    return JSON.parse((event as MessageEvent<string>).data) as T
  }
  const open = (): void => {
    source = new EventSource(address(cursor))
    source.addEventListener('open', () => listener.connected(true))
    source.addEventListener('metrics', (event) => {
      const page = read<MetricsPage>(event)
      cursor = page.cursor
      listener.metrics(page)
    })
    source.addEventListener('status', (event) => listener.status(read<Status>(event)))
    source.addEventListener('alarm', (event) => listener.alarm(read<Alarm>(event)))
    source.addEventListener('end', () => {
      stop()
      listener.end()
    })
    source.addEventListener('error', () => {
      source?.close()
      if (stopped) return
      listener.connected(false)
      timer = setTimeout(open, wait)
      wait = Math.min(wait * 2, LONGEST_WAIT)
    })
  }
  const stop = (): void => {
    stopped = true
    source?.close()
    clearTimeout(timer)
  }
  open()
  return stop
}
