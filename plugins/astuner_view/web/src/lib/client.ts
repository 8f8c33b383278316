/** Source of the data: the server, or the page itself if it was exported. Both have the same interface. */
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
import type { CompareRoute } from './routes'

/** Events of a running run, until it ends or `stop` is called. */
export interface Listener {
  metrics(page: MetricsPage): void
  status(status: Status): void
  alarm(alarm: Alarm): void
  end(): void
  /** Whether it is connected; it reconnects automatically. */
  connected(yes: boolean): void
}

export interface Client {
  /** Time of the export in seconds since 1970; null with a server. */
  exported: number | null
  runs(): Promise<Run[]>
  run(run: string): Promise<RunDetail>
  verdict(run: string): Promise<VerdictFacts>
  /** Metadata fields of tasks that have few values. */
  fields(run: string): Promise<Field[]>
  metrics(run: string, cursor?: string): Promise<MetricsPage>
  steps(run: string, split: string): Promise<StepRow[]>
  groups(run: string, where: string[], offset: number, limit: number): Promise<GroupsPage>
  episodes(run: string, query: Query, offset: number, limit: number): Promise<EpisodesPage>
  /** Index of an episode in a list; null if it is not in the list. */
  position(run: string, query: Query, episode: string): Promise<number | null>
  episode(run: string, episode: string): Promise<Episode>
  tokens(run: string, episode: string): Promise<EpisodeTokens>
  /** @returns stop */
  live(run: string, cursor: string, listener: Listener): () => void
  compare(runs: string[], metrics: string[]): Promise<Comparison>
  /** The tasks of two sides, by the ids of their runs. */
  compareTasks(a: string[], b: string[], how: Pick<CompareRoute, 'stepA' | 'stepB' | 'byText'>): Promise<TaskComparison>
  /** Write the label of an episode; an empty label removes it. Null: read-only. */
  label: ((run: string, episode: string, label: string, why: string) => Promise<Label>) | null
  /** Address of a file of the run; null if it is not available. */
  file(run: string, name: string): string | null
}

/** An error with the message of the server. */
export class Refused extends Error {
  readonly status: number
  constructor(message: string, status: number) {
    super(message)
    this.status = status
  }
}
