/** Types of the server. Times are seconds since 1970; null means unknown. */

export type RunState = 'running' | 'ended' | 'stopped'

/** What a running run does; null without a current `progress.json`. */
export interface Progress {
  time: number
  phase: string
  step: number
  total_steps: number
  /** 0 of 0 where the phase has no count. */
  done: number
  total: number
  elapsed_seconds: number | null
  /** Of the entire run, when `time` was written; null: unknown. */
  remaining_seconds: number | null
}

export interface Run {
  id: string
  name: string
  state: RunState
  backbone: string
  model: string
  step: number
  total_steps: number | null
  started: number | null
  updated: number
  episodes: number
  reward: number | null
  success: number | null
  alarms: number
  progress: Progress | null
}

/** Facts of the report; empty if the run's files cannot be read. */
export interface VerdictFacts {
  verdict?: { word: string; text: string; level: 'good' | 'warning' | 'error' }
  held_out?: {
    before?: Validation
    after: Validation
    best: Validation
    difference?: { measure: string; tasks: number }
  } | null
  alarms?: { rule: string; with?: string[]; current?: boolean; last_step?: number | null }[]
  informative_episodes?: { episode: string; reason: string }[]
  next?: { command: string; why: string } | null
  /** `metric`: the value's name in metrics; `fell`: success fell beyond chance, as `finding` states. */
  slices?: { field: string; value: string; metric: string; fell?: boolean; finding?: string }[]
}

export interface Validation {
  step: number
  success: number | null
  reward: number | null
  tasks: number | null
}

export interface Alarm {
  step: number
  time: number
  rule: string
  severity: 'warning' | 'error'
  message: string
  advice: string
}

export type Count = [value: string, count: number]

export interface Facets {
  stop_reason: Count[]
  split: Count[]
  agent: Count[]
  tool: Count[]
  error: Count[]
  /** Causes of episodes that a limit on tokens or calls ended. */
  limit: Count[]
  step: [number, number] | null
  reward: [number, number] | null
}

/** A metadata field of tasks, with the episodes of each value. */
export type Field = [name: string, values: Count[]]

export interface RunDetail extends Omit<Run, 'alarms'> {
  config: string
  certificate: Record<string, unknown> | null
  summary: Record<string, unknown> | null
  /** In a list of runs it is their number; here the alarms themselves. */
  alarms: Alarm[]
  facets: Facets
  problems: string[]
  files: Record<string, boolean>
}

/** A line of metrics.jsonl. */
export type MetricRow = { step: number; time?: number } & Record<string, unknown>

export interface MetricsPage {
  rows: MetricRow[]
  cursor: string
  /** The rows replace all previous ones: the first page, or the run was rewound to an earlier step. */
  reset: boolean
}

export interface StepRow {
  step: number
  split: string
  episodes: number
  groups: number
  scored: number
  reward_mean: number | null
  reward_min: number | null
  reward_max: number | null
  success: number | null
  failed: number
  seconds_max: number
  tokens: number
}

export interface GroupRow {
  group_id: string
  task_id: string
  query: string
  step: number
  split: string
  episodes: number
  scored: number
  reward_mean: number | null
  reward_std: number | null
  success: number | null
}

export interface Listed {
  episode_id: string
  group_id: string
  task_id: string
  step: number
  split: string
  attempt: number
  time: number
  query: string
  stop_reason: string
  reward: number | null
  success: boolean | null
  error: string
  seconds: number
  retries: number
  agents: string[]
  tools: string[]
  turns: number
  tokens: number
  prompt_tokens: number
  branches: number
  /** Label of the user: good, bad, or empty. */
  label: string
  why: string
  /** Its error without the parts that differ between occurrences. */
  cause: string
  /** Final answer and expected answer; in a list, their beginnings. */
  answer: string
  expected: string
}

export type Label = Pick<Listed, 'label' | 'why'>

export interface ToolCall {
  id?: string
  type?: string
  function?: { name?: string; arguments?: unknown }
}

