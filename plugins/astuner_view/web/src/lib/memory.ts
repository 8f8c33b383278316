/** The client of an exported page, which contains all data. */
import type {
  Episode,
  EpisodesPage,
  EpisodeTokens,
  Field,
  GroupRow,
  GroupsPage,
  Listed,
  MetricRow,
  MetricsPage,
  Query,
  Run,
  RunDetail,
  StepRow,
  VerdictFacts,
} from './api'
import { type Client, Refused } from './client'
import { callsOf, searchText } from './messages'
import { fieldsOf, meets, read, searchable, type Searchable } from './where'

export interface Exported {
  format: number
  exported: number
  astuner: string
  run: RunDetail
  metrics: MetricRow[]
  verdict?: VerdictFacts
  fields?: Field[]
  steps: Record<string, StepRow[]>
  groups: GroupRow[]
  episodes: EpisodeAndTokens[]
}

/** As in the file: `tokens` of an episode are its tokens; in a list, their number. */
type EpisodeAndTokens = Omit<Episode, 'tokens'> & { tokens: EpisodeTokens }

const FORMAT = 1

export class MemoryClient implements Client {
  readonly exported: number
  private readonly rows: Searchable[]
  /** Metadata fields of all tasks. */
  private readonly known: Set<string>
  private readonly whole: Map<string, EpisodeAndTokens>

  constructor(private readonly data: Exported) {
    if (data.format !== FORMAT) {
      throw new Refused(`This page requires export format ${FORMAT}, but its data has format ${data.format}.`, 400)
    }
    this.exported = data.exported
    const { episodes } = data
    this.whole = new Map(episodes.map((episode) => [episode.episode_id, episode]))
    this.rows = episodes.map(rowOf)
    this.known = new Set(this.rows.flatMap((row) => [...row.metadata.keys()]))
  }

  async runs(): Promise<Run[]> {
    return [{ ...this.data.run, alarms: this.data.run.alarms.length }]
  }

  async run(run: string): Promise<RunDetail> {
    if (run !== this.data.run.id) throw new Refused(`This page contains only the run ${this.data.run.name}.`, 404)
    return this.data.run
  }

  async verdict(): Promise<VerdictFacts> {
    return this.data.verdict ?? {}
  }

  async fields(): Promise<Field[]> {
    return this.data.fields ?? []
  }

  async metrics(): Promise<MetricsPage> {
    return { rows: this.data.metrics, cursor: '', reset: true }
  }

  async steps(_run: string, split: string): Promise<StepRow[]> {
    return this.data.steps[split] ?? []
  }

  async groups(_run: string, where: string[], offset: number, limit: number): Promise<GroupsPage> {
    const asked = new Set(this.met(where).map((row) => row.group_id))
    const groups = this.data.groups.filter((group) => asked.has(group.group_id))
    return { total: groups.length, groups: groups.slice(offset, offset + limit) }
  }

  async episodes(_run: string, query: Query, offset: number, limit: number): Promise<EpisodesPage> {
    const rows = this.sorted(query)
    return { total: rows.length, offset, episodes: rows.slice(offset, offset + limit) }
  }

  async position(_run: string, query: Query, episode: string): Promise<number | null> {
    const index = this.sorted(query).findIndex((row) => row.episode_id === episode)
    return index < 0 ? null : index
  }

  async episode(_run: string, episode: string): Promise<Episode> {
    const found = this.found(episode)
    return { ...found, tokens: found.turns.reduce((all, turn) => all + turn.response_tokens, 0) }
  }

  async tokens(_run: string, episode: string): Promise<EpisodeTokens> {
    return this.found(episode).tokens
  }

  readonly label = null

  compare(): Promise<never> {
    return Promise.reject(new Refused('This page contains one run. Use astuner view to compare several.', 404))
  }

  compareTasks(): Promise<never> {
    return this.compare()
  }

  live(): () => void {
    return () => undefined
  }

  file(): null {
    return null
  }

  private found(episode: string): EpisodeAndTokens {
    const found = this.whole.get(episode)
    if (!found) throw new Refused(`The episode ${episode} is not in this page, because it was not exported.`, 404)
    return found
  }

  private met(where: string[]): Searchable[] {
    const conditions = where.map((condition) => {
      try {
        return read(condition, this.known)
      } catch (e) {
        throw new Refused(`${condition}: ${e instanceof Error ? e.message : String(e)}`, 400)
      }
    })
    return this.rows.filter((row) => meets(row, conditions))
  }

  private sorted(query: Query): Searchable[] {
    const rows = this.met(query.where)
    if (query.order !== 'written') {
      const key = query.order as 'step' | 'query' | 'reward' | 'success'
      const sign = query.desc ? -1 : 1
      // missing values are last in both orders
      return rows.sort((a, b) => {
        const [left, right] = [a[key], b[key]]
        if (left === null || right === null) return Number(left === null) - Number(right === null)
        return sign * (left < right ? -1 : Number(left > right))
      })
    }
    return query.desc ? rows.reverse() : rows
  }
}

function rowOf(episode: EpisodeAndTokens): Searchable {
  const { turns, tokens: _tokens, samples: _samples, task, ...listed } = episode
  const messages = turns.flatMap((turn) => [...turn.request, turn.reply])
  const words = [episode.query, searchText(task.init_messages ?? []), searchText(messages), episode.error]
  const row: Listed = {
    ...listed,
    agents: episode.agents ?? [...new Set(turns.map((turn) => turn.agent))],
    tools: episode.tools ?? [...new Set(turns.flatMap((turn) => callsOf(turn.reply).map((call) => call.name)))],
    turns: turns.length,
    tokens: turns.reduce((all, turn) => all + (turn.external ? 0 : turn.response_tokens), 0),
  }
  return { ...row, text: searchable(words.join('\n')), metadata: fieldsOf(task.metadata) }
}
