/**
 * A long list of which only the blocks in sight are fetched. Invariant: row i is either the server's row i, or not
 * there yet; blocks of an earlier question are never mixed in.
 */

export const BLOCK = 200
/** Blocks that are kept: 12,000 rows. */
const KEPT = 60

export interface Page<T> {
  total: number
  rows: T[]
}

export type Fetch<T> = (offset: number, limit: number) => Promise<Page<T>>

export class Paged<T> {
  total = $state(0)
  /** The first answer has come. */
  ready = $state(false)
  error = $state('')
  /** Counts what came, so that rows are read again. */
  private version = $state(0)
  private blocks = new Map<number, T[]>()
  private asked = new Set<number>()
  private readonly fetch: Fetch<T>
  private stopped = false

  constructor(fetch: Fetch<T>) {
    this.fetch = fetch
    void this.load(0)
  }

  /** Undefined until it has come. Reading it takes part in effects and templates. */
  row(index: number): T | undefined {
    void this.version
    return this.blocks.get(Math.floor(index / BLOCK))?.[index % BLOCK]
  }

  /** Fetches what is missing of the rows `from` … `to`. */
  need(from: number, to: number): void {
    const last = Math.floor(Math.min(to, this.total - 1) / BLOCK)
    for (let block = Math.floor(Math.max(from, 0) / BLOCK); block <= last; block++) {
      if (!this.blocks.has(block)) void this.load(block)
    }
  }

  stop(): void {
    this.stopped = true
  }

  private async load(block: number): Promise<void> {
    if (this.asked.has(block) || this.blocks.has(block)) return
    this.asked.add(block)
    try {
      const page = await this.fetch(block * BLOCK, BLOCK)
      if (this.stopped) return
      this.total = page.total
      this.blocks.set(block, page.rows)
      for (const old of this.blocks.keys()) {
        if (this.blocks.size <= KEPT) break
        this.blocks.delete(old)
      }
      this.error = ''
    } catch (e) {
      if (!this.stopped) this.error = e instanceof Error ? e.message : String(e)
    } finally {
      this.asked.delete(block)
      if (!this.stopped) {
        this.ready = true
        this.version++
      }
    }
  }
}