/** OpenAI-style, as agents and models write them: anything may be missing, and anything may be added. */
export interface Message {
  role?: string
  name?: string
  content?: unknown
  tool_calls?: ToolCall[] | null
  tool_call_id?: string
  reasoning_content?: unknown
  reasoning?: unknown
  [more: string]: unknown
}

export interface Turn {
  index: number
  agent: string
  role: string
  policy: string
  /** From an external model: tokens are unknown. */
  external: boolean
  model: string | null
  trained: boolean
  lost: boolean
  continues: number | null
  branch_reason: string
  approximation: string
  finish_reason: string | null
  policy_version: number | null
  prompt_tokens: number
  response_tokens: number
  request: Message[]
  tools: unknown[] | null
  reply: Message
}

export interface Credited {
  sample: number
  step: number
  agent: string
  policy: string
  advantage: number
  token_weight: number
  reward: number
  trained_tokens: number
  policy_version: number
  turns: number[]
}

export interface Failure {
  what: string
  why: string
  advice: string
}

export interface Episode extends Omit<Listed, 'turns'> {
  reward_source: string
  rewards: Record<string, number> | null
  task: { init_messages: Message[]; env_type: string; metadata: unknown }
  output: Record<string, unknown> | null
  metrics: Record<string, number> | null
  /** In a list of episodes it is their number; here the turns themselves. */
  turns: Turn[]
  samples: Credited[]
  failure: Failure | null
}

export interface TurnTokens {
  index: number
  prompt: { ids: number[]; texts: string[] }
  response: {
    ids: number[]
    texts: string[]
    logprobs: (number | null)[]
    trained: (0 | 1)[]
    trainer_logprobs: (number | null)[] | null
  }
  advantage: number | null
  sample: number | null
}

export interface EpisodeTokens {
  has_text: boolean
  note: string
  turns: TurnTokens[]
}

export interface Status {
  state: RunState
  step: number
  episodes: number
  alarms: number
  updated: number
  progress: Progress | null
}

/** Query of a list of episodes. */
export interface Query {
  where: string[]
  order: string
  desc: boolean
}

export interface EpisodesPage {
  total: number
  offset: number
  episodes: Listed[]
}

export interface GroupsPage {
  total: number
  groups: GroupRow[]
}

/** Runs that differ only in the seed. */
export interface RunGroup {
  runs: { id: string; name: string }[]
  /** Metric -> a value for each of the comparison's steps; `low` and `high` of several seeds. */
  curves: Record<string, { mean: (number | null)[]; low?: (number | null)[]; high?: (number | null)[] }>
}

export interface Comparison {
  groups: RunGroup[]
  steps: number[]
  /** Metric names of all runs. */
  metrics: string[]
  /** Different settings, with a value for each group. */
  settings: { key: string; values: unknown[] }[]
  yardsticks: { about: string; key: string; values: unknown[] }[]
  problems: string[]
}

/** A task that one side solves and the other does not, with the run and the id of each of its episodes. */
export interface Flip {
  key: string
  task_id: string
  query: string
  success_a: number
  success_b: number
  episodes_a: [string, string][]
  episodes_b: [string, string][]
}

export interface Measure {
  a: number
  b: number
  difference: number
  ci_low: number
  ci_high: number
  ci_by: string
  p_value: number | null
  test: string
  comparable: boolean
}

/** Output of `astuner diff --json` for the two sides. */
export interface TaskComparison {
  a: { run: string; step: number | null; tasks: number }[]
  b: { run: string; step: number | null; tasks: number }[]
  yardsticks: { about: string; key: string; a: unknown[]; b: unknown[] }[]
  tasks: { paired: number; only_a: string[]; only_b: string[]; unscored: Record<string, string> }
  measures: Record<string, Measure>
  won: Flip[]
  lost: Flip[]
  won_total: number
  lost_total: number
  problems: string[]
}
