/** Where the page gets its data: from the server, or from itself when it was exported. Both say the same. */
import type {
  Alarm,
  Comparison,
  Episode,
  EpisodesPage,
  EpisodeTokens,
  GroupsPage,
  Label,
  MetricsPage,
  Query,
  Run,
  RunDetail,
  Status,
  StepRow,
  TaskComparison,
} from './api'
import type { CompareRoute } from './routes'

/** What a run that goes on tells, until it has ended or `stop` is called. */
export interface Listener {
  metrics(page: MetricsPage): void
  status(status: Status): void
  alarm(alarm: Alarm): void
  end(): void
  /** Whether the connection stands; it is made again by itself. */
  connected(yes: boolean): void
}

export interface Client {
  /** When it was exported, in seconds since 1970; null with a server. */
  exported: number | null
  runs(): Promise<Run[]>
  run(run: string): Promise<RunDetail>
  metrics(run: string, cursor?: string): Promise<MetricsPage>
  steps(run: string, split: string): Promise<StepRow[]>
  groups(run: string, where: string[], offset: number, limit: number): Promise<GroupsPage>
  episodes(run: string, query: Query, offset: number, limit: number): Promise<EpisodesPage>
  /** Where an episode is in a list; null where it is not in it. */
  position(run: string, query: Query, episode: string): Promise<number | null>
  episode(run: string, episode: string): Promise<Episode>
  tokens(run: string, episode: string): Promise<EpisodeTokens>
  /** @returns stop */
  live(run: string, cursor: string, listener: Listener): () => void
  compare(runs: string[], metrics: string[]): Promise<Comparison>
  /** The tasks of two sides, by the ids of their runs. */
  compareTasks(a: string[], b: string[], how: Pick<CompareRoute, 'stepA' | 'stepB' | 'byText'>): Promise<TaskComparison>
  /** Writes down what a person says of an episode; an empty label takes it back. Null: nothing can be written. */
  label: ((run: string, episode: string, label: string, why: string) => Promise<Label>) | null
  /** Address of a file of the run; null where it cannot be had. */
  file(run: string, name: string): string | null
}

/** What the server refused, in its words. */
export class Refused extends Error {
  readonly status: number
  constructor(message: string, status: number) {
    super(message)
    this.status = status
  }
}
