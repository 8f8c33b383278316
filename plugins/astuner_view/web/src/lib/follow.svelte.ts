/** The followed run: its details, metrics and live events. */
import type { Alarm, MetricRow, Progress, RunDetail, RunState, VerdictFacts } from './api'
import type { Client } from './client'
import { table } from './curves'

/** Interval in which a stopped run is checked for a resume. */
const ASK_AGAIN = 30_000
/** Shortest interval between two requests of the verdict of a running run. */
const VERDICT_EVERY = 5_000

export class Followed {
  readonly id: string
  detail: RunDetail | null = $state.raw(null)
  rows: MetricRow[] = $state.raw([])
  table = $derived(table(this.rows))
  alarms: Alarm[] = $state.raw([])
  state: RunState = $state('ended')
  step = $state(0)
  episodes = $state(0)
  updated = $state(0)
  connected = $state(false)
  progress: Progress | null = $state.raw(null)
  verdict: VerdictFacts | null = $state.raw(null)
  error = $state('')
  private readonly client: Client
  private cursor = ''
  private stopLive: (() => void) | null = null
  private timer: ReturnType<typeof setInterval> | undefined
  private stopped = false
  private asksVerdict: ReturnType<typeof setTimeout> | undefined

  constructor(client: Client, id: string) {
    this.client = client
    this.id = id
    void this.open()
    this.readVerdict(0)
  }

  stop(): void {
    this.stopped = true
    this.stopLive?.()
    clearInterval(this.timer)
    clearTimeout(this.asksVerdict)
  }

  private readVerdict(after: number): void {
    if (this.asksVerdict !== undefined) return
    this.asksVerdict = setTimeout(() => {
      this.asksVerdict = undefined
      this.client.verdict(this.id).then(
        (found) => this.stopped || (this.verdict = found),
        // the page shows everything else
        () => this.stopped || (this.verdict ??= {}),
      )
    }, after)
  }

  private async open(): Promise<void> {
    try {
      const [detail, page] = await Promise.all([this.client.run(this.id), this.client.metrics(this.id)])
      if (this.stopped) return
      this.take(detail)
      this.rows = page.rows
      this.cursor = page.cursor
      this.listen()
      if (this.client.exported === null) this.timer = setInterval(() => void this.again(), ASK_AGAIN)
    } catch (e) {
      if (!this.stopped) this.error = e instanceof Error ? e.message : String(e)
    }
  }

  private take(detail: RunDetail): void {
    this.detail = detail
    this.alarms = detail.alarms
    this.state = detail.state
    this.step = detail.step
    this.episodes = detail.episodes
    this.updated = detail.updated
    this.progress = detail.progress
  }

  private async again(): Promise<void> {
    if (this.stopLive) return
    try {
      const detail = await this.client.run(this.id)
      if (this.stopped) return
      this.take(detail)
      this.readVerdict(0)
      this.error = ''
      this.listen()
    } catch (e) {
      if (!this.stopped) this.error = e instanceof Error ? e.message : String(e)
    }
  }

  private listen(): void {
    if (this.state !== 'running' || this.stopLive) return
    this.stopLive = this.client.live(this.id, this.cursor, {
      metrics: (page) => {
        this.cursor = page.cursor
        this.rows = page.reset ? page.rows : [...this.rows, ...page.rows]
        this.readVerdict(VERDICT_EVERY)
      },
      status: (status) => {
        this.state = status.state
        this.step = status.step
        this.episodes = status.episodes
        this.updated = status.updated
        this.progress = status.progress
      },
      alarm: (alarm) => {
        const known = this.alarms.some((a) => a.step === alarm.step && a.rule === alarm.rule && a.time === alarm.time)
        if (!known) this.alarms = [...this.alarms, alarm]
      },
      connected: (yes) => (this.connected = yes),
      end: () => {
        this.connected = false
        this.stopLive = null
        setTimeout(() => void this.again(), 1000)
      },
    })
  }
}
